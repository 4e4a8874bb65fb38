"""Batch-norm statistics after the weights were edited: what is stored no longer fits, so it is measured again."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from enfold.data import Data
from enfold.data.batches import Order
from enfold.evaluate import member_logits
from enfold.modes import evaluating


def has_batch_norm(network: nn.Module) -> bool:
    """Whether any layer keeps running statistics."""
    return any(isinstance(layer, _BatchNorm) and layer.track_running_stats for layer in network.modules())


@torch.no_grad()
def reestimate(network: nn.Module, data: Data, *, batch_size: int = 256, seed: int = 0) -> None:
    """Set running means and variances to their averages over one pass of the training part, in place.

    Only batch norms are in train mode, so dropout draws nothing; each batch counts the same (momentum None).
    """
    layers = [layer for layer in network.modules() if isinstance(layer, _BatchNorm) and layer.track_running_stats]
    if not layers:
        return
    momenta = [layer.momentum for layer in layers]
    device = next(network.parameters()).device
    with evaluating(network):
        for layer in layers:
            layer.reset_running_stats()
            layer.momentum = None
            layer.train()
        for batch in Order(batch_size, seed=seed).batches(data, epoch=0):
            if len(batch.labels) > 1:  # the variance of one example is undefined
                member_logits(network, batch.inputs.to(device))
    for layer, momentum in zip(layers, momenta, strict=True):
        layer.momentum = momentum

"""Statistics of norms after the weights were edited: what is stored no longer fits, so it is measured again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from enfold.data import Data
from enfold.data.batches import Order
from enfold.engines.modes import evaluating
from enfold.errors import EnfoldError
from enfold.evaluate import member_logits

TRACKING = (_BatchNorm, _InstanceNorm)  # that may keep running statistics
Norm = _BatchNorm | _InstanceNorm


@torch.no_grad()
def reestimate(network: nn.Module, data: Data, *, batch_size: int = 256, seed: int = 0) -> None:
    """Set running means and variances to their averages over one pass of the training part, in place.

    Only batch norms, and instance norms that keep statistics, are in train mode, so dropout draws nothing; a batch
    counts as much as it has examples.
    """
    layers = _layers(network)
    if not layers:
        return
    device = next(network.parameters()).device
    least = 2 if any(isinstance(layer, _BatchNorm) for layer in layers) else 1  # the variance of one is undefined
    before, seen = {name: buffer.clone() for name, buffer in network.named_buffers()}, 0
    with evaluating(network), _averaging(layers):
        for layer in layers:
            layer.reset_running_stats()
            layer.train()
        for batch in Order(batch_size, seed=seed).batches(data, epoch=0):
            if len(batch.labels) >= least:
                member_logits(network, batch.inputs.to(device))
                seen += 1
    if not seen:
        for name, buffer in network.named_buffers():
            buffer.copy_(before[name])
        raise EnfoldError(
            "batch-norm statistics need batches of at least 2 examples, got none in the training part: pass larger ones"
        )


@contextmanager
def several_examples() -> Iterator[None]:
    """Torch's error about the variance of one example in a block that trains, with the remedy."""
    try:
        yield
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        raise EnfoldError(
            "batch norm trains on batches of 2 examples or more, got one of 1: raise batch_size, or make the loader "
            "with drop_last=True"
        ) from error


def has_running_statistics(network: nn.Module) -> bool:
    """Return whether a network has batch norms, or instance norms, that store statistics."""
    return bool(_layers(network))


def _layers(network: nn.Module) -> list[Norm]:
    return [layer for layer in network.modules() if isinstance(layer, TRACKING) and layer.track_running_stats]


@contextmanager
def _averaging(layers: list[Norm]) -> Iterator[None]:
    """Running statistics are the mean over all rows since the start of the block; a layer may be called repeatedly."""
    momenta = [layer.momentum for layer in layers]
    seen = [0] * len(layers)

    def counting(index: int) -> torch.utils.hooks.RemovableHandle:
        def count(layer: Norm, args: tuple[Tensor, ...]) -> None:
            rows = args[0].numel() // layer.num_features
            seen[index] += rows
            layer.momentum = rows / seen[index]

        return layers[index].register_forward_pre_hook(count)

    hooks = [counting(index) for index in range(len(layers))]
    try:
        yield
    finally:
        for layer, momentum, hook in zip(layers, momenta, hooks, strict=True):
            layer.momentum = momentum
            hook.remove()

"""Recompute normalization statistics after the weights were changed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from enfold.data import Data
from enfold.data.batches import Order
from enfold.data.tree import to_device
from enfold.engines.modes import eval_mode
from enfold.errors import EnfoldError
from enfold.evaluate import member_logits

TRACKING = (_BatchNorm, _InstanceNorm)  # layers that may have running statistics
Norm = _BatchNorm | _InstanceNorm


@torch.no_grad()
def reestimate(network: nn.Module, data: Data, *, batch_size: int = 256, seed: int = 0) -> None:
    """Set running means and variances to their averages over one pass of the training examples, in place.

    Only batch norms, and instance norms with running statistics, are in train mode, so that dropout is inactive.
    Batches
    are weighted by their size.

    Args:
        network: A network or an ensemble.
        data: The data; only the training split is used.
        batch_size: Examples per forward pass.
        seed: Seed of the data order.

    Raises:
        EnfoldError: If there is no batch of at least 2 examples; the statistics are left unchanged.
    """
    layers = _layers(network)
    if not layers:
        return
    device = next(network.parameters()).device
    least = 2 if any(isinstance(layer, _BatchNorm) for layer in layers) else 1  # the variance of one is undefined
    before, seen = {name: buffer.clone() for name, buffer in network.named_buffers()}, 0
    with eval_mode(network), _averaging(layers):
        for layer in layers:
            layer.reset_running_stats()
            layer.train()
        for batch in Order(batch_size, seed=seed).batches(data, epoch=0):
            if len(batch) >= least:
                member_logits(network, to_device(batch.inputs, device))
                seen += 1
    if not seen:
        for name, buffer in network.named_buffers():
            buffer.copy_(before[name])
        raise EnfoldError(
            "batch-norm statistics need batches of at least 2 examples, got no such batch in train: pass larger batches"
        )


@contextmanager
def several_examples() -> Iterator[None]:
    """Translate torch's error about the variance of one example into an `EnfoldError` with a remedy."""
    try:
        yield
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        raise EnfoldError(
            "batch norm needs training batches of at least 2 examples, got 1: raise batch_size, or create the "
            "DataLoader with drop_last=True"
        ) from error


def has_running_statistics(network: nn.Module) -> bool:
    """Return whether a network has batch norms, or instance norms, that store statistics."""
    return bool(_layers(network))


def _layers(network: nn.Module) -> list[Norm]:
    return [layer for layer in network.modules() if isinstance(layer, TRACKING) and layer.track_running_stats]


@contextmanager
def _averaging(layers: list[Norm]) -> Iterator[None]:
    """Compute running statistics as the mean over all rows inside the block; a layer may be called repeatedly."""
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

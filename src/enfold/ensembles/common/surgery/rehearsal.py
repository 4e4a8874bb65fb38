"""Rehearsal: run a changed copy of a network on shapes, without values or data, to check that it still runs."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from enfold.engines.outputs import get_logits
from enfold.engines.skeleton import Skeleton
from enfold.ensembles.common.surgery.layers import CONVOLUTIONS

SIDES = (32, 28, 8, 16, 64, 224, 12, 20, 24, 48, 96, 128, 256)  # of the images that are tried
TOKENS = 5


class Rehearsal:
    """Run changed copies of a network on the first likely input shape that the network itself accepts, if any."""

    def __init__(self, network: nn.Module, entrances: Sequence[nn.Module]) -> None:
        self.example: Tensor | None = None
        self.expected: torch.Size | None = None
        bare = Skeleton(network).network.eval()
        for example in (each for layer in entrances[:1] for each in _examples(layer)):
            try:
                self.expected = _shape_of(bare, example)
            except Exception:  # noqa: S112 - the user's forward may raise any error: try the next shape
                continue
            self.example = example
            break

    def failure(self, twin: nn.Module) -> str | None:
        """Return what fails in the copy; None if nothing does, or if no input shape is known."""
        if self.example is None:
            return None
        bare = Skeleton(twin).network.eval()
        entered: list[str] = []
        for name, module in bare.named_modules():
            if name and not any(True for _ in module.children()):
                module.register_forward_pre_hook(lambda *_, name=name: entered.append(name))
        try:
            found = _shape_of(bare, self.example)
        except Exception as error:
            where = f"at '{entered[-1]}'" if entered else "before its first layer"
            return f"does not run, and stops {where} ({str(error).splitlines()[0]})"
        if found != self.expected:
            return f"gives outputs of shape {tuple(found)} instead of {tuple(self.expected or ())}"
        return None


def _shape_of(bare: nn.Module, example: Tensor) -> torch.Size:
    with torch.no_grad(), torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return get_logits(bare(example), bare).shape


def _examples(layer: nn.Module) -> Iterator[Tensor]:
    """Yield likely inputs of a first layer like this, on the meta device."""
    known: Any = layer
    shapes: list[tuple[int, ...]] = []
    kind = next((tensor.dtype for tensor in layer.parameters()), torch.get_default_dtype())
    if isinstance(layer, nn.Embedding | nn.EmbeddingBag):
        shapes, kind = [(2, TOKENS)], torch.int64
    elif isinstance(layer, CONVOLUTIONS):
        shapes = [(2, known.in_channels, *(side,) * (known.weight.ndim - 2)) for side in SIDES]
    elif isinstance(layer, nn.LayerNorm):
        shapes = [(2, *layer.normalized_shape), (2, TOKENS, *layer.normalized_shape)]
    else:
        name = "num_features" if isinstance(layer, _NormBase) else "num_channels"
        width = next(getattr(layer, key) for key in ("in_features", "embed_dim", name) if hasattr(layer, key))
        shapes = [(2, width), (2, TOKENS, width), *((2, width, side, side) for side in SIDES)]
    for shape in shapes:
        yield torch.empty(shape, dtype=kind, device="meta")

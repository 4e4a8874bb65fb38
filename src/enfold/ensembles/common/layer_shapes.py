"""Shapes of channel factors: how r and s scale the weight of a linear layer, a convolution or an embedding."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
LAYERS = (nn.Linear, *CONVOLUTIONS, *TRANSPOSED, nn.Embedding)


@dataclass(frozen=True)
class LayerShape:
    """The axes of a weight that r and s scale."""

    inputs: int  # 0: no r
    outputs: int
    groups: int = 1
    axes: int = 2  # of the weight
    transposed: bool = False  # whether the weight's first axis is the input

    def factor(self, r: Tensor | None, s: Tensor) -> Tensor:
        """Return Σ_j s_j r_j^T for the axes of the weight: (rank, M, in), (rank, M, out) -> (M, *weight axes, or 1)."""
        if r is None:
            return s.sum(0).unsqueeze(1)  # embedding: (M, 1, out)
        first, second = (r, s) if self.transposed else (s, r)
        rank, members, _ = first.shape
        rows = first.view(rank, members, self.groups, -1, 1)
        columns = second.view(rank, members, self.groups, 1, -1)
        product = (rows * columns).sum(0).flatten(1, 2)  # (M, first, second / groups)
        return product.view(*product.shape, *(1,) * (self.axes - 2))


def layer_shape(layer: nn.Module) -> LayerShape:
    """Return the shape of the factors of a linear layer, a convolution or an embedding."""
    if isinstance(layer, nn.Embedding):
        return LayerShape(0, layer.embedding_dim)
    if isinstance(layer, nn.Linear):
        return LayerShape(layer.in_features, layer.out_features)
    assert isinstance(layer, CONVOLUTIONS + TRANSPOSED)  # noqa: S101 - chosen by type
    axes = layer.weight.ndim
    return LayerShape(layer.in_channels, layer.out_channels, layer.groups, axes, isinstance(layer, TRANSPOSED))

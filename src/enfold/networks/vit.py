"""ViT: a small vision transformer.

Dosovitskiy et al., "An Image is Worth 16x16 Words", ICLR 2021, arXiv:2010.11929.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

from enfold.errors import EnfoldError
from enfold.networks.arguments import image_shape, require_choice, require_fraction, require_positive


class Attention(nn.Module):
    """Multi-head self-attention; keys have no bias, as it would cancel in the softmax."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the attention output: (B, tokens, width) -> (B, tokens, width)."""
        query, key, value = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (B, heads, tokens, width / heads)
            for layer in (self.query, self.key, self.value)
        )
        mixed: Tensor = self.out(scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))
        return mixed


class Block(nn.Module):
    """A pre-norm transformer block: attention and a two-layer perceptron, each with a residual connection."""

    def __init__(self, width: int, heads: int, expansion: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.dropout1 = nn.Dropout(dropout)
        self.norm2 = nn.LayerNorm(width)
        self.linear1 = nn.Linear(width, expansion * width)
        self.linear2 = nn.Linear(expansion * width, width)
        self.dropout2 = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output: (B, tokens, width) -> (B, tokens, width)."""
        x = x + self.dropout1(self.attention(self.norm1(x)))
        total: Tensor = x + self.dropout2(self.linear2(gelu(self.linear1(self.norm2(x)))))
        return total


class ViT(nn.Module):
    """A vision transformer with learned positions, pre-norm blocks and a linear head.

    With 10 classes the defaults have 207,690 parameters for 3x32x32 inputs (64 tokens) and 204,682 for
    1x28x28 (49 tokens).

    Args:
        shape: Shape of one image, (channels, height, width).
        num_classes: Number of classes.
        patch: Side of a patch in pixels; it must divide height and width.
        width: Width of the tokens.
        depth: Number of blocks.
        heads: Number of attention heads; it must divide `width`.
        expansion: Width of the hidden layer of a block's perceptron, as a multiple of `width`.
        pooling: Input of the head: the "mean" token or a "class" token.
        dropout: Dropout rate.
    """

    def __init__(
        self,
        shape: Sequence[int] = (3, 32, 32),
        num_classes: int = 10,
        patch: int = 4,
        width: int = 64,
        depth: int = 4,
        heads: int = 4,
        expansion: int = 4,
        pooling: str = "mean",
        dropout: float = 0.0,
    ) -> None:
        in_channels, image_height, image_width = image_shape(shape)
        require_positive(
            num_classes=num_classes, patch=patch, width=width, depth=depth, heads=heads, expansion=expansion
        )
        require_fraction(dropout=dropout)
        require_choice("pooling", pooling, ("mean", "class"))
        if image_height % patch or image_width % patch:
            raise EnfoldError(
                f"patch must divide the height and width of the image, got patch={patch} for "
                f"{image_height}x{image_width}: change patch"
            )
        if width % heads:
            raise EnfoldError(f"heads must divide width, got heads={heads} and width={width}: change one of them")
        super().__init__()
        tokens = (image_height // patch) * (image_width // patch)
        self.embed = nn.Conv2d(in_channels, width, patch, stride=patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width)) if pooling == "class" else None
        self.positions = nn.Parameter(torch.empty(1, tokens + (self.token is not None), width))
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, expansion, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_classes)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize linear weights Xavier-uniform, positions normal and biases to zero."""
        nn.init.normal_(self.positions, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits: (B, channels, height, width) -> (B, C)."""
        x = self.embed(inputs).flatten(2).transpose(1, 2)  # (B, tokens, width)
        if self.token is not None:
            x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1)
        x = self.dropout(x + self.positions)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        logits: Tensor = self.head(x.mean(1) if self.token is None else x[:, 0])
        return logits

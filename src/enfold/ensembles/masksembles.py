"""Masksembles: one shared network, of which each member uses its own fixed part of every hidden layer's features.

    W_m = W ∘ (1 k_m^T),      k_m in {0, 1}^c, fixed, on the c input features of a layer               (1)

    independent:  k_m has c / s ones, drawn for each member alone                                      (2)
    joint:        k_m has o = c / (s (1 - (1 - 1/s)^M)) ones among o s places, of which those that no
                  member uses are dropped; places are searched until exactly c are left                (3)

    E |k_m ∧ k_n| / |k_m| = 1 / s                        (the same for both)                           (4)

N. Durasov, T. Bagautdinov, P. Baque, P. Fua: Masksembles for Uncertainty Estimation, CVPR 2021, arXiv:2012.08334.

The scale s sets how little members share: 1 gives equal masks of ones, 6 (the most that is published) nearly disjoint
ones. Masks lie on the inputs of every linear layer and convolution but the first, with all taps of a channel together;
a lone layer is masked at its own inputs. A linear layer after a flatten has a mask over channels times positions. What
has fewer than `min_features` inputs stays unmasked and is named in `unmasked`; the published code refuses less than 10.
The in-projection of torch's own attention is not masked. What is left of a layer is not scaled up.

Differs from the paper: masks are drawn by (2) unless masks="joint", so that M members are the first M of M + 1; it is
the limit of (3) for large M and leaves the share (1 - 1/s)^M of the features unused. Masks are not layers of their own
behind chosen activations, and every member sees whole batches: the paper splits a batch among members, which is the
plan's order="split".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from enfold.engines.base import EngineName
from enfold.engines.skeleton import State
from enfold.engines.tree import Tree
from enfold.ensembles.common.layer_shapes import CONVOLUTIONS, TRANSPOSED, layer_shape
from enfold.ensembles.common.sharing import NormChoice, Share, Sharing, chosen_layers, require_size
from enfold.errors import EnfoldError
from enfold.seeds import generator

LAYERS = (nn.Linear, *CONVOLUTIONS, *TRANSPOSED)
LARGEST_SCALE = 6.0
ATTEMPTS = 1000  # of the search in (3)


@dataclass(frozen=True)
class Masksembles(Share):
    """One shared network, of which each member uses its own fixed part of every hidden layer's features."""

    num_members: int = 4
    scale: float = 2.0  # s: how little members share; 1 gives equal masks, 6 nearly disjoint ones
    masks: Literal["independent", "joint"] = "independent"  # drawn for each member alone, or for all together
    min_features: int = 4  # a layer of fewer inputs is not masked
    batch_norm: NormChoice = "shared"  # "own" is EnsembleBN
    include: tuple[str, ...] = ()  # patterns of layer names; all layers but the first if empty
    exclude: tuple[str, ...] = ()
    seed: int = 0
    engine: EngineName = "auto"

    def __post_init__(self) -> None:
        require_size(self.num_members)
        if not 1 <= self.scale <= LARGEST_SCALE:
            raise EnfoldError(f"the scale of masks must be between 1 and 6, got {self.scale}: 2 is a usual choice")
        if self.min_features < 1:
            raise EnfoldError(f"min_features must be at least 1, got {self.min_features}: 10 is published")
        if self.masks not in ("independent", "joint"):
            raise EnfoldError(f"masks are drawn 'independent' or 'joint', got {self.masks!r}: choose one of them")

    def __call__(self, network: nn.Module) -> MasksemblesMembers:
        """M members that share the network's weights."""
        return MasksemblesMembers(network, self)


class MasksemblesMembers(Sharing):
    """The members; `masks` holds each layer's k as (M, inputs), by the layer's name."""

    share: Masksembles

    def __init__(self, network: nn.Module, share: Masksembles) -> None:
        layers = hidden_layers(network, share)
        shapes = {f"{name}." if name else "": layer_shape(layer) for name, layer in layers.items()}
        wide = {prefix: shape for prefix, shape in shapes.items() if shape.inputs >= share.min_features}
        if not wide:
            widest = max(shape.inputs for shape in shapes.values())
            raise EnfoldError(
                f"masks need a hidden layer with at least {share.min_features} inputs, but the widest has {widest}: "
                "give a wider network, or lower min_features"
            )
        super().__init__(network, share.num_members, (), share.engine, batch_norm=share.batch_norm)
        self.share = share
        self.layers = wide
        self.unmasked = tuple(prefix.removesuffix(".") for prefix in shapes if prefix not in wide)
        self.masks = Tree({f"{prefix}mask": masks(share, prefix, shape.inputs) for prefix, shape in wide.items()})

    def expand(self) -> State:
        """Equation (1) for every masked weight."""
        state, kept = super().expand(), self.masks.state()
        for prefix, shape in self.layers.items():
            mask = kept[f"{prefix}mask"]  # (M, inputs)
            every = mask.new_ones(1, len(mask), shape.outputs)
            state[f"{prefix}weight"] = state[f"{prefix}weight"] * shape.factor(mask[None], every)  # (1)
        return state


def hidden_layers(network: nn.Module, share: Masksembles) -> dict[str, nn.Module]:
    """The layers that may be masked: all that the patterns allow, but the one that sees the network's inputs."""
    chosen = chosen_layers(network, LAYERS, share.include, share.exclude)
    known = [name for name, part in network.named_modules() if isinstance(part, (*LAYERS, nn.Embedding))]
    if share.include or len(known) == 1:
        return chosen
    hidden = {name: layer for name, layer in chosen.items() if name != known[0]}
    if not hidden:
        raise EnfoldError(
            f"masks lie on all layers but the first, '{known[0]}', of which exclude={share.exclude} leaves none: "
            "exclude less, or name layers with include"
        )
    return hidden


def masks(share: Masksembles, name: str, features: int) -> Tensor:
    """(M, features), by (2) or (3)."""
    if share.masks == "joint":
        return joint_masks(share, name, features)
    ones = max(1, round(features / share.scale))  # (2)
    sources = (generator(share.seed, "masksembles", name, member) for member in range(share.num_members))
    return torch.stack([_drawn(features, ones, source) for source in sources])


def joint_masks(share: Masksembles, name: str, features: int) -> Tensor:
    """(M, features), of which every feature is used by a member: (3)."""
    size, scale = share.num_members, share.scale
    wanted = features / (scale * (1 - (1 - 1 / scale) ** size))
    ones = min(features, max(round(wanted), -(-features // size)))  # so that M masks can cover all features
    places = max(features, round(ones * scale))
    for attempt in range(ATTEMPTS):
        source = generator(share.seed, "masksembles", name, "joint", size, attempt)
        drawn = torch.stack([_drawn(places, ones, source) for _ in range(size)])
        used = drawn[:, drawn.any(0)]
        if used.shape[1] == features:
            return used
        places = max(features, places + (1 if used.shape[1] < features else -1))
    raise EnfoldError(
        f"joint masks must use all {features} features of '{name.removesuffix('.')}', but {ATTEMPTS} draws for scale "
        f"{scale} did not: change the scale, or use masks: independent"
    )


def _drawn(places: int, ones: int, source: torch.Generator) -> Tensor:
    mask = torch.zeros(places, dtype=torch.bool)
    mask[torch.randperm(places, generator=source)[:ones]] = True
    return mask

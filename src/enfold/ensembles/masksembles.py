"""Masksembles: one network, of which every member uses its own fixed subset of the features of each hidden layer.

    W_m = W ∘ (1 k_m^T),      k_m in {0, 1}^c, fixed, on the c input features of a layer               (1)

    independent:  k_m has c / s ones, drawn independently for each member                              (2)
    joint:        k_m has o = c / (s (1 - (1 - 1/s)^M)) ones among o s places, of which those that no
                  member uses are dropped; places are searched until exactly c are left                (3)

    E |k_m ∧ k_n| / |k_m| = 1 / s                        (the same for both)                           (4)

N. Durasov, T. Bagautdinov, P. Baque, P. Fua: Masksembles for Uncertainty Estimation, CVPR 2021, arXiv:2012.08334.

The scale s sets the overlap: 1 gives equal masks of ones, 6 (the largest that is published) nearly disjoint ones. Masks
are on the inputs of every linear layer and convolution but the first, the same for all positions of a kernel; a single
layer is masked at its own inputs. A linear layer after a flatten has a mask over channels times positions. Layers with
fewer than `min_features` inputs are listed in `unmasked`; the public code refuses less than 10. The joint projection of
torch's attention is not masked. The remaining features are not scaled up.

Differs from the paper: masks are drawn by (2) unless masks="joint", so that M members are the first M of M + 1; it is
the limit of (3) for large M and leaves the fraction (1 - 1/s)^M of the features unused. Masks are not layers of their
own after chosen activations, and every member sees complete batches; the paper splits a batch among members
(order="split" in the training configuration).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from pydantic import Field, PositiveInt
from torch import Tensor, nn

from enfold.arguments import checked
from enfold.engines.base import EngineName
from enfold.engines.parameters import Tree
from enfold.engines.skeleton import State
from enfold.ensembles.common.efficient import EfficientEnsemble, NormChoice, select_layers
from enfold.ensembles.common.layer_shapes import CONVOLUTIONS, TRANSPOSED, layer_shape
from enfold.errors import EnfoldError
from enfold.seeds import generator

LAYERS = (nn.Linear, *CONVOLUTIONS, *TRANSPOSED)
ATTEMPTS = 1000  # of the search in (3)


@checked
class Masksembles(EfficientEnsemble):
    """One network, of which every member uses its own fixed subset of the features of each hidden layer.

    Args:
        network: The network whose weights become the common weights. It is not modified.
        num_members: The number of members.
        scale: s: how little masks overlap, from 1 (equal masks) to 6 (nearly disjoint ones).
        masks: "independent": drawn for every member independently, (2); "joint": drawn together, (3).
        min_features: Layers with fewer inputs are not masked.
        batch_norm: shared (statistics are each member's own), own (EnsembleBN) or joint (one for all members).
        include: Regular expressions for the names of the layers to mask; all layers but the first if empty.
        exclude: Regular expressions for the names of layers not to mask.
        seed: The seed of the masks.
        engine: How members are run: auto, measure, stacked, loop or vmap.
    """

    def __init__(
        self,
        network: nn.Module,
        num_members: PositiveInt = 4,
        *,
        scale: Annotated[float, Field(ge=1, le=6)] = 2.0,
        masks: Literal["independent", "joint"] = "independent",
        min_features: PositiveInt = 4,
        batch_norm: NormChoice = "shared",
        include: tuple[str, ...] = (),
        exclude: tuple[str, ...] = (),
        seed: int = 0,
        engine: EngineName = "auto",
    ) -> None:
        layers = hidden_layers(network, include, exclude)
        shapes = {f"{name}." if name else "": layer_shape(layer) for name, layer in layers.items()}
        wide = {prefix: shape for prefix, shape in shapes.items() if shape.inputs >= min_features}
        if not wide:
            widest = max(shape.inputs for shape in shapes.values())
            raise EnfoldError(
                f"network must have a hidden layer with min_features={min_features} or more inputs, but the widest has "
                f"{widest}: pass a wider network, or lower min_features"
            )
        super().__init__(network, num_members, (), engine, batch_norm=batch_norm)
        self.scale, self.masks, self.min_features, self.batch_norm = scale, masks, min_features, batch_norm
        self.include, self.exclude, self.seed = include, exclude, seed
        self.layers = wide
        self.unmasked = tuple(prefix.removesuffix(".") for prefix in shapes if prefix not in wide)
        draw = joint_masks if masks == "joint" else independent_masks
        drawn = {prefix: draw(num_members, scale, seed, prefix, shape.inputs) for prefix, shape in wide.items()}
        self.mask_tree = Tree({f"{prefix}mask": mask for prefix, mask in drawn.items()})  # each (M, inputs)

    def expand(self) -> State:
        """Return the members' parameters: (1) for masked weights."""
        state, masks = super().expand(), self.mask_tree.state()
        for prefix, shape in self.layers.items():
            mask = masks[f"{prefix}mask"]  # (M, inputs)
            every = mask.new_ones(1, len(mask), shape.outputs)
            state[f"{prefix}weight"] = state[f"{prefix}weight"] * shape.factor(mask[None], every)  # (1)
        return state


def hidden_layers(network: nn.Module, include: Sequence[str], exclude: Sequence[str]) -> dict[str, nn.Module]:
    """Return the layers that may be masked: those that the patterns select, without the first of the network."""
    chosen = select_layers(network, LAYERS, include, exclude)
    known = [name for name, module in network.named_modules() if isinstance(module, (*LAYERS, nn.Embedding))]
    if include or len(known) == 1:
        return chosen
    hidden = {name: layer for name, layer in chosen.items() if name != known[0]}
    if not hidden:
        raise EnfoldError(
            f"exclude must leave a layer after the first, '{known[0]}', got exclude={exclude}: exclude less, or name "
            "layers with include"
        )
    return hidden


def independent_masks(num_members: int, scale: float, seed: int, name: str, features: int) -> Tensor:
    """Return masks by (2), (M, features).

    Args:
        num_members: The number of members.
        scale: The scale s of the masks.
        seed: The seed.
        name: The name of the layer.
        features: The number of features.
    """
    ones = max(1, round(features / scale))  # (2)
    sources = (generator(seed, "masksembles", name, member) for member in range(num_members))
    return torch.stack([_draw_mask(features, ones, source) for source in sources])


def joint_masks(num_members: int, scale: float, seed: int, name: str, features: int) -> Tensor:
    """Return masks by (3), (M, features): every feature is used by a member.

    Args:
        num_members: The number of members.
        scale: The scale s of the masks.
        seed: The seed.
        name: The name of the layer.
        features: The number of features.
    """
    size = num_members
    wanted = features / (scale * (1 - (1 - 1 / scale) ** size))
    ones = min(features, max(round(wanted), -(-features // size)))  # so that M masks can cover all features
    places = max(features, round(ones * scale))
    for attempt in range(ATTEMPTS):
        source = generator(seed, "masksembles", name, "joint", size, attempt)
        drawn = torch.stack([_draw_mask(places, ones, source) for _ in range(size)])
        used = drawn[:, drawn.any(0)]
        if used.shape[1] == features:
            return used
        places = max(features, places + (1 if used.shape[1] < features else -1))
    raise EnfoldError(
        f"scale must allow joint masks that use all {features} features of '{name.removesuffix('.')}', but {ATTEMPTS} "
        f"draws with scale={scale} found none: change scale, or use masks='independent'"
    )


def _draw_mask(places: int, ones: int, source: torch.Generator) -> Tensor:
    mask = torch.zeros(places, dtype=torch.bool)
    mask[torch.randperm(places, generator=source)[:ones]] = True
    return mask

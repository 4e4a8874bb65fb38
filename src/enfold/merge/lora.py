"""LoRA adapters of one network are merged as the products B A, never A and B apart, optionally at a lower rank.

    ΔW_m = s_m B_m A_m,   s = α / r,      or ΔW_m = W_m - W_0 for networks in which it was added to the weight     (1)
    ΔW = Σ_m w_m ΔW_m,   of rank M r in general                                                                   (2)
    W = W_0 + ΔW,   or with the `rank` largest singular values of ΔW                                              (3)

E. J. Hu, Y. Shen, P. Wallis, Z. Allen-Zhu, Y. Li, S. Wang, L. Wang, W. Chen: LoRA: Low-Rank Adaptation of Large
Language Models, ICLR 2022, arXiv:2106.09685. Merging is not part of it.

The mean of A and the mean of B have another product than (2): adapters are defined up to (B R⁻¹)(R A), and members
differ in R. With rank=r, (3) is the best approximation by one adapter of the members' rank.

Members are a `LoRAEnsemble`; or networks with adapters in their layers, parameters `lora_A` and `lora_B` beside a
`weight` or a `base_layer`, as peft and loralib make them; or, with `base`, plain networks into which adapters were
merged. The result has the product in the weight; `lora_B` is then 0.

Differs from the paper: see above; parameters without an adapter, such as heads, are averaged with the same weights.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn

from enfold.arguments import checked
from enfold.data.convert import Examples
from enfold.data.unpack import Unpack
from enfold.engines.skeleton import State
from enfold.ensemble import Ensemble
from enfold.ensembles.lora_ensemble import LoRAEnsemble
from enfold.errors import EnfoldError
from enfold.merge.common.fine_tuned import Base, base_state, finish, wide
from enfold.merge.common.inputs import Models, prepare_inputs
from enfold.merge.common.states import mean_of, states_of
from enfold.merge.repair import RepairKind

DOWN = re.compile(r"^(?:(.*)\.)?lora_A((?:\..*)?)$")  # the layer, and what follows: "", ".weight", ".default.weight"
OTHER_KINDS = ("lora_magnitude_vector", "lora_embedding_A", "lora_embedding_B")


@dataclass(frozen=True)
class Adapter:
    """The names of one adapter in a state, and the factor on B A; `flipped` if the weight is in x out."""

    down: str
    up: str
    weight: str
    scale: float
    flipped: bool = False

    def product(self, state: State) -> Tensor:
        """Return equation (1) in the shape of the weight."""
        down, up, weight = (wide(state[name]) for name in (self.down, self.up, self.weight))
        found = self.scale * (up.flatten(1) @ down.flatten(1))
        if found.numel() != weight.numel():
            raise EnfoldError(
                f"the product of '{self.up}' and '{self.down}' must have the size of '{self.weight}', got "
                f"{tuple(found.shape)} for {tuple(weight.shape)}: merge adapters into the weights and pass base="
            )
        return found.T.reshape(weight.shape) if self.flipped else found.reshape(weight.shape)


@checked
@torch.no_grad()
def lora(
    models: Models,
    train: Examples | None = None,
    *,
    base: Base | None = None,
    rank: Annotated[int, Field(ge=1)] | None = None,
    alpha: Annotated[float, Field(allow_inf_nan=False)] | None = None,
    weights: tuple[float, ...] | None = None,
    repair: RepairKind = "reset",
    seed: int = 0,
    unpack: Unpack | None = None,
) -> nn.Module:
    """Return one network with the mean of the members' low-rank changes.

    Args:
        models: A LoRAEnsemble, networks with adapters, or with `base` networks into which adapters were merged; they
            are not modified.
        train: Training examples, needed to correct statistics: with batch norm, or `repair` other than "reset".
        base: The network that the adapters belong to, its state dict, or the file of one; only for networks without
            adapters of their own.
        rank: Maximum rank of the change of each weight; None for the exact sum of products.
        alpha: α of equation (1) for adapters in layers without an attribute `scaling`; None for a factor of 1.
        weights: w of equation (2), one number for each member; None for 1/M each.
        repair: Statistics of the result: "reset" measures batch norms again, "none" averages their statistics,
            "repair", "rescale" and "closed_form" also correct hidden units as `enfold.merge.repair` does.
        seed: Seed of the order of the training examples.
        unpack: Function that splits a batch into (inputs, target); None for the usual structures of batches.

    Returns:
        A network of the members' class in eval mode; a single member with weight 1 is returned unchanged if its rank is
        not reduced.

    Raises:
        EnfoldError: If the networks cannot be averaged, have adapters of different bases or of other kinds, have none
            and no base is given, or examples are needed and missing.
    """
    inputs = prepare_inputs("lora", models, train, repair=repair, unpack=unpack)
    ensemble, states = inputs.ensemble, states_of(inputs.ensemble)
    factors = _factors(weights, len(states))
    if factors == [1.0] and rank is None:
        return ensemble.member(0).eval()
    state = mean_of(states) if weights is None else mean_of(states, factors)
    if isinstance(ensemble, LoRAEnsemble):
        changes, origin = _of_ensemble(ensemble), ensemble.shared.state()
    elif base is None:
        adapters = find_adapters(ensemble, alpha)
        require_one_base(states, adapters)
        origin = states[0]
        changes = {each.weight: [each.product(own) for own in states] for each in adapters}
        state |= {each.up: torch.zeros_like(state[each.up]) for each in adapters}
        state |= {each.down: states[0][each.down] for each in adapters}
    else:
        origin = base_state(ensemble, base, "lora")
        names = [name for name in ensemble.skeleton.parameters if origin[name].is_floating_point()]
        changes = {name: [wide(own[name]) - wide(origin[name]) for own in states] for name in names}
    for name, each in changes.items():
        change = sum((w * one for w, one in zip(factors, each, strict=True)), torch.zeros_like(each[0]))  # (2)
        if rank is not None and change.ndim > 1:
            change = truncate(change, rank, ensemble.shapes[name][0] if isinstance(ensemble, LoRAEnsemble) else 1)
        state[name] = origin[name] + change.to(origin[name])  # (3)
    return finish(inputs, state, repair, seed)


def _of_ensemble(ensemble: LoRAEnsemble) -> dict[str, list[Tensor]]:
    """Return equation (1) of every adapted weight and member."""
    found, factors = {}, ensemble.low_rank.state()
    for name in ensemble.shapes:
        down, up = factors[f"{name}.A"], factors[f"{name}.B"]
        scale = 1.0 if ensemble.alpha is None else ensemble.alpha / down.shape[-2]
        products = scale * (wide(up) @ wide(down))  # (M, blocks, out, in)
        found[name] = [each.reshape(ensemble.shared.state()[name].shape) for each in products]
    return found


def truncate(change: Tensor, rank: int, blocks: int = 1) -> Tensor:
    """Return the nearest change of at most a rank, for each block of rows.

    Args:
        change: The change of a weight, (out, ...).
        rank: The maximum rank.
        blocks: The number of blocks of rows, such as query, key and value.
    """
    left, values, right = torch.linalg.svd(change.double().reshape(blocks, len(change) // blocks, -1), False)
    found: Tensor = (left[..., :rank] * values[..., None, :rank]) @ right[..., :rank, :]  # (3)
    return found.reshape(change.shape).to(change)


def find_adapters(ensemble: Ensemble, alpha: float | None = None) -> list[Adapter]:
    """Return the adapters in the layers of the members.

    Args:
        ensemble: The members.
        alpha: α for layers without an attribute `scaling`.

    Raises:
        EnfoldError: If there are none, or they are of another kind, such as DoRA.
    """
    names = ensemble.skeleton.parameters
    other = next((name for name in names for kind in OTHER_KINDS if kind in name), None)
    if other is not None:
        raise EnfoldError(
            f"lora merges adapters whose change of a weight is B A, but '{other}' belongs to another kind: merge each "
            "adapter into its network and pass base="
        )
    found = []
    modules = dict(ensemble.skeleton.network.named_modules())
    for down in names:
        match = DOWN.match(down)
        if match is None:
            continue
        layer, rest = match[1] or "", match[2]
        prefix = f"{layer}." if layer else ""
        up, weight = f"{prefix}lora_B{rest}", f"{prefix}base_layer.weight"
        weight = weight if weight in names else f"{prefix}weight"
        if up not in names or weight not in names:
            raise EnfoldError(
                f"an adapter must have a lora_B and a weight beside its lora_A, but '{down}' lacks "
                f"'{up if up not in names else weight}': merge adapters into the weights and pass base="
            )
        module = modules[layer]
        scale = _scale(module, rest, alpha, min(ensemble.skeleton.shape(down)))
        found.append(Adapter(down, up, weight, scale, _is_flipped(module)))
    if not found:
        raise EnfoldError(
            "lora needs members with adapters, parameters named lora_A and lora_B, or a LoRAEnsemble, got networks "
            "without: pass base= if adapters were merged into the weights, or use average"
        )
    return found


def _is_flipped(module: nn.Module) -> bool:
    layer = getattr(module, "base_layer", module)
    return bool(getattr(module, "fan_in_fan_out", False)) or type(layer).__name__ == "Conv1D"


def _scale(module: nn.Module, rest: str, alpha: float | None, rank: int) -> float:
    """Return the factor on B A."""
    scaling: Any = getattr(module, "scaling", None)
    if isinstance(scaling, Mapping):
        name = rest.strip(".").removesuffix("weight").strip(".")
        scaling = scaling.get(name, next(iter(scaling.values()), None))
    if scaling is not None:
        return float(scaling)
    return 1.0 if alpha is None else alpha / rank


def require_one_base(states: Sequence[State], adapters: Sequence[Adapter]) -> None:
    """Refuse adapters that were trained for different weights.

    Raises:
        EnfoldError: With the name of the first weight that differs.
    """
    for each in adapters:
        for index, state in enumerate(states):
            if not torch.equal(states[0][each.weight], state[each.weight]):
                raise EnfoldError(
                    f"adapters must have one base, but '{each.weight}' of member {index} differs from that of member "
                    "0: merge each adapter into its own network and average these"
                )


def _factors(weights: tuple[float, ...] | None, count: int) -> list[float]:
    if weights is None:
        return [1 / count] * count
    if len(weights) != count:
        raise EnfoldError(f"weights must be one number for each of the {count} members, got {len(weights)}: change it")
    return list(weights)

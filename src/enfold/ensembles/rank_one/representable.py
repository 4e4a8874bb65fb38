"""Test whether M networks form a BatchEnsemble: layer by layer, all quotients of two members' weights have rank one.

    There are W and s_m, r_m with W_m = W ∘ (s_m r_m^T) for all m   <=>   rank(W_i / W_j) = 1 for all i, j      (1)

for weights without zeros: a quotient of two matrices of rank one has rank one; conversely, W = W_1 and
s_m r_m^T = W_m / W_1 satisfy it. One reference would suffice; all pairs are tested in both orders, since a quotient is
inaccurate where its denominator is small. With zeros, (1) is tested for each pair on the weights that are not zero.

Hidden units have no order, so networks may form a BatchEnsemble only after their units were matched (`match=True`).
Matching may miss a suitable permutation: a positive result is a proof, a negative one is not.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import permutations

import torch
from torch import Tensor

from enfold.engines.skeleton import State
from enfold.ensemble import Ensemble
from enfold.ensembles.common.efficient import batch_norm_names
from enfold.ensembles.rank_one.blocks import finite_blocks, layer_name, member_layers
from enfold.ensembles.rank_one.match import match_units
from enfold.ensembles.rank_one.quotient import quotient
from enfold.errors import EnfoldError


@dataclass(frozen=True)
class LayerDefect:
    """The largest defect over all pairs of members in one layer."""

    name: str
    shape: tuple[int, ...]  # of the weight
    defect: float  # σ_2 / σ_1 of the balanced quotient, see `hadamard_rank_defect`
    pair: tuple[int, int] | None  # numerator and denominator; None for a single member
    left_out: int  # weights near zero in both members: the maximum over pairs
    contradictions: int  # weights near zero in only one member, which no factor explains: the maximum over pairs


@dataclass(frozen=True)
class Representability:
    """The result of a test, layer by layer, whether members form a BatchEnsemble of rank one; usable as a bool.

    Args:
        layers: The residual of each layer.
        tolerance: Largest relative residual that counts as representable.
        others: Tensors that differ between members, but are common in a BatchEnsemble.
        norms_differ: Whether scales or shifts of norm layers differ, not only statistics: representable with
            batch_norm="own".
        matched: The result after the hidden units were matched; None if they were not.
    """

    layers: tuple[LayerDefect, ...]
    tolerance: float
    others: tuple[str, ...]
    norms_differ: bool
    matched: Representability | None = None

    @property
    def representable(self) -> bool:
        """True if all layers are representable, and all other common tensors of a BatchEnsemble are equal."""
        return not self.others and all(self.fits(layer) for layer in self.layers)

    def fits(self, layer: LayerDefect) -> bool:
        """Return whether one layer is representable."""
        return layer.defect <= self.tolerance

    def __bool__(self) -> bool:
        return self.representable

    def __str__(self) -> str:
        rows = [["layer", "weight", "defect", "pair", "near zero", "only in one", "representable"]]
        rows += [[*_cells(layer), "yes" if self.fits(layer) else "no"] for layer in self.layers]
        if self.matched is not None:
            rows[0] += ["matched", "representable"]
            for row, layer in zip(rows[1:], self.matched.layers, strict=True):
                row += [f"{layer.defect:.2e}", "yes" if self.matched.fits(layer) else "no"]
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([*table, *self._notes()])

    def _notes(self) -> list[str]:
        notes = [f"a BatchEnsemble of rank one within {self.tolerance:g}: {'yes' if self else 'no'}"]
        if self.matched is not None:
            notes[0] += f", after matching hidden units: {'yes' if self.matched else 'no'}"
        if self.others:
            notes.append(f"common in a BatchEnsemble, but different between members: {', '.join(self.others)}")
        if self.norms_differ:
            notes.append('scales or shifts of batch norms differ between members: use BatchEnsemble(batch_norm="own")')
        return notes


def _cells(layer: LayerDefect) -> list[str]:
    pair = "-" if layer.pair is None else f"{layer.pair[0]} / {layer.pair[1]}"
    shape = "x".join(str(size) for size in layer.shape)
    return [layer.name, shape, f"{layer.defect:.2e}", pair, str(layer.left_out), str(layer.contradictions)]


@torch.no_grad()
def representable(
    members: Ensemble, tolerance: float = 1e-6, *, match: bool = False, example: Tensor | None = None
) -> Representability:
    """Return whether the members form a BatchEnsemble of rank one, layer by layer.

    Args:
        members: An ensemble of networks of one architecture.
        tolerance: The largest defect that counts as rank one; the default suits float32.
        match: Test also after matching the hidden units of the members.
        example: With `match`, a few inputs of the network, (B, ...), whose values do not matter; not needed where the
            first layer is linear.

    Raises:
        EnfoldError: If members have no parameters of one architecture, or a weight is not finite.
    """
    if not 0 <= tolerance < 1:
        raise EnfoldError(f"tolerance must be in [0, 1), got {tolerance}: use 1e-6 for float32")
    layers = member_layers(members)
    matched = representable(match_units(members, example=example), tolerance) if match else None
    state = members.expand()
    found = []
    for prefix, shape in layers.items():
        weight = state[f"{prefix}weight"]
        blocks = finite_blocks(weight, shape, prefix)
        found.append(_worst(layer_name(prefix), tuple(weight.shape[1:]), blocks))
    norms = set(batch_norm_names(members.skeleton.network))
    scaled = {f"{prefix}{key}" for prefix in layers for key in ("weight", "bias")}
    different = _different(state, tolerance)
    others = tuple(name for name in different if name not in scaled and name not in norms)
    norms_differ = any(name in norms and name in members.skeleton.parameters for name in different)
    return Representability(tuple(found), tolerance, others, norms_differ, matched)


def _worst(name: str, shape: tuple[int, ...], blocks: Tensor) -> LayerDefect:
    defect, pair, left_out, contradictions = 0.0, None, 0, 0
    for first, second in permutations(range(len(blocks)), 2):
        ratio = quotient(blocks[first], blocks[second])
        found = ratio.defect(balanced=True)
        if pair is None or found > defect:
            defect, pair = found, (first, second)
        left_out, contradictions = max(left_out, ratio.left_out), max(contradictions, ratio.contradictions)
    return LayerDefect(name, shape, defect, pair, left_out, contradictions)


def _different(state: State, tolerance: float) -> list[str]:
    """Return the names of the floating-point tensors that differ between members."""
    found = []
    for name, tensor in state.items():
        if tensor.is_floating_point() and tensor.numel():
            values = tensor.detach().cpu().double()
            if not bool((values - values[:1]).abs().max() <= tolerance * values.abs().max()):  # also true for NaN
                found.append(name)
    return found

"""TIES: small changes are trimmed, members elect a sign for each weight, and those that have it are averaged.

    τ̂_m = the fraction `density` of the entries of τ_m = θ_m - θ_0 with the largest magnitudes, others 0          (1)
    γ = sign(Σ_m τ̂_m)                                                                                             (2)
    τ = mean over the members with sign(τ̂_m) = γ of τ̂_m,   for each entry; 0 if there are none                    (3)
    θ = θ_0 + λ τ                                                                                                 (4)

P. Yadav, D. Tam, L. Choshen, C. Raffel, M. Bansal: TIES-Merging: Resolving Interference When Merging Models, NeurIPS
2023, arXiv:2306.01708.

Equal members give themselves with density=1 only, because trimming changes each of them.

Differs from the paper: a single member is not trimmed, as nothing interferes with it; entries whose sum is exactly 0
stay as in the base; buffers are averaged, and batch-norm statistics measured again.
"""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from enfold.arguments import checked
from enfold.data.convert import Examples
from enfold.data.unpack import Unpack
from enfold.engines.skeleton import State
from enfold.merge.common.fine_tuned import (
    Base,
    FineTuned,
    finish_with_base,
    flatten,
    prepare_fine_tuned,
    unflatten,
)
from enfold.merge.common.inputs import Models
from enfold.merge.common.states import mean_of
from enfold.merge.repair import RepairKind


@checked
@torch.no_grad()
def ties(
    models: Models,
    train: Examples | None = None,
    *,
    base: Base | None = None,
    density: Annotated[float, Field(gt=0, le=1)] = 0.2,
    scale: Annotated[float, Field(allow_inf_nan=False)] = 1.0,
    repair: RepairKind = "reset",
    seed: int = 0,
    unpack: Unpack | None = None,
) -> nn.Module:
    """Return the base plus the mean change of the members that agree on its sign, weight by weight.

    Args:
        models: An ensemble, or networks of one architecture; they are not modified.
        train: Training examples, needed to correct statistics: with batch norm, or `repair` other than "reset".
        base: The network that the members were fine-tuned from, its state dict, or the file of one.
        density: Fraction of the entries of each member's change that is used, the largest over all parameters.
        scale: λ of equation (4); 0 gives the base.
        repair: Statistics of the result: "reset" measures batch norms again, "none" averages their statistics,
            "repair", "rescale" and "closed_form" also correct hidden units as `enfold.merge.repair` does.
        seed: Seed of the order of the training examples.
        unpack: Function that splits a batch into (inputs, target); None for the usual structures of batches.

    Returns:
        A network of the members' class in eval mode; a single member is returned unchanged at scale 1.

    Raises:
        EnfoldError: If the networks cannot be averaged, the base does not fit, or examples are needed and missing.
    """
    given = prepare_fine_tuned("ties", models, base, train, repair=repair, unpack=unpack)
    state = mean_of(given.states)
    if len(given.states) > 1:
        each = [trim(flatten(given.vectors(k), given.learned), density) for k in range(len(given.states))]
        state |= add_to_base(given, disjoint_mean(torch.stack(each)))
    return finish_with_base(given, given.along(state, scale), repair, seed)  # (4)


def trim(vector: Tensor, density: float) -> Tensor:
    """Return equation (1) of one task vector, (P,); entries as large as the smallest that is used are used, too."""
    used = max(1, round(density * len(vector)))
    if used >= len(vector):
        return vector
    least = vector.abs().kthvalue(len(vector) - used + 1).values
    return torch.where(vector.abs() >= least, vector, torch.zeros_like(vector))


def disjoint_mean(vectors: Tensor) -> Tensor:
    """Return equations (2) and (3) of trimmed task vectors: (M, P) -> (P,)."""
    elected = vectors.sum(0).sign()  # (2)
    agree = (vectors.sign() == elected) & (elected != 0)
    return (vectors * agree).sum(0) / agree.sum(0).clamp(min=1)  # (3)


def add_to_base(given: FineTuned, vector: Tensor) -> State:
    """Return the parameters of the base plus a change, (P,)."""
    change = unflatten(vector, given.base, given.learned)
    return {name: given.base[name] + change[name] for name in given.learned}

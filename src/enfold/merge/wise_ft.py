"""WiSE-FT: a point on the line from the network before fine-tuning to the fine-tuned network, or to the members' mean.

    θ(α) = (1 - α) θ_0 + α θ̄,   θ̄ = (1/M) Σ_m θ_m                                                              (1)

M. Wortsman, G. Ilharco, J. W. Kim, M. Li, S. Kornblith, R. Roelofs, R. Gontijo-Lopes, H. Hajishirzi, A. Farhadi,
H. Namkoong, L. Schmidt: Robust fine-tuning of zero-shot models, CVPR 2022, arXiv:2109.01903.

Useful where the base knows something that fine-tuning forgets, such as data from other sources. The paper recommends
α = 0.5 if no data of the target are available to choose it.

Differs from the paper: the fine-tuned end may be the mean of several members; α is chosen on validation examples by the
criterion of the task, NLL for classes; batch-norm statistics between the ends are measured again.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated

import torch
from pydantic import Field
from torch import nn

from enfold.arguments import checked
from enfold.data.convert import Examples
from enfold.data.unpack import Unpack
from enfold.merge.common.fine_tuned import (
    Base,
    FineTuned,
    choose_on_val,
    finish_with_base,
    prepare_fine_tuned,
)
from enfold.merge.common.inputs import Models
from enfold.merge.common.states import mean_of
from enfold.merge.repair import RepairKind
from enfold.tasks import TaskLike


@checked
@torch.no_grad()
def wise_ft(
    models: Models,
    train: Examples | None = None,
    val: Examples | None = None,
    *,
    base: Base | None = None,
    alpha: Annotated[float, Field(ge=0, le=1)] | None = None,
    points: Annotated[int, Field(ge=2)] = 11,
    task: TaskLike = None,
    repair: RepairKind = "reset",
    seed: int = 0,
    unpack: Unpack | None = None,
) -> nn.Module:
    """Return a network on the line from the base to the mean of the members.

    Args:
        models: An ensemble, or networks of one architecture; they are not modified.
        train: Training examples, needed to correct statistics: with batch norm, or `repair` other than "reset".
        val: Validation examples on which α is chosen.
        base: The network that the members were fine-tuned from, its state dict, or the file of one.
        alpha: α of equation (1): 0 is the base, 1 the mean of the members; None to choose it on validation examples.
        points: Number of values of α, evenly spaced from 0 to 1, to choose from.
        task: What outputs mean, for the criterion on validation examples; None to infer it.
        repair: Statistics of the result: "reset" measures batch norms again, "none" averages their statistics,
            "repair", "rescale" and "closed_form" also correct hidden units as `enfold.merge.repair` does.
        seed: Seed of the order of the training examples.
        unpack: Function that splits a batch into (inputs, target); None for the usual structures of batches.

    Returns:
        A network of the members' class in eval mode; at the ends, the base or a single member, unchanged.

    Raises:
        EnfoldError: If the networks cannot be averaged, the base does not fit, or examples are needed and missing.
    """
    given = prepare_fine_tuned("wise_ft", models, base, train, val, repair=repair, unpack=unpack)
    make = partial(_at, given, repair, seed)
    if alpha is not None:
        return make(alpha)
    grid = [index / (points - 1) for index in range(points)]
    return choose_on_val(given, {each: partial(make, each) for each in grid}, "alpha", task)


def _at(given: FineTuned, repair: RepairKind, seed: int, alpha: float) -> nn.Module:
    return finish_with_base(given, given.along(mean_of(given.states), alpha), repair, seed)  # (1)

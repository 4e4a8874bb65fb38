"""Task arithmetic: the differences between members and base are summed, scaled and added to the base.

    θ = θ_0 + λ Σ_m τ_m,   τ_m = θ_m - θ_0                                                                        (1)

G. Ilharco, M. T. Ribeiro, M. Wortsman, S. Gururangan, L. Schmidt, H. Hajishirzi, A. Farhadi: Editing Models with Task
Arithmetic, ICLR 2023, arXiv:2212.04089.

λ = 1/M is the mean of the members. Members of different tasks, whose vectors are nearly orthogonal, need more.

Differs from the paper: λ is 1/M by default, for members of one task; `choose` takes the best of several from 0 to 2/M
on validation examples, by the criterion of the task; batch-norm statistics are measured again.
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
def task_arithmetic(
    models: Models,
    train: Examples | None = None,
    val: Examples | None = None,
    *,
    base: Base | None = None,
    scale: Annotated[float, Field(allow_inf_nan=False)] | None = None,
    choose: bool = False,
    points: Annotated[int, Field(ge=3)] = 11,
    task: TaskLike = None,
    repair: RepairKind = "reset",
    seed: int = 0,
    unpack: Unpack | None = None,
) -> nn.Module:
    """Return the base plus the scaled sum of the members' differences from it.

    Args:
        models: An ensemble, or networks of one architecture; they are not modified.
        train: Training examples, needed to correct statistics: with batch norm, or `repair` other than "reset".
        val: Validation examples, on which λ is chosen if `choose` is true.
        base: The network that the members were fine-tuned from, its state dict, or the file of one.
        scale: λ of equation (1), 0 gives the base; None for 1/M, the mean of the members.
        choose: Whether λ is chosen on validation examples.
        points: Number of values of λ, evenly spaced from 0 to 2/M, to choose from.
        task: What outputs mean, for the criterion on validation examples; None to infer it.
        repair: Statistics of the result: "reset" measures batch norms again, "none" averages their statistics,
            "repair", "rescale" and "closed_form" also correct hidden units as `enfold.merge.repair` does.
        seed: Seed of the order of the training examples.
        unpack: Function that splits a batch into (inputs, target); None for the usual structures of batches.

    Returns:
        A network of the members' class in eval mode.

    Raises:
        EnfoldError: If the networks cannot be averaged, the base does not fit, or examples are needed and missing.
    """
    given = prepare_fine_tuned("task_arithmetic", models, base, train, val, repair=repair, unpack=unpack)
    make = partial(_at, given, repair, seed)
    if not choose:
        return make(1.0 if scale is None else scale * len(given.states))
    grid = [2 * index / (points - 1) for index in range(points)]
    return choose_on_val(given, {each: partial(make, each) for each in grid}, "scale", task)


def _at(given: FineTuned, repair: RepairKind, seed: int, weight: float) -> nn.Module:
    return finish_with_base(given, given.along(mean_of(given.states), weight), repair, seed)  # (1), weight = M λ

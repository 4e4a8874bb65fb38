"""permAVG: soft permutations that align members' hidden units are learned, and the aligned weights are averaged.

    P_ln = S(C_ln / τ),   S: Sinkhorn's iterations, C_ln = I at the start                     (1)
    a_l = (1/M) Σ_n P_ln (W_ln P_(l-1)n^-1 h_(l-1) + b_ln),   h_l = ReLU(a_l)                 (2)
    W̄_l = (1/M) Σ_n P_ln W_ln P_(l-1)n^-1,   b̄_l = (1/M) Σ_n P_ln b_ln                        (3)
    min over C   CE(y, softmax(a_L))                                                          (4)

permAVG is from a thesis of 2021. A close relative, for two networks, with Pᵀ and permutations at the end, is published:
F. A. Guerrero Peña et al.: Re-basin via implicit Sinkhorn differentiation, CVPR 2023, arXiv:2212.12042.

Algorithm 1 of the thesis runs (2): layer by layer, one member after the other, all with the mean of the previous
layer as input; each P is computed and inverted at each use. Inputs and outputs have P = I, as has the first member, the
reference; the other C are learned by Adam, rate 0.1, cosine, 20 epochs, τ = 1. As all members of a layer see one h, (2)
is the network with the weights (3): these are computed once a step, and that network is run once.

With order="joint", as in Algorithm 1, all C are learned at once; the published tables, in which accuracy falls with M,
are of this form. With order="sequential", also in the thesis, members 1 and 2 are aligned first; then P_2 is fixed,
member 3 is added at weights of 1/3, only its C are learned, and so on. Two members are the same in both.

S(I/τ) is not the identity: for τ = 1 and wide layers it is almost uniform, so that the start is not the plain average.
Only P of positive determinant can be reached from there: between them and others P is singular, and P^-1 without bound.
`matched` starts at c times the permutations of weight matching, also odd ones; 10 to 14 is near them. Tied weights that
produce and consume the same units need P^-1 = Pᵀ, which holds for permutations only: `matched` permutes these units
once.

The thesis reports that C = I is a better start than a random one, and that nothing is learned without the inverse:
`start` and `inverse` are its ablation. With permutations Pᵀ is P^-1; without an inverse, the units of a layer are moved
and those of the next layer are not, so that (3) is not an average of equal functions.

Differs from the thesis: any task, with its loss in place of the cross-entropy; any network whose symmetries are found,
not only MLPs, and units without a symmetry are not aligned; linear systems are solved instead of computing inverses;
iterations end when rows sum to 1 within `tolerance`; bitwise equal members have one P, and those equal to the first
none; the epoch with the best validation score is returned, as in `fit` (`select`). Its batch size is not known.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import nn

from enfold.arguments import checked
from enfold.data.convert import Examples
from enfold.data.unpack import Unpack
from enfold.errors import EnfoldError
from enfold.loggers import Log, LoggerLike, as_log, with_log
from enfold.merge.common.inputs import Models, choose_task, prepare_inputs
from enfold.merge.common.permutation_learning import (
    PUBLISHED,
    LearningOrder,
    PermutationOptions,
    Start,
    find_groups,
    learn_permutations,
)
from enfold.merge.common.sinkhorn import Gradient
from enfold.merge.common.soft_permutations import Mixing, all_equal
from enfold.merge.common.solve import Inverse
from enfold.merge.repair import RepairKind, repair_network
from enfold.train import Epoch, TrainConfig

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@checked
@with_log
def perm_avg(
    models: Models,
    train: Examples,
    val: Examples | None = None,
    *,
    temperature: Positive = 1.0,
    final_temperature: Positive | None = None,
    iterations: Annotated[int, Field(ge=1)] = 100,
    tolerance: Annotated[float, Field(ge=0)] = 1e-8,
    gradient: Gradient = "unrolled",
    warm: bool = False,
    ridge: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0,
    matched: Positive | None = None,
    start: Start = "identity",
    inverse: Inverse = "exact",
    order: LearningOrder = "sequential",
    universe: bool = False,
    alpha: Annotated[float, Field(ge=0, le=1)] = 0.0,
    mixing: Mixing = "equal",
    gain: bool = False,
    project: bool = False,
    repair: RepairKind = "reset",
    config: TrainConfig | None = None,
    checkpoint: str | Path | None = None,
    on_epoch: Callable[[Epoch], None] | None = None,
    logger: LoggerLike | Log = None,
    quiet: bool = False,
    unpack: Unpack | None = None,
    **settings: Any,
) -> nn.Module:
    """Return the average of members whose units are aligned by learned soft permutations.

    Args:
        models: An ensemble, or networks of one architecture; they are not modified.
        train: Training examples from which the permutations are learned.
        val: Validation examples, which choose the best epoch.
        temperature: τ of equation (1).
        final_temperature: τ at the end of training, reached geometrically; None if τ is constant.
        iterations: Maximum number of Sinkhorn iterations.
        tolerance: Iterations end when all rows sum to 1 within it, or within rounding.
        gradient: Gradient of the iterations that were run ("unrolled"), or of their limit ("implicit").
        warm: Start iterations from the result of the last step, so that fewer are run.
        ridge: ε of (P + ε Π) / (1 + ε) instead of P, with Π the permutation at the start: better conditioned.
        matched: Start at this multiple of the permutations of weight matching; None starts at `start`.
        start: C at the start: "identity", as published, or "random", standard normal entries that follow the seed.
        inverse: What stands for P^-1 in (2) and (3), for comparisons: "exact", Pᵀ ("transpose"), or nothing ("none").
        order: Add members one after the other ("sequential"), or learn all permutations at once ("joint").
        universe: Also align the first member, to a universe of all members.
        alpha: Weight of the ensemble's mean prediction in the loss; that of the labels is 1 - alpha.
        mixing: Weights of the members in training: "equal", or drawn in each step ("dirichlet").
        gain: Also learn a factor for each hidden unit of the average.
        project: Replace all P by the nearest permutations at the end.
        repair: Statistics of the average: "reset" measures batch norms again, "none" averages them, "repair",
            "rescale" and "closed_form" also correct hidden units as `enfold.merge.repair` does.
        config: How the permutations are learned; by default as published: Adam, lr 0.1, cosine, 20 epochs.
        checkpoint: A file that is written after every epoch; if it exists, training continues from it.
        on_epoch: Called with the record of every epoch, an `Epoch`.
        logger: Where settings and metrics are logged to, as for `fit`.
        quiet: Show no progress bar.
        unpack: Function that splits a batch into (inputs, target); None for the usual structures of batches.
        **settings: Fields of `TrainConfig`, such as `epochs=5` or `task="regression"`, which replace those of `config`.

    Returns:
        A network of the members' class in eval mode; equal members are returned unchanged.

    Raises:
        EnfoldError: If the networks cannot be aligned, examples are missing, or a matrix becomes singular.
    """
    if matched is not None and start == "random":
        raise EnfoldError(f"start must be 'identity' with matched={matched}, got 'random': leave start or matched out")
    plan = (config or PUBLISHED).update(settings)
    inputs = prepare_inputs("perm_avg", models, train, val, needs_train=True, unpack=unpack)
    plan = plan.replace(task=choose_task(plan.task, inputs.ensemble))
    if all_equal(inputs.ensemble):
        return inputs.ensemble.member(0).eval()
    options = PermutationOptions(
        temperature=temperature,
        final_temperature=final_temperature,
        iterations=iterations,
        tolerance=tolerance,
        gradient=gradient,
        warm=warm,
        ridge=ridge,
        matched=matched,
        start=start,
        inverse=inverse,
        order=order,
        universe=universe,
        alpha=alpha,
        mixing=mixing,
        gain=gain,
        measure_statistics=repair != "none",
        config=plan,
    )
    ensemble, symmetry = find_groups(inputs.ensemble, inputs.data, options)
    model = learn_permutations(
        ensemble,
        inputs.data,
        symmetry,
        options,
        checkpoint=checkpoint,
        quiet=quiet,
        on_epoch=on_epoch,
        log=as_log(logger),
    )
    with torch.no_grad():
        if model is None:
            network = ensemble.network(ensemble.mean_state())
        else:
            state = model.project() if project else model.average(model.matrices())  # (3)
            network = ensemble.network({**{name: t[0] for name, t in model.held.state().items()}, **state}).cpu()
    return repair_network(network, inputs.ensemble, inputs.data, repair, seed=plan.seed).eval()


def count_trainings(num_members: int, *, order: LearningOrder = "sequential", **_: object) -> int:
    """Return how many times permutations are learned: once for each member that is added, or once for all."""
    return 1 if order == "joint" else max(num_members - 1, 1)

"""Out-of-fold teachers: each training example is answered only by members that were not trained on it.

    target(x_n) = target of the members m with seen[m, n] = 0, such as their mean prediction               (1)

Members nearly agree on the examples that they were trained on, where their mean says little more than the labels do;
on the others it is an honest prediction. Members of a cross-validation have it for free.

T. Dao, G. M. Kamath, V. Syrgkanis, L. Mackey: Knowledge Distillation as Semiparametric Inference, ICLR 2021,
arXiv:2104.09732.

Differs from the paper: the teachers' folds, not the student's, decide who answers; the loss is not corrected.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from enfold.data import Data, Split
from enfold.data.indexed import loader_indices
from enfold.distill.loss import DistillationLoss
from enfold.distill.losses.kd import KD
from enfold.distill.perturbation import Perturbation
from enfold.ensemble import Ensemble
from enfold.ensembles.deep_ensemble import as_ensemble
from enfold.errors import EnfoldError


class OutOfFoldTeacher:
    """Members as a teacher in which each example is answered by the members that were not trained on it.

    ``distill(OutOfFoldTeacher(members, folds), train, val)``, with the training examples as tensors or as a Dataset.

    Args:
        members: An ensemble, or networks.
        folds: Which member saw which example: the fold of each example, (N,), if member k was trained on all but fold
            k, as `fit(..., folds=M)` does; or booleans (M, N), True where member m was trained on example n.

    Raises:
        EnfoldError: If `folds` does not fit the members, or all members were trained on an example.
    """

    def __init__(self, members: Ensemble | Sequence[nn.Module], folds: Tensor) -> None:
        self.members = members if isinstance(members, Ensemble) else as_ensemble(list(members))
        self.unseen = ~_training_mask(folds, self.members.num_members)  # (M, N)
        known = int((~self.unseen.any(0)).sum())
        if known:
            raise EnfoldError(
                f"folds must leave each example to at least one member, got {known} examples that all members were "
                "trained on: leave them out of train, or pass the ensemble itself as teacher"
            )

    @property
    def num_examples(self) -> int:
        """The number of training examples."""
        return self.unseen.shape[1]


def _training_mask(given: Any, num_members: int) -> Tensor:
    """Return which member was trained on which example, (M, N)."""
    folds: Tensor = torch.as_tensor(given)
    if folds.dtype == torch.bool and folds.ndim == 2 and len(folds) == num_members:
        return folds
    is_integer = not (folds.is_floating_point() or folds.is_complex() or folds.dtype == torch.bool)
    if is_integer and folds.ndim == 1 and len(folds) and int(folds.min()) >= 0 and int(folds.max()) < num_members:
        return folds != torch.arange(num_members)[:, None]
    raise EnfoldError(
        f"folds must be the fold of each example, integers (N,) from 0 to {num_members - 1}, or booleans "
        f"({num_members}, N) that are True where a member was trained on an example, got {folds.dtype} of shape "
        f"{tuple(folds.shape)}: pass enfold.data.fold_numbers(N, {num_members}) for members of fit(..., "
        f"folds={num_members})"
    )


def check_out_of_fold(
    teacher: OutOfFoldTeacher, data: Data, loss: DistillationLoss, perturb: Perturbation | None
) -> None:
    """Raise an error if examples cannot be answered by the members that have not seen them.

    Args:
        teacher: The members with their folds.
        data: The training data.
        loss: The distillation loss.
        perturb: The perturbation; None for none.
    """
    size = len(data.train) if isinstance(data.train, Split) else loader_indices(data.train)
    if size != teacher.num_examples:
        given = "a loader, whose examples have no indices" if size is None else f"{size} training examples"
        raise EnfoldError(
            f"an OutOfFoldTeacher answers for the {teacher.num_examples} examples of its folds, got {given}: pass "
            "these examples in their order, as tensors or as a Dataset"
        )
    if not isinstance(loss, KD):
        raise EnfoldError(
            f"loss must be KD() for an OutOfFoldTeacher, whose members answer for different examples, got "
            f"{type(loss).__name__}(): pass loss=KD()"
        )
    if perturb is not None and perturb.replaces_batch:
        raise EnfoldError(
            f"perturb must not mix examples for an OutOfFoldTeacher, as members were trained on one of two, got "
            f"{type(perturb).__name__}(): pass Gaussian() or None"
        )

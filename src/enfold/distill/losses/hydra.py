"""Hydra: one body learns the mean of the teachers, then as many heads on it each learn from a teacher of their own.

    first   L   = τ² KL(t̄(τ) || p(τ)),       t̄(τ) = (1/M) Σ_m t_m(τ)        (the Hinton head)  (1)
    then    L_m = τ² KL(t_m(τ) || p_m(τ)),    p_m = softmax(head_m(body(x)) / τ)                (2)

The heads of the second step start as copies of the first one's, set apart by noise; each step takes a whole plan, and
the body is trained on, or its parameters are kept (`body="frozen"`): heads of one layer are then M convex problems, but
for batch norms of the body, which go on to normalise each batch. The result is a share:
its members' mean is the prediction, and their differences tell what the teachers do not agree on.

L. Tran, B. S. Veeling, K. Roth, J. Swiatkowski, J. V. Dillon, J. Snoek, S. Mandt, T. Salimans, S. Nowozin,
R. Jenatton: Hydra: Preserving Ensemble Diversity for Model Distillation, 2020, arXiv:2001.04694.

Heads on a shared last layer differ linearly only; `split` gives them a block or more.

Differs from the paper: how copies are set apart is not published there, a tenth of each tensor's size is ours; for
classification only; a perturbation that compares students (TDiv-SDiv) acts in the second step alone, where there are
some. Nothing else known.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torch import nn

from enfold.data import Data
from enfold.distill.cached import CachedTeacher
from enfold.distill.losses.kd import KD
from enfold.distill.losses.one_to_one import OneToOne
from enfold.distill.perturbation import Perturbation
from enfold.distill.start import Start
from enfold.ensembles.common.efficient import EfficientEnsemble
from enfold.ensembles.hydra_ensemble import HydraEnsemble
from enfold.errors import EnfoldError
from enfold.io.files import part_file


@dataclass(frozen=True)
class HydraDistillation(OneToOne):
    """One body taught by the mean of the teachers, then a head for each teacher."""

    start: Start | None = "fresh"  # of the body and its first head
    split: str | None = None  # path of the first module of the head; None: the last layer
    noise: float = 0.1  # sets the copies of the head apart, relative to the size of each tensor
    body: Literal["trained", "frozen"] = "trained"  # in the second step: trained on, or frozen
    first_epochs: int | None = None  # of the first step; None: as many as the plan has

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.share is not None:
            raise EnfoldError(
                f"Hydra's student is a Hydra, got a {type(self.share).__name__}: leave share out, or use one_to_one"
            )
        if self.first_epochs is not None and self.first_epochs < 0:
            raise EnfoldError(f"first_epochs must be 0 or more, got {self.first_epochs}: None is the plan's epochs")

    def begin(
        self, members: nn.Module | CachedTeacher, data: Data, checkpoint: Path | None, answers: Path | None
    ) -> nn.Module:
        """The first step (1), and heads that are copies of its head."""
        epochs = self.plan.epochs if self.first_epochs is None else self.first_epochs
        first = KD(
            alpha=self.alpha,
            temperature=self.temperature,
            start=self.start,
            student=self.student,
            perturb=self.perturb if isinstance(self.perturb, Perturbation) and not self.perturb.replaces else None,
            plan=self.plan.replace(epochs=epochs, warmup_epochs=min(self.plan.warmup_epochs, epochs)),
        )
        before = checkpoint and part_file(checkpoint, "first")
        network = first(members, data, checkpoint=before, answers=answers)
        return self.started(network, int(getattr(members, "num_members", 1)))

    def started(self, network: nn.Module, num_teachers: int) -> nn.Module:
        """Heads that are copies of the network's."""
        heads = HydraEnsemble(network, num_teachers, split=self.split, noise=self.noise, seed=self.plan.seed)
        if self.body == "frozen":
            _train_body(heads, False)
        return heads

    def finish(self, student: nn.Module, data: Data) -> nn.Module:
        """The heads on their body, all of it open to training again."""
        _train_body(student, True)
        return student


def _train_body(heads: nn.Module, trained: bool) -> None:
    """Whether what all heads share is trained."""
    if not isinstance(heads, EfficientEnsemble):
        raise TypeError("Hydra's student is a share")
    learned = heads.skeleton.trainable
    for name, tensor in heads.shared.state().items():
        if name in learned:
            tensor.requires_grad_(trained)

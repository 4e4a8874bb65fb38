"""Hydra: one body learns the mean of the teachers, then each of its heads learns from a teacher of its own.

    first   L   = τ² KL(t̄(τ) || p(τ)),       t̄(τ) = (1/M) Σ_m t_m(τ)        (the Hinton head)         (1)
    then    L_m = τ² KL(t_m(τ) || p_m(τ)),    p_m = softmax(head_m(body(x)) / τ)                       (2)

The heads of the second stage start as copies of the head of the first, with noise added. Each stage takes the complete
training; in the second the body is trained further, or frozen (`body="frozen"`): heads of one layer are then M convex
problems, except for batch norms of the body, which normalise by each batch. The result is an ensemble: the mean of its
members is the prediction, and their differences represent the disagreement of the teachers.

L. Tran, B. S. Veeling, K. Roth, J. Swiatkowski, J. V. Dillon, J. Snoek, S. Mandt, T. Salimans, S. Nowozin,
R. Jenatton: Hydra: Preserving Ensemble Diversity for Model Distillation, 2020, arXiv:2001.04694.

Heads of one layer differ linearly only; `split` gives them a block or more. Like the paper, the network starts from
random weights unless `init` is given.

Differs from the paper: the noise of the copies is not published, a tenth of the scale of each tensor is ours; for
classification only; a perturbation that replaces the batch, such as TDiv-SDiv, acts in the second stage only. Nothing
else known.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from torch import nn

from enfold.arguments import checked
from enfold.data import Data
from enfold.distill.loss import Fraction, Temperature, Weight
from enfold.distill.losses.kd import KD
from enfold.distill.losses.one_to_one import OneToOne
from enfold.ensemble import Ensemble
from enfold.ensembles.hydra_ensemble import HydraEnsemble
from enfold.errors import EnfoldError
from enfold.train import TrainConfig


@checked
@dataclass(frozen=True)
class Hydra(OneToOne):
    """Match a body to the mean of the teachers, then one head to each teacher; the result is an ensemble.

    Args:
        alpha: Weight of the teachers' term; the labels have the weight 1 - alpha.
        temperature: τ, by which the logits of teachers and students are divided.
        split: Path of the first module of the head; None: the last layer.
        noise: Standard deviation of the noise on the copies of the head, relative to the scale of each tensor.
        body: Whether the body is trained further in the second stage.
        first_epochs: Epochs of the first stage; None: as many as the second has.
    """

    alpha: Fraction = 1.0
    temperature: Temperature = 1.0
    split: str | None = None
    noise: Weight = 0.1
    body: Literal["trained", "frozen"] = "trained"
    first_epochs: Annotated[int, Field(ge=0)] | None = None

    default_init: ClassVar[Literal["random"]] = "random"

    def pretrain(self, config: TrainConfig) -> tuple[KD, TrainConfig]:
        """Return the first stage, equation (1)."""
        epochs = config.epochs if self.first_epochs is None else self.first_epochs
        first = config.replace(epochs=epochs, warmup_epochs=min(config.warmup_epochs, epochs))
        return KD(alpha=self.alpha, temperature=self.temperature), first

    def build_student(self, network: nn.Module, num_teachers: int, config: TrainConfig) -> nn.Module:
        """Return a body with copies of the network's head.

        Args:
            network: The network from which the student starts, or the ensemble passed as `student`.
            num_teachers: Number of teachers, T.
            config: The training settings.
        """
        if isinstance(network, Ensemble):
            raise EnfoldError(
                f"loss=Hydra() builds its own student, got a {type(network).__name__}: leave student out, or use "
                "OneToOne()"
            )
        student = HydraEnsemble(network, num_teachers, split=self.split, noise=self.noise, seed=config.seed)
        if self.body == "frozen":
            _set_body_trainable(student, False)
        return student

    def finish(self, student: nn.Module, data: Data) -> nn.Module:
        """Return the ensemble with a trainable body."""
        _set_body_trainable(student, True)
        return student


def _set_body_trainable(student: nn.Module, is_trainable: bool) -> None:
    if not isinstance(student, HydraEnsemble):
        raise TypeError("the student of Hydra is a HydraEnsemble")
    trainable = student.skeleton.trainable
    for name, tensor in student.shared.state().items():
        if name in trainable:
            tensor.requires_grad_(is_trainable)

"""A network whose logits are the concentrations of a distribution over class probabilities: how it is read and taught.

A student is too sure where its distributions are far narrower than its teachers are apart,

    exp mean ln (α_0 / β_0) > TOO_SURE,   β_0 = C + (C - 1) / (2 (1/M) Σ_m KL(π̄ || π_m))    (1)

over validation examples, with α_0 the student's precision and β_0 that of the members' probabilities by Stirling's
approximation, beside the C of a distribution that knows nothing. The mean is one of logarithms, as a few examples have
most of the sum of precisions. Trained students were found below 4.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import asdict

import torch
from torch import Tensor, nn

from enfold.data import Data, Split
from enfold.data.dataset import has_examples
from enfold.distill.base import Distillation
from enfold.distill.cached import CachedTeacher
from enfold.engines.modes import evaluating
from enfold.engines.outputs import logits_of
from enfold.errors import EnfoldError
from enfold.evaluate import member_logits
from enfold.metrics.dirichlet import concentrations, dirichlet_uncertainty
from enfold.metrics.predictions import Predictions
from enfold.metrics.uncertainty import decomposition
from enfold.train import TrainConfig

TOO_SURE = 10.0
SOME = 1024  # examples
SMALLEST = torch.finfo(torch.float32).eps  # of a divergence


class OverconfidentWarning(UserWarning):
    """A student's distributions are far narrower than its teachers are apart."""


class Dirichlet(nn.Module):
    """A network with concentrations α = exp(z) + offset; it answers with the mean of that distribution.

    The network stays what it is and is stored as it is; this only reads it. A share of M members is read member by
    member.
    """

    def __init__(self, network: nn.Module, offset: float = 0.0) -> None:
        require_offset(offset)
        super().__init__()
        self.network, self.offset = network, offset
        self.training = network.training
        if hasattr(network, "num_members"):
            self.num_members = int(network.num_members)  # type: ignore[arg-type]

    def forward(self, inputs: Tensor) -> Tensor:
        """ln α, logits whose softmax is the mean: (B, ...) -> (B, C), or (M, B, C) of a share."""
        logits = self._logits(inputs)
        return torch.logaddexp(logits, logits.new_tensor(math.log(self.offset))) if self.offset else logits

    def concentrations(self, inputs: Tensor) -> Tensor:
        """α in float64: (B, ...) -> (B, C), or (M, B, C) of a share."""
        return concentrations(self._logits(inputs), self.offset)

    @torch.no_grad()
    def uncertainties(self, inputs: Tensor) -> dict[str, Tensor]:
        """total, aleatoric, epistemic, epkl, mkl and precision of each example, (B,), or (M, B) of a share."""
        return asdict(dirichlet_uncertainty(self.concentrations(inputs)))

    def _logits(self, inputs: Tensor) -> Tensor:
        return logits_of(self.network(inputs))

    def extra_repr(self) -> str:
        """Shown by print."""
        return f"offset={self.offset}"


class DirichletStudent(Distillation):
    """What distillations to concentrations have in common; the network of the last epoch is kept."""

    offset: float  # a setting of each method

    def adapted(self, student: nn.Module) -> TrainConfig:
        """The plan; the last epoch is kept."""
        return super().adapted(student).replace(select="last", patience=None)

    def judged(self, student: nn.Module) -> nn.Module:
        """The mean of the distribution."""
        return self.answering(student)

    def answering(self, network: nn.Module) -> Dirichlet:
        """The network as the distribution it learned."""
        return Dirichlet(network, self.offset)

    def looked_at(self, student: nn.Module, members: nn.Module | CachedTeacher, data: Data) -> None:
        """One that is too sure is told of."""
        if self.plan.epochs:
            warn_if_too_sure(self.answering(student), members, data)


@torch.no_grad()
def warn_if_too_sure(student: Dirichlet, members: nn.Module | CachedTeacher, data: Data) -> None:
    """Equation (1) on validation data, or on training data where teachers answered for nothing else."""
    recorded = isinstance(members, CachedTeacher)
    part = data.train if recorded or not has_examples(data.val) else data.val
    if not isinstance(part, Split):
        return
    few = part[: min(len(part), SOME)]
    inputs = data.prepare(few.inputs)
    with evaluating(student, *([] if isinstance(members, CachedTeacher) else [members])):
        told = members.logits[:, :SOME] if isinstance(members, CachedTeacher) else _asked(members, inputs)
        own = torch.log(_asked(student, inputs).double().exp().sum(-1)).mean()  # ln α_0
    apart = decomposition(Predictions(torch.log_softmax(told, dim=-1), few.labels.cpu())).rmi
    classes = told.shape[-1]
    theirs = torch.log(classes + (classes - 1) / (2 * apart + SMALLEST)).mean()  # ln β_0
    ratio = float((own - theirs).exp())  # (1)
    if ratio > TOO_SURE:
        warnings.warn(
            f"a student's distributions should be about as wide as its teachers are apart, but their mean precision on "
            f"{'training' if part is data.train else 'validation'} data is {float(own.exp()):.3g}, "
            f"{ratio:.3g} times the teachers' {float(theirs.exp()):.3g}: train for more epochs, or use start: fresh",
            OverconfidentWarning,
            stacklevel=2,
        )


def _asked(model: nn.Module, inputs: Tensor) -> Tensor:
    device = next((tensor.device for tensor in model.parameters()), inputs.device)
    return member_logits(model, inputs.to(device)).float().cpu()


def require_offset(offset: float, name: str = "offset") -> None:
    """Concentrations are above 0, so what is added to exp(z) is not below."""
    if not 0 <= offset < math.inf:
        raise EnfoldError(f"the {name} must be 0 or more, got {offset}: 0 and 1 are usual")


def require_temperature(temperature: float) -> None:
    """Logits are read as concentrations as they are, so they must be learned as they are."""
    if temperature != 1:
        raise EnfoldError(
            f"concentrations are read at the temperature 1 and must be learned there, got {temperature}: "
            "leave the temperature at 1"
        )

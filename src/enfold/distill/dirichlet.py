"""Networks whose logits are the concentrations of a Dirichlet distribution over class probabilities.

A student is overconfident if its distributions are far narrower than the spread of its teachers,

    exp mean ln (α_0 / β_0) > LARGEST_RATIO,   β_0 = C + (C - 1) / (2 (1/M) Σ_m KL(π̄ || π_m))          (1)

over validation examples, with α_0 the student's precision and β_0 that of the members' probabilities by Stirling's
approximation, beside the C of a uniform distribution. The mean is one of logarithms, because few examples have most of
the sum of precisions. Ratios of trained students were below 4.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import asdict
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn

from enfold.arguments import check_value
from enfold.data import Data, Split
from enfold.data.dataset import has_examples
from enfold.distill.cached import CachedTeacher
from enfold.distill.loss import DistillationLoss
from enfold.engines.call import call_network, pack_inputs
from enfold.engines.modes import eval_mode
from enfold.engines.outputs import get_logits
from enfold.engines.skeleton import State
from enfold.ensemble import Ensemble
from enfold.errors import EnfoldError, level_outside
from enfold.evaluate import member_logits
from enfold.metrics.dirichlet import concentrations, dirichlet_uncertainty
from enfold.metrics.predictions import Predictions
from enfold.metrics.uncertainty import decomposition
from enfold.train import TrainConfig

LARGEST_RATIO = 10.0
NUM_EXAMPLES = 1024
SMALLEST = torch.finfo(torch.float32).eps  # of a divergence


class OverconfidentWarning(UserWarning):
    """The distributions of a student are far narrower than the spread of its teachers."""


class Dirichlet(nn.Module):
    """A network read as a Dirichlet distribution with the concentrations α = exp(z) + offset.

    The outputs are the mean of the distribution. The network is neither copied nor changed.

    Args:
        network: The result of a distillation with `EnD2` or `ProxyEnD2`.
        offset: The `offset` of that loss.
    """

    def __init__(self, network: nn.Module, offset: float = 0.0) -> None:
        check_value("offset", offset, Annotated[float, Field(ge=0, allow_inf_nan=False)])
        if isinstance(network, Ensemble):
            raise EnfoldError(
                f"network must be a single network, got a {type(network).__name__}: use DirichletEnsemble(...) for an "
                "ensemble"
            )
        super().__init__()
        self.network, self.offset, self.training = network, offset, network.training

    def called_networks(self) -> list[nn.Module]:
        """Return the network that is called, which shows how many inputs there are."""
        return [self.network]

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return ln α, logits whose softmax is the mean: (B, ...) -> (B, C), or (M, B, C) of an ensemble."""
        logits = self._logits(pack_inputs(args, kwargs))
        return torch.logaddexp(logits, logits.new_tensor(math.log(self.offset))) if self.offset else logits

    def concentrations(self, inputs: Tensor) -> Tensor:
        """Return α in float64: (B, ...) -> (B, C), or (M, B, C) of an ensemble."""
        return concentrations(self._logits(inputs), self.offset)

    @torch.no_grad()
    def uncertainties(self, inputs: Tensor) -> dict[str, Tensor]:
        """Return total, aleatoric, epistemic, epkl, mkl and precision, each (B,), or (M, B) of an ensemble."""
        return asdict(dirichlet_uncertainty(self.concentrations(inputs)))

    def _logits(self, inputs: Any) -> Tensor:
        return get_logits(call_network(self.network, inputs), self.network)

    def extra_repr(self) -> str:
        """Return the text in the parentheses of print."""
        return f"offset={self.offset}"


class DirichletEnsemble(Dirichlet, Ensemble):
    """An ensemble whose members are read as Dirichlet distributions.

    Args:
        ensemble: The result of a distillation with `EnD2` or `ProxyEnD2` into an ensemble.
        offset: The `offset` of that loss.
    """

    def __init__(self, ensemble: Ensemble, offset: float = 0.0) -> None:
        check_value("offset", offset, Annotated[float, Field(ge=0, allow_inf_nan=False)])
        Ensemble.__init__(self, [], ensemble.num_members)
        self.ensemble, self.offset, self.training = ensemble, offset, ensemble.training

    def called_networks(self) -> list[nn.Module]:
        """Return the networks of the ensemble."""
        return self.ensemble.called_networks()

    def member(self, index: int) -> nn.Module:
        """Return a copy of one member, read as a Dirichlet distribution."""
        return Dirichlet(self.ensemble.member(index), self.offset)

    def expand(self) -> State:
        """Return the parameters of the members."""
        return self.ensemble.expand()

    def convert_inputs(self, inputs: Any) -> Any:
        """Return the inputs in the type of the members."""
        return self.ensemble.convert_inputs(inputs)

    def _logits(self, inputs: Any) -> Tensor:
        logits: Tensor = call_network(self.ensemble, inputs)
        return logits


class DirichletLoss(DistillationLoss):
    """Base of losses for concentrations; the network of the last epoch is the result."""

    offset: float  # an option of each method

    def configure(self, config: TrainConfig) -> TrainConfig:
        """Return settings that select the last epoch."""
        return config.replace(select="last", patience=None)

    def as_predictor(self, network: nn.Module) -> Dirichlet:
        """Return the network or ensemble with the mean of its distribution as the output."""
        if isinstance(network, Ensemble):
            return DirichletEnsemble(network, self.offset)
        return Dirichlet(network, self.offset)

    def check_result(self, student: nn.Module, models: nn.Module | CachedTeacher, data: Data) -> None:
        """Warn if the student is overconfident.

        Args:
            student: The trained student.
            models: The teachers, or their stored logits.
            data: The training data.
        """
        warn_if_overconfident(self.as_predictor(student), models, data)


@torch.no_grad()
def warn_if_overconfident(student: Dirichlet, models: nn.Module | CachedTeacher, data: Data) -> None:
    """Check equation (1) on validation data, or on training data if the teacher has logits for nothing else."""
    is_cached = isinstance(models, CachedTeacher)
    part = data.train if is_cached or not has_examples(data.val) else data.val
    if not isinstance(part, Split):
        return
    examples = part[: min(len(part), NUM_EXAMPLES)]
    inputs = data.prepare(examples.inputs)
    with eval_mode(student, *([] if isinstance(models, CachedTeacher) else [models])):
        cached = models.logits[:, :NUM_EXAMPLES] if isinstance(models, CachedTeacher) else None
        logits = _cpu_logits(models, inputs) if cached is None else cached  # type: ignore[arg-type]
        own = torch.log(_cpu_logits(student, inputs).double().exp().sum(-1)).mean()  # ln α_0
    unused = torch.zeros(len(examples), dtype=torch.long)  # labels, which there may be none of
    divergence = decomposition(Predictions(torch.log_softmax(logits, dim=-1), unused)).rmi
    classes = logits.shape[-1]
    precision = torch.log(classes + (classes - 1) / (2 * divergence + SMALLEST)).mean()  # ln β_0
    ratio = float((own - precision).exp())  # (1)
    if ratio > LARGEST_RATIO:
        warnings.warn(
            f"the student is overconfident: the mean precision of its distributions on "
            f"{'training' if part is data.train else 'validation'} data is {float(own.exp()):.3g}, {ratio:.3g} times "
            f"the {float(precision.exp()):.3g} of the teachers: train for more epochs, or use init='random'",
            OverconfidentWarning,
            stacklevel=level_outside(),
        )


def _cpu_logits(model: nn.Module, inputs: Tensor) -> Tensor:
    device = next((tensor.device for tensor in model.parameters()), inputs.device)
    return member_logits(model, inputs.to(device)).float().cpu()

"""Calibration and rejection: a temperature or a scale that is part of a model, and a cut on its uncertainty.

    classes    logits of softmax(log p̄ / T), where p̄ are the mean probabilities of the members                (1)
    numbers    mean μ̄, aleatoric variance s² a, epistemic variance s² e; for points s² and e                  (2)

T and s have the lowest negative log-likelihood on validation data (`metrics.fit_temperature`, `metrics.fit_scale`). The
temperature is applied after averaging, as an average of calibrated members is under-confident.

(1) Guo, Pleiss, Sun, Weinberger, ICML 2017, arXiv:1706.04599; Rahaman, Thiery, NeurIPS 2021, arXiv:2007.08792.
(2) Laves et al., MIDL 2020.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn

from enfold.arguments import checked
from enfold.data.convert import Examples, require
from enfold.data.unpack import Unpack
from enfold.engines.call import pack_inputs, require_network
from enfold.engines.inputs import from_arrays
from enfold.engines.modes import ensure_eval_mode
from enfold.ensemble import Ensemble, called_network, predict_outputs
from enfold.errors import EnfoldError
from enfold.evaluate import member_logits, predict
from enfold.metrics import RegressionPredictions, fit_scale, fit_temperature, metrics_for
from enfold.tasks import (
    Classification,
    FirstBatchTask,
    Prediction,
    Regression,
    Task,
    TaskLike,
    as_task,
    current_task,
    task_of,
)

SMALLEST = 1e-12  # variance: quantiles may be equal


class Calibrated(nn.Module):
    """A network or an ensemble as one calibrated network, equation (1) or (2).

    The factor is a buffer, `temperature` or `scale`, so that it is saved and loaded with the parameters. Outputs are
    those of a single network for the task `task`: logits in the shape of the model's outputs; for numbers D means, then
    D aleatoric, then D epistemic variances, at the axis where the model has its parameters, or at axis 1.

    Args:
        model: The network or ensemble.
        task: What its outputs mean; with the axis of the classes or of the parameters, if there are positions.
        factor: The temperature T, or the scale s.
    """

    model: nn.Module

    def __init__(self, model: nn.Module, task: Task, factor: float = 1.0) -> None:
        super().__init__()
        self.model, self.model_task = model, task
        self.name = "temperature" if task.is_categorical else "scale"
        self.register_buffer(self.name, torch.tensor(float(factor)))

    @property
    def factor(self) -> Tensor:
        """The temperature or the scale."""
        found: Tensor = getattr(self, self.name)
        return found

    @property
    def task(self) -> Task:
        """The task of the outputs of this module."""
        if not isinstance(self.model_task, Regression):
            return self.model_task
        return Regression(head="uncertainty", axis=self._axis(self.model_task), min_variance=SMALLEST)

    def called_networks(self) -> list[nn.Module]:
        """Return the network that is called, which shows how many inputs there are."""
        return [called_network(self.model)]

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return calibrated outputs of a single network, for inputs as the model takes them."""
        return self.combine_raw(self._member_outputs(args, kwargs))

    def combine_raw(self, outputs: Tensor) -> Tensor:
        """Return calibrated outputs of a single network from those of every member, (M, B, ...)."""
        task = self.model_task
        if isinstance(task, Classification):
            mean = outputs[0].float() if len(outputs) == 1 else self._mean_logits(task, outputs)
            return mean / self.factor  # (1)
        found = self._scale(predict_outputs(self.model, task, outputs))
        parts = [found.mean, found.aleatoric, found.epistemic]
        return torch.stack(parts, 1) if found.mean.ndim == 1 else torch.cat(parts, self._axis(task))

    @torch.no_grad()
    def predict(self, *args: Any, **kwargs: Any) -> Prediction:
        """Return the calibrated mean prediction, the members' own predictions and the uncertainty, in eval mode.

        The total uncertainty of classes is the entropy of the calibrated mean. Its epistemic part is that of the
        members, at most the total; the aleatoric part is the rest. Inputs may be numpy arrays.
        """
        with ensure_eval_mode(self):
            return self.combine(member_logits(self.model, from_arrays(self, pack_inputs(args, kwargs))))

    def combine(self, outputs: Tensor) -> Prediction:
        """Return the calibrated prediction from the outputs of every member, (M, B, ...)."""
        task = self.model_task
        own = predict_outputs(self.model, task, outputs)
        if not isinstance(task, Classification):
            return self._scale(own)
        mean = task.predict((self._mean_logits(task, outputs) / self.factor)[None])
        epistemic = torch.minimum(own.epistemic, mean.total)
        return replace(mean, members=own.members, epistemic=epistemic, aleatoric=mean.total - epistemic)

    def _member_outputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        return member_logits(self.model, pack_inputs(args, kwargs))

    def _mean_logits(self, task: Classification, outputs: Tensor) -> Tensor:
        weights = self.model.member_weights if isinstance(self.model, Ensemble) else None
        return task.mean_logits(outputs) if weights is None else task.mean_logits(outputs, weights)

    def _scale(self, found: Prediction) -> Prediction:
        """Return a prediction of numbers with scaled variances, equation (2)."""
        variance = self.factor.square()
        if isinstance(self.model_task, Regression) and self.model_task.head in ("point", None):
            aleatoric, epistemic = torch.zeros_like(found.mean) + variance, found.epistemic
        else:
            aleatoric, epistemic = variance * found.aleatoric.clamp(min=SMALLEST), variance * found.epistemic
        return replace(found, total=aleatoric + epistemic, aleatoric=aleatoric, epistemic=epistemic)

    @staticmethod
    def _axis(task: Task) -> int:
        """Return the axis of means and variances in the outputs."""
        assert isinstance(task, Regression)  # noqa: S101 - the only task without classes
        has_axis = task.head in ("gaussian", "uncertainty") and task.axis is not None
        return task.axis if has_axis and task.axis is not None else 1


def calibrate(
    model: nn.Module,
    val: Examples,
    task: TaskLike = None,
    *,
    batch_size: int = 1024,
    unpack: Unpack | None = None,
) -> Calibrated:
    """Return a model with the temperature (classes) or the scale (numbers) that fits validation data.

    Args:
        model: A network or an ensemble. It is part of the result and not copied.
        val: Validation examples, which were not used for training.
        task: What the outputs mean; None for the task that the model was trained for, or to infer it.
        batch_size: Examples per forward pass, where `val` is not a loader.
        unpack: Function that splits a batch into (inputs, target); None for the usual structures of batches.
    """
    require(val, "val", "calibrate")
    require_network(model)
    if isinstance(model, Calibrated):  # fits the factor again
        return calibrate(model.model, val, task or model.model_task, batch_size=batch_size, unpack=unpack)
    known = FirstBatchTask(given=as_task(task if task is not None else task_of(model)))
    found = predict(model, val, batch_size, task=known, unpack=unpack)
    factor = fit_scale(found) if isinstance(found, RegressionPredictions) else fit_temperature(found)
    device = next((tensor.device for tensor in model.parameters()), torch.device("cpu"))
    return Calibrated(model, current_task(known), factor).to(device).train(model.training)


@dataclass(frozen=True)
class Threshold:
    """A cut on the total uncertainty: predictions above it are rejected.

    Args:
        cut: The largest total uncertainty that is accepted.
        rejected: The fraction of validation predictions that is rejected.
        metrics: The names of the criterion and of the score.
        everything: Their values for all validation predictions.
        accepted: Their values for those that are accepted.
    """

    cut: float
    rejected: float
    metrics: tuple[str, str]
    everything: tuple[float, float]
    accepted: tuple[float, float]

    def accepts(self, prediction: Prediction) -> Tensor:
        """Return which predictions are certain enough, in the shape of `prediction.total`."""
        return prediction.total <= self.cut

    def __str__(self) -> str:
        pairs = zip(self.metrics, self.everything, self.accepted, strict=True)
        changes = "  ".join(f"{name} {before:.4f} -> {after:.4f}" for name, before, after in pairs)
        return f"reject {100 * self.rejected:.1f} % with uncertainty above {self.cut:.4g}: {changes}"


@checked
def threshold(
    model: nn.Module,
    val: Any,
    reject: Annotated[float, Field(gt=0, lt=1)] = 0.1,
    task: Any = None,
    *,
    batch_size: Annotated[int, Field(ge=1)] = 1024,
    unpack: Any = None,
) -> Threshold:
    """Return the cut on the total uncertainty above which the least certain validation predictions are rejected.

    Args:
        model: A network, an ensemble or a calibrated model.
        val: Validation examples, which were not used for training.
        reject: The fraction of predictions to reject: of examples, pixels, labels or numbers. Predictions with the
            same uncertainty are accepted or rejected together.
        task: What the outputs mean; None for the task that the model was trained for, or to infer it.
        batch_size: Examples per forward pass, where `val` is not a loader.
        unpack: Function that splits a batch into (inputs, target); None for the usual structures of batches.

    Raises:
        EnfoldError: If all predictions have the same uncertainty.
    """
    require(val, "val", "threshold")
    found = predict(model, val, batch_size, task=task, unpack=unpack)
    uncertainty = found.uncertainty().double()
    ordered = uncertainty[~uncertainty.isnan()].sort().values
    last = max(1, len(ordered) - round(reject * len(ordered)))  # how many are accepted
    if float(ordered[0]) == float(ordered[-1]) or last == len(ordered):
        raise EnfoldError(
            f"val must have predictions of different uncertainty, and at least {-(-1 // reject):.0f} of them for "
            f"reject={reject}, got {len(ordered)} from {ordered[0]:.4g} to {ordered[-1]:.4g}: use an ensemble or a "
            "network that predicts variances, and more examples"
        )
    last = int((ordered <= ordered[last - 1]).sum())
    if last == len(ordered):  # reject all of the most uncertain ones
        last = int((ordered < ordered[-1]).sum())
    cut = (ordered[last - 1] + ordered[last]).item() / 2  # between two, so that rounding errors change nothing
    kept = (uncertainty <= cut).nonzero()[:, 0]
    table, names = metrics_for(found), (found.criterion, found.score)
    accepted = found.select(kept)
    return Threshold(
        cut,
        1 - len(kept) / len(ordered),
        names,
        (table[names[0]](found), table[names[1]](found)),
        (table[names[0]](accepted), table[names[1]](accepted)),
    )

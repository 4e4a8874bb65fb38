"""Distillations that `compress` tries, most promising first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from enfold.compress.routes import Route, Setting, average_decay
from enfold.data import Data, Split
from enfold.data.convert import first_inputs
from enfold.data.tree import tensors
from enfold.distill.losses.kd import KD
from enfold.distill.losses.latent_be import LatentBE
from enfold.distill.perturb.conf_ods import ConfODS
from enfold.distill.perturb.cutmix import CutMix
from enfold.distill.perturb.cutmix_mixup import CutMixMixup
from enfold.distill.perturb.gaussian import Gaussian
from enfold.distill.perturb.mixup import Mixup
from enfold.distill.perturb.tdiv_sdiv import TDivSDiv
from enfold.distill.perturbation import Perturbation

LABELS = 0.5  # weight of the labels in the routes that learn from both
NOISE = 0.1  # standard deviation of Gaussian noise, as a fraction of the range of the inputs
SOME = 1000  # examples from which the range is estimated
UNEVEN = 10.0  # ratio of the ranges of two features from which on noise of one size has no meaning


def find_distillations(
    setting: Setting, merged: nn.Module | None = None, *, expensive: bool = False
) -> Iterator[Route]:
    """Yield the distillations, most promising first.

    Args:
        setting: The members and the data.
        merged: A merge to start from as well, if there is a good one.
        expensive: Whether to include those whose epochs take several times as long.
    """
    if not setting.students:
        yield from _own_architecture(setting, merged, expensive)
        return
    for route in _common(setting, expensive):
        for student in setting.students:
            into = f" into {student.name}" if student.name else ""
            yield replace(route, name=route.name.replace("distill", f"distill{into}", 1), student=student.make)


def _own_architecture(setting: Setting, merged: nn.Module | None, expensive: bool) -> Iterator[Route]:
    yield from _common(setting, expensive)
    if merged is not None:
        yield Route("merge, then distill", "learn the predictions from the best merge on", init=merged)
    if expensive and setting.members.is_expandable:
        yield from _latent(setting)


def _common(setting: Setting, expensive: bool) -> Iterator[Route]:
    """Yield what any student can learn from."""
    both, real = KD(alpha=1 - LABELS), has_real_inputs(setting.data)
    yield Route("distill", "learn the ensemble's predictions")
    mixed = mixtures(setting.data) if real else []
    for name, idea, perturb in mixed:
        yield Route(f"distill + {name}", idea, perturb=perturb)
    if setting.folds is not None:
        name = "distill out of fold"
        yield Route(name, "of members that were not trained on the example", is_out_of_fold=True)
        yield Route(f"{name} + labels", "and labels, half each", loss=both, is_out_of_fold=True)
    yield Route("distill + labels", "predictions and labels, half each", loss=both)
    if real and setting.task.is_categorical:
        for name, _, perturb in mixed:
            yield Route(f"distill + {name} + labels", "the same with labels, half each", loss=both, perturb=perturb)
    step = noise_step(setting.data) if real else None
    if step is not None:
        yield Route("distill + noise", "on inputs with Gaussian noise", perturb=Gaussian(step=step))
    if setting.config.ema is None and average_decay(setting, setting.config.epochs):
        yield Route("distill + ema", "the moving average of the weights", is_averaged=True)
    if expensive and real and setting.task.is_categorical:
        yield Route("distill + ConfODS", "where a teacher's prediction changes", perturb=ConfODS(), effort=2.5)


def _latent(setting: Setting) -> Iterator[Route]:
    """Yield LatentBE, whose training costs as much as that of all members."""
    loss, effort = LatentBE(temperature=1.0), float(setting.members.num_members)
    idea, start = "a BatchEnsemble learns one to one, its mean is the result", setting.best_member()
    yield Route("latent BE", idea, loss=loss, init=start, effort=effort)
    if not (has_real_inputs(setting.data) and setting.task.is_categorical):
        return
    for name, perturb in (("ConfODS", ConfODS()), ("TDiv-SDiv", TDivSDiv())):
        idea = f"the same with {name}, where predictions differ more"
        yield Route(f"latent BE + {name}", idea, loss=loss, init=start, perturb=perturb, effort=2.5 * effort)


def mixtures(data: Data) -> list[tuple[str, str, Perturbation]]:
    """Return name, idea and perturbation of the mixtures of inputs, most promising first."""
    if _num_axes(data) != 4:
        return [("mixup", "on mixtures of pairs of inputs", Mixup())]
    return [
        ("cutmix", "on images with a rectangle of another", CutMix()),
        ("cutmix or mixup", "on these and on mixtures of pairs of images, by turns", CutMixMixup()),
    ]


def has_real_inputs(data: Data) -> bool:
    """Return whether inputs are one tensor of floating-point numbers or pixels, so that they can be mixed."""
    if isinstance(data.train, Split):
        return data.train.inputs.is_floating_point() or data.train.inputs.dtype == torch.uint8
    inputs = first_inputs(data.train)
    return isinstance(inputs, torch.Tensor) and all(each.is_floating_point() for each in tensors(inputs))


def noise_step(data: Data) -> float | None:
    """Return the step of `Gaussian` for noise of a tenth of the range of the inputs; None if features differ in range.

    Args:
        data: Training examples, whose inputs are one tensor of real numbers.
    """
    if data.has_pixels:
        return NOISE * 255
    inputs = _some_inputs(data).float()
    if inputs.ndim == 2 and len(inputs) > 1:
        spread = inputs.std(0)
        spread = spread[spread > 0]
        if not len(spread) or float(spread.max() / spread.min()) > UNEVEN:
            return None
    values = inputs.flatten().sort().values
    values = values[torch.isfinite(values)]
    if not len(values):
        return None
    width = float(values[int(0.99 * (len(values) - 1))] - values[int(0.01 * (len(values) - 1))])
    return NOISE * 255 * width if width > 0 else None


def _some_inputs(data: Data) -> Tensor:
    if isinstance(data.train, Split):
        return data.prepare(data.train.inputs[:SOME])
    found = first_inputs(data.train)
    assert isinstance(found, Tensor)  # noqa: S101 - of has_real_inputs
    return found


def _num_axes(data: Data) -> int:
    if isinstance(data.train, Split):
        return data.train.inputs.ndim
    found = first_inputs(data.train)
    return found.ndim if isinstance(found, Tensor) else 0

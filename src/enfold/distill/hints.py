"""Hints: what a layer inside the teachers says, taught beside their logits.

    L = a · labels + b · teachers + c · hints(features of the students, features of the teachers)              (1)

Features are what the module at one path returns, in students and teachers alike, so both have that path and the same
shape there. Teachers' features are too large to be kept: teachers are asked in every step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from enfold.data import Split
from enfold.data.batches import Batch
from enfold.distill.lesson import Lesson, Lessons, Subject
from enfold.distill.teacher import Teacher
from enfold.engines.inputs import in_type_of
from enfold.engines.modes import evaluating
from enfold.engines.outputs import at_least_float32
from enfold.engines.trunk import OneByOne
from enfold.ensemble import Ensemble
from enfold.ensembles.mixed_ensemble import MixedEnsemble
from enfold.errors import EnfoldError, closest
from enfold.train.objective import Objective, StepContext, batch_logits


class Hinting(Subject, Protocol):
    """A method that learns features, too."""

    def hint_loss(self, given: Tensor, wanted: Tensor) -> Tensor:
        """Features (S, B, ...) of S students, and (T, B, ...) or (T, S, B, ...) of T teachers -> (S,)."""


@dataclass(frozen=True)
class Hints(Lessons):
    """Lessons with a hint: equation (1) as an objective."""

    subject: Hinting
    path: str = ""
    weight: float = 1.0  # c

    def for_batch(self, model: nn.Module, batch: Batch, moment: StepContext) -> Objective:
        """The lesson of one batch, and what the teachers' layers say about it."""
        lesson = super().for_batch(model, batch, moment)
        if not isinstance(lesson, Lesson):
            raise TypeError("lessons make a lesson")
        taught = lesson.taught
        inputs = taught.inputs.flatten(0, 1) if taught.own else taught.inputs
        wanted = teacher_features(self.teacher, inputs, self.path).to(taught.labels.device)
        if taught.own:
            wanted = wanted.unflatten(1, taught.labels.shape)
        return Hint(
            self.subject,
            lesson.clean,
            taught,
            lesson.target,
            lesson.progress,
            lesson.label_smoothing,
            wanted,
            self.path,
            self.weight,
        )


@dataclass(frozen=True)
class Hint(Lesson):
    """What one batch teaches, features among it; all students are run at once."""

    subject: Hinting
    wanted: Tensor  # (T, B, ...) or (T, S, B, ...)
    path: str
    weight: float

    def teaching(self, model: nn.Module) -> tuple[Tensor, Tensor]:
        """The students' logits on what is taught, (S, B, C), and the last two terms of (1), (S,)."""
        logits, given = with_features(model, self.taught, self.path)
        taught = self.subject.weights[1] * self.subject.loss(logits, self.target, self.progress)
        return logits, taught + self.weight * self.subject.hint_loss(given, self.wanted)


def with_features(model: nn.Module, batch: Batch, path: str) -> tuple[Tensor, Tensor]:
    """Logits (S, B, C), and what the layer at `path` returned for each student, (S, B, ...)."""
    networks = (
        [code.network for code in model.codes] if isinstance(model, Ensemble) and model.is_expandable else [model]
    )
    found: list[Tensor] = []

    def keep(module: nn.Module, arguments: Any, output: Any) -> Any:
        if not isinstance(output, Tensor):
            raise EnfoldError(
                f"a hint is a layer that returns a tensor, but '{path}' returns {type(output).__name__}: name another"
            )
        found.append(output)
        return output.clone()  # a layer that works in place works on the copy

    handles = [layer_at(network, path).register_forward_hook(keep) for network in networks]
    try:
        if isinstance(model, Ensemble) and model.is_expandable:  # one after the other, as other engines run no modules
            inputs = in_type_of(model, batch.inputs)
            logits = at_least_float32(OneByOne(model.codes)(model.expand(), inputs, batch.own))
        else:
            logits = batch_logits(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    if len(found) != len(logits):
        raise EnfoldError(
            f"a hint is a layer that runs once in a pass, but '{path}' ran {len(found)} times for {len(logits)} "
            "networks: name another"
        )
    return logits, torch.stack(found)


@torch.no_grad()
def teacher_features(teacher: Teacher, inputs: Tensor, path: str) -> Tensor:
    """What the layer at `path` returns in each teacher, (T, B, ...)."""
    if teacher.members is None:
        raise EnfoldError("recorded answers hold no features: use the members themselves, or no hint")
    batch = Batch(inputs.to(teacher.device), torch.zeros(len(inputs), dtype=torch.long))
    networks = teacher.members.members if isinstance(teacher.members, MixedEnsemble) else [teacher.members]
    found = [with_features(network, batch, path)[1] for network in networks]
    shapes = {tuple(features.shape[2:]) for features in found}
    if len(shapes) > 1:
        raise EnfoldError(
            f"all teachers must have features of one shape, but '{path}' gives {' and '.join(map(str, shapes))}: name "
            "another layer, or use members of one architecture"
        )
    return torch.cat(found)


@torch.no_grad()
def require_features(teacher: Teacher, student: nn.Module, path: str) -> None:
    """Teachers and student have the layer, and it says things of one shape."""
    if isinstance(student, Ensemble) and (not student.is_expandable or getattr(student, "joint", False)):
        raise EnfoldError(
            f"a hint is learned by networks that can be run one by one, got a {type(student).__name__}: use one "
            "network, or a share without joint batch norms"
        )
    train = teacher.data.train
    inputs = teacher.data.prepare(train.inputs[:2]) if isinstance(train, Split) else next(iter(train))[0][:2]
    wanted = teacher_features(teacher, inputs, path)
    device = next((tensor.device for tensor in student.parameters()), inputs.device)
    batch = Batch(inputs.to(device), torch.zeros(len(inputs), dtype=torch.long))
    with evaluating(student):
        _, given = with_features(student, batch, path)
    if given.shape[2:] != wanted.shape[2:]:
        raise EnfoldError(
            f"a student's features must have the shape of its teachers', but '{path}' gives {tuple(given.shape[2:])} "
            f"in a {_name(student)} and {tuple(wanted.shape[2:])} in the teachers: name another layer, or "
            "use a student of their architecture"
        )


def layer_at(network: nn.Module, path: str) -> nn.Module:
    """The module at `path`, which an error names if there is none."""
    known = dict(network.named_modules(remove_duplicate=False))
    if not path or path not in known:
        near = closest(path, known)
        meant = f", did you mean '{near}'?" if near else ""
        raise EnfoldError(
            f"a hint is the path of a module, got '{path}', which a {type(network).__name__} lacks{meant}: "
            f"choose from {', '.join(name for name in known if name)}"
        )
    found: nn.Module = known[path]
    return found


def _name(student: nn.Module) -> str:
    return type(
        student.skeleton.network if isinstance(student, Ensemble) and student.is_expandable else student
    ).__name__

"""Perturbations: changes of a batch of inputs, seen by teachers and students, where the teachers' outputs say more.

A perturbation is a frozen dataclass that maps inputs to inputs. Steps in pixel space are

    x̃ = clip(x + ε),   ε = (η / 255) u,   mean u² = 1 in each example                                  (1)

x are pixels in [0, 1], before normalisation, so that a step has the same size in every channel. Data that are not known
to be pixels (neither bytes nor given with a mean) are moved in their own unit and not clipped.

Of inputs that are a tuple or dictionary of tensors, x are all floating-point tensors, joined to one row per example;
tensors of other types, such as token indices and boolean masks, are not changed.
"""
# Not `from __future__ import annotations`: types of inherited fields are then values and need no import elsewhere.

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from enfold.data import Data
from enfold.data.batches import Batch
from enfold.data.tree import (
    clone,
    count_examples,
    describe,
    device_of,
    is_container,
    map_tensors,
    named_tensors,
    to_device,
)
from enfold.distill.teacher import count_members
from enfold.engines.modes import eval_mode
from enfold.engines.skeleton import State
from enfold.ensemble import Ensemble
from enfold.errors import EnfoldError
from enfold.evaluate import member_logits
from enfold.tasks import Classification, Inferred, Task


@dataclass(frozen=True)
class LabelMixture:
    """The labels of a batch whose examples were mixed in pairs: weight · y + (1 - weight) · y[partners]."""

    partners: Tensor  # (B,)
    weight: float


@dataclass(frozen=True)
class Perturbation(ABC):
    """Base of all perturbations."""

    replaces_batch: ClassVar[bool] = False  # whether the labels' term, too, is computed at the perturbed inputs
    needs_classes: ClassVar[bool] = False  # whether it reads outputs of the teachers as logits (B, C)

    @abstractmethod
    def __call__(
        self, inputs: Any, data: Data, teachers: nn.Module, student: nn.Module, generator: torch.Generator
    ) -> Any:
        """Return perturbed inputs, detached; given and returned as a network takes them, (B, ...).

        Teachers and student are not changed, neither their modes nor their gradients.
        """

    def check(self, teachers: nn.Module, student: nn.Module) -> None:  # noqa: B027 - optional
        """Raise an error if teachers and student do not fit the perturbation; called before training."""

    def check_task(self, task: Task) -> None:
        """Raise an error if the perturbation reads the teachers' outputs as classes, and they are something else."""
        if self.needs_classes and not isinstance(task, Inferred) and type(task) is not Classification:
            raise EnfoldError(
                f"perturb={type(self).__name__}() needs the logits of classes, got task='{task.name}': use Gaussian() "
                "or Mixup()"
            )

    def apply(
        self, batch: Batch, data: Data, teachers: nn.Module, student: nn.Module, generator: torch.Generator
    ) -> tuple[Batch, LabelMixture | None]:
        """Return the perturbed batch, and how its labels were mixed; None if they were not.

        Args:
            batch: The batch.
            data: The training data, which hold the normalization.
            teachers: The teachers.
            student: The student.
            generator: The generator of random numbers.
        """
        inputs = batch.inputs.flatten(0, 1) if batch.own else batch.inputs
        moved = self(inputs, data, teachers, student, generator)
        moved = moved.view_as(batch.inputs) if batch.own else moved
        return replace(batch, inputs=moved), None


@dataclass(frozen=True)
class PixelStep(Perturbation):
    """A perturbation by equation (1); subclasses give the direction u.

    Args:
        step: η, the root mean square of a step, in 1/255 of the pixel range.
    """

    step: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0

    @abstractmethod
    def direction(
        self, pixels: Tensor, teachers: "MemberLogits", student: "MemberLogits", generator: torch.Generator
    ) -> Tensor:
        """Return u of equation (1), shaped like the pixels, of which the logits are functions; 0 if undefined.

        Args:
            pixels: Floating-point inputs before normalization, (B, ...).
            teachers: The teachers' logits as functions of the pixels.
            student: The student's logits as functions of the pixels.
            generator: The generator of random numbers.
        """

    def __call__(
        self, inputs: Any, data: Data, teachers: nn.Module, student: nn.Module, generator: torch.Generator
    ) -> Any:
        """Return the inputs moved by one step."""
        parts = RealParts(inputs)
        self.check(teachers, student)
        inputs = parts.values
        # float32 also if training runs in 16 bits, where gradients of confident teachers would be rounded to zero.
        with torch.enable_grad(), torch.autocast(inputs.device.type, enabled=False):
            pixels = data.denormalise(inputs).detach().requires_grad_()
            seen = parts.rebuild(data.normalise(pixels))
            u = self.direction(pixels, MemberLogits(teachers, seen), MemberLogits(student, seen), generator).detach()
        pixels = pixels.detach()
        moved = pixels + (self.step / 255) * u  # (1)
        if data.has_pixels:  # values beyond [0, 1] before the step are not pulled in
            moved = torch.clamp(moved, pixels.clamp(max=0.0), pixels.clamp(min=1.0))
        still = moved.eq(pixels).flatten(1).all(1).view(-1, *(1,) * (inputs.ndim - 1))
        # Examples that do not move keep their bits.
        return parts.rebuild(torch.where(still, inputs, data.normalise(moved)))


class RealParts:
    """The floating-point tensors of a batch as one tensor, which perturbations change.

    Args:
        inputs: A tensor, or a tuple or dictionary of tensors.

    Raises:
        EnfoldError: If no tensor has floating-point numbers, or examples cannot be told apart.
    """

    def __init__(self, inputs: Any) -> None:
        self.inputs = inputs
        self.is_single = isinstance(inputs, Tensor)
        self.tensors = [tensor.detach() for _, tensor in real_tensors(inputs)]

    @property
    def values(self) -> Tensor:
        """The tensor itself, or the tensors of a container as rows (B, D)."""
        if self.is_single:
            return self.tensors[0]
        return torch.cat([tensor.flatten(1) for tensor in self.tensors], dim=1)

    def rebuild(self, values: Tensor) -> Any:
        """Return the inputs with other floating-point values, in the type and shape of the given ones."""
        if self.is_single:
            return values
        parts = values.split([tensor[0].numel() for tensor in self.tensors], dim=1)
        pairs = zip(parts, self.tensors, strict=True)
        return replace_real(self.inputs, [part.view(old.shape).to(old.dtype) for part, old in pairs])


def real_tensors(inputs: Any) -> list[tuple[str, Tensor]]:
    """Return the floating-point tensors of a batch with their names, the empty name for inputs that are one tensor.

    Raises:
        EnfoldError: If there are none, or examples cannot be told apart.
    """
    named = named_tensors(inputs)
    if not is_container(inputs) or not named:
        raise EnfoldError(
            f"perturb needs inputs that are a tensor, or a tuple or dict of tensors, got {describe(inputs)}: use "
            "perturb=None, or unpack= to return the tensors"
        )
    real = [(name, tensor) for name, tensor in named if tensor.is_floating_point()]
    if not real:
        given = ", ".join(f"{tensor.dtype} in '{name}'" if name else f"{tensor.dtype}" for name, tensor in named)
        raise EnfoldError(f"perturb needs floating-point inputs, got {given}: use perturb=None for tokens")
    if isinstance(inputs, Tensor):
        return real
    wrong = next((name for name, each in real if not each.ndim or len(each) != count_examples(real[0][1])), None)
    if wrong is not None:
        raise EnfoldError(
            f"perturb needs tensors with one row per example, got '{wrong}' of another length in {describe(inputs)}: "
            "use perturb=None"
        )
    return real


def replace_real(inputs: Any, values: Sequence[Tensor]) -> Any:
    """Return a batch with other floating-point tensors, in their order."""
    left = iter(values)
    return map_tensors(lambda tensor: next(left) if tensor.is_floating_point() else tensor, inputs)


class MemberLogits:
    """The logits of a model for one batch, member by member: in eval mode, with gradients to the inputs only.

    A member of an ensemble runs without the others where it can. Parameters are read again for each batch.
    """

    def __init__(self, model: nn.Module, inputs: Any) -> None:
        self.model = model
        self.num_members = count_members(model)
        device = next((tensor.device for tensor in model.parameters()), device_of(inputs))
        self.inputs = to_device(inputs, device)
        self._networks = _member_networks(model)
        self._runs_singly = bool(self._networks) or (isinstance(model, Ensemble) and model.is_expandable)
        self._logits: dict[int, Tensor] = {}

    def logits(self, index: int) -> Tensor:
        """Return the logits of one member, (B, C), differentiable in the inputs."""
        if index not in self._logits:
            self._logits.update({index: self._one(index)} if self._runs_singly else enumerate(self._all()))
        return _require_classes(self._logits[index])

    def constant_logits(self, index: int) -> Tensor:
        """Return the same values without a gradient, (B, C)."""
        if index in self._logits or not self._runs_singly:
            return self.logits(index).detach()
        with torch.no_grad():
            return _require_classes(self._one(index))

    @cached_property
    def _state(self) -> State:
        with torch.no_grad():
            return self.model.expand() if isinstance(self.model, Ensemble) and self.model.is_expandable else {}

    def _one(self, index: int) -> Tensor:
        if isinstance(self.model, Ensemble) and self.model.is_expandable:
            self.model.verify(self.inputs)
            code = self.model.code(index)
            state = {name: tensor.detach()[index] for name, tensor in self._state.items()}
            with eval_mode(code.network), code.use_values(state) as network:
                return member_logits(network, clone(self.inputs) if code.writes_inputs else self.inputs)[0]
        network = self._networks[index]
        with eval_mode(network), freeze_parameters(network):
            return member_logits(network, self.inputs)[0]

    def _all(self) -> Tensor:
        with eval_mode(self.model), freeze_parameters(self.model):
            return member_logits(self.model, self.inputs)


def _member_networks(model: nn.Module) -> list[nn.Module]:
    """Return the networks of an ensemble without stacked parameters; empty if members do not exist as networks."""
    if not isinstance(model, Ensemble):
        return [model]
    try:
        return [] if model.is_expandable else model.networks()
    except EnfoldError:
        return []


@contextmanager
def freeze_parameters(model: nn.Module) -> Iterator[None]:
    """Inside the block no parameter requires a gradient."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in trainable:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in trainable:
            parameter.requires_grad_()


def _require_classes(logits: Tensor) -> Tensor:
    """Return logits (B, C); dense outputs and single outputs are refused."""
    if logits.ndim != 2 or logits.shape[-1] < 2:
        raise EnfoldError(
            f"perturb needs the logits (B, C) of at least 2 classes, got outputs of shape {tuple(logits.shape)}: use "
            "Gaussian() or Mixup()"
        )
    return logits


def normalise_rms(gradient: Tensor) -> Tensor:
    """Return each example's gradient at a root mean square of 1; 0 where it is zero or not finite."""
    rows = gradient.flatten(1)
    rows = rows / rows.abs().amax(1, keepdim=True)  # first, because the squares of a small gradient would underflow
    rows = rows / rows.square().mean(1, keepdim=True).sqrt()
    return torch.where(torch.isfinite(rows).all(1, keepdim=True), rows, 0.0).view_as(gradient)


def input_gradient(pixels: Tensor, outputs: Sequence[Tensor], weights: Sequence[Tensor | None]) -> Tensor:
    """Return Σ weights · ∂outputs/∂pixels; outputs that do not depend on the pixels add nothing."""
    pairs = [pair for pair in zip(outputs, weights, strict=True) if pair[0].requires_grad]
    if not pairs:
        return torch.zeros_like(pixels)
    found = torch.autograd.grad([one for one, _ in pairs], pixels, [one for _, one in pairs], materialize_grads=True)
    return found[0]

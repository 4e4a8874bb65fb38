"""What every fold keeps to."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, is_dataclass, replace
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import nn

from enfold.data import Data
from enfold.data.dataset import evaluation_batches, has_examples
from enfold.engines.inputs import in_type_of
from enfold.engines.modes import refuse_inference_mode
from enfold.engines.skeleton import RUNNING, State
from enfold.engines.trial import EXAMPLES
from enfold.ensemble import Ensemble
from enfold.errors import EnfoldError, UnchangedWarning, level_outside
from enfold.io.files import part_file
from enfold.options import require_types
from enfold.train.history import History


class Fold(Protocol):
    """A frozen dataclass whose fields are the method's hyper-parameters."""

    def __call__(
        self, members: Ensemble, data: Data, *, checkpoint: Path | None = None, answers: Path | None = None
    ) -> nn.Module:
        """One network of the user's own class; members are left untouched; training resumes from `checkpoint`.

        What members say about data that stay the same may be kept in the folder `answers`.
        """


class Step(Protocol):
    """What can follow a fold in a route: it takes the network so far and makes a better one of it."""

    def after(
        self,
        network: nn.Module,
        members: Ensemble,
        data: Data,
        *,
        checkpoint: Path | None = None,
        answers: Path | None = None,
    ) -> nn.Module:
        """Another network; the one given and the members are left untouched."""


_notes: ContextVar[dict[str, Any] | None] = ContextVar("notes", default=None)


@contextmanager
def noted() -> Iterator[dict[str, Any]]:
    """Inside the block, what folds find out while they work is kept in the dictionary, to be stored with the result."""
    notes: dict[str, Any] = {}
    before = _notes.set(notes)
    try:
        yield notes
    finally:
        _notes.reset(before)


def note(**found: Any) -> None:
    """Tell whoever asked for the fold what was found; plain values."""
    notes = _notes.get()
    if notes is not None:
        notes.update(found)


def report_unchanged(history: History, what: str, start: str, remedy: str) -> None:
    """Warn if a training returned its start, and record it; `start` names what the training began from."""
    unchanged, count = history.unchanged, len(history.chosen)
    note(unchanged=start if unchanged else None)
    if not unchanged:
        return
    which = "" if count == 1 else f" for students {', '.join(map(str, unchanged))} of {count}"
    warnings.warn(
        f"{what} returned its start, {start}, unchanged{which}: no epoch had a lower NLL on validation data; {remedy}",
        UnchangedWarning,
        stacklevel=level_outside(),
    )


class Composable:
    """What `>>` joins to a route: a dataclass, whose settings are of the types that they are declared with."""

    def __post_init__(self) -> None:
        require_types(self)

    def __rshift__(self, step: Step) -> Route:
        """This first, then the step: ``WeightMatching() >> Repair() >> KD()``."""
        return Route((*_steps(self), *_steps(step)))


@dataclass(frozen=True)
class Route(Composable):
    """A fold, and steps that follow it, as one fold; without a fold at its start it is a step itself."""

    steps: tuple[Any, ...]  # a fold, then steps

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", tuple(self.steps))
        if not self.steps:
            raise EnfoldError("a route must have at least one step, got none: begin it with a fold")
        for step in self.steps:
            if isinstance(step, type) or not (hasattr(step, "after") or callable(step)):
                raise EnfoldError(f"a route is made of folds and steps, got {step!r}: write KD() for a step")
        for step in self.steps[1:]:
            if not hasattr(step, "after"):
                raise EnfoldError(
                    f"what follows in a route must take the network before it, but {type(step).__name__} starts from "
                    "members alone: put it first, or follow with Repair or a distillation"
                )

    def __call__(
        self, members: Ensemble, data: Data, *, checkpoint: Path | None = None, answers: Path | None = None
    ) -> nn.Module:
        """What the last step makes; each step that trains has its own file, the last one `checkpoint` itself."""
        fold = self.steps[0]
        if not callable(fold):
            raise EnfoldError(
                f"a route must begin with a fold, got {type(fold).__name__}, which needs a network before it: put a "
                "merge first, for example WeightMatching()"
            )
        first = cast("Fold", fold)
        with noted() as found:
            network = first(members, data, checkpoint=self._file(checkpoint, 0), answers=answers)
        note(**found)
        parts, route = found.get("ingredients"), self
        if parts:  # of a soup: what follows is about what is in it
            rest = (_after_soup(step, parts, members.num_members) for step in self.steps[1:])
            route = Route((fold, *rest))
        return route._followed(network, members, data, checkpoint, answers, start=1)

    def after(
        self,
        network: nn.Module,
        members: Ensemble,
        data: Data,
        *,
        checkpoint: Path | None = None,
        answers: Path | None = None,
    ) -> nn.Module:
        """All steps on a network that is there already."""
        if not hasattr(self.steps[0], "after"):
            raise EnfoldError(
                f"a route that continues must begin with a step, got {type(self.steps[0]).__name__}, which starts from "
                "members alone: leave it out"
            )
        return self._followed(network, members, data, checkpoint, answers, start=0)

    def _followed(
        self,
        network: nn.Module,
        members: Ensemble,
        data: Data,
        checkpoint: Path | None,
        answers: Path | None,
        start: int,
    ) -> nn.Module:
        for index in range(start, len(self.steps)):
            step: Step = self.steps[index]
            file = self._file(checkpoint, index)
            network = step.after(network, members, data, checkpoint=file, answers=answers)
        return network

    def _file(self, checkpoint: Path | None, index: int) -> Path | None:
        if checkpoint is None or index == len(self.steps) - 1:
            return checkpoint
        return part_file(Path(checkpoint), index)

    @property
    def one_network(self) -> bool:
        """Whether it ends in the user's own class."""
        return bool(getattr(self.steps[-1], "one_network", True))

    def answering(self, network: nn.Module) -> nn.Module:
        """The network as a predictor, as the last step says."""
        said: Callable[[nn.Module], nn.Module] | None = getattr(self.steps[-1], "answering", None)
        return network if said is None else said(network)


def _after_soup(step: Any, parts: Mapping[str, float], count: int) -> Any:
    """A step that is told with which weights members were merged, if it asks for them and has none."""
    if not is_dataclass(step) or isinstance(step, type) or getattr(step, "weights", ()) is not None:
        return step
    return replace(step, weights=tuple(parts.get(str(index), 0.0) for index in range(count)))


def _steps(one: object) -> tuple[object, ...]:
    return one.steps if isinstance(one, Route) else (one,)


def mean_state(members: Ensemble) -> State:
    """The mean of the members' values; counters and index buffers, which have no mean, are the first member's."""
    return {
        name: stacked.mean(dim=0) if stacked.is_floating_point() or stacked.is_complex() else stacked[0]
        for name, stacked in members.expand().items()
    }


def require_data(data: object, purpose: str) -> None:
    """Three parts with what is known of them, not one part alone."""
    if not isinstance(data, Data):
        raise EnfoldError(
            f"{purpose} needs data with its parts, got {type(data).__name__}: pass "
            "enfold.Data(train, validation, test, num_classes, shape), of which each part may be a DataLoader"
        )


class BufferMismatchWarning(UserWarning):
    """Members differ in buffers that have no mean."""


def require_members(model: object, purpose: str, *, averaged: bool = False, data: object = None) -> Ensemble:
    """Members of one architecture and of finite values, which is what can be merged or started from.

    Where they are to be averaged, a warning tells of buffers that differ and are no running statistics. With data,
    members are compared on one batch: networks that compute different functions of their parameters are refused.
    """
    if not isinstance(model, Ensemble) or not model.is_expandable:
        raise EnfoldError(
            f"{purpose} needs members of one architecture, got {type(model).__name__}: put networks into "
            "DeepEnsemble([...]) first, or distill into a student of its own"
        )
    refuse_inference_mode(purpose)
    with torch.no_grad():
        values = model.expand()
    for name, stacked in values.items():
        if stacked.is_floating_point() and not bool(stacked.isfinite().all()):
            index = int(stacked.isfinite().flatten(1).all(1).logical_not().nonzero()[0])
            raise EnfoldError(
                f"{purpose} needs members of finite values, but '{name}' of member {index} is not: leave that one out"
            )
    if isinstance(data, Data):
        _require_one_function(model, data, purpose)
    if averaged:
        _say_unlike({name: values[name] for name in model.skeleton.buffers if name in values})
    return model


def _require_one_function(members: Ensemble, data: Data, purpose: str) -> None:
    """Values of one network mean something else in a network that computes otherwise with them."""
    part = next((part for part in (data.val, data.train) if has_examples(part)), None)
    if part is None or isinstance(part, Iterator):  # of which a batch would be missing later
        return
    with torch.random.fork_rng(devices=[]):
        inputs, _ = next(iter(evaluation_batches(part, EXAMPLES)))
    members.verify(in_type_of(members, inputs[:EXAMPLES]).to(next(iter(members.expand().values())).device))
    if members.mismatch is not None and not members.mismatch.same_code:
        raise EnfoldError(
            f"{purpose} needs members that compute the same function of their parameters, but by the code of the first "
            f"network {members.mismatch}: distill them instead"
        )


def _say_unlike(buffers: State) -> None:
    """Statistics are measured again or have a mean; masks, and vectors that others are computed from, have not."""
    differ = (name for name, stacked in buffers.items() if not bool((stacked == stacked[:1]).all()))
    name = next((name for name in differ if name.rsplit(".", 1)[-1] not in (*RUNNING, "num_batches_tracked")), None)
    if name is not None:
        warnings.warn(
            f"buffers other than running statistics should be the same in all members to be averaged, but '{name}' "
            "differs: if weights are made by it, store these instead (torch.nn.utils.prune.remove, "
            "parametrize.remove_parametrizations)",
            BufferMismatchWarning,
            stacklevel=level_outside(),
        )

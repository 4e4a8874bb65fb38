"""The inputs of `compress`: members, the folds that they were trained on, and the students to distil into."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from enfold.data import Data, Split, fold_numbers
from enfold.data.indexed import loader_indices
from enfold.distill.out_of_fold import OutOfFoldTeacher
from enfold.ensemble import Ensemble
from enfold.ensembles.deep_ensemble import DeepEnsemble, as_ensemble
from enfold.ensembles.mixed_ensemble import MixedEnsemble
from enfold.errors import EnfoldError
from enfold.evaluate import predict
from enfold.tasks import Task

Make = Callable[[], nn.Module]


@dataclass(frozen=True)
class Student:
    """A network of another architecture to distil into.

    Args:
        name: Its name in the table; empty if there is one.
        make: Function that makes it.
    """

    name: str
    make: Make


def as_students(given: Make | Sequence[Make] | None) -> tuple[Student, ...]:
    """Return the students that the user passed, with names if there are several.

    Raises:
        EnfoldError: If one of them is not a function.
    """
    if given is None:
        return ()
    several = list(given) if isinstance(given, Sequence) else [given]
    for each in several:
        if isinstance(each, nn.Module) or not callable(each):
            raise EnfoldError(
                f"student must be a function that makes a network, or a list of them, got {type(each).__name__}: pass "
                "lambda: YourNetwork(...)"
            )
    if not several:
        raise EnfoldError("student must contain at least one function, got an empty list: leave it out")
    if len(several) == 1:
        return (Student("", several[0]),)
    return tuple(Student(f"student {index}", each) for index, each in enumerate(several))


def as_members(models: Any, network: Make | None) -> Ensemble:
    """Return the members of a compression as one ensemble.

    Args:
        models: An ensemble, networks, or checkpoint files.
        network: Function that makes the network of checkpoint files.

    Raises:
        EnfoldError: If they are of another kind, or fewer than two.
    """
    if isinstance(models, Ensemble):
        return models
    is_file = isinstance(models, str | Path)
    files = [models] if is_file else list(models) if isinstance(models, Sequence) else []
    if files and all(isinstance(each, str | Path) for each in files):
        if network is None:
            raise EnfoldError("network must be given for checkpoint files, got None: pass a function that makes it")
        return DeepEnsemble.from_checkpoints(models if is_file else files, network)
    if not files or not all(isinstance(each, nn.Module) for each in files):
        raise EnfoldError(
            f"models must be an ensemble, networks or checkpoint files, got {type(models).__name__}: pass "
            "DeepEnsemble([a, b, c])"
        )
    if len(files) < 2:
        raise EnfoldError("models must be at least 2 networks, got one network: pass the members of an ensemble")
    try:
        return as_ensemble(files)
    except EnfoldError:  # networks of different architectures
        return MixedEnsemble(files)


def refuse_identical(members: Ensemble, data: Data, task: Task) -> None:
    """Refuse members that are one network, from which nothing can be gained; it also infers the task.

    Raises:
        EnfoldError: If all members have the same outputs.
    """
    found = predict(members, data.val, task=task)
    values = getattr(found, "log_probs", None)
    values = getattr(found, "means", values) if values is None else values
    if found.num_members > 1 and isinstance(values, Tensor) and bool((values == values[:1]).all()):
        raise EnfoldError(
            f"models must differ, got {found.num_members} members with identical outputs, so that there is nothing to "
            "compress: ship one of them, or pass members that were trained with different seeds"
        )


def as_folds(folds: Tensor | int | None, members: Ensemble, data: Data, seed: int) -> Tensor | None:
    """Return which member was trained on which example, as `OutOfFoldTeacher` takes it.

    Args:
        folds: What the user passed: a number of folds, the fold of each example, or booleans (M, N).
        members: The ensemble.
        data: Training examples.
        seed: Seed of the members' training, from which `fit` draws the folds.

    Raises:
        EnfoldError: If they do not fit members or examples.
    """
    if folds is None:
        return None
    size = len(data.train) if isinstance(data.train, Split) else loader_indices(data.train)
    if size is None:
        raise EnfoldError(
            "folds need training examples with indices, got a loader: pass them as tensors or as a Dataset"
        )
    if isinstance(folds, int):
        if folds != members.num_members:
            raise EnfoldError(
                f"folds must be the number of members, as each leaves out one fold, got {folds} for "
                f"{members.num_members} members: change folds, or pass the fold of each example"
            )
        folds = fold_numbers(size, folds, seed)
    teacher = OutOfFoldTeacher(members, folds)
    if teacher.num_examples != size:
        raise EnfoldError(
            f"folds must be given for the {size} training examples, got {teacher.num_examples}: pass those of train"
        )
    return torch.as_tensor(folds)

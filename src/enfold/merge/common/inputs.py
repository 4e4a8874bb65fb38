"""Inputs of merges: networks and data are converted and checked before anything is computed."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from enfold.data import Data, Split
from enfold.data.convert import Examples, as_data, require
from enfold.data.convert import first_inputs as first_of_loader
from enfold.data.dataset import evaluation_batches, has_examples
from enfold.data.tree import first_examples, to_device
from enfold.data.unpack import Batches, Unpack
from enfold.engines.examples import EXAMPLES
from enfold.engines.inputs import in_type_of
from enfold.engines.modes import refuse_inference_mode
from enfold.engines.skeleton import RUNNING, State
from enfold.ensemble import Ensemble, called_network
from enfold.ensembles.deep_ensemble import as_ensemble
from enfold.errors import EnfoldError, level_outside
from enfold.symmetry.find import require_batch
from enfold.tasks import Task, TaskLike, first_batch_task
from enfold.train.batch_norm import has_running_statistics

Models = Ensemble | Sequence[nn.Module]
"""Networks to merge: an ensemble, or networks of one architecture."""


class BufferMismatchWarning(UserWarning):
    """Members differ in buffers that have no mean."""


@dataclass(frozen=True)
class MergeInputs:
    """The checked inputs of a merge.

    Args:
        method: The name of the method in messages.
        ensemble: The members.
        data: Training and validation examples; splits that were not given are empty.
        example: Two inputs with which the network is run to find its symmetries; None if there are no inputs.
    """

    method: str
    ensemble: Ensemble
    data: Data
    example: Any = None

    def require_example(self) -> Any:
        """Return two inputs of the network.

        Raises:
            EnfoldError: If neither `example` nor training examples were given.
        """
        if self.example is not None:
            return self.example
        with torch.random.fork_rng(devices=[]):  # a loader may draw
            return first_inputs(self.data, self.method)


def prepare_inputs(
    method: str,
    models: Models,
    train: Examples | None = None,
    val: Examples | None = None,
    *,
    example: Any = None,
    repair: str = "none",
    needs_train: bool = False,
    warn: bool = True,
    unpack: Unpack | None = None,
) -> MergeInputs:
    """Convert and check what a merge is called with.

    Args:
        method: The name of the method in messages.
        models: An ensemble, or networks of one architecture.
        train: Training examples.
        val: Validation examples.
        example: A few inputs of the network.
        repair: The correction after merging, which may need training examples.
        needs_train: Whether the method itself needs training examples.
        warn: Whether to warn of buffers that cannot be averaged.
        unpack: Function that splits a batch of a loader; None for the usual structures of batches.

    Raises:
        EnfoldError: If networks differ in architecture or function, values are not finite, or examples are missing.
    """
    if needs_train:
        require(train, "train", method)
    if example is not None:
        require_batch(example)
    ensemble = require_members(models, method)
    data = as_data(train, val, unpack=unpack, network=called_network(ensemble))
    require_one_function(ensemble, data, method, example)
    if warn:
        _warn_if_buffers_differ(ensemble)
    _require_repairable(ensemble, data, repair, method)
    return MergeInputs(method, ensemble, data, None if example is None else select_few(example, 2))


def require_members(models: object, method: str) -> Ensemble:
    """Return networks as an ensemble of one architecture with finite values.

    Raises:
        EnfoldError: If `models` is neither an ensemble nor networks of one architecture, or a value is not finite.
    """
    if isinstance(models, nn.ModuleList) or (isinstance(models, Iterable) and not isinstance(models, nn.Module)):
        given = list(models)
        if not given or not all(isinstance(each, nn.Module) for each in given):
            raise EnfoldError(
                f"{method} needs an Ensemble or a list of networks as models, got {models!r}: pass [a, b]"
            )
        models = as_ensemble(given)
    if not isinstance(models, Ensemble):
        raise EnfoldError(
            f"{method} needs members of one architecture as models, got {type(models).__name__}: pass a list of "
            "networks, or distill into a student"
        )
    refuse_inference_mode(method)
    with torch.no_grad():
        values = models.expand()
    for name, stacked in values.items():
        if stacked.is_floating_point() and not bool(stacked.isfinite().all()):
            index = int(stacked.isfinite().flatten(1).all(1).logical_not().nonzero()[0])
            raise EnfoldError(
                f"{method} needs members of finite values, but '{name}' of member {index} is not: leave out that member"
            )
    return models


def require_one_function(ensemble: Ensemble, data: Data, method: str, example: Any = None) -> None:
    """Run members on one batch and refuse networks that compute different functions of their parameters.

    Args:
        ensemble: The ensemble.
        data: The data.
        method: The name of the method, for messages.
        example: One batch of inputs; taken from the data by default.

    Raises:
        EnfoldError: If a member computes something else than the code of the first network with its parameters.
    """
    split = next((split for split in (data.val, data.train) if has_examples(split)), None)
    if split is not None and not is_iterator(split):  # an iterator would lose the batch
        with torch.random.fork_rng(devices=[]):
            batch = next(iter(evaluation_batches(split, EXAMPLES)), None)
        example = example if batch is None else batch.inputs
    if example is None:
        return
    device = next(iter(ensemble.expand().values())).device
    ensemble.verify(to_device(in_type_of(ensemble, select_few(example, EXAMPLES)), device))
    if ensemble.mismatch is not None and not ensemble.mismatch.same_code:
        raise EnfoldError(
            f"{method} needs members that compute the same function of their parameters, but by the code of the first "
            f"network {ensemble.mismatch}: distill them instead"
        )


def require_reference(index: int, num_members: int) -> int:
    """Return the index of the reference member.

    Raises:
        EnfoldError: If there is no member of that index.
    """
    if not 0 <= index < num_members:
        raise EnfoldError(
            f"reference must be the index of one of the {num_members} members, got {index}: use 0 to {num_members - 1}"
        )
    return index


def is_iterator(part: Any) -> bool:
    """Return whether batches can be read only once, so that reading one would lose it."""
    return isinstance(part.loader if isinstance(part, Batches) else part, Iterator)


def choose_task(task: TaskLike, ensemble: Ensemble) -> Task:
    """Return the task that was named, else that of the ensemble, else one that is inferred from the first batch."""
    return first_batch_task(ensemble.task if task is None else task)


def select_few(inputs: Any, number: int) -> Any:
    """Return the inputs of the first examples; all of a batch whose examples cannot be told apart."""
    few = first_examples(inputs, number)
    return inputs if few is None else few


def first_inputs(data: Data, method: str = "merging") -> Any:
    """Return the first two training inputs as a network receives them; in a batch of graphs, all of the first batch.

    Raises:
        EnfoldError: If there are none.
    """
    if not has_examples(data.train):
        raise EnfoldError(f"{method} needs example inputs of the network, got none: pass example=inputs, or train")
    if isinstance(data.train, Split):
        return data.prepare(data.train.inputs[:2])
    try:
        return first_of_loader(data.train)
    except EnfoldError as error:
        raise EnfoldError(f"train: {error}") from error


def _require_repairable(ensemble: Ensemble, data: Data, repair: str, method: str) -> None:
    """Refuse a correction that measures statistics on training examples if there are none."""
    if ensemble.num_members == 1:
        return
    norms = has_running_statistics(ensemble.skeleton.network)
    if repair == "none" or (repair == "reset" and not norms) or has_examples(data.train):
        return
    reason = "measures the statistics of batch norms" if repair == "reset" else "measures hidden units"
    raise EnfoldError(
        f"{method} with repair={repair!r} {reason}, which needs train examples, got none: pass train, or repair='none'"
    )


def _warn_if_buffers_differ(ensemble: Ensemble) -> None:
    """Warn if buffers other than running statistics differ, such as masks: they have no mean."""
    with torch.no_grad():
        values = ensemble.expand()
    buffers: State = {name: values[name] for name in ensemble.skeleton.buffers if name in values}
    differ = (name for name, stacked in buffers.items() if not bool((stacked == stacked[:1]).all()))
    name = next((name for name in differ if name.rsplit(".", 1)[-1] not in (*RUNNING, "num_batches_tracked")), None)
    if name is not None:
        warnings.warn(
            f"buffers other than running statistics should be equal in all members to be averaged, but '{name}' "
            "differs: if weights are computed from it, store these instead (torch.nn.utils.prune.remove, "
            "parametrize.remove_parametrizations)",
            BufferMismatchWarning,
            stacklevel=level_outside(),
        )

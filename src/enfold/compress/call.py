"""The function `compress`: check its arguments, and search."""

from __future__ import annotations

import time as clock
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor, nn

from enfold.arguments import check_value
from enfold.compress.limits import parse_budget, parse_memory, parse_time
from enfold.compress.members import Make, as_folds, as_members, as_students, refuse_identical
from enfold.compress.result import Compression
from enfold.compress.runner import Limit, Runner
from enfold.compress.search import Effort, Search
from enfold.data.convert import Examples, as_data, require
from enfold.data.dataset import has_examples
from enfold.data.unpack import Unpack
from enfold.ensemble import Ensemble, called_network, set_model_output
from enfold.ensembles.mixed_ensemble import MixedEnsemble
from enfold.errors import EnfoldError
from enfold.executors import ExecutorLike, Parallel, as_parallel
from enfold.loggers import Log, LoggerLike, as_log, with_log
from enfold.tasks import TaskLike, current_task, first_batch_task
from enfold.train import TrainConfig
from enfold.train.config import as_config
from enfold.train.history import Epoch


@with_log
def compress(
    models: Ensemble | Sequence[nn.Module] | Sequence[str | Path] | str,
    train: Examples,
    val: Examples | None = None,
    *,
    network: Make | None = None,
    budget: str | float = "1x",
    memory: str | float | None = None,
    time: str | float | None = None,
    student: Make | Sequence[Make] | None = None,
    base: nn.Module | None = None,
    folds: Tensor | int | None = None,
    train_longer: bool = False,
    routes: Effort = "default",
    task: TaskLike = None,
    unpack: Unpack | None = None,
    outputs: Callable[[Any], Tensor] | None = None,
    folder: str | Path | None = None,
    config: TrainConfig | None = None,
    on_epoch: Callable[[Epoch], None] | None = None,
    logger: LoggerLike | Log = None,
    quiet: bool = False,
    executor: ExecutorLike = None,
    **settings: Any,
) -> Compression:
    """Find the best network to ship in place of an ensemble.

    Members are diagnosed first. Merges are tried next, then short distillations, of which the best is trained for all
    epochs beside a control: one member that is trained as long on the labels. The network with the lowest criterion on
    validation examples is recommended; it is never worse there than the best member or the control.

    Args:
        models: An ensemble, networks, or checkpoint files for `network`; they are not changed.
        train: Training examples, as for `fit`.
        val: Validation examples, as for `fit`; everything is chosen by them.
        network: Function that makes the network of checkpoint files.
        budget: Largest cost of a prediction relative to one member, such as "1x" or 0.5. Below 1 a `student` is
            needed; above 1 ensembles are tried, too.
        memory: Largest size relative to one member, such as "1.5x"; None for no limit beside the budget.
        time: Limit of the search, such as "30 min" or a number of seconds: routes are left out and epochs are
            shortened to fit, and if time is left, the final trainings are repeated with 2, 4 and 8 times the epochs, as
            long as that improves. None for no limit.
        student: Function that makes a network of another architecture to distil into, or a list of them.
        base: Network that the members were fine-tuned from, for the merges that use it.
        folds: For members of a cross-validation: the number of folds of `fit(..., folds=M)`, the fold of each example,
            or booleans (M, N), True where member m was trained on example n. None takes the folds of `config`.
        train_longer: Train members longer first if that helps a member more than the ensemble does.
        routes: "default", or "all" to include routes that take several times as long.
        task: What the outputs mean; None for the task that an ensemble was trained for, or to infer it.
        unpack: Function that splits a batch, as for `fit`.
        outputs: Function that selects the output of a network, as for `fit`.
        folder: Folder in which finished trials are stored, so that an interrupted search continues.
        config: Settings of training; use those of the members.
        on_epoch: Called with the record of every epoch of every trial, an `Epoch`; `Epoch.training` is the trial.
        logger: Where settings, the metrics of every trial and the table are logged to, as for `fit`.
        quiet: Show no progress bars.
        executor: Where the trials of a round are trained side by side, as for `fit`; None for one after the other in
            this process.
        **settings: Fields of `TrainConfig`, which replace those of `config`.

    Returns:
        The network, everything that was tried, and the explanation.

    Raises:
        EnfoldError: If an argument is invalid, there are no validation examples, or nothing meets the budget.
    """
    started = clock.monotonic()
    require(train, "train", "compress")
    limit, largest, seconds = parse_budget(budget), parse_memory(memory), parse_time(time)
    check_value("routes", routes, Effort)
    settings_given = as_config(config).update(settings)
    members, students = as_members(models, network), as_students(student)
    _check_size(limit, largest, members, bool(students))
    if outputs is not None:
        set_model_output(members, outputs)
    task = first_batch_task(task or settings_given.task or members.task)
    folds = settings_given.folds if folds is None else folds
    data = as_data(
        train,
        val,
        batch_size=settings_given.batch_size,
        unpack=unpack,
        network=called_network(members),
        indexed=folds is not None,
    )
    if not has_examples(data.val):
        raise EnfoldError(
            "val must be given, as compress chooses by validation examples, got none: pass val=, or hold out a part of "
            "train"
        )
    known = as_folds(folds, members, data, settings_given.seed)
    if train_longer and known is not None and settings_given.folds is None:
        raise EnfoldError(
            "train_longer needs members that `fit` can train on their folds, got folds of another kind: set folds in "
            "config, or leave out train_longer"
        )
    refuse_identical(members, data, current_task(task))
    parallel = as_parallel(executor)
    if parallel is not None:
        _check_executor(parallel, seconds, on_epoch)
    place = None if folder is None else Path(folder)
    runner = Runner(Limit(started, seconds), limit, largest, place, on_epoch, as_log(logger), quiet)
    search = Search(runner, members, data, current_task(task), settings_given, students, base, known, routes)
    if parallel is None:
        return search.run(train_longer=train_longer)
    with TemporaryDirectory(prefix="enfold-") as temporary:
        runner.use_folder(place or Path(temporary))
        search.parallel = parallel
        return search.run(train_longer=train_longer)


def _check_executor(parallel: Parallel, seconds: float | None, on_epoch: object) -> None:
    """Refuse arguments that need the trainings in this process."""
    given = {"time": seconds, "on_epoch": on_epoch, "Parallel(store=)": parallel.store}
    for name, value in given.items():
        if value is not None:
            instead = ": pass folder= in its place" if name.startswith("Parallel") else f": leave out {name}"
            raise EnfoldError(f"{name} is for trainings in this process, got executor as well{instead}")
    if parallel.kind == "auto":
        raise EnfoldError("executor must be serial, local or ray for compress, got 'auto': choose one of them")


def _check_size(budget: float, memory: float, members: Ensemble, has_students: bool) -> None:
    """Refuse limits that only a student of another architecture can meet if there is none."""
    for name, value in (("budget", budget), ("memory", memory)):
        if value < 1 and not has_students:
            raise EnfoldError(
                f"{name} must be at least 1x, that of the members' architecture, got {value:g}: raise {name}, or pass "
                "student=, a function that makes a smaller network"
            )
    if not members.is_expandable and not isinstance(members, MixedEnsemble) and not has_students:
        raise EnfoldError(
            f"student must be given for a {type(members).__name__}, whose members do not exist as networks, got None: "
            "pass a function that makes the network to distil into"
        )

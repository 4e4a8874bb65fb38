"""Train blocks of independent members as tasks, which run anywhere with the same results.

A block is trained exactly as `fit` trains it in one process: member k draws its order, its augmentation and its noise
from the seed and k. Its result is stored under the digest of everything that it depends on.
"""

from __future__ import annotations

import json
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from enfold.data import Data, Split
from enfold.data.convert import as_data
from enfold.ensemble import Ensemble, called_network
from enfold.errors import EnfoldError, FailedMembers
from enfold.executors import ExecutorLike, Failure, Parallel, Store, Task, as_parallel, run_tasks
from enfold.io.files import digest, parsing
from enfold.loggers import Log
from enfold.tasks import training_task
from enfold.tasks.infer import task_from_dict, task_to_dict
from enfold.train.block_history import join_histories
from enfold.train.config import TrainConfig
from enfold.train.diversity import LowDiversityWarning, warn_if_similar
from enfold.train.history import Epoch, History
from enfold.train.loop import Fit, train_model
from enfold.train.objective import Objective
from enfold.train.placement import choose
from enfold.train.shared_data import SharedData

PER_MEMBER = ("lr", "weight_decay", "label_smoothing")


def refuse_arguments(**given: object) -> None:
    """Refuse arguments of `fit` that need the training in this process."""
    for name, value in given.items():
        if value is not None:
            raise EnfoldError(f"{name} needs a training in this process, got executor as well: leave out {name}")


def require_independent(model: nn.Module, config: TrainConfig) -> Ensemble:
    """Return the model if its members can be trained in blocks.

    Raises:
        EnfoldError: If it is a single network, or a method whose members are trained together.
    """
    if not isinstance(model, Ensemble):
        raise EnfoldError(
            f"executor distributes the members of an ensemble, got one {type(model).__name__}: leave out executor, or "
            "start a script with torchrun"
        )
    if not model.has_independent_members:
        raise EnfoldError(
            f"executor needs members that are trained independently, as those of DeepEnsemble and Bagging, but "
            f"{type(model).__name__} trains its members together: leave out executor"
        )
    if config.order == "split":
        raise EnfoldError(
            "order='split' divides each batch among all members, got executor as well: set order='own' or 'shared'"
        )
    return model


@dataclass(frozen=True)
class Block:
    """Consecutive members that one task trains, and all that it needs.

    Args:
        members: The members, untrained.
        first: Index of the first.
        config: Settings of the training of these members.
        data: The examples.
        objective: The loss; None for that of the task.
        output: The name of the result in the store.
    """

    members: Ensemble
    first: int
    config: TrainConfig
    data: SharedData
    objective: Objective | None
    output: str = ""

    @property
    def indices(self) -> range:
        """The indices of the members."""
        return range(self.first, self.first + self.members.num_members)

    @property
    def name(self) -> str:
        """The members in words."""
        return f"member {self.first}" if len(self.indices) == 1 else f"members {self.first} to {self.indices[-1]}"


def fit_blocks(
    model: nn.Module,
    data: Data,
    config: TrainConfig,
    objective: Objective | None,
    checkpoint: Path | None,
    executor: ExecutorLike,
    *,
    title: str,
    quiet: bool,
    log: Log,
) -> History:
    """Train the blocks of an ensemble on an executor; the arguments are those of `fit`.

    Args:
        model: The ensemble.
        data: Training and validation data.
        config: The training settings.
        objective: The loss of each member; None for that of the task.
        checkpoint: File of the training; finished blocks are stored beside it.
        executor: The executor.
        title: Title of the progress bar.
        quiet: Whether to show no progress.
        log: Where metrics are logged.

    Raises:
        FailedMembers: If blocks fail; the model is unchanged then.
    """
    parallel = as_parallel(executor)
    assert parallel is not None  # noqa: S101 - `fit` has checked it
    ensemble = require_independent(model, config)
    config = ensemble.configure(config)
    if checkpoint is not None and checkpoint.exists():
        raise EnfoldError(
            f"'{checkpoint}' belongs to a training of all members in one process, got executor as well: leave out "
            "executor to continue it, or delete the file"
        )
    _require_identified(data, parallel)
    with _store(parallel, checkpoint) as store:
        blocks = make_blocks(ensemble, data, config, objective, parallel.block_size, store)
        if parallel.kind == "auto":
            parallel = choose(parallel, blocks, data)
        tasks = [Task(block.name, block.output, train_block, (block,)) for block in blocks]
        failures = run_tasks(tasks, store, parallel, device=config.device, title=title, quiet=quiet)
        if failures:
            permanent = parallel.store is not None or checkpoint is not None
            raise _failed(ensemble, blocks, failures, store, permanent=permanent)
        history = load_blocks(ensemble, blocks, store)
    if log:
        log.log_settings(Fit(ensemble, data, config, objective, None)._describe(title))
        for record in history.epochs:
            log.log_metrics(history.metrics(record), record.epoch + 1)
    ensemble.to(config.device).eval()
    warn_if_similar(ensemble, data)
    return history


def _require_identified(data: Data, parallel: Parallel) -> None:
    """Refuse a permanent store for examples whose content is not known."""
    if parallel.store is not None and not isinstance(data.train, Split):
        raise EnfoldError(
            "store identifies a result by the content of its data, got a loader, whose content is not known: pass the "
            "examples as tensors or a Dataset, or use checkpoint= in place of store"
        )


def plan_blocks(model: Ensemble, data: Data, config: TrainConfig, size: int, store: Store) -> list[Block]:
    """Return the blocks that ``fit(model, data, config=config, executor=...)`` trains.

    Args:
        model: The ensemble.
        data: The examples, which are written to the store.
        config: Settings of the training.
        size: The number of members of a block.
        store: Where the blocks write.
    """
    config = config.replace(task=training_task(model, config.task))
    data = as_data(data, None, batch_size=config.batch_size, network=called_network(model))
    return make_blocks(model, data, require_independent(model, config).configure(config), None, size, store)


def make_blocks(
    ensemble: Ensemble, data: Data, config: TrainConfig, objective: Objective | None, size: int, store: Store
) -> list[Block]:
    """Return the blocks of an ensemble; the data is written to the store.

    Args:
        ensemble: The ensemble.
        data: Training and validation data.
        config: The training settings.
        objective: The loss of each member; None for that of the task.
        size: Members in a block.
        store: Where the data is written.
    """
    shared, count = SharedData.write(data, store), ensemble.num_members
    per_member = {
        name: config.per_member(name, count) for name in PER_MEMBER if isinstance(getattr(config, name), tuple)
    }
    blocks = []
    for first in range(0, count, size):
        last = min(first + size, count)
        own = {name: tuple(values[first:last]) for name, values in per_member.items()}
        settings = config.replace(first_member=config.first_member + first, **own)
        block = Block(ensemble[first:last], first, settings, shared, objective)
        identity = Fit(block.members, data, settings, objective, Path("block")).identity  # the path is not used
        key = digest([], json.dumps(identity, sort_keys=True))[:16]
        blocks.append(replace(block, output=f"members-{first}-{last - 1}-{key}.safetensors"))
    return blocks


@contextmanager
def _store(parallel: Parallel, checkpoint: Path | None) -> Iterator[Store]:
    """Yield the store of a training: the given one, one beside the checkpoint, or a temporary one."""
    if parallel.store is not None:
        yield Store(parallel.store)
    elif checkpoint is not None:
        yield Store(block_folder(checkpoint))
    else:
        with tempfile.TemporaryDirectory(prefix="enfold-") as folder:
            yield Store(folder)


def block_folder(checkpoint: Path) -> Path:
    """Return the folder of the blocks of a training with this checkpoint."""
    return checkpoint.with_suffix(".blocks")


def train_block(store: Store, block: Block) -> None:
    """Train a block and write its members to the store; an interrupted training continues from its checkpoint."""
    name = block.output.replace(".safetensors", ".checkpoint")
    data = block.data.read(store)
    with _checkpoint(store, name) as (path, on_epoch), warnings.catch_warnings():
        warnings.simplefilter("ignore", LowDiversityWarning)  # all members are compared afterwards
        history = train_model(block.members, data, block.config, block.objective, path, on_epoch=on_epoch, quiet=True)
    about = {
        "history": history.as_dict(),
        "task": task_to_dict(block.members.task),
        "threads": torch.get_num_threads(),
    }
    state = {key: value.clone(memory_format=torch.contiguous_format) for key, value in _state(block.members).items()}
    with store.write(block.output) as path:
        save_file(state, path, {"about": json.dumps(about)})
    store.remove(name)


@contextmanager
def _checkpoint(store: Store, name: str) -> Iterator[tuple[Path, Callable[[Epoch], None] | None]]:
    """Yield the local file of a checkpoint in the store, and a function that is called after every epoch."""
    if store.folder is not None:
        store.folder.mkdir(parents=True, exist_ok=True)
        yield store.folder / name, None
        return
    with tempfile.TemporaryDirectory(prefix="enfold-") as place:
        path = Path(place) / name
        if store.exists(name):
            with store.read(name) as copy:
                path.write_bytes(copy.read_bytes())
        yield path, lambda _: store.upload(path, name)


def load_blocks(ensemble: Ensemble, blocks: Sequence[Block], store: Store) -> History:
    """Load finished blocks into the ensemble, and return the history of all members."""
    states, abouts = zip(*(_read(block, store) for block in blocks), strict=True)
    device = next(ensemble.parameters()).device
    joined = {name: torch.cat([state[name] for state in states]).to(device) for name in states[0]}
    ensemble.load_state_dict(joined)
    known = task_from_dict(abouts[0]["task"])
    if known is not None:
        ensemble.task = known
    return join_histories(
        [History.from_dict(about["history"]) for about in abouts], [len(block.indices) for block in blocks]
    )


def _read(block: Block, store: Store) -> tuple[dict[str, Tensor], dict[str, Any]]:
    with (
        store.read(block.output) as path,
        parsing(path, "the result of a task", "delete it and train again"),
        safe_open(path, "pt") as file,
    ):
        about: dict[str, Any] = json.loads(file.metadata()["about"])
        return {name: file.get_tensor(name) for name in file.keys()}, about  # noqa: SIM118 - not a dictionary


def _failed(
    ensemble: Ensemble, blocks: Sequence[Block], failures: Sequence[Failure], store: Store, *, permanent: bool
) -> FailedMembers:
    """Return the error of a training with failed blocks, with an ensemble of the other members."""
    reasons = {failure.task: failure for failure in failures}
    finished = [block for block in blocks if block.name not in reasons]
    trained = [index for block in finished for index in block.indices]
    rest = None
    if trained:
        rest = ensemble[trained]
        load_blocks(rest, finished, store)
        rest.eval()
    first = failures[0]
    remedy = "the attribute 'ensemble' of this error has the others" if trained else "correct the cause"
    kept = f"; finished members are in '{store.address}'" if permanent and trained else ""
    error = FailedMembers(
        f"all members must be trained, but only {len(trained)} of {ensemble.num_members} are: {first.task} failed with "
        f"{first.message}{kept}: {remedy}",
        trained,
        rest,
    )
    if first.details:
        error.add_note(f"in the worker:\n{first.details}")
    return error


def _state(model: nn.Module) -> dict[str, Tensor]:
    return {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}

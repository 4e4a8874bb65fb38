"""Cells: the parts of a run that are made independently, blocks of members first, then groups of steps.

Each is a task whose output exists or not, so that any number of processes, started at any time, can share a run: those
of one call (`--executor`), or of the array of a cluster (`--shard i/n`), which needs nothing but the folder of the run.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.errors import EnfoldError
from enfold.executors import Failure, Parallel, Store, Task, run_tasks
from enfold.io.files import write_json
from enfold.progress import announce
from enfold.run.directory import RunDirectory
from enfold.run.execute import seed_runs
from enfold.run.recipe import Recipe
from enfold.run.seed_run import SeedRun
from enfold.train.blocks import Block, plan_blocks, train_block
from enfold.train.placement import choose

FOLDER = "tasks"  # in the run: results of blocks until all members of a seed are there
SETTINGS = "settings.json"


@dataclass(frozen=True)
class Shard:
    """One of several processes that share the cells of a run: cell j belongs to shard j modulo `count`.

    Args:
        index: Its number, counted from 1.
        count: The number of shards.
    """

    index: int = 1
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Return the shard of a text such as "2/8".

        Raises:
            EnfoldError: If it is not of this form.
        """
        index, _, count = text.partition("/")
        if not (index.isascii() and index.isdigit() and count.isascii() and count.isdigit()) or not (
            1 <= int(index) <= int(count)
        ):
            raise EnfoldError(f"--shard must be i/n with i from 1 to n, got '{text}': write for example --shard 1/8")
        return cls(int(index), int(count))

    def has(self, index: int) -> bool:
        """Return whether a cell belongs to this shard."""
        return index % self.count == self.index - 1


@dataclass(frozen=True)
class Stages:
    """Steps or controls of a seed that one task makes, in this order.

    Args:
        run: The folder of the run.
        trusted: Whether code that the recipe names may run.
        seed: The seed.
        device: The device of training.
        stages: Folder and label of each.
    """

    run: Path
    trusted: bool
    seed: int
    device: str
    stages: tuple[tuple[str, str], ...]


@dataclass
class Cells:
    """The cells of a run.

    Args:
        run: The run.
        recipe: Its recipe.
        parallel: Where cells are made, and how many members a block has.
        device: The device of training.
    """

    run: RunDirectory
    recipe: Recipe
    parallel: Parallel
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.recipe.trajectory is not None:
            raise EnfoldError(
                "trajectory needs the members' training in one process, got --executor or --shard as well: remove "
                "trajectory from the recipe, or the option"
            )
        self.seeds = seed_runs(self.run, self.recipe, self.device)
        self.blocks = Store(self.run.path / FOLDER)
        self.assembly = replace(self.parallel, executor="serial", store=self.run.path / FOLDER, address=None)

    def make(self, shard: Shard | None = None) -> list[str]:
        """Make the cells, or those of one shard, and return the names of those that are not made yet.

        Raises:
            EnfoldError: If a cell fails; the others are made first.
        """
        shard = shard or Shard()
        self._require_same_blocks()
        for each in self.seeds:
            each.require_same_code()
        members = self._member_tasks()
        self._choose([task.arguments[0] for _, task in members])
        self._run([task for index, task in members if shard.has(index)], self.blocks, "members")
        missing = [task.name for _, task in members if not self.blocks.exists(task.output)]
        ready = [each for each in self.seeds if not any(name.startswith(f"seed {each.seed}:") for name in missing)]
        for each in ready:
            each.members(self.assembly)  # from the blocks
        store = Store(self.run.path)
        steps = list(enumerate(self._step_tasks()))
        seeds = {each.seed for each in ready}
        own = [task for index, task in steps if shard.has(index) and task.arguments[0].seed in seeds]
        self._run(own, store, "steps")
        return missing + [task.name for _, task in steps if not store.exists(task.output)]

    def _choose(self, blocks: Sequence[Block]) -> None:
        """Replace "auto" by the executor that is faster for these blocks."""
        if self.parallel.kind != "auto":
            return
        if blocks:
            self.parallel = choose(self.parallel, blocks, self.seeds[0].data)
        else:
            announce("enfold: the members are trained: what is left runs in this process")
            self.parallel = replace(self.parallel, executor="serial")

    def missing(self) -> list[str]:
        """Return the names of the cells that are not made."""
        self._require_same_blocks()
        members = [task.name for _, task in self._member_tasks() if not self.blocks.exists(task.output)]
        return members + [task.name for task in self._step_tasks() if not Store(self.run.path).exists(task.output)]

    def remove_blocks(self) -> None:
        """Remove the results of blocks, which the members of each seed contain."""
        if all(each.run.is_done("members", "members") for each in self.seeds):
            shutil.rmtree(self.run.path / FOLDER, ignore_errors=True)

    def _member_tasks(self) -> list[tuple[int, Task]]:
        """Return the blocks of seeds without members, each with its index among the blocks of all seeds."""
        size, count = self.parallel.block_size, self.recipe.members
        found = []
        for number, each in enumerate(self.seeds):
            if self.recipe.checkpoints is not None or each.is_done("members", "members"):
                continue
            members = DeepEnsemble(each.make_network, count, seed=each.seed)
            config = self.recipe.members_config(each.seed, self.device)
            first = number * -(-count // size)
            for index, block in enumerate(plan_blocks(members, each.data, config, size, self.blocks)):
                task = Task(f"seed {each.seed}: {block.name}", block.output, train_block, (block,))
                found.append((first + index, task))
        return found

    def _step_tasks(self) -> Iterator[Task]:
        """Yield the steps and controls of all seeds; steps that use each other are one task."""
        for each in self.seeds:
            folder = "" if each.run.path == self.run.path else f"{each.run.path.name}/"
            for group in _groups(each):
                kind, label = group[-1]
                name = f"seed {each.seed}: {', '.join(label for _, label in group)}"
                stages = Stages(self.run.path.resolve(), self.run.trust_code, each.seed, self.device, tuple(group))
                yield Task(name, f"{folder}{kind}/{label}.json", make_stages, (stages,))

    def _run(self, tasks: Sequence[Task], store: Store, title: str) -> None:
        failures = run_tasks(tasks, store, self.parallel, device=self.device, title=title)
        for failure in failures:
            self.run.log("failed", task=failure.task, kind=failure.kind, message=failure.message)
        if failures:
            raise _failed(failures, len(tasks))

    def _require_same_blocks(self) -> None:
        """Refuse another size of blocks than the one that the run was started with."""
        file, now = self.run.path / FOLDER / SETTINGS, {"block_size": self.parallel.block_size}
        if not file.is_file():
            write_json(file, now)
        before = json.loads(file.read_text(encoding="utf-8"))
        if before != now:
            raise EnfoldError(
                f"all processes of a run must train blocks of one size, got {now['block_size']}, and the run was "
                f"started with {before['block_size']}: use --block-size {before['block_size']}"
            )


def make_stages(store: Store, job: Stages) -> None:
    """Make steps and controls of a seed whose members are made; the store is the run itself."""
    run = RunDirectory.open(job.run, trust_code=job.trusted)
    recipe = run.recipe()
    (each,) = [found for found in seed_runs(run, recipe, job.device) if found.seed == job.seed]
    members = each.members()
    for kind, label in job.stages:
        if kind == "controls":
            each.control(label, each.list_models()[kind, label], members)
        else:
            each.step(recipe.step(label), members)


def has_blocks(run: RunDirectory) -> bool:
    """Return whether members of a run were trained in blocks that are not assembled yet."""
    return (run.path / FOLDER / SETTINGS).is_file()


def _groups(run: SeedRun) -> list[list[tuple[str, str]]]:
    """Return the controls, each by itself, and the steps in groups that use each other's models."""
    wanted = list(run.list_models())
    groups: list[list[tuple[str, str]]] = [[stage] for stage in wanted if stage[0] == "controls"]
    steps: list[list[tuple[str, str]]] = []
    for kind, label in wanted:
        if kind != "steps":
            continue
        used = set(run.recipe.dependencies(run.recipe.step(label)))
        joined = [group for group in steps if used & {name for _, name in group}]
        steps = [group for group in steps if group not in joined]
        steps.append([*(stage for group in joined for stage in group), (kind, label)])
    return groups + steps


def _failed(failures: Sequence[Failure], count: int) -> EnfoldError:
    for failure in failures[1:]:
        announce(f"enfold: {failure.task} failed with {failure.message}")
    first = failures[0]
    error = EnfoldError(
        f"{len(failures)} of {count} tasks failed, {first.task} with {first.message}; the others are stored: correct "
        "the cause and continue with --resume"
    )
    if first.details:
        error.add_note(f"in the worker:\n{first.details}")
    return error

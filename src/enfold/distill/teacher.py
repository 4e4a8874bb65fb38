"""The teacher of a distillation: members in eval mode, whose targets are looked up if inputs never change."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from enfold.data import Data, Split
from enfold.data.batches import Batch
from enfold.data.content import content
from enfold.data.convert import has_targets
from enfold.data.dataset import evaluation_batches, has_examples
from enfold.data.tree import device_of, to_device
from enfold.data.unpack import are_targets
from enfold.distill.answers import answer
from enfold.distill.cached import CachedTeacher, write_logits
from enfold.engines.copying import copy_network
from enfold.engines.modes import ensure_eval_mode
from enfold.ensemble import Ensemble
from enfold.ensembles.deep_ensemble import as_ensemble
from enfold.errors import EnfoldError
from enfold.evaluate import best_member, member_logits
from enfold.io.files import digest
from enfold.io.identity import differences
from enfold.metrics.weights import Weights
from enfold.tasks import Classification, Inferred, Task, TaskLike, as_task, current_task

Target = Callable[[Tensor], Tensor]
"""From the teachers' logits (M, N, C) to what a student learns: (..., N, K), example by example."""

FEW = 256  # examples from which a task is inferred
LARGE = 1 << 28  # bytes of logits above which they are read from disk instead of being held in memory
CHUNK = 1024  # examples: networks run fastest on about a thousand


class BatchTargets(NamedTuple):
    """The targets of a batch.

    Args:
        target: Targets (..., N, K), or (..., S, N, K) if each of S students has its own batch.
        task: The task of the teacher.
        chosen: Indices of the rows of the batch that are learned; None for all.
        labels: The targets of the batch; None without any, or a tensor of their shape.
    """

    target: Tensor
    task: Task
    chosen: Tensor | None = None
    labels: Any = None


class Teacher:
    """Frozen members, or their cached logits, as a source of targets.

    Args:
        models: A network, an ensemble or cached logits; models may be on another device than the student.
        data: The training data.
        target: The target of a loss; the default is the logits.
        is_constant: Whether inputs never change (no augmentation, no perturbation): targets are then computed once.
        folder: A folder for the logits of constant inputs, under a key of the values of models and data.
        task: What the outputs mean; None to infer it. Targets are computed once only if an example has one row.
        unseen: Which members answer for each training example, (M, N); None for all.
    """

    def __init__(
        self,
        models: nn.Module | CachedTeacher,
        data: Data,
        target: Target = lambda logits: logits,
        *,
        is_constant: bool = False,
        folder: Path | None = None,
        task: TaskLike = None,
        unseen: Tensor | None = None,
    ) -> None:
        self.unseen = unseen
        self.models = None if isinstance(models, CachedTeacher) else models
        self.cached = models if isinstance(models, CachedTeacher) else None
        self.data, self.target, self.folder = data, target, folder
        self.num_members = count_members(models)
        self.task = as_task(task)
        self.targets: Tensor | None = None  # (..., N, K)
        self.mapped: Tensor | None = None  # (T, N, C): logits too large for memory
        self._example_labels: Tensor | None = None  # in the shape of the targets of one example, without any
        is_cacheable = self._check(is_constant)
        if self.cached is not None or (is_constant and is_cacheable):
            self._hold(self.cached or self._compute())

    def __call__(self, batch: Batch) -> Tensor:
        """Return the targets (..., N, K), or (..., S, N, K) if each of S students has its own batch."""
        return self.batch_targets(batch).target

    def batch_targets(self, batch: Batch, generator: torch.Generator | None = None) -> BatchTargets:
        """Return what is learned about a batch.

        Args:
            batch: The examples.
            generator: Generator of the choice of positions, for tasks with `positions`.
        """
        device = device_of(batch.inputs)
        if self.targets is not None and batch.indices is not None:
            found = _rows(self.targets, batch.indices.cpu())
            return BatchTargets(found.to(device), current_task(self.task), None, self._labels_of(batch))
        if self.mapped is not None and batch.indices is not None:
            found = self._targets(self.mapped[:, batch.indices.cpu().flatten()], batch.indices)
            found = found.view(*found.shape[:-2], *batch.indices.shape, -1)
            return BatchTargets(found.to(device), current_task(self.task), None, self._labels_of(batch))
        students = len(batch.inputs) if batch.own else 1
        inputs, targets = (each.flatten(0, 1) if batch.own else each for each in (batch.inputs, batch.targets))
        outputs = self.logits(inputs)
        known = _known(targets)
        task = self.task.resolve(outputs, known)
        labels = batch.targets if known is not None else task.stand_in_targets(outputs)
        if known is None and labels is not None and batch.own:
            labels = labels.unflatten(0, (students, -1))
        chosen = choose_rows(task, outputs, known, generator)
        if chosen is not None and students > 1:
            raise EnfoldError(
                "order must be 'shared' where targets are ignored or positions are chosen, got a batch for each "
                "student: train with order='shared'"
            )
        values = task.rows(outputs)
        found = self._targets(values, batch.indices, None if chosen is None else chosen.to(values.device))
        if batch.own:
            found = found.view(*found.shape[:-2], students, -1, found.shape[-1])
        return BatchTargets(found.to(device), task, None if chosen is None else chosen.to(device), labels)

    def _labels_of(self, batch: Batch) -> Any:
        """Return the targets of a batch; without any, a tensor of their shape or None."""
        if are_targets(batch.targets) or self._example_labels is None:
            return batch.targets if are_targets(batch.targets) else None
        return self._example_labels.expand(*batch.targets.shape[:-1], *self._example_labels.shape)

    def _targets(self, values: Tensor, indices: Tensor | None, chosen: Tensor | None = None) -> Tensor:
        """Return the targets of rows (M, R, K) of examples with these indices, or of chosen rows."""
        if self.unseen is None:
            return self.target(values if chosen is None else values[:, chosen])
        if indices is None:
            raise EnfoldError("an OutOfFoldTeacher needs the indices of the examples, got none: pass tensors")
        unseen = self.unseen[:, indices.cpu().flatten()]
        unseen = unseen.repeat_interleave(values.shape[1] // unseen.shape[1], dim=1).to(values.device)  # rows
        if chosen is not None:
            values, unseen = values[:, chosen], unseen[:, chosen]
        return unseen_targets(values, unseen, self.target)

    @torch.no_grad()
    def logits(self, inputs: Any) -> Tensor:
        """Return the members' outputs in eval mode for prepared inputs: (B, ...) -> (M, B, ...)."""
        if self.models is None:
            raise EnfoldError("a CachedTeacher has logits for its training examples only: pass the networks as teacher")
        models = self.models

        def compute() -> Tensor:
            with ensure_eval_mode(models):
                logits = _require_finite(member_logits(models, to_device(inputs, self.device)))
            return logits.float() if logits.dtype == torch.bfloat16 else logits  # numpy and files have no bfloat16

        logits = answer(models, inputs, compute)
        self._require_classes(logits)
        return logits

    @cached_property
    def device(self) -> torch.device:
        """The device of the members."""
        tensors = () if self.models is None else self.models.parameters()
        return next((tensor.device for tensor in tensors), torch.device("cpu"))

    def _check(self, is_constant: bool) -> bool:
        """Check the teacher on a few examples, and return whether its targets can be computed once."""
        train = self.data.train
        if self.cached is None:
            if not isinstance(train, Split) or not len(train):
                return False
            outputs = self.logits(self.data.prepare(train.inputs[:2]))
            self._resolve(outputs, train)
            task = current_task(self.task)
            if isinstance(task, Inferred):
                return False
            has_one_row = task.rows(outputs).shape[1] == outputs.shape[1]
            return has_one_row and choose_rows(task, outputs, _known(train.targets[:2]), None) is None
        is_same = isinstance(train, Split) and len(train) == self.cached.num_examples
        changed = differences(self.cached.inputs, self.inputs) if is_same and self.cached.inputs else []
        if not is_constant or not is_same or changed:
            given = f"{len(train)} examples" if isinstance(train, Split) else "a loader"
            given += f" with other {', '.join(changed)}" if changed else ""
            raise EnfoldError(
                f"a CachedTeacher belongs to the training examples that it was computed for, got logits of "
                f"{self.cached.num_examples} examples and {given}{'' if is_constant else ', augmented or perturbed'}: "
                "pass those examples as tensors without augmentation, or the networks as teacher"
            )
        self._require_classes(self.cached.logits)
        if isinstance(train, Split):
            self._resolve(self.cached.logits[:, :FEW], train)
        return True

    def _resolve(self, outputs: Tensor, train: Split) -> None:
        """Infer the task from outputs of the first examples and the targets of some."""
        if not are_targets(train.targets):
            task = self.task.resolve(outputs, None)
            stand_in = task.stand_in_targets(outputs)
            self._example_labels = None if stand_in is None else stand_in[0]
            return
        targets = train.targets[:FEW]
        is_labels = outputs.ndim == 3 and outputs.shape[-1] > 1 and targets.ndim == 1
        if len(outputs[0]) < len(targets) and not is_labels and isinstance(current_task(self.task), Inferred):
            outputs = self.logits(self.data.prepare(train.inputs[:FEW]))
        self.task.resolve(outputs, targets[: len(outputs[0])])

    def _require_classes(self, logits: Tensor) -> None:
        classes, task = logits.shape[-1], current_task(self.task)
        if logits.ndim != 3 or type(task) not in (Inferred, Classification):
            return
        if self.data.num_classes not in (None, classes):
            raise EnfoldError(
                f"teacher must predict the {self.data.num_classes} classes of the data, got {classes} classes: pass "
                "networks trained on these labels"
            )

    def _compute(self) -> CachedTeacher:
        """Return the logits for all training examples: from the folder if they are there, else computed."""
        split = self.data.train
        if not isinstance(split, Split):
            raise TypeError("logits are cached for tensors in memory")
        if self.folder is None:
            return CachedTeacher(torch.cat(list(self._chunks()), dim=1))
        file = Path(self.folder) / f"{self._key[:16]}.safetensors"
        if file.exists():
            found = CachedTeacher.load(file)
            if found.key == self._key and found.num_examples == len(split):
                return found
        one = self.logits(self.data.prepare(split.inputs[:1]))
        one = current_task(self.task).rows(one)
        shape = (self.num_members, len(split), one.shape[-1])
        write_logits(file, self._chunks(), shape, one.dtype, self._key, self.inputs)
        return CachedTeacher.load(file)

    def _chunks(self) -> Iterator[Tensor]:
        for inputs, targets, _ in evaluation_batches(self.data.train, CHUNK):
            outputs = self.logits(inputs)
            yield self.task.resolve(outputs, _known(targets)).rows(outputs).cpu()

    def _hold(self, cached: CachedTeacher) -> None:
        """Compute the targets of all examples; of logits larger than `LARGE`, only refer to them."""
        chunks = (_require_finite(chunk) for chunk in cached.logits.split(CHUNK, dim=1))
        if cached.logits.nbytes <= LARGE:
            rows = torch.arange(cached.num_examples).split(CHUNK)
            found = [self._targets(chunk, indices) for chunk, indices in zip(chunks, rows, strict=True)]
            self.targets = torch.cat(found, dim=-2)
            return
        for _ in chunks:  # reads the file once, chunk by chunk, to check that all logits are finite
            pass
        self.mapped = cached.logits

    @cached_property
    def key(self) -> str:
        """A digest of the values of teacher and data."""
        return self._key if self.unseen is None else digest([self.unseen], self._key)

    @cached_property
    def _key(self) -> str:
        """A digest of the values of members and data."""
        if self.cached is not None:
            return self.cached.key or digest([self.cached.logits])
        state = {} if self.models is None else self.models.state_dict()
        network = None
        if isinstance(self.models, Ensemble) and self.models.is_expandable:
            network = self.models.skeleton.network
        values = [value for value in state.values() if isinstance(value, Tensor)]
        extra = [value for value in state.values() if not isinstance(value, Tensor)]  # of get_extra_state
        # The architecture is included: the same values in another one give other logits.
        text = f"{self.models!r}{network!r}{list(state)}{extra or ''}"
        return digest(values, re.sub(" at 0x[0-9a-fA-F]+", "", text) + str(self.inputs))

    @cached_property
    def inputs(self) -> dict[str, str]:
        """The identity of the inputs: their values in order, and their normalisation."""
        if not isinstance(self.data.train, Split):
            return {}
        known = content(self.data, ("train",))
        return {name: known[name] for name in ("training inputs", "normalisation")}

    def __repr__(self) -> str:
        """The same text in every process, because checkpoints store it."""
        return f"Teacher({self.key[:16]})"


def unseen_targets(values: Tensor, unseen: Tensor, target: Target) -> Tensor:
    """Return the targets of rows (M, N, K) of which each is answered by some members only, (N, K').

    Args:
        values: Rows of all members.
        unseen: Which members answer, (M, N).
        target: Function from rows (T, n, K) to targets (n, K').
    """
    counts, found = unseen.sum(0), None
    for count in counts.unique().tolist():
        chosen = (counts == count).nonzero()[:, 0]
        members = unseen[:, chosen].T.nonzero()[:, 1].view(-1, count).T  # (count, n)
        part = target(values[members, chosen])
        found = part.new_zeros((len(counts), part.shape[-1])) if found is None else found
        found[chosen] = part
    return cast("Tensor", found)


def choose_rows(task: Task, outputs: Tensor, targets: Any, generator: torch.Generator | None = None) -> Tensor | None:
    """Return the indices of the rows that are learned: those that are not ignored, or some of them; None for all.

    Args:
        task: The task.
        outputs: Outputs of the teachers, (T, B, ...).
        targets: Targets (B, ...); None without any.
        generator: Generator of the choice of positions; None to learn all of them.

    Raises:
        EnfoldError: If all targets are to be ignored.
    """
    most, chosen = getattr(task, "positions", None), None
    if isinstance(targets, Tensor):
        ignored = task.ignore_mask(task.row_targets(outputs, targets, check=False))
        chosen = None if ignored is None or not bool(ignored.any()) else (~ignored).nonzero()[:, 0]
    elif most is None:
        return None
    size = task.rows(outputs).shape[1] if chosen is None else len(chosen)
    if not size:
        raise EnfoldError(
            "a batch must have a target that is not ignored, got none: drop such batches, or check ignore_index"
        )
    if most is None or size <= most or generator is None:
        return chosen
    some = torch.randperm(size, generator=generator)[:most].to(outputs.device)
    return some if chosen is None else chosen[some]


def _known(targets: Any) -> Any:
    return targets if are_targets(targets) else None


def as_teacher(teacher: object) -> nn.Module | CachedTeacher:
    """Return a teacher as one model: a list of networks becomes an ensemble.

    Raises:
        EnfoldError: If it is neither a model, a list of networks nor cached logits.
    """
    if isinstance(teacher, nn.Module | CachedTeacher):
        return teacher
    networks = list(teacher) if isinstance(teacher, Sequence) and not isinstance(teacher, str) else []
    if not networks or not all(isinstance(network, nn.Module) for network in networks):
        raise EnfoldError(
            f"teacher must be an Ensemble, a network, a list of networks or a CachedTeacher, got "
            f"{type(teacher).__name__}: pass DeepEnsemble([a, b, c])"
        )
    return as_ensemble(networks)


def count_members(models: nn.Module | CachedTeacher) -> int:
    """Return the number of members of a teacher; 1 for a network."""
    return models.num_members if isinstance(models, Ensemble | CachedTeacher) else 1


def teacher_weights(models: nn.Module | CachedTeacher) -> Weights:
    """Return the weights of a teacher's members; None for equal weights."""
    if isinstance(models, CachedTeacher):
        return models.weights
    return models.member_weights if isinstance(models, Ensemble) else None


def first_member(models: nn.Module | CachedTeacher) -> nn.Module:
    """Return a copy of member 0 of a teacher, or of a teacher that is a network.

    Raises:
        EnfoldError: If the members do not exist as networks of one architecture.
    """
    if isinstance(models, CachedTeacher) or (isinstance(models, Ensemble) and not models.is_expandable):
        raise EnfoldError(
            f"student=None needs a teacher of networks of one architecture, got a {type(models).__name__}: pass a "
            "function that makes the student as student=, or a network as init="
        )
    return models.member(0) if isinstance(models, Ensemble) else copy_network(models)


def starting_member(models: nn.Module | CachedTeacher, data: Data, task: TaskLike = None) -> tuple[nn.Module, int]:
    """Return a copy of the best member on validation data, of member 0 without them or their targets, and its index."""
    is_chosen = has_examples(data.val) and has_targets(data.val)
    if not isinstance(models, Ensemble) or not models.is_expandable or not is_chosen:
        return first_member(models), 0
    index = best_member(models, data, task)
    return models.member(index), index


def _rows(targets: Tensor, indices: Tensor) -> Tensor:
    """Return the targets of examples: (..., N, K) -> (..., *indices, K)."""
    if indices.ndim == 1:
        return targets.index_select(-2, indices)  # half the time of an index
    return targets[..., indices, :]


def _require_finite(logits: Tensor) -> Tensor:
    if not bool(torch.isfinite(logits).all()):
        raise EnfoldError("teacher must have finite outputs, got NaN or infinity: leave out the diverged member")
    return logits

"""Teacher: what the members say about a batch; looked up where inputs are always the same, computed elsewhere."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn

from enfold.data import Data, Split
from enfold.data.batches import Batch
from enfold.data.content import content
from enfold.data.dataset import evaluation_batches
from enfold.distill.cached import CachedTeacher, write_answers
from enfold.engines.modes import in_eval_mode
from enfold.errors import EnfoldError
from enfold.evaluate import member_logits
from enfold.io.files import digest
from enfold.io.identity import differences

Target = Callable[[Tensor], Tensor]
"""From teachers' logits (M, N, C) to what a student is to learn: (..., N, K), example by example."""


def as_they_are(logits: Tensor) -> Tensor:
    """The target of a loss that wants the logits."""
    return logits


LARGE = 1 << 28  # bytes of logits that are looked up on disk instead of being held in memory
CHUNK = 1024  # rows run fastest in chunks of about a thousand


class Teacher:
    """Frozen members, or their recorded answers, asked for targets.

    `remembers` says that inputs never change (no augmentation): answers are then computed once, and kept in `file` if
    one is given, under a key of the teacher's values and the data's. The members may live on another device than the
    student; they answer in eval mode.
    """

    def __init__(
        self,
        members: nn.Module | CachedTeacher,
        data: Data,
        target: Target = as_they_are,
        *,
        remembers: bool = False,
        folder: Path | None = None,
    ) -> None:
        self.members = None if isinstance(members, CachedTeacher) else members
        self.recorded = members if isinstance(members, CachedTeacher) else None
        self.data, self.target, self.folder = data, target, folder
        self.num_members = int(getattr(members, "num_members", 1))
        self._check(remembers)
        self.targets: Tensor | None = None  # (..., N, K)
        self.mapped: Tensor | None = None  # (T, N, C): answers too large to be held, of which batches are looked up
        if self.recorded is not None or (remembers and isinstance(data.train, Split)):
            self._keep(self.recorded or self._answers())

    def _check(self, remembers: bool) -> None:
        """What can be said before anything is trained."""
        if self.recorded is not None:
            classes, train = self.recorded.num_classes, self.data.train
            same = isinstance(train, Split) and len(train) == self.recorded.num_examples
            others = differences(self.recorded.about, self.about) if same and self.recorded.about else []
            if not remembers or not same or others:
                held = f"{len(train)} examples" if isinstance(train, Split) else "a loader"
                held += f" with other {', '.join(others)}" if others else ""
                raise EnfoldError(
                    f"recorded answers hold for the very training part they were made on, got "
                    f"{self.recorded.num_examples} answers, {held}{'' if remembers else ', augmented or perturbed'}: "
                    "use that part without augmentation, or the members themselves"
                )
            self._require_classes(classes)
        elif isinstance(self.data.train, Split) and len(self.data.train):
            self.answer(self.data.prepare(self.data.train.inputs[:2]))

    def _require_classes(self, classes: int) -> None:
        if self.data.num_classes not in (None, classes):
            raise EnfoldError(
                f"a teacher must know the data's classes, got {classes} for the {self.data.num_classes} of the data: "
                "use members trained on these labels"
            )

    def _answers(self) -> CachedTeacher:
        """All answers for the training part: from the folder if they are there, else computed, and kept in it."""
        split = self.data.train
        if not isinstance(split, Split):
            raise TypeError("answers are remembered for a split")
        if self.folder is None:
            return CachedTeacher(torch.cat(list(self._pieces()), dim=1))
        file = self.folder / f"{self.key[:16]}.safetensors"
        if file.exists():
            found = CachedTeacher.load(file)
            if found.key == self.key and found.num_examples == len(split):
                return found
        one = self.answer(self.data.prepare(split.inputs[:1]))
        shape = (self.num_members, len(split), one.shape[-1])
        write_answers(file, self._pieces(), shape, {"key": self.key, "about": json.dumps(self.about)}, one.dtype)
        return CachedTeacher.load(file)

    def _pieces(self) -> Iterator[Tensor]:
        for inputs, _ in evaluation_batches(self.data.train, CHUNK):
            yield self.answer(inputs).cpu()

    def _keep(self, answers: CachedTeacher) -> None:
        """The targets of all examples; of answers that fill more than `LARGE`, only where they are found."""
        pieces = (_finite(piece) for piece in answers.logits.split(CHUNK, dim=1))
        if answers.logits.nbytes <= LARGE:
            self.targets = torch.cat([self.target(piece) for piece in pieces], dim=-2)
            return
        for _ in pieces:  # read once, page by page, to see that all are finite
            pass
        self.mapped = answers.logits

    @torch.no_grad()
    def answer(self, inputs: Tensor) -> Tensor:
        """The members' logits for prepared inputs: (B, ...) -> (M, B, C)."""
        if self.members is None:
            raise EnfoldError("recorded answers cannot be asked about other inputs: use the members themselves")
        with in_eval_mode(self.members):
            logits = _finite(member_logits(self.members, inputs.to(self.device)))
        self._require_classes(logits.shape[-1])
        return logits.float() if logits.dtype == torch.bfloat16 else logits  # as files and losses take them

    @cached_property
    def device(self) -> torch.device:
        """Where the members live."""
        tensors = () if self.members is None else self.members.parameters()
        return next((tensor.device for tensor in tensors), torch.device("cpu"))

    def __call__(self, batch: Batch) -> Tensor:
        """The targets (..., B, K), or (..., S, B, K) where each of S students has its own batch."""
        if self.targets is not None and batch.indices is not None:
            found = _chosen(self.targets, batch.indices.cpu())
        elif self.mapped is not None and batch.indices is not None:
            chosen = batch.indices.cpu().flatten()
            found = self.target(self.mapped[:, chosen])
            found = found.view(*found.shape[:-2], *batch.indices.shape, -1)
        elif batch.own:
            found = self.target(self.answer(batch.inputs.flatten(0, 1)))
            found = found.view(*found.shape[:-2], *batch.labels.shape, -1)
        else:
            found = self.target(self.answer(batch.inputs))
        return found.to(batch.labels.device)

    @cached_property
    def key(self) -> str:
        """What tells these answers from all others: the values of teacher and data."""
        if self.recorded is not None:
            return self.recorded.key or digest([self.recorded.logits])
        state = {} if self.members is None else self.members.state_dict()
        network = getattr(getattr(self.members, "skeleton", None), "network", None)
        values = [value for value in state.values() if isinstance(value, Tensor)]
        extra = [value for value in state.values() if not isinstance(value, Tensor)]  # of get_extra_state
        # The same values in another architecture answer otherwise.
        made = f"{self.members!r}{network!r}{list(state)}{extra or ''}"
        return digest(values, re.sub(" at 0x[0-9a-fA-F]+", "", made) + str(self.about))

    @cached_property
    def about(self) -> dict[str, str]:
        """What tells these questions from all others: the inputs in their order, and how they are prepared."""
        if not isinstance(self.data.train, Split):
            return {}
        known = content(self.data, ("train",))
        return {name: known[name] for name in ("training inputs", "normalisation")}

    def __repr__(self) -> str:
        """The same in a later process: a checkpoint belongs to one teacher."""
        return f"Teacher({self.key[:16]})"


def _chosen(targets: Tensor, indices: Tensor) -> Tensor:
    """The examples' targets: (..., N, K) -> (..., *indices, K)."""
    if indices.ndim == 1:
        return targets.index_select(-2, indices)  # half the time of an index
    return targets[..., indices, :]


def _finite(logits: Tensor) -> Tensor:
    if not bool(torch.isfinite(logits).all()):
        raise EnfoldError("a teacher's outputs must be finite, got NaN or infinity: look for a diverged member")
    return logits

"""Answers of a teacher that several trainings have in common.

Distillations with the same seed, augmentation and perturbation ask the same questions: they differ in the loss, in the
weights they start from or in their length only. Inside `shared_answers` each batch is answered once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor, nn

LARGEST = 1 << 29  # bytes of answers; others are not kept


class Answers:
    """The outputs of teachers by their inputs.

    Args:
        largest: Bytes of outputs that are kept.
    """

    def __init__(self, largest: int = LARGEST) -> None:
        self.largest, self.bytes = largest, 0
        self.known: dict[bytes, Tensor] = {}
        self.teachers: dict[int, nn.Module] = {}  # held, so that no other teacher gets the same id

    def find(self, teacher: nn.Module, inputs: Tensor, compute: Callable[[], Tensor]) -> Tensor:
        """Return the outputs of a teacher for inputs; compute them if they are not known.

        Args:
            teacher: The teacher.
            inputs: The inputs.
            compute: Function that returns the outputs.
        """
        key = self._key(teacher, inputs)
        found = self.known.get(key)
        if found is not None:
            return found.clone()
        outputs = compute()
        if self.bytes + outputs.nbytes <= self.largest:
            self.known[key], self.bytes = outputs.clone(), self.bytes + outputs.nbytes
            self.teachers[id(teacher)] = teacher
        return outputs

    @staticmethod
    def _key(teacher: nn.Module, inputs: Tensor) -> bytes:
        device = inputs.device.type
        precision = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        what = f"{id(teacher)} {inputs.dtype} {tuple(inputs.shape)} {precision}"
        values = inputs.detach().cpu().contiguous().flatten().view(torch.uint8)
        return hashlib.blake2b(values.numpy().data, digest_size=16).digest() + what.encode()


_shared: ContextVar[Answers | None] = ContextVar("answers", default=None)


@contextmanager
def shared_answers(answers: Answers | None) -> Iterator[None]:
    """Answer each batch once in all trainings inside the block.

    Args:
        answers: Where answers are kept; None to compute all of them.
    """
    token = _shared.set(answers)
    try:
        yield
    finally:
        _shared.reset(token)


def answer(teacher: nn.Module, inputs: object, compute: Callable[[], Tensor]) -> Tensor:
    """Return the outputs of a teacher, from the answers of the block if there is one.

    Args:
        teacher: The teacher.
        inputs: The inputs; only those that are one tensor are looked up.
        compute: Function that returns the outputs.
    """
    answers = _shared.get()
    if answers is None or not isinstance(inputs, Tensor):
        return compute()
    return answers.find(teacher, inputs, compute)

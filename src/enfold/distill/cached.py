"""Teacher logits in a file: the logits of M members for the N training examples, memory-mapped when they are read.

The file is a safetensors file with one tensor, `logits` (M, N, C). It is written in chunks, so that neither writing nor
reading needs as much memory as the file has bytes.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from enfold.errors import EnfoldError
from enfold.io.files import atomic_path, parsing
from enfold.io.identity import Identity
from enfold.metrics.weights import Weights, as_weights

DTYPES: dict[str, tuple[type[np.floating[Any]], torch.dtype]] = {
    "F16": (np.float16, torch.float16),
    "F32": (np.float32, torch.float32),
    "F64": (np.float64, torch.float64),
}

HEADER = 1 << 20  # bytes: the header of a file with one tensor is far smaller
CHUNK = 4096  # examples


class CachedTeacher:
    """A teacher known by its logits for the training examples only, in the order of these examples.

    Args:
        logits: Logits of shape (members, examples, classes).
        key: A digest of teacher and inputs; it identifies the logits in checkpoints.
        inputs: The identity of the inputs, by which other training data are refused; empty if unknown.
        weights: Weights of the members; None for equal weights.
    """

    def __init__(
        self,
        logits: Tensor,
        key: str = "",
        inputs: Identity | None = None,
        weights: Sequence[float] | None = None,
    ) -> None:
        if not isinstance(logits, Tensor) or logits.ndim != 3 or not logits.is_floating_point():
            shape = f"{tuple(logits.shape)} of {logits.dtype}" if isinstance(logits, Tensor) else type(logits).__name__
            raise EnfoldError(
                f"logits must be a floating-point tensor of shape (members, examples, classes), got {shape}: stack one "
                "(examples, classes) tensor per member"
            )
        self.logits, self.key, self.inputs = logits, key, dict(inputs or {})
        self.num_members, self.num_examples, self.num_classes = logits.shape
        self.weights = as_weights(weights, self.num_members)

    @classmethod
    def load(cls, path: str | Path) -> CachedTeacher:
        """Return the logits of a safetensors file; pages are read when they are used."""
        path = Path(path)
        with parsing(path, "a safetensors file with floating-point 'logits'", "write it with CachedTeacher.save"):
            with path.open("rb") as file:
                size = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(min(size, HEADER)))
            (start, end), shape = header["logits"]["data_offsets"], tuple(header["logits"]["shape"])
            number, dtype = DTYPES[header["logits"]["dtype"]]
            metadata = dict(header.get("__metadata__", {}))
            inputs = dict(json.loads(metadata.get("about") or "{}"))
            weights = json.loads(metadata.get("weights") or "null")
            is_complete = 0 <= start <= end <= path.stat().st_size - 8 - size and min(shape) >= 0
            if not is_complete or end - start != math.prod(shape) * dtype.itemsize:
                raise ValueError("its header does not fit its size")
            # Mode "c", copy on write: nothing that is done to the tensor reaches the file.
            mapped = np.memmap(path, dtype=number, mode="c", offset=8 + size + start, shape=shape)
        return cls(torch.from_numpy(mapped), str(metadata.get("key", "")), inputs, weights)

    def save(self, path: str | Path) -> Path:
        """Write the logits to a safetensors file, the counterpart of `load`."""
        chunks = (self.logits[:, start : start + CHUNK] for start in range(0, self.num_examples, CHUNK))
        shape = tuple(self.logits.shape)
        return write_logits(Path(path), chunks, shape, self.logits.dtype, self.key, self.inputs, self.weights)


def write_logits(
    path: Path,
    chunks: Iterable[Tensor],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    key: str,
    inputs: Identity,
    weights: Weights = None,
) -> Path:
    """Write logits (M, N, C), given as chunks (M, n, C), to a file that is complete or absent.

    Args:
        path: The file.
        chunks: Chunks of logits, (M, n, C), in the order of the examples.
        shape: (M, N, C).
        dtype: The type of the logits.
        key: Checksum of teachers and data; see `CachedTeacher`.
        inputs: Identity of the inputs.
        weights: Normalized weights of the teachers; None for equal weights.
    """
    name = next(name for name, (_, known) in DTYPES.items() if known == dtype)
    size = math.prod(shape) * dtype.itemsize
    tensor = {"dtype": name, "shape": list(shape), "data_offsets": [0, size]}
    metadata = {"key": key, "about": json.dumps(dict(inputs))}
    metadata |= {} if weights is None else {"weights": json.dumps(weights)}
    header = json.dumps({"__metadata__": metadata, "logits": tensor}).encode()
    header += b" " * (-len(header) % 8)
    # Written, not mapped: a full disk raises an error, where a mapped page would end the process.
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        start, done = file.tell(), 0
        _reserve(file, start + size)
        for chunk in chunks:
            for member, logits in enumerate(chunk.cpu().contiguous()):
                file.seek(start + (member * shape[1] + done) * shape[2] * dtype.itemsize)
                file.write(logits.numpy())
            done += chunk.shape[1]
        if done != shape[1]:
            raise EnfoldError(f"logits must cover all {shape[1]} examples, got {done}: check the training data")
    return path


def _reserve(file: BinaryIO, size: int) -> None:
    """Reserve the space on disk before anything is computed, where the system supports it."""
    file.flush()
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file.fileno(), 0, size)

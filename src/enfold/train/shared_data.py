"""Data for workers: examples in memory are written to the store once, by their content; loaders go with the task."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from safetensors.torch import load_file, save_file
from torch import Tensor

from enfold.data import Data, Split
from enfold.data.content import content
from enfold.executors import Store
from enfold.io.files import digest

PARTS = ("train", "val")


@dataclass(frozen=True)
class SharedData:
    """The training and validation examples of a training on workers.

    Args:
        data: The data without the examples that are in the file.
        file: The file in the store; None if nothing is in memory.
        stored: The splits in the file.
    """

    data: Data
    file: str | None
    stored: tuple[str, ...]

    @classmethod
    def write(cls, data: Data, store: Store) -> SharedData:
        """Write the examples to the store, unless it has them."""
        stored = tuple(name for name in PARTS if isinstance(getattr(data, name), Split))
        rest = data.replace(test=[], **{name: [] for name in stored})
        if not stored:
            return cls(rest, None, ())
        file = f"data-{digest([], str(content(data, stored)))[:16]}.safetensors"
        if not store.exists(file):
            parts = {name: getattr(data, name) for name in stored}
            tensors = {f"{name}/inputs": part.inputs for name, part in parts.items()}
            tensors |= {f"{name}/targets": part.targets for name, part in parts.items()}
            with store.write(file) as path:
                save_file({name: tensor.cpu().contiguous().clone() for name, tensor in tensors.items()}, path)
        return cls(rest, file, stored)

    def read(self, store: Store) -> Data:
        """Return the data, whose examples a worker reads once."""
        if self.file is None:
            return self.data
        tensors = _tensors(store.address, self.file)
        parts = {name: Split(tensors[f"{name}/inputs"], tensors[f"{name}/targets"]) for name in self.stored}
        return self.data.replace(**parts)


@lru_cache(maxsize=2)
def _tensors(address: str, file: str) -> dict[str, Tensor]:
    with Store(address).read(file) as path:
        return {name: tensor.clone() for name, tensor in load_file(path).items()}  # a copy may be removed

"""Folders of torch.distributed.checkpoint: tensors in pieces, put together without a process group.

PyTorch reads the index of such a folder, the file .metadata, as a pickle that may run code. Here it is read with inert
classes in place of all others, and any other name in it is refused.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from enfold.errors import EnfoldError
from enfold.io.files import parsing
from enfold.io.layouts import METADATA

LARGEST = 256 << 20  # bytes of the index
PIECES = "torch.distributed.checkpoint"
CLASSES = {
    *(f"{PIECES}.metadata.{name}" for name in ("Metadata", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING")),
    *(f"{PIECES}.metadata.{name}" for name in ("TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties")),
    *(f"{PIECES}.metadata.ChunkStorageMetadata", f"{PIECES}.filesystem._StorageInfo"),
    *("torch.serialization._get_layout", "collections.OrderedDict", "pathlib.PosixPath", "pathlib.WindowsPath"),
    *("pathlib._local.PosixPath", "pathlib._local.WindowsPath", "pathlib.Path", "builtins.getattr"),
}


class _Record:
    """An inert object: it keeps the values of its fields, and hashes by identity."""

    fields: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, *args: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        """Keep the state."""
        self.fields = state if isinstance(state, dict) else {"state": state}


class _Size(tuple[int, ...]):
    """In place of torch.Size."""

    def __new__(cls, values: Any = ()) -> _Size:
        """Accept integers only."""
        if not all(type(value) is int and value >= 0 for value in values):
            raise ValueError("a size is not a list of integers")
        return super().__new__(cls, values)


class _Unpickler(pickle.Unpickler):
    """Make records in place of all known classes, and refuse others."""

    def find_class(self, module: str, name: str) -> Any:
        """Return an inert class."""
        full = f"{module}.{name}"
        if full == "torch.Size":
            return _Size
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if full in CLASSES:
            return _Record
        raise pickle.UnpicklingError(f"it names {full}, which could run code")


def read_distributed(folder: Path) -> dict[str, Any]:
    """Return the tensors of a folder as nested dictionaries; each is read from its pieces when it is needed.

    Args:
        folder: The folder with .metadata and the .distcp files.

    Raises:
        EnfoldError: If a file is missing or damaged, names other files or has a pickled object.
    """
    path = folder / METADATA
    with parsing(path, "an index of torch.distributed.checkpoint", "save the checkpoint again"):
        index = _Index(folder, _read_index(path))
        return index.nest_tensors()


def _read_index(path: Path) -> _Record:
    size = path.stat().st_size
    if size > LARGEST:
        raise ValueError(f"it has {size:,} bytes")
    content = path.read_bytes()
    for code, argument, _ in pickletools.genops(content):
        if "PUT" in code.name and isinstance(argument, int) and argument > size:  # the reader allocates as many places
            raise ValueError("its references are out of range")
    found = _Unpickler(io.BytesIO(content)).load()
    if not isinstance(found, _Record):
        raise ValueError(f"it contains a {type(found).__name__}")
    return found


class _Index:
    """The content of .metadata: the pieces of each tensor, and their positions."""

    def __init__(self, folder: Path, found: _Record) -> None:
        self.folder = folder
        self.tensors: dict[str, Any] = found.fields["state_dict_metadata"]
        self.paths: Mapping[str, Any] = found.fields.get("planner_data") or {}
        self.places = {
            (key.fields["fqn"], tuple(key.fields["offset"])): place.fields
            for key, place in found.fields["storage_data"].items()
            if key.fields.get("offset") is not None
        }

    def nest_tensors(self) -> dict[str, Any]:
        """Return lazy tensors under the keys of the state dict that was saved."""
        tree: dict[str, Any] = {}
        for name, about in self.tensors.items():
            keys = self.paths.get(name) or (name,)
            if "size" not in about.fields or not all(isinstance(key, str) for key in keys):
                continue  # an object, or a list of an optimizer
            place = tree
            for key in keys[:-1]:
                place = place.setdefault(key, {})
            place[keys[-1]] = Piecewise(self, name)
        return tree

    def read(self, name: str) -> Tensor:
        """Return a complete tensor."""
        about = self.tensors[name].fields
        size, pieces = tuple(about["size"]), [piece.fields for piece in about["chunks"]]
        dtype = about["properties"].fields["state"][0]
        files = {self._place(name, piece["offsets"])["relative_path"] for piece in pieces}
        held = sum((self.folder / file).stat().st_size for file in files)
        if math.prod(size) * dtype.itemsize > held:
            raise ValueError(f"'{name}' of shape {size} has {held:,} bytes")
        found, is_filled = torch.empty(size, dtype=dtype), torch.zeros(size, dtype=torch.bool)
        for piece in pieces:
            part = tuple(slice(o, o + s) for o, s in zip(piece["offsets"], piece["sizes"], strict=True))
            values = self._load(name, piece["offsets"])
            if values.shape != found[part].shape or values.shape != tuple(piece["sizes"]) or values.dtype != dtype:
                raise ValueError(f"a piece of '{name}' has another shape or type")
            found[part], is_filled[part] = values, True
        if not bool(is_filled.all()):
            raise ValueError(f"a piece of '{name}' is missing")
        return found

    def _place(self, name: str, offset: Any) -> Mapping[str, Any]:
        place: Mapping[str, Any] | None = self.places.get((name, tuple(offset)))
        if place is None:
            raise ValueError(f"a piece of '{name}' is missing")
        if place.get("transform_descriptors"):
            raise ValueError(f"'{name}' is compressed ({place['transform_descriptors']})")
        file = place["relative_path"]
        if not isinstance(file, str) or Path(file).name != file:
            raise ValueError(f"it names '{file}', which is not in its folder")
        if not (self.folder / file).is_file():
            raise EnfoldError(f"'{self.folder}' must have all its files, but '{file}' is missing: complete the folder")
        size = (self.folder / file).stat().st_size
        start, length = place["offset"], place["length"]
        if not (type(start) is type(length) is int and 0 <= start <= start + length <= size):
            raise ValueError(f"'{file}' is shorter than it says")
        return place

    def _load(self, name: str, offset: Any) -> Tensor:
        place = self._place(name, offset)
        with (self.folder / place["relative_path"]).open("rb") as file:
            file.seek(place["offset"])
            content = file.read(place["length"])
        values = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        if not isinstance(values, Tensor) or values.untyped_storage().nbytes() > len(content):
            raise ValueError(f"a piece of '{name}' is not a tensor")
        return values.detach()


class Piecewise:
    """A tensor that is read when it is needed: a folder may have more than the network."""

    def __init__(self, index: _Index, name: str) -> None:
        self.index, self.name = index, name

    def read(self) -> Tensor:
        """Return the complete tensor."""
        path = self.index.folder / METADATA
        with parsing(path, "an index of torch.distributed.checkpoint", "save the checkpoint again"):
            return self.index.read(self.name)

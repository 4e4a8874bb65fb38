"""Files with tensors: safetensors, shards with an index, and PyTorch files, of which nothing but tensors is loaded.

PyTorch files are pickles. They are read with `weights_only=True`; numbers of NumPy and a few other kinds of values that
trainers write beside the weights are replaced by placeholders: nothing of other packages is called.
"""

from __future__ import annotations

import mmap
import pickle
import pickletools
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, cast

import torch
from safetensors.torch import load_file
from torch import Tensor

from enfold.errors import EnfoldError
from enfold.io.files import parsing, reading
from enfold.io.layouts import INDEX
from enfold.io.manifest import read_json

LARGEST_HEADER = 32 << 20  # bytes; 100 of each name allow 300,000 tensors
LARGEST_INDEX = 64 << 20
PICKLES = 5  # in a file of PyTorch before 1.6
MODULES = ("numpy", "omegaconf", "pathlib", "argparse", "datetime")  # of values beside the weights
VALUES = {
    *(f"builtins.{name}" for name in ("int", "float", "bool", "str", "list", "tuple", "dict")),
    *(f"{name}.multiarray.{each}" for name in ("numpy.core", "numpy._core") for each in ("scalar", "_reconstruct")),
    *("numpy.dtype", "numpy.ndarray"),
}
DICTIONARIES = (
    "lightning.fabric.utilities.data.AttributeDict",
    "lightning_fabric.utilities.data.AttributeDict",
    "pytorch_lightning.utilities.parsing.AttributeDict",
)
FACTORY = "collections.defaultdict"


class Placeholder:
    """Placeholder for a value that is not a tensor; it stores nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __new__(cls, *args: Any, **kwargs: Any) -> Placeholder:
        """Accept the arguments of any class."""
        return super().__new__(cls)

    def __setstate__(self, state: object) -> None:
        """Ignore the state."""


def _make_dict(*args: object) -> dict[object, object]:
    return {}


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file, or of a PyTorch file that contains nothing else."""
    content = read_file(path)
    if not isinstance(content, Mapping) or not all(isinstance(each, Tensor) for each in content.values()):
        raise EnfoldError(f"'{path}' must contain tensors by name, got something else: save it again")
    return {str(name): tensor for name, tensor in content.items()}


def read_file(path: Path) -> Any:
    """Return what a file contains, on the CPU: tensors by name, or nested dictionaries of a PyTorch file.

    Args:
        path: A safetensors file, an index of shards, or a PyTorch file (.pt, .pth, .bin, .ckpt).

    Raises:
        EnfoldError: If the file is damaged, claims to have more than it has, or has a pickled object.
    """
    if path.name.endswith(INDEX):
        return _read_shards(path)
    return _read_safetensors(path) if path.suffix == ".safetensors" else _read_pickle(path)


def check_header(path: Path) -> None:
    """Refuse a safetensors file with a header that is larger than any that is written.

    Raises:
        EnfoldError: With its size.
    """
    with parsing(path, "a safetensors file", "save it again"), path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > min(LARGEST_HEADER, path.stat().st_size):
            raise EnfoldError(
                f"'{path}' must be a safetensors file, but it cannot be read (its header has {size:,} bytes): save it "
                "again"
            )


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    check_header(path)
    with parsing(path, "a safetensors file", "save it again"):
        return dict(load_file(path))


def _read_shards(index: Path) -> dict[str, Tensor]:
    """Return the tensors of all shards that an index names."""
    files = read_json(index, LARGEST_INDEX).get("weight_map")
    if not isinstance(files, dict) or not files or not all(isinstance(name, str) for name in files.values()):
        raise EnfoldError(f"'{index}' must have a weight_map from tensors to files, got something else: save it again")
    names = sorted(set(files.values()))
    outside = next((name for name in names if Path(name).name != name or name.endswith(INDEX)), None)
    if outside is not None:
        raise EnfoldError(f"'{index}' must name files of its own folder, got '{outside}': save it again")
    with reading(index):  # a name may be too long for a file
        missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise EnfoldError(
            f"'{index.parent}' must have all {len(names)} shards of its index, but '{missing[0]}' is missing "
            f"({len(missing)} in total): complete the folder"
        )
    found = {}
    for name in names:
        found.update(read_tensors(index.parent / name))
    if found.keys() != files.keys():
        other = sorted(found.keys() ^ files.keys())[0]
        raise EnfoldError(f"'{index}' must name the tensors of its shards, but '{other}' differs: complete the folder")
    return found


def _read_pickle(path: Path) -> Any:
    with parsing(path, "a PyTorch checkpoint", "save it again"):
        if zipfile.is_zipfile(path):
            _require_stored(path)
        else:
            _require_small_claims(path)
        try:
            placeholders = torch.serialization.safe_globals(_placeholders(path))
            with warnings.catch_warnings(action="ignore"), placeholders:  # about pickle protocols
                content = torch.load(path, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise _unsafe(path) from error
        _require_bytes(content, path)
    return content


def _unsafe(path: Path) -> EnfoldError:
    named = [name for name in _foreign(path) if not _is_value(name) and name not in (*DICTIONARIES, FACTORY)]
    what = f" ({', '.join(named[:3])})" if named else ""
    return EnfoldError(
        f"a checkpoint must contain tensors only, but '{path}' is damaged or contains a pickled object{what}, which "
        "could run code: save network.state_dict() instead of the network"
    )


def _foreign(path: Path) -> list[str]:
    """Return the names of functions and classes of other packages in a file, without importing any."""
    if not zipfile.is_zipfile(path):
        return []
    try:
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    except Exception:  # a damaged file; reading it gives the reason
        return []


def _is_value(name: str) -> bool:
    return name in VALUES or name.partition(".")[0] in MODULES


def _placeholders(path: Path) -> list[Any]:
    """Return what takes the place of the values of a file that are not tensors."""
    names = {name for name in _foreign(path) if _is_value(name)} | VALUES
    found: list[Any] = [(Placeholder, name) for name in sorted(names)]
    return [*found, *((dict, name) for name in DICTIONARIES), (_make_dict, FACTORY)]


def _require_stored(path: Path) -> None:
    """Refuse an archive that is larger inside than outside; PyTorch does not compress."""
    with zipfile.ZipFile(path) as archive:
        inside = sum(each.file_size for each in archive.infolist())
    if inside > path.stat().st_size:
        raise EnfoldError(
            f"'{path}' must store its tensors uncompressed, but it has {path.stat().st_size:,} bytes for "
            f"{inside:,}: save it again with torch.save"
        )


def _require_small_claims(path: Path) -> None:
    """Refuse a file of PyTorch before 1.6 with texts or tensors larger than itself, before these are allocated.

    It has five pickles: a number, a version, facts about the system, the content and the order of the tensors.
    """
    with path.open("rb") as file:
        size = path.stat().st_size
        if not size:
            raise EOFError("it is empty")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:  # which reads no more than there is
            for _ in range(PICKLES):
                if content.tell() == size:
                    break  # another pickle, which PyTorch refuses
                last, pickled = 0, cast("IO[bytes]", content)
                for code, argument, _ in pickletools.genops(pickled):
                    last = argument if type(argument) is int and "PUT" not in code.name else last
                    if code.name == "BINPERSID" and last > size:
                        raise ValueError(f"a tensor of it has {last:,} values in {size:,} bytes")


def _require_bytes(content: Any, path: Path) -> None:
    """Refuse tensors with more memory than the file has."""
    sizes: dict[int, int] = {}
    for tensor in _tensors_in(content):
        if tensor.layout is torch.strided and tensor.device.type == "cpu":
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = max(storage.nbytes(), sizes.get(storage.data_ptr(), 0))
    if sum(sizes.values()) > path.stat().st_size:
        raise EnfoldError(
            f"'{path}' must have the values of its tensors, but it has {path.stat().st_size:,} bytes for "
            f"{sum(sizes.values()):,}: save it again"
        )


def _tensors_in(content: Any) -> Iterator[Tensor]:
    """Yield the tensors of nested containers, each container once, as a hostile file may be inside of itself."""
    seen, rest = set(), [content]
    while rest:
        each = rest.pop()
        if isinstance(each, Tensor):
            yield each
        elif isinstance(each, Mapping | list | tuple) and id(each) not in seen:
            seen.add(id(each))
            rest.extend(each.values() if isinstance(each, Mapping) else each)

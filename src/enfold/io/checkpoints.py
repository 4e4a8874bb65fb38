"""Checkpoints that users already have: safetensors, or `.pt` files that hold tensors and nothing that could run."""

from __future__ import annotations

import glob
import os
import pickle
import warnings
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import count
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from enfold.errors import EnfoldError
from enfold.io.files import parsing
from enfold.io.usercode import places, searched

WRAPPERS = ("state_dict", "model_state_dict", "model", "network", "net", "module", "weights", "params")
EXTRA_STATE = "_extra_state"  # how state dicts name what get_extra_state returns
MOST = 100_000  # entries of folders that a pattern may look at
PREFIXES = ("module.", "_orig_mod.", "model.", "network.", "net.")


def matching_files(files: str | Path | Sequence[str | Path]) -> list[Path]:
    """The files of a pattern, in order of name, or the given list; each must exist."""
    if isinstance(files, str | Path):
        for place in places():
            found = _matching(place, str(files))
            if found:
                return found
        raise EnfoldError(
            f"a checkpoint pattern must match at least one file, got '{files}', which has none in {searched()}: check "
            "the path"
        )
    paths = [Path(name) for name in files]
    missing = [path for path in paths if not path.is_file()]
    if missing or not paths:
        what = f"'{missing[0]}' is not a file" if missing else "the list is empty"
        raise EnfoldError(f"checkpoints must be files that exist, but {what}: check the path")
    return paths


def _matching(place: Path, files: str) -> list[Path]:
    whole = place / files
    if whole.is_file():  # a name may hold brackets
        return [whole]
    if not glob.has_magic(files):
        return []
    return sorted(set(_search(place, list(Path(files).parts), count())))


def require_local(pattern: str) -> None:
    """Refuse a recipe's pattern that searches folders elsewhere: a recipe may come from anybody."""
    path = Path(pattern)
    if (path.is_absolute() or ".." in path.parts) and glob.has_magic(str(path.parent)):
        raise EnfoldError(
            "a recipe's checkpoints may be searched for in folders below its own or the current one, and elsewhere by "
            f"their file names alone, got '{pattern}': name their folder, or start in a folder above them"
        )


def _search(folder: Path, parts: list[str], seen: Iterator[int]) -> Iterator[Path]:
    """The files below a folder that match a pattern's parts; one that looks at too many entries is refused."""
    if not glob.has_magic(parts[0]):
        inner = folder / parts[0]
        if parts[1:] and inner.is_dir():
            yield from _search(inner, parts[1:], seen)
        elif not parts[1:] and inner.is_file():
            yield inner
        return
    anywhere, last = parts[0] == "**", not parts[1:]
    if anywhere and not last:
        yield from _search(folder, parts[1:], seen)
    for entry in _entries(folder):
        if next(seen) > MOST:
            raise EnfoldError(f"a pattern of checkpoints must lead to them within {MOST:,} files: name their folder")
        hidden = entry.name.startswith(".") and not parts[0].startswith(".")
        if hidden or not (anywhere or fnmatchcase(entry.name, parts[0])):
            continue
        if last and entry.is_file():
            yield Path(entry.path)
        if entry.is_dir(follow_symlinks=not anywhere) and (anywhere or not last):
            yield from _search(Path(entry.path), parts if anywhere else parts[1:], seen)


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return list(found)
    except OSError:  # not ours to read
        return []


def read_checkpoint(path: Path) -> dict[str, Tensor]:
    """The tensors of one checkpoint by name, on the CPU."""
    if path.suffix == ".safetensors":
        with parsing(path, "a safetensors file", "save it again"):
            return dict(load_file(path))
    with parsing(path, "a PyTorch checkpoint", "save it again"):
        try:
            with warnings.catch_warnings(action="ignore"):  # about pickle protocols: what it cannot read, it refuses
                content = torch.load(path, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise EnfoldError(
                f"a checkpoint must hold tensors only, but '{path}' is damaged or holds a pickled object, which could "
                "run code: save network.state_dict() instead of the network"
            ) from error
    return _unwrapped(content, path)


def _unwrapped(content: Any, path: Path) -> dict[str, Tensor]:
    while isinstance(content, Mapping) and not _is_state(content):
        inner = next((content[key] for key in WRAPPERS if isinstance(content.get(key), Mapping)), None)
        if inner is None:
            break
        content = inner
    if not isinstance(content, Mapping) or not _is_state(content):
        raise EnfoldError(
            f"a checkpoint must be a state dict, or hold one under a key such as '{WRAPPERS[0]}', but '{path}' does "
            "not: save network.state_dict()"
        )
    return {str(name): tensor for name, tensor in content.items()}


def _is_state(content: Mapping[Any, Any]) -> bool:
    return bool(content) and all(
        isinstance(tensor, Tensor) or str(name).endswith(EXTRA_STATE) for name, tensor in content.items()
    )


def require_tensors(state: Mapping[str, Any], purpose: str) -> None:
    """Refuse a state dict with anything but tensors in it, which `get_extra_state` may return."""
    name = next((name for name, value in state.items() if not isinstance(value, Tensor)), None)
    if name is not None:
        raise EnfoldError(
            f"{purpose} as tensors, but '{name}' is a {type(state[name]).__name__}: keep it in buffers, or return a "
            "tensor from get_extra_state"
        )


def load_into(network: nn.Module, path: Path) -> nn.Module:
    """Load a checkpoint into a network, in place, and switch it to eval mode; all names and shapes must match.

    The values that `get_extra_state` returns may be missing: safetensors files do not store them.

    Args:
        network: A network of the architecture of the checkpoint.
        path: The checkpoint.

    Returns:
        The network.

    Raises:
        EnfoldError: If the checkpoint does not fit the network.
    """
    expected = network.state_dict()
    extra = {name: value for name, value in expected.items() if not isinstance(value, Tensor)}
    state = {**extra, **with_ties(_without_prefix(read_checkpoint(path), expected), network)}
    missing, unexpected = sorted(expected.keys() - state.keys()), sorted(state.keys() - expected.keys())
    remedy = "pass the network that it was saved from"
    if missing or unexpected:
        what = f"it lacks '{missing[0]}'" if missing else f"it has the unknown '{unexpected[0]}'"
        raise EnfoldError(
            f"a checkpoint must fit the network {type(network).__name__}, but '{path}' does not: {what} "
            f"({len(missing)} missing, {len(unexpected)} unknown); {remedy}"
        )
    for name, tensor in expected.items():
        if name not in extra and tensor.shape != state[name].shape:
            raise EnfoldError(
                f"a checkpoint must fit the network {type(network).__name__}, but in '{path}' the shape of '{name}' is "
                f"{tuple(state[name].shape)} instead of {tuple(tensor.shape)}: {remedy}"
            )
    network.load_state_dict(state)
    return network.eval()


def with_ties(state: Mapping[str, Tensor], network: nn.Module) -> dict[str, Tensor]:
    """The state with all names of tied tensors; a safetensors file may hold each tensor under one of its names."""
    first: dict[int, str] = {}
    own = network.state_dict(keep_vars=True)
    for name, tensor in own.items():
        if name in state and not _same(state[name], state[first.setdefault(id(tensor), name)]):
            raise EnfoldError(
                f"'{first[id(tensor)]}' and '{name}' are one tensor in the network {type(network).__name__}, but "
                "differ in the checkpoint: give the network that it was saved from"
            )
    tied = {name: state[first[id(tensor)]] for name, tensor in own.items() if id(tensor) in first}
    return {**tied, **state}


def _same(one: Tensor, other: Tensor) -> bool:
    return one is other or torch.equal(one, other)


def _without_prefix(state: dict[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Drop what wrappers such as DataParallel put before every name, as long as that brings them to the network's."""
    bare = state
    while bare and not bare.keys() & expected.keys():
        prefix = next((prefix for prefix in PREFIXES if all(name.startswith(prefix) for name in bare)), None)
        if prefix is None:
            return state
        bare = {name.removeprefix(prefix): tensor for name, tensor in bare.items()}
    return bare

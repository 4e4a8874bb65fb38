"""Existing checkpoints: safetensors files, or `.pt` files that contain tensors only and cannot run code."""

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
from enfold.io.usercode import places, searched_folders

WRAPPERS = ("state_dict", "model_state_dict", "model", "network", "net", "module", "weights", "params")
EXTRA_STATE = "_extra_state"  # suffix of the value of get_extra_state in a state dict
MOST = 100_000  # directory entries that a pattern may visit
PREFIXES = ("module.", "_orig_mod.", "model.", "network.", "net.")


def matching_files(files: str | Path | Sequence[str | Path]) -> list[Path]:
    """Return the files that match a pattern, sorted by name, or the given list of files.

    Args:
        files: A path, a glob pattern, or a list of paths.

    Raises:
        EnfoldError: If a file does not exist or nothing matches the pattern.
    """
    if isinstance(files, str | Path):
        for place in places():
            found = _match_pattern(place, str(files))
            if found:
                return found
        raise EnfoldError(
            f"files must match at least one checkpoint, got '{files}' without a match in {searched_folders()}: "
            "check the path"
        )
    paths = [Path(name) for name in files]
    missing = [path for path in paths if not path.is_file()]
    if missing or not paths:
        what = f"'{missing[0]}', which is not a file" if missing else "an empty list"
        raise EnfoldError(f"files must be existing checkpoints, got {what}: check the path")
    return paths


def _match_pattern(place: Path, files: str) -> list[Path]:
    path = place / files
    if path.is_file():  # a file name may contain brackets
        return [path]
    if not glob.has_magic(files):
        return []
    return sorted(set(_search(place, list(Path(files).parts), count())))


def require_local(pattern: str) -> None:
    """Check that a recipe's pattern does not search folders elsewhere, as recipes may be untrusted.

    Raises:
        EnfoldError: If a folder outside the current one contains wildcards.
    """
    path = Path(pattern)
    if (path.is_absolute() or ".." in path.parts) and glob.has_magic(str(path.parent)):
        raise EnfoldError(
            "a checkpoint pattern with wildcards in its folders must be below the recipe's or the current folder, got "
            f"'{pattern}': write the folder without wildcards, or run from a folder above it"
        )


def _search(folder: Path, parts: list[str], seen: Iterator[int]) -> Iterator[Path]:
    """Yield the files below a folder that match the components of a pattern; limit the number of visited entries."""
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
            raise EnfoldError(
                f"a checkpoint pattern must visit at most {MOST:,} files, got more below '{folder}': use a more "
                "specific pattern"
            )
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
    except OSError:  # no permission
        return []


def read_checkpoint(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint by name, on the CPU.

    Args:
        path: A safetensors file, or a `.pt` file with a state dict.

    Raises:
        EnfoldError: If the file is damaged, is not a state dict, or contains pickled objects.
    """
    if path.suffix == ".safetensors":
        with parsing(path, "a safetensors file", "save it again"):
            return dict(load_file(path))
    with parsing(path, "a PyTorch checkpoint", "save it again"):
        try:
            with warnings.catch_warnings(action="ignore"):  # about pickle protocols
                content = torch.load(path, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise EnfoldError(
                f"a checkpoint must contain tensors only, but '{path}' is damaged or contains a pickled object, which "
                "could run code: save network.state_dict() instead of the network"
            ) from error
    return _find_state(content, path)


def _find_state(content: Any, path: Path) -> dict[str, Tensor]:
    while isinstance(content, Mapping) and not _is_state(content):
        inner = next((content[key] for key in WRAPPERS if isinstance(content.get(key), Mapping)), None)
        if inner is None:
            break
        content = inner
    if not isinstance(content, Mapping) or not _is_state(content):
        raise EnfoldError(
            f"a checkpoint must be a state dict, or contain one under a key such as '{WRAPPERS[0]}', but '{path}' does "
            "not: save network.state_dict()"
        )
    return {str(name): tensor for name, tensor in content.items()}


def _is_state(content: Mapping[Any, Any]) -> bool:
    return bool(content) and all(
        isinstance(tensor, Tensor) or str(name).endswith(EXTRA_STATE) for name, tensor in content.items()
    )


def require_tensors(state: Mapping[str, Any], purpose: str) -> None:
    """Check that a state dict contains tensors only; `get_extra_state` may return other objects.

    Args:
        state: The state dict.
        purpose: Beginning of the error message, such as "a checkpoint is written".

    Raises:
        EnfoldError: If a value is not a tensor.
    """
    name = next((name for name, value in state.items() if not isinstance(value, Tensor)), None)
    if name is not None:
        raise EnfoldError(
            f"{purpose} as tensors, but '{name}' is a {type(state[name]).__name__}: store it in a buffer, or return a "
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
    """Return the state with all names of tied tensors; a safetensors file may contain only one of the names.

    Raises:
        EnfoldError: If tied tensors differ in the checkpoint.
    """
    first: dict[int, str] = {}
    own = network.state_dict(keep_vars=True)
    for name, tensor in own.items():
        if name in state and not _is_same(state[name], state[first.setdefault(id(tensor), name)]):
            raise EnfoldError(
                f"'{first[id(tensor)]}' and '{name}' are one tensor in the network {type(network).__name__}, but "
                "differ in the checkpoint: pass the network that it was saved from"
            )
    tied = {name: state[first[id(tensor)]] for name, tensor in own.items() if id(tensor) in first}
    return {**tied, **state}


def _is_same(one: Tensor, other: Tensor) -> bool:
    return one is other or torch.equal(one, other)


def _without_prefix(state: dict[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Remove the prefixes that wrappers such as DataParallel add, until the names match the network's."""
    bare = state
    while bare and not bare.keys() & expected.keys():
        prefix = next((prefix for prefix in PREFIXES if all(name.startswith(prefix) for name in bare)), None)
        if prefix is None:
            return state
        bare = {name.removeprefix(prefix): tensor for name, tensor in bare.items()}
    return bare

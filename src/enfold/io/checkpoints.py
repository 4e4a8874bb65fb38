"""Existing checkpoints: tensors of files and folders of many kinds, loaded into a network; none can run code."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from enfold.errors import EnfoldError, closest
from enfold.io.distributed import Piecewise, read_distributed
from enfold.io.layouts import ADAPTER_CONFIG, find_network, is_adapter
from enfold.io.patterns import matching_files as matching_files
from enfold.io.patterns import require_local as require_local
from enfold.io.selection import WRAPPERS as WRAPPERS
from enfold.io.selection import find_state, select_names
from enfold.io.tensors import read_file


def _read(path: Path, key: str | None) -> tuple[dict[str, Any], str | None]:
    """Return the tensors of a checkpoint by name, on the CPU, and the key if it is not one of the file's.

    Args:
        path: A safetensors or PyTorch file, or a folder with one network.
        key: The key of its state dict, or the prefix of its names; None if there is one.

    Raises:
        EnfoldError: If the file is damaged, has no state dict or several, or contains pickled objects.
    """
    source = find_network(path) if path.is_dir() else path
    if source.is_dir():
        return find_state(read_distributed(source), source, key)
    content = read_file(source)
    return (dict(content), key) if source.suffix in (".safetensors", ".json") else find_state(content, source, key)


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


def load_into(network: nn.Module, path: Path, key: str | None = None) -> nn.Module:
    """Load a checkpoint into a network, in place, and switch it to eval mode; all names and shapes must match.

    The values that `get_extra_state` returns may be missing: safetensors files do not store them.

    Args:
        network: A network of the architecture of the checkpoint.
        path: The checkpoint.
        key: The key or the prefix of its names, if the checkpoint has several networks.

    Returns:
        The network.

    Raises:
        EnfoldError: If the checkpoint does not fit the network.
    """
    if path.is_dir() and is_adapter(path):
        raise EnfoldError(
            f"a checkpoint must have all weights of a network, but '{path}' has {ADAPTER_CONFIG}, an adapter: read it "
            "with DeepEnsemble.from_checkpoints, or merge it into its base"
        )
    expected = network.state_dict()
    extra = {name: value for name, value in expected.items() if not isinstance(value, Tensor)}
    chosen = select_names(*_read(path, key), network, path)
    _require_fitting({**extra, **chosen}, expected, network, path)
    state = {name: each.read() if isinstance(each, Piecewise) else each for name, each in chosen.items()}
    _require_shapes(state, expected, network, path)
    network.load_state_dict({**extra, **with_ties(state, network)})
    return network.eval()


def _require_fitting(found: Mapping[str, Any], expected: Mapping[str, Any], network: nn.Module, path: Path) -> None:
    """Refuse names that are not those of the network; a tied tensor needs one of its names."""
    groups: dict[int, set[str]] = {}
    for name, tensor in network.state_dict(keep_vars=True).items():
        groups.setdefault(id(tensor), set()).add(name)
    missing = sorted(min(names) for names in groups.values() if not names & found.keys())
    unexpected = sorted(found.keys() - expected.keys())
    if not missing and not unexpected:
        return
    what = f"it lacks '{missing[0]}'" if missing else f"it has the unknown '{unexpected[0]}'"
    near = closest(missing[0] if missing else unexpected[0], unexpected if missing else missing or expected)
    raise EnfoldError(
        f"a checkpoint must fit the network {type(network).__name__}, but '{path}' does not: {what} "
        f"({len(missing)} missing, {len(unexpected)} unknown)" + (f", nearest '{near}'" if near else "") + "; "
        "pass the network that it was saved from"
    )


def _require_shapes(state: Mapping[str, Tensor], expected: Mapping[str, Any], network: nn.Module, path: Path) -> None:
    for name, tensor in state.items():
        if not isinstance(expected[name], Tensor):
            continue  # the value of get_extra_state
        if not isinstance(tensor, Tensor) or tensor.shape != expected[name].shape:
            raise EnfoldError(
                f"a checkpoint must fit the network {type(network).__name__}, but in '{path}' the shape of '{name}' is "
                f"{tuple(getattr(tensor, 'shape', ()))} instead of {tuple(expected[name].shape)}: pass the network "
                "that it was saved from"
            )


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

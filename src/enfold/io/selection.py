"""Which tensors of a checkpoint belong to a network: keys of trainers, prefixes of wrappers, averaged weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from enfold.errors import EnfoldError
from enfold.io.distributed import Piecewise

WRAPPERS = (
    "state_dict",
    "model_state_dict",
    "model",
    "network",
    "net",
    "module",
    "weights",
    "params",
    "network_weights",
)
AVERAGES = ("state_dict_ema", "ema_state_dict", "model_ema", "ema_model", "ema", "params_ema", "averaged_model")
PREFIXES = {"module", "_orig_mod", "model", "network", "net"}  # parts of names that wrappers add
INSIDE = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")  # that wrappers of parts add
EXTRA_STATE = "_extra_state"  # suffix of the value of get_extra_state in a state dict
DEEPEST = 4
State = dict[str, Any]


def find_state(content: Any, path: Path, key: str | None) -> tuple[State, str | None]:
    """Return the state dict of a file, which may be below a key such as `state_dict`, and the key if it was not used.

    Args:
        content: What the file contains.
        path: The file, for errors.
        key: The key; None if there is one state dict. A key that the file has not is a prefix of names.

    Raises:
        EnfoldError: If there is no state dict, or several.
    """
    if key is not None and isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
        content, key = content[key], None
    found = dict(_states(content))
    if len(found) == 1:
        return {str(name): tensor for name, tensor in next(iter(found.values())).items()}, key
    if found:
        raise EnfoldError(
            f"'{path}' must have one state dict, got {len(found)}, under {_shorten(found)}: pass the key of the one to "
            f"read, such as key='{next(iter(found))}'"
        )
    others = [str(name) for name, each in content.items() if _is_state(each)] if isinstance(content, Mapping) else []
    raise EnfoldError(
        f"a checkpoint must be a state dict, or contain one under a key such as '{WRAPPERS[0]}', but '{path}' does "
        "not: " + (f"pass key='{others[0]}' for one of {_shorten(others)}" if others else "save network.state_dict()")
    )


def _states(content: Any, name: str = "", depth: int = 0) -> Iterable[tuple[str, Mapping[Any, Any]]]:
    """Yield the state dicts below the keys of trainers; a hostile file may contain itself."""
    if _is_state(content):
        yield name, content
    elif isinstance(content, Mapping) and depth < DEEPEST:
        for key in (*WRAPPERS, *AVERAGES):
            if isinstance(content.get(key), Mapping):
                yield from _states(content[key], name or key, depth + 1)


def _is_state(content: Any) -> bool:
    return (
        isinstance(content, Mapping)
        and bool(content)
        and all(
            isinstance(tensor, Tensor | Piecewise) or str(name).endswith(EXTRA_STATE)
            for name, tensor in content.items()
        )
    )


def select_names(state: Mapping[str, Any], key: str | None, network: nn.Module, path: Path) -> State:
    """Return the tensors of a network under its own names: those below the prefix that fits.

    Prefixes of wrappers, such as `module.` or `model.`, are removed, and names beside them are left out. Another
    prefix must be given as the key. If no prefix fits, the names are returned as they are.

    Args:
        state: The tensors of the checkpoint.
        key: The prefix; None to find it.
        network: The network.
        path: The file, for errors.

    Raises:
        EnfoldError: If several prefixes fit, or one that wrappers do not add.
    """
    groups: dict[int, set[str]] = {}
    for name, tensor in network.state_dict(keep_vars=True).items():
        groups.setdefault(id(tensor) if isinstance(tensor, Tensor) else id(name), set()).add(name)
    expected = set().union(*groups.values())
    required = [names for names in groups.values() if not all(name.endswith(EXTRA_STATE) for name in names)]
    bare = _without_parts(state, expected)
    if key is not None:
        bare = _below(bare, f"{key.rstrip('.')}.")
        if not bare:
            known = dict.fromkeys(f"{name.partition('.')[0]}." for name in state)
            raise EnfoldError(
                f"key must be a key of '{path}' or a prefix of its names, got '{key}': pass one of {_shorten(known)}"
            )
    fitting = [each for each in _prefixes(bare, required) if _fits(_below(bare, each), expected, required)]
    if "" in fitting:
        return bare
    if len(fitting) > 1:
        raise EnfoldError(
            f"'{path}' must have one network {type(network).__name__}, got {len(fitting)}, below {_shorten(fitting)}: "
            f"pass the one to read, such as key='{fitting[0]}'"
        )
    if not fitting:
        return _without_prefix(bare, expected)
    if not set(fitting[0].rstrip(".").split(".")) <= PREFIXES:
        raise EnfoldError(
            f"a checkpoint must fit the network {type(network).__name__}, but '{path}' does not: it lacks "
            f"'{min(expected)}' ({len(required)} missing, {len(bare)} unknown); if the network is the part below "
            f"'{fitting[0]}', pass key='{fitting[0]}'"
        )
    return _below(bare, fitting[0])


def _without_parts(state: Mapping[str, Any], expected: set[str]) -> State:
    """Remove parts of names that `torch.compile`, FSDP and activation checkpointing add inside."""
    found = dict(state)
    for part in INSIDE:
        if not any(part in name for name in expected):
            renamed = {name.replace(part, ""): tensor for name, tensor in found.items()}
            found = renamed if len(renamed) == len(found) else found
    return found


def _below(state: Mapping[str, Any], prefix: str) -> State:
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}


def _prefixes(state: Mapping[str, Any], required: list[set[str]]) -> list[str]:
    """Return the prefixes below which one of the network's names is."""
    anchors = tuple(required[0]) if required else ()
    found = {name[: len(name) - len(each)] for name in state for each in anchors if name.endswith(each)}
    return sorted(prefix for prefix in found if not prefix or prefix.endswith("."))


def _fits(found: State, expected: set[str], required: list[set[str]]) -> bool:
    return found.keys() <= expected and all(names & found.keys() for names in required)


def _without_prefix(state: State, expected: set[str]) -> State:
    """Remove prefixes that all names have, until one is the network's, so that an error names what differs."""
    bare = state
    while bare and not bare.keys() & expected:
        part = next(iter(bare)).partition(".")[0]
        if part not in PREFIXES or not all(name.startswith(f"{part}.") for name in bare):
            return state
        bare = _below(bare, f"{part}.")
    return bare


def _shorten(names: Iterable[str]) -> str:
    shown = [f"'{name[:60]}'" for name in names]
    return ", ".join(shown[:4]) + (f" and {len(shown) - 4} more" if len(shown) > 4 else "")

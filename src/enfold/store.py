"""Store: safetensors for the values, a JSON manifest beside them for what they are. Nothing is ever unpickled.

The values keep the names of the network's own state_dict, so a folded network is loaded without enfold.
"""

from __future__ import annotations

import copy
import json
import platform
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_model
from torch import nn

from enfold.errors import EnfoldError
from enfold.files import atomic_path, sha256, write_json
from enfold.members import Members, Stacked
from enfold.networks import NETWORKS, factory

FORMAT = 1


def save(model: nn.Module, path: str | Path, *, about: Mapping[str, Any] | None = None) -> Path:
    """Write `path` (.safetensors) and its manifest (.json); `about` is recorded with it.

    If `about["network"]` is a reference network's spec with the data's `shape` and `num_classes`, `load` can rebuild
    the network from the manifest alone.
    """
    path = Path(path)
    if path.suffix != ".safetensors":
        raise EnfoldError(f"models are stored as .safetensors, got '{path}': change the ending")
    with atomic_path(path) as temporary:
        save_model(model, str(temporary))
    write_json(path.with_suffix(".json"), {**_manifest(model), "sha256": sha256(path), "about": dict(about or {})})
    return path


def _manifest(model: nn.Module) -> dict[str, Any]:
    kind: dict[str, Any] = {"kind": "network", "class": type(model).__name__}
    if isinstance(model, Members):
        kind = {
            "kind": "members",
            "method": type(model).__name__,
            "class": type(model.skeleton.network).__name__,
            "num_members": model.num_members,
            "seeds": list(getattr(model, "seeds", None) or []),
        }
    return {"format": FORMAT, **kind, "versions": versions()}


def versions() -> dict[str, str]:
    """What a result depends on."""
    packages = {name: version(name) for name in ("enfold", "torch", "numpy", "safetensors")}
    return {"python": platform.python_version(), **packages}


def load(path: str | Path, network: nn.Module | Callable[[], nn.Module] | None = None) -> nn.Module:
    """What `save` wrote: members, or a network of your class.

    `network` is one of the same architecture or its factory; it may be left out for reference networks. Code that a
    manifest names is never imported.
    """
    path = Path(path)
    manifest = read_manifest(path)
    fresh = _fresh(network, manifest, path)
    if manifest["kind"] == "members":
        members = Stacked([fresh] * manifest["num_members"])
        members.seeds = tuple(manifest["seeds"]) or None
        fresh = members
    state = load_file(path)
    unfit = [
        name for name, tensor in fresh.state_dict().items() if name not in state or state[name].shape != tensor.shape
    ]
    if unfit and not _only_tied(fresh, unfit, set(state)):
        raise EnfoldError(
            f"'{path}' must fit the network {type(fresh).__name__}, but '{unfit[0]}' differs: give the network that it "
            "was saved from"
        )
    fresh.load_state_dict(state, strict=False)
    return fresh.eval()


def _only_tied(model: nn.Module, missing: list[str], stored: set[str]) -> bool:
    """Whether every missing name is another name of a stored tensor."""
    full = model.state_dict(keep_vars=True)
    kept = {full[name].data_ptr() for name in stored if name in full}
    return all(name not in stored and full[name].data_ptr() in kept for name in missing)


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest beside `path`, after checking format and checksum."""
    beside = path.with_suffix(".json")
    if not path.is_file() or not beside.is_file():
        missing = path if not path.is_file() else beside
        raise EnfoldError(f"a stored model is a .safetensors file with a .json manifest, but '{missing}' is missing")
    try:
        manifest: dict[str, Any] = json.loads(beside.read_text(encoding="utf-8"))
        known = manifest["format"] == FORMAT
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise EnfoldError(
            f"'{beside}' must be a manifest written by enfold, but it cannot be read ({error})"
        ) from error
    if not known:
        raise EnfoldError(
            f"this enfold reads format {FORMAT}, but '{beside}' is format {manifest['format']}: update enfold"
        )
    if sha256(path) != manifest["sha256"]:
        raise EnfoldError(
            f"'{path}' must be as it was saved, but its checksum differs from the manifest's: restore the file"
        )
    return manifest


def _fresh(network: nn.Module | Callable[[], nn.Module] | None, manifest: dict[str, Any], path: Path) -> nn.Module:
    if isinstance(network, nn.Module):
        return copy.deepcopy(network)
    if network is not None:
        return network()
    about = manifest["about"]
    spec = about.get("network")
    name = spec.get("name") if isinstance(spec, dict) else spec
    if name in NETWORKS:
        with torch.random.fork_rng(devices=[]):
            return factory(spec, about["shape"], about["num_classes"])()
    raise EnfoldError(
        f"'{path}' holds a {manifest['class']}, which is not a network of enfold's: pass the network or its factory"
    )

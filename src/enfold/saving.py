"""Store: safetensors for the values, a JSON manifest beside them for what they are. Nothing is ever unpickled.

The values keep the names of the network's own state_dict, so a folded network is loaded without enfold.
"""

from __future__ import annotations

import dataclasses
import json
import math
import platform
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from enfold.engines.fingerprint import fingerprint, require_fingerprint
from enfold.engines.initialization import blank
from enfold.engines.verify import different_attribute
from enfold.ensemble import Ensemble
from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.errors import EnfoldError
from enfold.io.checkpoints import require_tensors, with_ties
from enfold.io.files import atomic_path, parsing, sha256
from enfold.networks import factory
from enfold.registry import method, method_name

FORMAT = 1
FEWEST = 4096  # any setting may be as large as this, however small the file
LARGER = 1000  # times what a file holds: so much smaller may an efficient ensemble be than one of its networks


def save(model: nn.Module, path: str | Path, *, about: Mapping[str, Any] | None = None) -> Path:
    """Write `path` (.safetensors) and its manifest (.json); `about` is recorded with it.

    If `about["network"]` is a reference network's spec with the data's `shape` and `num_classes`, `load` can rebuild
    the network from the manifest alone.
    """
    path = Path(path)
    if path.suffix != ".safetensors":
        raise EnfoldError(f"models are stored as .safetensors, got '{path}': change the ending")
    # Both files are complete before either takes its place, the manifest last: where it is, the model is whole.
    with atomic_path(path.with_suffix(".json")) as beside, atomic_path(path) as values:
        save_file(_tensors(model), values)
        manifest = {**_manifest(model), "sha256": sha256(values), "about": dict(about or {})}
        try:
            text = json.dumps(manifest, indent=2, ensure_ascii=False)
        except (TypeError, ValueError) as error:
            raise EnfoldError(f"`about` must be what JSON can hold, got {about!r} ({error}): leave it out") from error
        beside.write_text(f"{text}\n", encoding="utf-8")
    return path


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """The state dict as safetensors takes it: in the usual memory layout, and a tied tensor under each of its names.

    `load_state_dict` asks for all of them, and safetensors for memory of their own.
    """
    state = model.state_dict()
    require_tensors(state, "a model is stored")
    return {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in state.items()}


def _manifest(model: nn.Module) -> dict[str, Any]:
    kind: dict[str, Any] = {"kind": "network", "class": type(model).__name__}
    if isinstance(model, Ensemble) or hasattr(model, "source_class"):  # a predictor without separate networks has that
        network = type(model.skeleton.network).__name__ if isinstance(model, Ensemble) else model.source_class
        share: Any = model.share
        kind = {
            "kind": "members",
            "fingerprint": fingerprint(model) if isinstance(model, Ensemble) else None,
            "separate": isinstance(model, Ensemble) and _is_separate(model),
            "method": type(model).__name__ if share is None else method_name(type(share)),
            "class": network,
            "num_members": model.num_members,
            "seeds": list(getattr(model, "seeds", None) or []),
            "settings": None if share is None else dataclasses.asdict(share),
        }
    return {"format": FORMAT, **kind, "versions": versions()}


def versions() -> dict[str, str]:
    """What a result depends on."""
    packages = {name: version(name) for name in ("enfold", "torch", "numpy", "safetensors")}
    return {"python": platform.python_version(), **packages}


def load(
    path: str | Path, network: nn.Module | Callable[[], nn.Module] | Sequence[nn.Module] | None = None
) -> nn.Module:
    """What `save` wrote: members, or a network of your class.

    `network` is one of the same architecture or its factory; it may be left out for reference networks. Members whose
    networks differ in more than parameters are loaded into a list of these networks. Code that a manifest names is
    never imported.
    """
    path = Path(path)
    manifest = read_manifest(path)
    _require_modest(manifest, path, own=network is None)
    several = list(network) if isinstance(network, Sequence) else None
    model = _fresh(several[0] if several else network, manifest, path)  # type: ignore[arg-type]
    if manifest["kind"] == "members":
        model = _members(several or model, manifest)
    with parsing(path, "a safetensors file", "save it again"):
        stored = load_file(path)
    state = with_ties(stored, model)
    own = model.state_dict(keep_vars=True)
    require_tensors(own, "a model is loaded")
    unfit = sorted(own.keys() ^ state.keys()) or [name for name in own if own[name].shape != state[name].shape]
    if unfit:
        raise EnfoldError(
            f"'{path}' must fit the network, but '{unfit[0]}' differs: give the {manifest['class']} that it was saved "
            "from"
        )
    for name, tensor in own.items():
        tensor.data = tensor.data.to(state[name].dtype)  # what was saved in double stays double
    model.load_state_dict(state)
    if isinstance(model, Ensemble) and manifest.get("fingerprint"):
        require_fingerprint(model.eval(), manifest["fingerprint"], path.name)
    return model.eval()


def _is_separate(members: Ensemble) -> bool:
    """Whether members are networks of different settings, as far as they were run or their attributes tell."""
    own_codes = len(members.codes) > 1 and members.share is None
    is_separate = members.mismatch is not None and not members.mismatch.recomputes
    return own_codes and (is_separate or different_attribute(members.codes) is not None)


def _members(network: nn.Module | list[nn.Module], manifest: dict[str, Any]) -> nn.Module:
    """Members of the stored kind; their values are put in afterwards."""
    settings = manifest.get("settings")
    if manifest.get("separate") and not isinstance(network, list):
        raise EnfoldError(
            f"these members are networks that differ in more than parameters, got one {type(network).__name__} for "
            f"{manifest['num_members']} members: pass a list with the network of each member"
        )
    several = network if isinstance(network, list) else [network] * manifest["num_members"]
    if len(several) != manifest["num_members"]:
        raise EnfoldError(
            f"there must be one network a member, got {len(several)} networks for {manifest['num_members']} members: "
            "pass one network, or one for each"
        )
    if settings is not None:
        network = several[0]
        plain = {name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()}
        shared: nn.Module = method("share", manifest["method"]).make(**plain)(network)
        return shared
    members = DeepEnsemble(several)
    members.seeds = tuple(manifest["seeds"]) or None
    return members


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest beside `path`, after checking format and checksum."""
    beside = path.with_suffix(".json")
    if not path.is_file() or not beside.is_file():
        missing = path if not path.is_file() else beside
        raise EnfoldError(
            f"a stored model is a .safetensors file with a .json manifest, but '{missing}' is missing: correct the "
            "path, or read the .safetensors file alone with DeepEnsemble.load"
        )
    try:
        manifest: dict[str, Any] = json.loads(beside.read_text(encoding="utf-8"))
        known = manifest["format"] == FORMAT
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _unreadable(beside, error) from error
    if not known:
        raise EnfoldError(
            f"this enfold reads format {FORMAT}, but '{beside}' is format {manifest['format']}: update enfold"
        )
    _check_fields(manifest, beside)
    if sha256(path) != manifest["sha256"]:
        raise EnfoldError(
            f"'{path}' must be as it was saved, but its checksum differs from the manifest's: restore the file"
        )
    return manifest


def _check_fields(manifest: dict[str, Any], beside: Path) -> None:
    fields: dict[str, type] = {"kind": str, "class": str, "sha256": str, "about": dict}
    if manifest.get("kind") == "members":
        fields |= {"num_members": int, "seeds": list}
    for name, kind in fields.items():
        if not isinstance(manifest.get(name), kind):
            raise _unreadable(beside, f"'{name}' is {manifest.get(name)!r}")


def _require_modest(manifest: dict[str, Any], path: Path, *, own: bool) -> None:
    """Refuse a manifest of far more than its file holds, before anything is made: it may come from anybody."""
    with parsing(path, "a safetensors file", "save it again"), safe_open(path, "pt") as file:
        shapes = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118 - not a dictionary
    held = sum(math.prod(shape) for shape in shapes)
    members, about = manifest.get("num_members", 0), manifest["about"]
    counts = [members, *_integers(manifest.get("settings"))]
    if own:
        counts += _integers([about.get(key) for key in ("network", "shape", "num_classes")])
    stacked = members <= FEWEST or any(shape[:1] == [members] for shape in shapes)
    if max(counts) > max(held, FEWEST) or not stacked:
        raise _unreadable(path.with_suffix(".json"), f"it tells of {max(counts):,}, the file has {held:,} numbers")
    if own:
        with torch.device("meta"):
            made = sum(tensor.numel() for tensor in _fresh(None, manifest, path).state_dict().values())
        if made > LARGER * max(held, FEWEST):
            raise _unreadable(path.with_suffix(".json"), f"its network has {made:,} numbers, the file {held:,}")


def _integers(value: Any) -> list[int]:
    """All whole numbers of a tree but for seeds."""
    if isinstance(value, Mapping):
        return [number for key, each in value.items() if "seed" not in key for number in _integers(each)]
    if isinstance(value, list):
        return [number for each in value for number in _integers(each)]
    return [value] if isinstance(value, int) else []


def _unreadable(beside: Path, why: object) -> EnfoldError:
    return EnfoldError(f"'{beside}' must be a manifest written by enfold, but it cannot be read ({why}): save it again")


def _fresh(network: nn.Module | Callable[[], nn.Module] | None, manifest: dict[str, Any], path: Path) -> nn.Module:
    if network is not None:
        return blank(network)
    about = manifest["about"]
    spec = about.get("network")
    name = spec.get("name") if isinstance(spec, dict) else spec
    if not isinstance(name, str) or ":" in name or not {"shape", "num_classes"} <= about.keys():  # the user's own code
        raise EnfoldError(
            f"'{path}' holds a {manifest['class']} that enfold has no network for: pass the network or its factory"
        )
    return blank(factory(spec, about["shape"], about["num_classes"]))

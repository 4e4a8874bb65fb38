"""Save and load models: tensors as safetensors, and a JSON manifest beside them. Nothing is ever unpickled.

Tensors have the names of the model's state dict, so a single network can be loaded without enfold.
"""

from __future__ import annotations

import json
import math
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from enfold import ensembles
from enfold.arguments import check_arguments
from enfold.engines.fingerprint import compute_fingerprint, require_fingerprint
from enfold.engines.initialization import make_blank
from enfold.engines.verify import different_attribute
from enfold.ensemble import Ensemble, set_model_task
from enfold.ensembles import DeepEnsemble, MixedEnsemble
from enfold.errors import EnfoldError
from enfold.io.checkpoints import require_tensors, with_ties
from enfold.io.files import atomic_path, parsing, sha256
from enfold.io.usercode import PREFIX
from enfold.networks import factory
from enfold.tasks import task_of
from enfold.tasks.infer import task_from_dict, task_to_dict

FORMAT = 2
FEWEST = 4096  # options up to this value are accepted for files of any size
LARGER = 1000  # the largest accepted size of a network, as a multiple of its file: ensembles may be smaller


def save(model: nn.Module, path: str | Path, *, about: Mapping[str, Any] | None = None) -> Path:
    """Save a network or an ensemble to a .safetensors file and a .json manifest beside it.

    Args:
        model: The network or ensemble.
        path: The file, with the ending .safetensors.
        about: Plain values that are stored in the manifest. If `about["network"]` is the spec of a network of
            `enfold.networks`, with `shape` and `num_classes` of the data, `load` needs no network.

    Returns:
        The path.
    """
    path = Path(path)
    if path.suffix != ".safetensors":
        raise EnfoldError(f"path must end in .safetensors, got '{path}': change the ending")
    # Both files are complete before either is moved to its place, the manifest last.
    with atomic_path(path.with_suffix(".json")) as beside, atomic_path(path) as values:
        save_file(_tensors(model), values)
        manifest = {**_manifest(model), "sha256": sha256(values), "about": dict(about or {})}
        try:
            text = json.dumps(manifest, indent=2, ensure_ascii=False)
        except (TypeError, ValueError) as error:
            raise EnfoldError(f"about must contain JSON values, got {about!r} ({error}): leave it out") from error
        beside.write_text(f"{text}\n", encoding="utf-8")
    return path


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict for safetensors: contiguous, and a copy of a tied tensor under each of its names."""
    state = model.state_dict()
    require_tensors(state, "a model is stored")
    return {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in state.items()}


def _manifest(model: nn.Module) -> dict[str, Any]:
    kind: dict[str, Any] = {"kind": "network", "class": type(model).__name__}
    if isinstance(model, Ensemble):
        kind = {
            "kind": "ensemble",
            "method": type(model).__name__,
            **({} if type(model).__name__ in ensembles.__all__ else {"defined_in": defined_in(type(model))}),
            "options": model.options(),
            "class": model.network_name,
            "num_members": model.num_members,
            **({} if model.member_weights is None else {"weights": list(model.member_weights)}),
            "seeds": list(model.seeds or ()) if isinstance(model, DeepEnsemble) else [],
            "separate": _is_separate(model),
            "fingerprint": compute_fingerprint(model) if model.is_expandable else None,
        }
    return {"format": FORMAT, **kind, "task": task_to_dict(task_of(model)), "versions": versions()}


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that a result depends on."""
    packages = {name: version(name) for name in ("enfold", "torch", "numpy", "safetensors")}
    return {"python": platform.python_version(), **packages}


def load(
    path: str | Path, network: nn.Module | Callable[[], nn.Module] | Sequence[nn.Module] | None = None
) -> nn.Module:
    """Load a network or an ensemble that `save` wrote.

    Args:
        path: The .safetensors file; its manifest is beside it.
        network: A network of the same architecture, or a function that makes one; for an ensemble whose networks differ
            in more than parameters, a list of them. It may be left out for the networks of `enfold.networks`. Code that
            a manifest names is never imported.

    Returns:
        The model in eval mode. An ensemble is made again by its class with the options it was saved with.

    Raises:
        EnfoldError: If a file is missing, damaged, or does not fit the network.
    """
    path = Path(path)
    manifest = read_manifest(path)
    _require_modest(manifest, path, own=network is None)
    several = list(network) if isinstance(network, Sequence) else None
    model = _fresh(several[0] if several else network, manifest, path)  # type: ignore[arg-type]
    if manifest["kind"] == "ensemble":
        model = _make_ensemble(several or model, manifest)
    task = task_from_dict(manifest.get("task"))
    if task is not None:
        set_model_task(model, task)
    with parsing(path, "a safetensors file", "save it again"):
        stored = load_file(path)
    state = with_ties(stored, model)
    own = model.state_dict(keep_vars=True)
    require_tensors(own, "a model is loaded")
    unfit = sorted(own.keys() ^ state.keys()) or [name for name in own if own[name].shape != state[name].shape]
    if unfit:
        raise EnfoldError(
            f"network must have the tensors of '{path}', but '{unfit[0]}' differs: pass the "
            f"{manifest['class']} that was saved"
        )
    for name, tensor in own.items():
        tensor.data = tensor.data.to(state[name].dtype)  # the type that was saved
    model.load_state_dict(state)
    if isinstance(model, Ensemble) and model.is_expandable and manifest.get("fingerprint"):
        require_fingerprint(model.eval(), manifest["fingerprint"], path.name)
    return model.eval()


def _is_separate(model: Ensemble) -> bool:
    """Return whether the members' networks differ in more than parameters, so that each is needed for loading."""
    if isinstance(model, MixedEnsemble):
        return True
    was_given = type(model) is DeepEnsemble and len(model.codes) > 1
    differs = model.mismatch is not None and not model.mismatch.recomputes
    return was_given and (differs or different_attribute(model.codes) is not None)


def _make_ensemble(network: nn.Module | list[nn.Module], manifest: dict[str, Any]) -> Ensemble:
    """Return an ensemble of the stored class and options; values are loaded afterwards."""
    if manifest.get("separate") and not isinstance(network, list):
        raise EnfoldError(
            f"network must be a list, as members differ in more than parameters, got one {type(network).__name__} for "
            f"{manifest['num_members']} members: pass the network of each member"
        )
    several = network if isinstance(network, list) else [network] * manifest["num_members"]
    if len(several) != manifest["num_members"]:
        raise EnfoldError(
            f"network must be one network or one per member, got {len(several)} for {manifest['num_members']} members: "
            "pass one network, or one for each"
        )
    kind = _ensemble_class(manifest["method"], manifest.get("defined_in"))
    options = check_arguments(kind, manifest["options"])
    model = kind.from_options(several, options)
    if isinstance(model, DeepEnsemble):
        model.seeds = tuple(manifest["seeds"]) or None
    if manifest.get("weights") is not None:
        model._member_weights = (1.0,) * len(manifest["weights"])  # the values are in the file
    return model


def defined_in(kind: type) -> str:
    """Return where a class is defined, for messages: its module, or the name of the file that was run or loaded."""
    module = sys.modules.get(kind.__module__)
    file = Path(str(getattr(module, "__file__", None) or "the interactive session"))
    return file.name if kind.__module__ == "__main__" or kind.__module__.startswith(PREFIX) else kind.__module__


def _ensemble_class(name: str, where: object = None) -> type[Ensemble]:
    """Return the ensemble class of this name: one of `enfold.ensembles`, or one that the caller has imported."""
    if name in ensembles.__all__:
        return getattr(ensembles, name)  # type: ignore[no-any-return]
    classes: list[type[Ensemble]] = Ensemble.__subclasses__()
    known: dict[str, type[Ensemble]] = {}
    while classes:
        kind = classes.pop()
        known[kind.__name__] = kind
        classes += kind.__subclasses__()
    if name not in known:
        known_from = f", which was defined in {where}" if isinstance(where, str) else ""
        raise EnfoldError(
            f"the class of a saved ensemble must be imported before it is loaded, got '{name}'{known_from}: import it "
            "first"
        )
    return known[name]


def read_manifest(path: Path) -> dict[str, Any]:
    """Return the manifest beside `path`, after checking format and checksum."""
    beside = path.with_suffix(".json")
    if not path.is_file() or not beside.is_file():
        missing = path if not path.is_file() else beside
        raise EnfoldError(
            f"path must be a .safetensors file with a .json manifest beside it, but '{missing}' is missing: "
            "correct the path, or read a .safetensors file without manifest with DeepEnsemble.from_checkpoints"
        )
    try:
        manifest: dict[str, Any] = json.loads(beside.read_text(encoding="utf-8"))
        known = manifest["format"] == FORMAT
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _unreadable(beside, error) from error
    if not known:
        raise EnfoldError(
            f"'{beside}' must be of format {FORMAT}, got format {manifest['format']}: use the version that wrote it"
        )
    _check_fields(manifest, beside)
    if sha256(path) != manifest["sha256"]:
        raise EnfoldError(
            f"'{path}' must be as it was saved, but its checksum differs from the manifest's: restore the file"
        )
    return manifest


def _check_fields(manifest: dict[str, Any], beside: Path) -> None:
    fields: dict[str, type] = {"kind": str, "class": str, "sha256": str, "about": dict}
    if manifest.get("kind") == "ensemble":
        fields |= {"num_members": int, "seeds": list, "method": str, "options": dict}
    for name, kind in fields.items():
        if not isinstance(manifest.get(name), kind):
            raise _unreadable(beside, f"'{name}' is {manifest.get(name)!r}")


def _require_modest(manifest: dict[str, Any], path: Path, *, own: bool) -> None:
    """Refuse a manifest that describes much more than its file contains, before anything is made."""
    with parsing(path, "a safetensors file", "save it again"), safe_open(path, "pt") as file:
        shapes = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118 - not a dictionary
    held = sum(math.prod(shape) for shape in shapes)
    members, about = manifest.get("num_members", 0), manifest["about"]
    counts = [members, *_integers(manifest.get("options"))]
    if own:
        counts += _integers([about.get(key) for key in ("network", "shape", "num_classes")])
    is_stacked = members <= FEWEST or any(shape[:1] == [members] for shape in shapes)
    if max(counts) > max(held, FEWEST) or not is_stacked:
        raise _unreadable(path.with_suffix(".json"), f"it describes {max(counts):,}, the file has {held:,} numbers")
    if own:
        with torch.device("meta"):
            made = sum(tensor.numel() for tensor in _fresh(None, manifest, path).state_dict().values())
        if made > LARGER * max(held, FEWEST):
            raise _unreadable(path.with_suffix(".json"), f"its network has {made:,} numbers, the file {held:,}")


def _integers(value: Any) -> list[int]:
    """Return all integers of nested lists and dictionaries, without seeds."""
    if isinstance(value, Mapping):
        return [number for key, each in value.items() if "seed" not in key for number in _integers(each)]
    if isinstance(value, list):
        return [number for each in value for number in _integers(each)]
    return [value] if isinstance(value, int) else []


def _unreadable(beside: Path, why: object) -> EnfoldError:
    return EnfoldError(f"'{beside}' must be a manifest written by enfold, but it cannot be read ({why}): save it again")


def _fresh(network: nn.Module | Callable[[], nn.Module] | None, manifest: dict[str, Any], path: Path) -> nn.Module:
    if network is not None:
        return make_blank(network)
    about = manifest["about"]
    spec = about.get("network")
    name = spec.get("name") if isinstance(spec, dict) else spec
    if not isinstance(name, str) or ":" in name or not {"shape", "num_classes"} <= about.keys():  # the user's own code
        raise EnfoldError(
            f"network must be given for a {manifest['class']}, which is not in enfold.networks, got None for '{path}': "
            "pass the network or a function that makes it"
        )
    return make_blank(factory(spec, about["shape"], about["num_classes"]))

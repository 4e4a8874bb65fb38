"""Save and load models: tensors as safetensors, and a JSON manifest beside them. Nothing is ever unpickled.

Tensors have the names of the model's state dict, so a single network can be loaded without enfold.
"""

from __future__ import annotations

import functools
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
from enfold.calibrate import Calibrated
from enfold.engines.attributes import different_attribute
from enfold.engines.call import require_network
from enfold.engines.initialization import make_blank
from enfold.ensemble import Ensemble, set_model_task
from enfold.ensembles import DeepEnsemble, MixedEnsemble
from enfold.errors import EnfoldError
from enfold.fingerprint import compute_fingerprint, require_fingerprint
from enfold.io.checkpoints import require_tensors, with_ties
from enfold.io.files import atomic_path, parsing, sha256
from enfold.io.manifest import CONFIG, LIBRARY, VALUES, all_integers, described_model, model_files, unreadable
from enfold.io.manifest import FORMAT as FORMAT
from enfold.io.manifest import read_manifest as read_manifest
from enfold.io.tensors import check_header
from enfold.io.usercode import PREFIX
from enfold.networks import factory
from enfold.tasks import task_of
from enfold.tasks.infer import task_from_dict, task_to_dict

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
    write_model(model, path, path.with_suffix(".json"), about)
    return path


def write_model(model: nn.Module, values: Path, beside: Path, about: Mapping[str, Any] | None) -> None:
    """Write the tensors and the manifest; both are complete before either is moved to its place, the manifest last.

    Args:
        model: The network or ensemble.
        values: The safetensors file.
        beside: The file of the manifest.
        about: What the caller stores with it; None for nothing.
    """
    require_network(model)
    library = {"library_name": LIBRARY} if beside.name == CONFIG else {}
    with atomic_path(beside) as manifest_file, atomic_path(values) as values_file:
        save_file(_tensors(model), values_file)
        manifest = {**library, **_manifest(model), "sha256": sha256(values_file), "about": dict(about or {})}
        try:
            text = json.dumps(manifest, indent=2, ensure_ascii=False)
        except (TypeError, ValueError) as error:
            raise EnfoldError(f"about must contain JSON values, got {about!r} ({error}): leave it out") from error
        manifest_file.write_text(f"{text}\n", encoding="utf-8")


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict for safetensors: contiguous, and a copy of a tied tensor under each of its names."""
    state = model.state_dict()
    require_tensors(state, "a model is stored")
    return {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in state.items()}


def _manifest(model: nn.Module) -> dict[str, Any]:
    return {"format": FORMAT, **describe(model), "versions": versions()}


def describe(model: nn.Module) -> dict[str, Any]:
    """Return what a model is made again from, beside its tensors and the network: its kind, class and options."""
    if isinstance(model, Calibrated):
        if isinstance(model.model, Calibrated):
            raise EnfoldError("model must be calibrated once, got a Calibrated in a Calibrated: save model.model")
        inner = describe(model.model)
        task = task_to_dict(model.model_task)
        return {"kind": "calibrated", "class": inner["class"], "task": task, "model": inner}
    if isinstance(model, Ensemble):
        return {
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
            "task": task_to_dict(model.task),
        }
    return {"kind": "network", "class": type(model).__name__, "task": task_to_dict(task_of(model))}


_find_version = functools.cache(version)  # a search through the installed packages takes milliseconds


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that a result depends on."""
    packages = {name: _find_version(name) for name in ("enfold", "torch", "numpy", "safetensors")}
    return {"python": platform.python_version(), **packages}


def load(
    path: str | Path, network: nn.Module | Callable[[], nn.Module] | Sequence[nn.Module] | None = None
) -> nn.Module:
    """Load a model that `save` or `enfold.integrations.hub.save_pretrained` wrote.

    Args:
        path: The .safetensors file, with its manifest beside it; or a folder with model.safetensors and config.json.
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
    path, described = model_files(path)[0], described_model(manifest)
    _require_modest(manifest, path, own=network is None)
    several = list(network) if isinstance(network, Sequence) else None
    given = _fresh(several[0] if several else network, manifest, path)  # type: ignore[arg-type]
    is_complete = manifest["kind"] == "calibrated" and isinstance(given, Calibrated)  # with its model and its task
    model = given if is_complete else _make_model(several or given, manifest, path)
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
    if not is_complete and not described.get("separate"):
        _require_class(given, described, path)
    for name, tensor in own.items():
        tensor.data = tensor.data.to(state[name].dtype)  # the type that was saved
    model.load_state_dict(state)
    inner = model.model if isinstance(model, Calibrated) else model
    if isinstance(inner, Ensemble) and inner.is_expandable and described.get("fingerprint"):
        require_fingerprint(inner.eval(), described["fingerprint"], path.name)
    return model.eval()


def _require_class(network: nn.Module, described: Mapping[str, Any], path: Path) -> None:
    """Refuse a network of another class: one with tensors of the same names may compute something else."""
    if type(network).__name__ != described["class"]:
        raise EnfoldError(
            f"network must be of the class {described['class'][:80]} that was saved to '{path}', got "
            f"{type(network).__name__}: pass that class, or change 'class' in {_manifest_of(path)} if it was renamed"
        )


def _manifest_of(path: Path) -> str:
    return CONFIG if (path.parent / CONFIG).is_file() and path.name == VALUES else f"{path.stem}.json"


def _make_model(network: nn.Module | list[nn.Module], manifest: Mapping[str, Any], path: Path) -> nn.Module:
    """Return the model that a manifest describes; values are loaded afterwards."""
    described = described_model(manifest)
    model: nn.Module
    if described["kind"] == "ensemble":
        model = _make_ensemble(network, described)
    else:
        model = network[0] if isinstance(network, list) else network
    known = task_from_dict(described.get("task"))
    if known is not None:
        set_model_task(model, known)
    if manifest["kind"] == "calibrated":
        with parsing(path, "a calibrated model", "save it again"):
            task = task_from_dict(manifest["task"])
        assert task is not None  # noqa: S101 - a dictionary was required
        return Calibrated(model, task)
    return model


def _is_separate(model: Ensemble) -> bool:
    """Return whether the members' networks differ in more than parameters, so that each is needed for loading."""
    if isinstance(model, MixedEnsemble):
        return True
    was_given = type(model) is DeepEnsemble and len(model.codes) > 1
    differs = model.mismatch is not None and not model.mismatch.recomputes
    return was_given and (differs or different_attribute(model.codes) is not None)


def _make_ensemble(network: nn.Module | list[nn.Module], manifest: Mapping[str, Any]) -> Ensemble:
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
    if manifest.get("weights"):
        model._member_weights = (1.0,) * len(several)  # the values are in the file
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


def _require_modest(manifest: dict[str, Any], path: Path, *, own: bool) -> None:
    """Refuse a manifest that describes much more than its file contains, before anything is made."""
    check_header(path)
    with parsing(path, "a safetensors file", "save it again"), safe_open(path, "pt") as file:
        shapes = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118 - not a dictionary
    held = sum(math.prod(shape) for shape in shapes)
    described, about = described_model(manifest), manifest["about"]
    members = described.get("num_members", 0)
    counts = [members, *all_integers(described.get("options"))]
    if own:
        counts += all_integers([about.get(key) for key in ("network", "shape", "num_classes")])
    is_stacked = members <= FEWEST or any(shape[:1] == [members] for shape in shapes)
    if max(counts) > max(held, FEWEST) or not is_stacked:
        raise unreadable(
            path.parent / _manifest_of(path), f"it describes {max(counts):,}, the file has {held:,} numbers"
        )
    if own:
        with torch.device("meta"):
            made = sum(tensor.numel() for tensor in _fresh(None, manifest, path).state_dict().values())
        if made > LARGER * max(held, FEWEST):
            raise unreadable(path.parent / _manifest_of(path), f"its network has {made:,} numbers, the file {held:,}")


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

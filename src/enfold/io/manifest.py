"""The manifest of a saved model: JSON that describes the tensors beside it. It is read, checked and never run.

name.safetensors  name.json                    what `enfold.save` writes
model.safetensors config.json [README.md]      in a folder: what `enfold.integrations.hub.save_pretrained` writes
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from enfold.errors import EnfoldError
from enfold.io.files import reading, sha256

FORMAT = 2
LIBRARY = "enfold"  # `library_name` of a folder
VALUES, CONFIG, CARD = "model.safetensors", "config.json", "README.md"
LARGEST = 16 << 20  # bytes of a manifest
PICKLES = (".bin", ".ckpt", ".dill", ".joblib", ".npy", ".npz", ".pickle", ".pkl", ".pt", ".pth")  # may run code
FIELDS: dict[str, dict[str, type]] = {
    "network": {"class": str},
    "ensemble": {"class": str, "num_members": int, "seeds": list, "method": str, "options": dict},
    "calibrated": {"class": str, "model": dict, "task": dict},
}


def model_files(path: Path) -> tuple[Path, Path]:
    """Return the file with the tensors and its manifest: those in a folder, or a file and the one beside it."""
    return (path / VALUES, path / CONFIG) if path.is_dir() else (path, path.with_suffix(".json"))


def read_manifest(path: Path) -> dict[str, Any]:
    """Return the manifest of a saved model, after checking its format and the checksum of the tensors.

    Args:
        path: The .safetensors file, or the folder of `save_pretrained`.

    Raises:
        EnfoldError: If a file is missing, of another library or another version, or not as it was written.
    """
    values, beside = model_files(path)
    if path.is_dir():
        _require_own_folder(path)
    missing = next((each for each in (values, beside) if not each.is_file()), None)
    if missing is not None:
        raise EnfoldError(
            "path must be a .safetensors file with a .json manifest beside it, or a folder with "
            f"{VALUES} and {CONFIG}, but '{missing}' is missing: "
            "correct the path, or read a .safetensors file without manifest with DeepEnsemble.from_checkpoints"
        )
    manifest = read_json(beside, LARGEST)
    if path.is_dir() and manifest.get("library_name") != LIBRARY:
        library = str(manifest.get("library_name") or manifest.get("model_type") or "another library")[:40]
        raise EnfoldError(
            f"path must be a folder that enfold.integrations.hub.save_pretrained wrote, but '{beside}' is of "
            f"{library}: load it with its own library, or read its weights with DeepEnsemble.from_checkpoints"
        )
    if "format" not in manifest:
        raise unreadable(beside, "'format' is missing")
    if manifest["format"] != FORMAT:
        raise EnfoldError(
            f"'{beside}' must be of format {FORMAT}, got format {str(manifest['format'])[:40]}: use the version that "
            "wrote it"
        )
    _check_fields(manifest, beside)
    if sha256(values) != manifest["sha256"]:
        raise EnfoldError(
            f"'{values}' must be as it was saved, but its checksum differs from the manifest's: restore the file"
        )
    return manifest


def read_json(path: Path, largest: int) -> dict[str, Any]:
    """Return the dictionary in a JSON file of a limited size.

    Raises:
        EnfoldError: If the file is larger, damaged, or contains something else.
    """
    with reading(path):
        size = path.stat().st_size
        if size > largest:
            raise EnfoldError(f"'{path}' must have at most {largest:,} bytes, got {size:,}: save it again")
        stored = path.read_bytes()
    try:
        content = json.loads(stored.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise unreadable(path, error) from error
    if not isinstance(content, dict):
        raise unreadable(path, f"it contains a {type(content).__name__}")
    return content


def _require_own_folder(folder: Path) -> None:
    """Refuse a folder in which somebody could take a pickle for the model."""
    found = sorted(each.name for each in folder.iterdir() if each.suffix.lower() in PICKLES)
    if found:
        raise EnfoldError(
            f"'{folder}' must contain tensors as safetensors only, but it has '{found[0]}', a kind of file that may "
            f"run code: remove it, or read {VALUES} with safetensors"
        )


def described_model(manifest: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the description of the network or ensemble: that of the model inside, for a calibrated one."""
    found: Mapping[str, Any] = manifest["model"] if manifest["kind"] == "calibrated" else manifest
    return found


def _check_fields(manifest: dict[str, Any], beside: Path) -> None:
    _require_fields(manifest, {"kind": str, "sha256": str, "about": dict}, beside)
    _check_kind(manifest, beside)
    inner = described_model(manifest)
    if inner is not manifest:
        _require_fields(inner, {"kind": str}, beside)
        _check_kind(inner, beside)
        if inner["kind"] == "calibrated":
            raise unreadable(beside, "a calibrated model is inside of another")


def _check_kind(content: Mapping[str, Any], beside: Path) -> None:
    if content["kind"] not in FIELDS:
        raise unreadable(beside, f"'kind' is {content['kind'][:40]!r}")
    _require_fields(content, FIELDS[content["kind"]], beside)
    if content.get("num_members", 1) < 1:
        raise unreadable(beside, f"'num_members' is {content['num_members']}")


def _require_fields(content: Mapping[str, Any], fields: Mapping[str, type], beside: Path) -> None:
    for name, kind in fields.items():
        value = content.get(name)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise unreadable(beside, f"'{name}' is {repr(value)[:60]}")


def all_integers(value: Any) -> list[int]:
    """Return all integers of nested lists and dictionaries, without seeds."""
    if isinstance(value, Mapping):
        return [number for key, each in value.items() if "seed" not in key for number in all_integers(each)]
    if isinstance(value, list):
        return [number for each in value for number in all_integers(each)]
    return [value] if isinstance(value, int) else []


def unreadable(beside: Path, why: object) -> EnfoldError:
    """Return the error for a damaged manifest."""
    return EnfoldError(f"'{beside}' must be a manifest written by enfold, but it cannot be read ({why}): save it again")

"""Folders with checkpoints: which files of a folder are one network, and which folders are several.

model.safetensors, pytorch_model.bin, their shards with an index      transformers, diffusers, timm, accelerate
pytorch_model_fsdp.bin, pytorch_model_fsdp_0/                         accelerate with FSDP
.metadata and .distcp files                                           torch.distributed.checkpoint
adapter_config.json with adapter_model.safetensors                    peft
fold_0/checkpoint_final.pth, fold_1/...                               nnU-Net: one network for each fold
"""

from __future__ import annotations

import re
from pathlib import Path

from enfold.errors import EnfoldError

ADAPTER_CONFIG = "adapter_config.json"
ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin")
METADATA = ".metadata"
INDEX = ".index.json"
MODELS = (  # of one network, the first that exists is read
    "model.safetensors",
    "model.safetensors.index.json",
    "diffusion_pytorch_model.safetensors",
    "diffusion_pytorch_model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "diffusion_pytorch_model.bin",
    "pytorch_model_fsdp.bin",
    "pytorch_model_fsdp_0",
    METADATA,
)
FINAL = "checkpoint_final.pth"  # of a fold
SHARD = re.compile(r"(.+)-\d{5}-of-\d{5}\.(safetensors|bin)")
SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".tar")
OTHERS = {"optimizer", "optimizer_0", "scheduler", "scaler", "sampler", "rng_state", "training_args"}  # beside weights


def is_adapter(path: Path) -> bool:
    """Return whether a folder has an adapter of peft."""
    return (path / ADAPTER_CONFIG).is_file()


def find_adapter(folder: Path) -> Path:
    """Return the file with the tensors of an adapter.

    Raises:
        EnfoldError: If there is none, or the folder also has a complete network.
    """
    found = next((folder / name for name in ADAPTERS if (folder / name).is_file()), None)
    model = _find_model(folder)
    if found is None or model is not None:
        what = f"'{ADAPTERS[0]}' is missing" if found is None else f"'{model.name if model else ''}' is beside it"
        raise EnfoldError(
            f"a folder with {ADAPTER_CONFIG} must have an adapter only, but in '{folder}' {what}: complete the folder, "
            "or pass the file of the network"
        )
    return found


def find_network(folder: Path) -> Path:
    """Return the file, the index of shards or the folder in which the tensors of one network are.

    Raises:
        EnfoldError: If the folder has no network in a known layout, or several.
    """
    found = _find_model(folder)
    if found is not None and found.is_dir():
        return find_network(found)
    if found is not None:
        return folder if found.name == METADATA else found
    files = _files(folder)
    if len(files) == 1 and not SHARD.fullmatch(files[0].name):
        return files[0]
    raise _no_network(folder, files)


def members_of(folder: Path) -> list[Path]:
    """Return what a folder has one member in: itself, folds, other folders, or files; in natural order.

    Raises:
        EnfoldError: If there is nothing, a fold is incomplete, or files and folders are mixed.
    """
    if is_member(folder):
        return [folder]
    folders = sorted((each for each in folder.iterdir() if each.is_dir()), key=natural)
    folds = [each for each in folders if re.fullmatch(r"fold_\d+", each.name)]
    if folds:
        return [_final_of(fold) for fold in folds]
    members, files = [each for each in folders if is_member(each)], _files(folder)
    if bool(members) == bool(files) or any(SHARD.fullmatch(each.name) for each in files):
        raise _no_network(folder, [*members, *files])
    return members or files


def is_member(folder: Path) -> bool:
    """Return whether a folder has one network or one adapter in a known layout."""
    return is_adapter(folder) or _find_model(folder) is not None


def natural(path: Path) -> list[tuple[int, str]]:
    """Return a key that sorts fold_2 before fold_10."""
    return [(int(part or 0), "") if part.isdecimal() else (0, part) for part in re.split(r"(\d+)", str(path))]


def _final_of(fold: Path) -> Path:
    if not (fold / FINAL).is_file():
        raise EnfoldError(
            f"each fold must have {FINAL}, but '{fold}' has not: finish its training, or pass the files of the other "
            "folds as a list"
        )
    return fold / FINAL


def _find_model(folder: Path) -> Path | None:
    return next((folder / name for name in MODELS if (folder / name).exists()), None)


def _files(folder: Path) -> list[Path]:
    """Return the files that may be checkpoints, without those of optimizers and generators."""
    return sorted(
        (
            each
            for each in folder.iterdir()
            if each.suffix in SUFFIXES
            and not each.name.startswith(".")
            and each.is_file()
            and re.sub(r"_?\d+$", "", each.stem) not in OTHERS
        ),
        key=natural,
    )


def _no_network(folder: Path, found: list[Path]) -> EnfoldError:
    shard = next((each for each in found if SHARD.fullmatch(each.name)), None)
    if shard is not None:
        what, remedy = f"'{shard.name}' without an index ({INDEX})", "complete the folder"
    elif found:
        what, remedy = f"{len(found)} of them, such as '{found[0].name}'", "pass a list or a pattern such as '*.ckpt'"
    else:
        known = f"{', '.join(MODELS[:5])}, {ADAPTER_CONFIG}, fold_0/{FINAL}"
        what, remedy = f"none ({known})", "check the path, or pass a pattern of files"
    return EnfoldError(f"a folder must have checkpoints in a known layout, but '{folder}' has {what}: {remedy}")

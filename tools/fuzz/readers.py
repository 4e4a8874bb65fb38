"""What is fuzzed: for each reader valid files, how they are mutated, and the call that reads them."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import shutil
import struct
import sys
import tarfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed import checkpoint as dcp

import enfold
from enfold.data.cifar import extract, read_records
from enfold.data.corruptions import cifar_c, read_cifar_c
from enfold.data.idx import read_idx
from enfold.integrations.hub import from_pretrained, save_pretrained
from enfold.io.adapters import add_adapter
from enfold.io.checkpoints import load_into
from enfold.io.files import sha256
from enfold.networks import make
from enfold.report.page import render_page
from enfold.report.svg import inline_svg
from enfold.run import RunDirectory, read_recipe
from enfold.run.collect import collect

FEW = 4  # images of each severity, of 10,000

Kinds = tuple[str, ...]


@dataclass(frozen=True)
class Reader:
    """One kind of input.

    Args:
        name: The name in the results.
        number: How many of 100,000 inputs are of this kind.
        write: Writes valid files into a folder.
        read: Reads the folder.
        kinds: The mutations of each file, by name; `**` for all others of the run directory.
        repair: Makes checksums match after a mutation, so that what is behind them is reached.
    """

    name: str
    number: int
    write: Callable[[Path], None]
    read: Callable[[Path], Any]
    kinds: dict[str, Kinds]
    repair: Callable[[Path], None] | None = None


def network() -> nn.Module:
    """Return the network of all checkpoints."""
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def _images(folder: Path) -> None:
    (folder / "a").write_bytes(bytes((0, 0, 8, 3)) + struct.pack(">III", 5, 4, 4) + bytes(80))


def _zipped(folder: Path) -> None:
    _images(folder)
    (folder / "a.gz").write_bytes(gzip.compress((folder / "a").read_bytes(), mtime=0))


def _records(folder: Path) -> None:
    (folder / "data.bin").write_bytes(bytes(3073 * 2))


def _archive(folder: Path) -> None:
    with tarfile.open(folder / "small.tar.gz", "w:gz") as archive:
        for name in ("data.bin", "test.bin"):
            member = tarfile.TarInfo(f"small/{name}")
            member.size = 50
            archive.addfile(member, io.BytesIO(bytes(50)))


def _read_archive(folder: Path) -> None:
    try:
        extract(folder / "small.tar.gz", folder / "small", ["data.bin", "test.bin"])
    finally:
        shutil.rmtree(folder / "small", ignore_errors=True)


def _npy(array: Any) -> bytes:
    written = io.BytesIO()
    np.save(written, array)
    return written.getvalue()


def _cifar_c(folder: Path) -> None:
    (folder / "labels.npy").write_bytes(_npy(np.zeros(5 * FEW, np.uint8)))
    (folder / "fog.npy").write_bytes(_npy(np.zeros((5 * FEW, 32, 32, 3), np.uint8)))


def _read_cifar_c(folder: Path) -> None:
    before, cifar_c.IMAGES = cifar_c.IMAGES, FEW
    try:
        read_cifar_c(folder, "fog", 1)
    finally:
        cifar_c.IMAGES = before


def _npz(folder: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = {"inputs": rng.random((24, 4), np.float32), "labels": np.arange(24) % 3, "names": np.array(list("abc"))}
    np.savez(folder / "a.npz", **arrays)


def _keras(folder: Path) -> None:
    inputs, labels = np.zeros((12, 1, 2, 2), np.uint8), np.arange(12) % 3
    np.savez_compressed(folder / "a.npz", x_train=inputs, y_train=labels, x_test=inputs, y_test=labels)


def _png() -> bytes:
    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    size = struct.pack(">IIBBBBB", 6, 5, 8, 2, 0, 0, 0)
    pixels = zlib.compress(b"".join(bytes((0, *range(18))) for _ in range(5)))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", size) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def _pictures(suffixes: tuple[str, ...], folder: Path) -> None:
    from PIL import Image

    for index, name in enumerate(("a", "b")):
        (folder / name).mkdir(parents=True)
        for number in range(3):
            suffix = suffixes[(index + number) % len(suffixes)]
            if suffix == "png":
                (folder / name / f"{number}.png").write_bytes(_png())
            else:
                Image.new("L" if suffix == "pgm" else "RGB", (6, 5), 3).save(folder / name / f"{number}.{suffix}")


def _imagenet(folder: Path) -> None:
    (folder / "val" / "images").mkdir(parents=True)
    wnids = ("n01440764", "n01443537")
    for wnid in wnids:
        (folder / "train" / wnid / "images").mkdir(parents=True)
        for number in range(4):
            (folder / "train" / wnid / "images" / f"{number}.png").write_bytes(_png())
    lines = [f"{number}.png\t{wnids[number % 2]}\t0\t0\t5\t5" for number in range(4)]
    for number in range(4):
        (folder / "val" / "images" / f"{number}.png").write_bytes(_png())
    (folder / "val" / "val_annotations.txt").write_text("\n".join(lines) + "\n")
    (folder / "words.txt").write_text("".join(f"{wnid}\tsome fish, fish\n" for wnid in wnids))


def _safetensors(folder: Path) -> None:
    save_file(network().state_dict(), folder / "a.safetensors", {"format": "pt"})


def _torch_file(name: str, folder: Path) -> None:
    state: dict[str, Any] = dict(network().state_dict())
    if name.endswith(".ckpt"):
        state = {"state_dict": {f"model.{key}": each for key, each in state.items()}, "epoch": 3, "lr": [0.1, None]}
    torch.save(state, folder / name)


def _old_torch_file(folder: Path) -> None:
    torch.save(network().state_dict(), folder / "a.pth", _use_new_zipfile_serialization=False)


def _shards(folder: Path) -> None:
    names = {}
    for number, part in enumerate(("0", "2"), start=1):
        tensors = {name: each for name, each in network().state_dict().items() if name.startswith(part)}
        names |= dict.fromkeys(tensors, f"model-0000{number}-of-00002.safetensors")
        save_file(tensors, folder / f"model-0000{number}-of-00002.safetensors")
    index = {"metadata": {"total_size": 268}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _distributed(folder: Path) -> None:
    with contextlib.redirect_stderr(io.StringIO()):
        dcp.save({"model": network().state_dict()}, checkpoint_id=folder, no_dist=True)


def _adapter(folder: Path) -> None:
    config = {
        "peft_type": "LORA",
        "r": 2,
        "lora_alpha": 4,
        "rank_pattern": {"2": 2},
        "use_rslora": False,
        "base_model_name_or_path": "base",
        "target_modules": ["0", "2"],
        "init_lora_weights": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    shapes = {"0.lora_A": (2, 4), "0.lora_B": (8, 2), "2.lora_A": (2, 8), "2.lora_B": (3, 2)}
    tensors = {f"base_model.model.{name}.weight": torch.zeros(shape) for name, shape in shapes.items()}
    save_file(tensors, folder / "adapter_model.safetensors")


ABOUT = {"network": {"name": "mlp", "widths": [8]}, "shape": [4], "num_classes": 3}


def _model(folder: Path) -> None:
    made = enfold.DeepEnsemble(partial(make, ABOUT["network"], (4,), 3), 2, seed=0)
    enfold.save(made, folder / "m.safetensors", about=ABOUT)


def _efficient(folder: Path) -> None:
    made = enfold.BatchEnsemble(make(ABOUT["network"], (4,), 3), num_members=2)
    enfold.save(made, folder / "m.safetensors", about=ABOUT)


def _repaired(values: str, manifest: str, folder: Path) -> None:
    """Store the checksum of the tensors in the manifest, if that is still JSON."""
    with contextlib.suppress(ValueError, OSError, RecursionError, AttributeError):
        content = json.loads((folder / manifest).read_text())
        if isinstance(content, dict) and "sha256" in content:
            content["sha256"] = sha256(folder / values)
            (folder / manifest).write_text(json.dumps(content))


def _hub(folder: Path) -> None:
    save_pretrained(make(ABOUT["network"], (4,), 3), folder, about=ABOUT)


def _teacher(folder: Path) -> None:
    logits = torch.randn(2, 6, 3, generator=torch.Generator().manual_seed(0))
    enfold.CachedTeacher(logits, "key", {"inputs": "x"}, [0.5, 0.5]).save(folder / "t.safetensors")


def _data() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(12, 4, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 3


PLAN = {"epochs": 1, "batch_size": 6, "select": "last"}


def _training(folder: Path) -> None:
    _resume(folder)


def _resume(folder: Path) -> None:
    torch.manual_seed(0)
    enfold.fit(network(), _data(), checkpoint=folder / "t.safetensors", quiet=True, **PLAN)


RECIPE = """\
name: small
data: {source: digits, val_size: 60}
network: {name: mlp, widths: [16]}
members: 3
seeds: [0, 1]
sizes: [2, 3]
cost: false
train: {epochs: 3, batch_size: 32, lr: 0.01, augment: []}
steps:
  - average
  - {method: kd, label: distill-fresh, init: random, temperature: 2.0, train: {epochs: 2}}
  - {method: batch_ensemble, rank: 2, num_members: 3}
  - {method: one_to_one, student: {method: batch_ensemble}, perturb: conf_ods}
ood: [{noise: gaussian}]
"""


def _recipe(folder: Path) -> None:
    (folder / "r.yaml").write_text(RECIPE)


def _read_recipe(folder: Path) -> None:
    read_recipe(folder / "r.yaml").as_yaml()


SVG = """<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" width="72pt" height="40pt">
<defs><clipPath id="c"><rect x="0" y="0" width="9" height="9"/></clipPath><path id="m" d="M 0 0 L 9 9"/></defs>
<g clip-path="url(#c)" style="fill: #ffffff; stroke: rgb(0, 0, 0)">
<use xlink:href="#m" x="3" transform="rotate(30)"/></g>
<text font-size="9">word</text></svg>
"""


def _svg(folder: Path) -> None:
    (folder / "f.svg").write_text(SVG)


def _read_svg(folder: Path) -> None:
    """Read a figure; nothing in it may load anything afterwards."""
    file = folder / "f.svg"
    text = file.read_bytes().decode("utf-8", "replace") if file.is_file() else ""
    found = inline_svg(text, "alt", "f-")
    lower = found.lower()
    if any(word in lower for word in ("<script", "javascript:", "@import", "<foreignobject", "onload=")):
        raise AssertionError("something that runs is in the figure")


def _run(folder: Path) -> None:
    """A finished run and one in progress."""
    from enfold.cli import main

    out = folder / "run"
    words = ["train", out, "--data", "digits", "--network", "mlp", "--members", "2", "--set", "train.epochs=1"]
    words += ["--set", "cost=false", "--set", "data.train_size=60", "--set", "data.val_size=60"]
    for given in (words, ["merge", out, "average"], ["distill", out, "kd", "--set", "train.epochs=1"]):
        argv, sys.argv = sys.argv, ["enfold", *map(str, given)]
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                main()
        except SystemExit as stopped:
            if stopped.code:
                raise
        finally:
            sys.argv = argv
    (out / "figures.json").write_text(json.dumps([{"file": "f.svg", "title": "t", "caption": "c", "alt": "a"}]))
    (out / "f.svg").write_text(SVG)


def _read_run(folder: Path) -> None:
    run = RunDirectory.open(folder / "run")
    run.changed_environment()
    collect(run.path)


def _read_page(folder: Path) -> None:
    RunDirectory.open(folder / "run")
    render_page([collect(folder / "run")])


def _evaluate(folder: Path) -> None:
    from enfold.run import execute, open_run

    run, recipe = open_run(folder / "run")
    execute(run, recipe, only=())


def _load(folder: Path) -> None:
    enfold.load(folder / "m.safetensors")


RUN_FILES: dict[str, Kinds] = {
    "run/run.json": ("json", "bytes"),
    "run/recipe.yaml": ("text", "bytes"),
    "run/summary.json": ("json", "bytes"),
    "run/results.json": ("json", "bytes"),
    "run/log.jsonl": ("text", "bytes"),
    "run/members/history.json": ("json", "bytes"),
    "run/members/members.json": ("json", "bytes"),
    "run/histories/steps/kd.json": ("json", "bytes"),
    "run/predictions/ensemble.safetensors": ("header", "bytes"),
    "run/predictions/kd.safetensors": ("header", "bytes"),
    "run/figures.json": ("json", "bytes"),
    "run/f.svg": ("text", "bytes"),
}
IMAGE = {f"a/{number}.{{}}": ("bytes",) for number in range(3)}


READERS = (
    Reader("idx", 6000, _images, lambda folder: read_idx(folder / "a", 3), {"a": ("bytes",)}),
    Reader("gzipped idx", 5000, _zipped, lambda folder: read_idx(folder / "a.gz", 3), {"a.gz": ("bytes", "gzip")}),
    Reader("cifar", 3000, _records, lambda folder: read_records(folder / "data.bin", 1), {"data.bin": ("bytes",)}),
    Reader("cifar archive", 4000, _archive, _read_archive, {"small.tar.gz": ("tar", "bytes")}),
    Reader(
        "cifar-c",
        3000,
        _cifar_c,
        _read_cifar_c,
        {"labels.npy": ("npy", "bytes"), "fog.npy": ("npy", "bytes")},
    ),
    Reader("npz", 6000, _npz, lambda folder: enfold.data.load(folder / "a.npz"), {"a.npz": ("zip", "bytes")}),
    Reader(
        "npz of keras", 3000, _keras, lambda folder: enfold.data.load(folder / "a.npz"), {"a.npz": ("zip", "bytes")}
    ),
    Reader(
        "png",
        5000,
        partial(_pictures, ("png",)),
        enfold.data.load,
        {"a/0.png": ("png", "bytes"), "b/1.png": ("png",)},
    ),
    Reader(
        "other images",
        6000,
        partial(_pictures, ("jpg", "gif", "bmp", "tif", "webp", "ppm")),
        enfold.data.load,
        dict.fromkeys(("a/0.jpg", "a/1.gif", "a/2.bmp", "b/0.gif", "b/2.tif", "b/1.bmp"), ("bytes",)),
    ),
    Reader(
        "imagenet",
        2500,
        _imagenet,
        enfold.data.load,
        {"val/val_annotations.txt": ("text", "bytes"), "words.txt": ("text", "bytes"), "val/images/0.png": ("png",)},
    ),
    Reader(
        "safetensors",
        7000,
        _safetensors,
        lambda folder: load_into(network(), folder / "a.safetensors"),
        {"a.safetensors": ("header", "header", "bytes")},
    ),
    Reader(
        "pt",
        8000,
        partial(_torch_file, "a.pt"),
        lambda folder: load_into(network(), folder / "a.pt"),
        {"a.pt": ("zip", "zip", "bytes")},
    ),
    Reader(
        "old pt",
        4000,
        _old_torch_file,
        lambda folder: load_into(network(), folder / "a.pth"),
        {"a.pth": ("bytes",)},
    ),
    Reader(
        "ckpt",
        6000,
        partial(_torch_file, "a.ckpt"),
        lambda folder: enfold.DeepEnsemble.from_checkpoints([folder / "a.ckpt"], network),
        {"a.ckpt": ("zip", "zip", "bytes")},
    ),
    Reader(
        "shards",
        3000,
        _shards,
        lambda folder: load_into(network(), folder),
        {"model.safetensors.index.json": ("json", "bytes"), "model-00001-of-00002.safetensors": ("header", "bytes")},
    ),
    Reader(
        "distributed",
        5000,
        _distributed,
        lambda folder: load_into(network(), folder),
        {".metadata": ("pickle", "bytes"), "__0_0.distcp": ("bytes",)},
    ),
    Reader(
        "adapters",
        5000,
        _adapter,
        lambda folder: add_adapter(network(), folder),
        {"adapter_config.json": ("json", "bytes"), "adapter_model.safetensors": ("header", "bytes")},
    ),
    Reader(
        "manifests",
        4000,
        _model,
        _load,
        {"m.json": ("json", "json", "bytes"), "m.safetensors": ("header", "bytes")},
        partial(_repaired, "m.safetensors", "m.json"),
    ),
    Reader(
        "manifests of efficient ensembles",
        3000,
        _efficient,
        _load,
        {"m.json": ("json", "json", "bytes"), "m.safetensors": ("header", "bytes")},
        partial(_repaired, "m.safetensors", "m.json"),
    ),
    Reader(
        "hub folders",
        4000,
        _hub,
        from_pretrained,
        {"config.json": ("json", "json", "bytes"), "model.safetensors": ("header", "bytes")},
        partial(_repaired, "model.safetensors", "config.json"),
    ),
    Reader(
        "teacher logits",
        6000,
        _teacher,
        lambda folder: enfold.CachedTeacher.load(folder / "t.safetensors"),
        {"t.safetensors": ("header", "bytes")},
    ),
    Reader("training checkpoints", 3000, _training, _resume, {"t.safetensors": ("header", "bytes")}),
    Reader("recipes", 7000, _recipe, _read_recipe, {"r.yaml": ("text", "text", "bytes")}),
    Reader("figures", 6000, _svg, _read_svg, {"f.svg": ("text", "bytes")}),
    Reader("run directories", 600, _run, _read_run, RUN_FILES),
    Reader("pages of runs", 60, _run, _read_page, RUN_FILES),
    Reader("evaluation of runs", 100, _run, _evaluate, RUN_FILES),
)

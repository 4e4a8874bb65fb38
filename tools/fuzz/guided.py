"""Inputs that atheris finds by coverage of enfold's code: `python -m tools.fuzz.guided RUNS SEED FOLDER`.

Modules that read files are instrumented. Each reader runs in a fork, which libFuzzer ends. Archives and headers are
opened before a mutation and closed after it, so that checksums do not stop it.
"""

from __future__ import annotations

import gzip
import importlib.util
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tools.fuzz.readers import Reader

FILES = {  # the file of each reader that is mutated, and the container that is opened for it
    "idx": ("a", "plain"),
    "gzipped idx": ("a.gz", "gzip"),
    "cifar archive": ("small.tar.gz", "gzip"),
    "npz": ("a.npz", "zip"),
    "imagenet": ("val/val_annotations.txt", "plain"),
    "safetensors": ("a.safetensors", "header"),
    "pt": ("a.pt", "zip"),
    "shards": ("model.safetensors.index.json", "plain"),
    "distributed": (".metadata", "plain"),
    "adapters": ("adapter_config.json", "plain"),
    "manifests": ("m.json", "plain"),
    "teacher logits": ("t.safetensors", "header"),
    "recipes": ("r.yaml", "plain"),
    "figures": ("f.svg", "plain"),
}
MODULES = ["enfold.io", "enfold.data", "enfold.saving", "enfold.distill.cached", "enfold.run", "enfold.report", "yaml"]
LARGEST = 1 << 16  # bytes of an input


def run_all(number: int, seed: int, show: Callable[[str, dict[str, Any]], None]) -> dict[str, dict[str, Any]]:
    """Run every reader of `FILES`; return the counts by name, none if atheris is not installed."""
    if importlib.util.find_spec("atheris") is None:
        print("atheris is not installed: no inputs by coverage")
        return {}
    rows = {}
    with tempfile.TemporaryDirectory() as place:
        words = [sys.executable, "-m", "tools.fuzz.guided", str(number // len(FILES)), str(seed), place]
        done = subprocess.run(words, capture_output=True, text=True, check=False)  # noqa: S603
        for reader in FILES:
            out = Path(place) / f"{reader}.json"
            row = json.loads(out.read_text()) if out.is_file() else {**vars(_nothing()), "seconds": 0.0}
            if row["inputs"] < number // len(FILES):
                row["findings"]["process ended"] = [1, done.stderr[-600:]]
            rows[f"{reader}, by coverage"] = row
            show(f"{reader}, by coverage", row)
    return rows


def _nothing() -> Any:
    from tools.fuzz.worker import Outcome

    return Outcome()


def opened(kind: str, content: bytes) -> bytes:
    """Return what a container has inside."""
    if kind == "gzip":
        return gzip.decompress(content)
    if kind == "zip":
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            return b"".join(_entry(each.filename, archive.read(each)) for each in archive.infolist())
    if kind == "header":
        return content[8:]
    return content


def _entry(name: str, value: bytes) -> bytes:
    return bytes((len(name),)) + name.encode() + len(value).to_bytes(4, "little") + value


def closed(kind: str, inside: bytes) -> bytes:
    """Invert `opened`; a damaged inside gives a damaged container."""
    if kind == "gzip":
        return gzip.compress(inside, 1, mtime=0)
    if kind == "zip":
        made, at = io.BytesIO(), 0
        with zipfile.ZipFile(made, "w") as archive:
            while at < len(inside):
                name = inside[at + 1 : at + 1 + inside[at]].decode("latin-1")
                at += 1 + inside[at]
                size = int.from_bytes(inside[at : at + 4], "little")
                archive.writestr(zipfile.ZipInfo(name), inside[at + 4 : at + 4 + size])
                at += 4 + size
        return made.getvalue()
    if kind == "header":
        end = inside.find(b"}}") + 2  # of a header without nested metadata; else the end of the file
        size = end if end > 1 else len(inside)
        size += -size % 8 if inside[size : size + 8].startswith(b" ") else 0
        return size.to_bytes(8, "little") + inside
    return inside


def main() -> None:
    """Fuzz all readers, one after the other."""
    import atheris

    number, seed, out = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    with atheris.instrument_imports(include=MODULES, enable_loader_override=False):
        import tools.fuzz.readers
        import tools.fuzz.worker
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for reader in tools.fuzz.readers.READERS:
        if reader.name not in FILES:
            continue
        child = os.fork()
        if not child:
            _fuzz(reader, number, seed, out / f"{reader.name}.json")
        os.waitpid(child, 0)


def _fuzz(reader: Reader, number: int, seed: int, out: Path) -> None:
    """Fuzz one reader; libFuzzer ends the process."""
    import atheris

    from tools.fuzz.worker import Outcome, judge, put

    place = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))  # noqa: S108
    folder, corpus = place / "inputs", place / "corpus"
    folder.mkdir()
    corpus.mkdir()
    reader.write(folder)
    file, kind = FILES[reader.name]
    (corpus / "valid").write_bytes(opened(kind, (folder / file).read_bytes()))
    outcome, started = Outcome(), time.time()
    os.chdir(folder)

    def one(data: bytes) -> None:
        put(folder, file, closed(kind, data))
        if reader.repair is not None:
            reader.repair(folder)
        judge(reader, folder, outcome)
        if outcome.inputs % 50 == 0 or outcome.inputs >= number:
            out.write_text(json.dumps({**vars(outcome), "seconds": round(time.time() - started, 1)}))
            if outcome.inputs >= number:
                shutil.rmtree(place, ignore_errors=True)
                os._exit(0)

    flags = [f"-seed={seed + 1}", f"-max_len={LARGEST}", "-timeout=120", "-rss_limit_mb=3000", "-verbosity=0"]
    atheris.Setup([sys.argv[0], *flags, str(corpus)], one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()

"""Tiny data sets in the official formats, and a local web server with configurable faults."""

from __future__ import annotations

import gzip
import hashlib
import io
import struct
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from enfold.data import cifar, idx
from enfold.data.download import Remote
from enfold.data.official import CIFAR10, MNIST, Official

TRAIN, TEST = 60, 20


@pytest.fixture(autouse=True)
def _no_data_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Isolate tests from the user's cache."""
    monkeypatch.delenv("ENFOLD_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def idx_bytes(array: np.ndarray) -> bytes:
    sizes = struct.pack(f">{array.ndim}I", *array.shape)
    return bytes((0, 0, 8, array.ndim)) + sizes + array.astype(np.uint8).tobytes()


def tiny_idx() -> dict[str, bytes]:
    """Four files; image i is filled with the value i, and its label is i modulo 10."""
    files = {}
    for count, images, labels in (
        (TRAIN, idx.TRAIN_IMAGES, idx.TRAIN_LABELS),
        (TEST, idx.TEST_IMAGES, idx.TEST_LABELS),
    ):
        numbers = np.arange(count)
        files[images] = idx_bytes(np.broadcast_to(numbers[:, None, None], (count, 28, 28)))
        files[labels] = idx_bytes(numbers % 10)
    return files


def cifar_bytes(count: int, label_bytes: int = 1) -> bytes:
    """Records whose channels are filled with i, i + 1, i + 2 and whose last label is i modulo 10."""
    records = bytearray()
    for number in range(count):
        records += bytes([99] * (label_bytes - 1) + [number % 10])
        for channel in range(3):
            records += bytes([number + channel]) * 1024
    return bytes(records)


def md5(content: bytes) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def write(folder: Path, files: dict[str, bytes], suffix: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / f"{name}{suffix}").write_bytes(gzip.compress(content, mtime=0) if suffix else content)
    return folder


def tar_bytes(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


class Server:
    """Serve `files`; `cut` drops connections after a number of bytes, `ranges` may be disabled."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.files: dict[str, bytes] = {}
        self.requests: list[tuple[str, str | None]] = []
        self.cut: int | None = None
        self.ranges = True


def _handler(server: Server) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.path.lstrip("/")
            wanted = self.headers.get("Range")
            server.requests.append((name, wanted))
            if name not in server.files:
                self.send_error(404)
                return
            content = server.files[name]
            start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted and server.ranges else 0
            if start and start >= len(content):
                self.send_error(416)
                return
            self.send_response(206 if start else 200)
            self.send_header("Content-Length", str(len(content) - start))
            self.end_headers()
            end = len(content) if server.cut is None else start + server.cut
            self.wfile.write(content[start:end])

        def log_message(self, *arguments: object) -> None:
            pass

    return Handler


@pytest.fixture
def server() -> Iterator[Server]:
    state = Server("")
    web = ThreadingHTTPServer(("127.0.0.1", 0), _handler(state))
    state.address = f"http://127.0.0.1:{web.server_port}"
    thread = threading.Thread(target=web.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield state
    web.shutdown()
    web.server_close()
    thread.join()


def tiny_mnist(address: str = "http://127.0.0.1:9") -> Official:
    """MNIST with 60 + 20 images, at another address."""
    files = tiny_idx()
    packed = {f"{name}.gz": gzip.compress(content, mtime=0) for name, content in files.items()}
    return replace(
        MNIST,
        files={name: md5(content) for name, content in files.items()},
        remotes=tuple(Remote(f"{address}/{name}", md5(c), len(c)) for name, c in packed.items()),
        counts=(TRAIN, TEST),
    )


def tiny_cifar_files() -> dict[str, bytes]:
    return {"data_batch_1.bin": cifar_bytes(30), "data_batch_2.bin": cifar_bytes(30), "test_batch.bin": cifar_bytes(20)}


def tiny_cifar_archive() -> bytes:
    inside = {f"cifar-10-batches-bin/{name}": content for name, content in tiny_cifar_files().items()}
    return tar_bytes({**inside, "cifar-10-batches-bin/readme.html": b"read me", "../outside.bin": b"evil"})


def tiny_cifar(archive: bytes, address: str = "http://127.0.0.1:9") -> Official:
    """CIFAR-10 with 30 + 30 + 20 images, at another address."""
    return replace(
        CIFAR10,
        files={name: md5(content) for name, content in tiny_cifar_files().items()},
        remotes=(Remote(f"{address}/cifar-10-binary.tar.gz", md5(archive), len(archive)),),
        counts=(TRAIN, TEST),
        reader=partial(
            cifar.read_cifar_folder,
            train=("data_batch_1.bin", "data_batch_2.bin"),
            test=("test_batch.bin",),
            label_bytes=1,
        ),
    )


@pytest.fixture
def tiny() -> SimpleNamespace:
    """The makers above, for test modules, which cannot import this one."""
    return SimpleNamespace(
        idx_bytes=idx_bytes,
        idx=tiny_idx,
        cifar_bytes=cifar_bytes,
        md5=md5,
        write=write,
        tar_bytes=tar_bytes,
        mnist=tiny_mnist,
        cifar_files=tiny_cifar_files,
        cifar_archive=tiny_cifar_archive,
        cifar=tiny_cifar,
    )

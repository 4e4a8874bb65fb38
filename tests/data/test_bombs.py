"""Small files that would fill the memory, and damaged ones: refused in one sentence, before anything is allocated."""

import gzip
import io
import os
import socket
import struct
import tracemalloc
import zipfile
import zlib

import numpy as np
import pytest

from enfold.data import download as module
from enfold.data import idx, load
from enfold.data.corruptions import read_cifar_c
from enfold.data.download import Remote, download, download_lock
from enfold.data.official import CIFAR10, CIFAR100, FASHION_MNIST, MNIST
from enfold.errors import EnfoldError

LIMIT = 100 << 20  # bytes that a refusal may take


@pytest.fixture(autouse=True)
def _little_memory():
    tracemalloc.start()
    yield
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < LIMIT


def header(shape, descr="|u1"):
    written = io.BytesIO()
    np.lib.format.write_array_header_1_0(written, {"descr": descr, "fortran_order": False, "shape": shape})
    return written.getvalue()


def archive(path, **entries):
    """An .npz file of proper inputs and labels, and these entries instead or beside them, each as bytes."""
    proper = {"inputs": np.random.default_rng(0).random((40, 4), np.float32), "labels": np.arange(40) % 4}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as made:
        for name, array in proper.items():
            content = io.BytesIO()
            np.save(content, array)
            made.writestr(f"{name}.npy", entries.pop(name, content.getvalue()))
        for name, content in entries.items():
            made.writestr(f"{name}.npy", content)
    return path


def with_claimed_size(path, name, size):
    """The archive, in whose directory the entry has another size."""
    content = bytearray(path.read_bytes())
    at = content.find(b"PK\x01\x02")
    while content[at + 46 : at + 46 + len(name)] != name.encode():
        at = content.find(b"PK\x01\x02", at + 1)
    content[at + 24 : at + 28] = struct.pack("<I", size)
    path.write_bytes(content)
    return path


def test_unused_arrays_are_not_read(tmp_path):
    path = archive(tmp_path / "a.npz", other=header((1 << 60,)))
    assert load(path).num_classes == 4


@pytest.mark.parametrize(
    "inputs",
    [
        header((1 << 60, 4)),
        header((2 << 30,), "<U0"),
        header((10**30, 4)),
        header((3,), "|V0"),
        header((1,), "|O"),
        header((), "<f4") + bytes(4),
        b"\x93NUMPY\x01\x00\x01\x00{",
        b"\x93NUMPY\x01\x00" + struct.pack("<H", 300) + b"[" * 300,
        b"x",
        b"",
    ],
)
def test_headers_that_do_not_match_the_file(tmp_path, inputs):
    with pytest.raises(EnfoldError, match=r"a\.npz|inputs"):
        load(archive(tmp_path / "a.npz", inputs=inputs))


def test_names_without_letters_make_no_classes(tmp_path):
    with pytest.raises(EnfoldError, match="names"):
        load(archive(tmp_path / "a.npz", names=header((2 << 30,), "<U0")))


def test_an_array_out_of_proportion_to_its_file(tmp_path):
    path = with_claimed_size(archive(tmp_path / "a.npz"), "inputs.npy", 3 << 30)
    with pytest.raises(EnfoldError, match="100 times its size"):
        load(path)


def test_an_encrypted_archive_and_a_folder(tmp_path):
    path = archive(tmp_path / "a.npz")
    content = bytearray(path.read_bytes())
    at = content.find(b"PK\x01\x02")
    content[6] |= 1
    content[at + 8] |= 1
    path.write_bytes(content)
    with pytest.raises(EnfoldError, match=r"a\.npz"):
        load(path)


@pytest.mark.parametrize("head", [b"\x93NUMPY\x01\x00\x01\x00{", header((10**30,)), b""])
def test_damaged_files_of_cifar_c(tmp_path, head):
    (tmp_path / "labels.npy").write_bytes(head)
    (tmp_path / "fog.npy").write_bytes(head)
    with pytest.raises(EnfoldError, match=r"labels\.npy"):
        read_cifar_c(tmp_path, "fog", 1)


def bomb(path, start, megabytes):
    with gzip.open(path, "wb", 1) as file:
        file.write(start)
        for _ in range(megabytes):
            file.write(bytes(1 << 20))
    return path


def test_gzipped_files_larger_than_their_header(tmp_path):
    start = bytes((0, 0, 8, 3)) + struct.pack(">III", 600, 28, 28)
    with pytest.raises(EnfoldError, match="got more"):
        idx.read_idx(bomb(tmp_path / "images.gz", start, 150), axes=3)


def test_gzipped_files_with_a_huge_declared_size(tmp_path):
    start = bytes((0, 0, 8, 3)) + struct.pack(">III", 1 << 20, 1 << 10, 1 << 10)
    with pytest.raises(EnfoldError, match="100 times its size"):
        idx.read_idx(bomb(tmp_path / "images.gz", start, 150), axes=3)


def png(width, height):
    def chunk(kind, content):
        checked = kind + content
        return struct.pack(">I", len(content)) + checked + struct.pack(">I", zlib.crc32(checked))

    size = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", size) + chunk(b"IDAT", zlib.compress(bytes(100))) + chunk(b"IEND", b"")


@pytest.mark.parametrize(("side", "memory", "says"), [(60_000, None, "image"), (9_400, 1000, "memory")])
def test_images_with_a_huge_declared_size(tmp_path, side, memory, says, monkeypatch):
    for name in ("a", "b"):
        (tmp_path / "images" / name).mkdir(parents=True)
        (tmp_path / "images" / name / "0.png").write_bytes(png(side, side))
    if memory:
        monkeypatch.setattr(os, "sysconf", lambda name: memory)
    with pytest.raises(EnfoldError, match=says):
        load(tmp_path / "images")


def test_downloads_use_https_only():
    for source in (MNIST, FASHION_MNIST, CIFAR10, CIFAR100):
        assert all(remote.url.startswith("https://") for remote in source.remotes)


@pytest.mark.parametrize("url", ["http://example.org/f.gz", "file:///etc/passwd", "ftp://example.org/f.gz"])
def test_other_addresses_are_not_contacted(tmp_path, url, monkeypatch):
    monkeypatch.setattr(socket, "create_connection", lambda *given: pytest.fail("asked"))
    with pytest.raises(EnfoldError, match="https only"):
        download(Remote(url, "0" * 32, 10), tmp_path / "f.gz", "do it by hand")


def test_an_endless_response_is_cut_off(server, tmp_path, monkeypatch):
    server.files["f.gz"] = bytes(5 << 20)
    received, found = [], module.file_md5
    monkeypatch.setattr(module, "file_md5", lambda path: (received.append(path.stat().st_size), found(path))[1])
    with pytest.raises(EnfoldError, match="MD5"):
        download(Remote(f"{server.address}/f.gz", "0" * 32, 1000), tmp_path / "f.gz", "do it by hand")
    assert not list(tmp_path.glob("f.gz*"))
    assert received == [1001]


def test_downloads_follow_no_symbolic_link(server, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    server.files["f.gz"] = b"content"
    (tmp_path / "f.gz.part").symlink_to(victim)
    remote = Remote(f"{server.address}/f.gz", "9a0364b9e99bb480dd25e1f0284c8555", 7)
    download(remote, tmp_path / "f.gz", "do it by hand")
    assert (tmp_path / "f.gz").read_bytes() == b"content"
    (tmp_path / ".lock").symlink_to(victim)
    with pytest.raises(OSError, match=os.strerror(40)), download_lock(tmp_path):
        pass
    assert victim.read_text() == "mine"

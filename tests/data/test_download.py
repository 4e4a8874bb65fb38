import errno
import hashlib

import pytest

from enfold.data import download as module
from enfold.data.download import Remote, download
from enfold.errors import EnfoldError

CONTENT = bytes(range(256)) * 1200  # 300 kB: several chunks


def remote(server, content=CONTENT, name="file.gz"):
    return Remote(f"{server.address}/{name}", hashlib.md5(content, usedforsecurity=False).hexdigest(), len(content))


@pytest.fixture
def target(tmp_path):
    return tmp_path / "deep" / "file.gz"


def leftovers(target):
    return {path.name for path in target.parent.iterdir()} - {target.name}


def test_the_file_arrives_and_no_part_is_left(server, target, capsys):
    server.files["file.gz"] = CONTENT
    download(remote(server), target, "do it by hand")
    assert target.read_bytes() == CONTENT
    assert not leftovers(target)
    assert capsys.readouterr().out == ""


def test_an_interrupted_download_resumes(server, target):
    server.files["file.gz"] = CONTENT
    target.parent.mkdir()
    target.with_name("file.gz.part").write_bytes(CONTENT[:100_000])
    download(remote(server), target, "do it by hand")
    assert target.read_bytes() == CONTENT
    assert server.requests == [("file.gz", "bytes=100000-")]


def test_broken_connections_are_resumed(server, target):
    server.files["file.gz"] = CONTENT
    server.cut = 80_000
    download(remote(server), target, "do it by hand")
    assert target.read_bytes() == CONTENT
    assert [wanted for _, wanted in server.requests] == [None, "bytes=80000-", "bytes=160000-", "bytes=240000-"]


def test_a_connection_without_data_ends_and_preserves_the_partial_file(server, target):
    server.files["file.gz"] = CONTENT
    server.cut = 0
    target.parent.mkdir()
    target.with_name("file.gz.part").write_bytes(CONTENT[:1000])
    with pytest.raises(EnfoldError, match=r"after 1000 of 307200 bytes.*do it by hand"):
        download(remote(server), target, "do it by hand")
    assert target.with_name("file.gz.part").read_bytes() == CONTENT[:1000]


def test_a_server_without_ranges_restarts_the_download(server, target):
    server.files["file.gz"] = CONTENT
    server.ranges = False
    target.parent.mkdir()
    target.with_name("file.gz.part").write_bytes(CONTENT[:1000])
    download(remote(server), target, "do it by hand")
    assert target.read_bytes() == CONTENT


def test_a_partial_file_that_is_too_large_is_deleted(server, target):
    server.files["file.gz"] = CONTENT
    target.parent.mkdir()
    target.with_name("file.gz.part").write_bytes(b"?" * (len(CONTENT) + 5))
    download(remote(server), target, "do it by hand")
    assert target.read_bytes() == CONTENT
    assert server.requests == [("file.gz", None)]


@pytest.mark.parametrize("size", [1000, len(CONTENT)])
def test_a_partial_file_of_another_download_is_deleted(server, target, size):
    server.files["file.gz"] = CONTENT
    target.parent.mkdir()
    target.with_name("file.gz.part").write_bytes(b"?" * size)
    download(remote(server), target, "do it by hand")
    assert target.read_bytes() == CONTENT
    assert server.requests == [("file.gz", f"bytes={size}-"), ("file.gz", None)]


def test_a_complete_partial_file_is_not_downloaded_again(server, target):
    server.files["file.gz"] = CONTENT
    target.parent.mkdir()
    target.with_name("file.gz.part").write_bytes(CONTENT)
    download(remote(server), target, "do it by hand")
    assert target.read_bytes() == CONTENT
    assert len(server.requests) == 1


def test_a_wrong_checksum_deletes_the_file(server, target):
    server.files["file.gz"] = CONTENT[:-1] + b"!"
    with pytest.raises(EnfoldError, match=r"must have the MD5 .* do it by hand"):
        download(remote(server), target, "do it by hand")
    assert list(target.parent.iterdir()) == []


def test_an_unreachable_server_gives_the_remedy_in_one_sentence(target):
    nobody = Remote("http://127.0.0.1:9/file.gz", "0" * 32, 1)
    with pytest.raises(EnfoldError, match=r"got URLError .*: do it by hand") as caught:
        download(nobody, target, "do it by hand")
    assert "\n" not in str(caught.value)
    assert not target.exists()


def test_a_missing_file_on_the_server_is_named(server, target):
    with pytest.raises(EnfoldError, match=r"file\.gz must be downloaded .* HTTPError \(Not Found\)"):
        download(remote(server), target, "do it by hand")
    assert len(server.requests) == 1


def test_a_slow_server_times_out(server, target, monkeypatch):
    monkeypatch.setattr(module, "RECONNECTIONS", 3)
    server.files["file.gz"] = CONTENT
    server.cut = 10
    with pytest.raises(EnfoldError, match="in 3 connections"):
        download(remote(server), target, "do it by hand")
    assert target.with_name("file.gz.part").stat().st_size == 30


def test_a_full_disk_is_reported(server, target, monkeypatch):
    server.files["file.gz"] = CONTENT

    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, "_stream", full)
    with pytest.raises(EnfoldError, match="No space left on device"):
        download(remote(server), target, "do it by hand")

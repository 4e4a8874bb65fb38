"""Stores: files are complete or absent, in a folder and at addresses of fsspec."""

import pytest

from enfold.errors import EnfoldError, WriteError
from enfold.executors import Store


@pytest.fixture(params=["folder", "file", "memory"])
def store(request, tmp_path):
    return Store({"folder": tmp_path, "file": f"file://{tmp_path}", "memory": f"memory://{tmp_path}"}[request.param])


def test_a_file_is_written_read_and_removed(store):
    assert not store.exists("a")
    with store.write("a") as path:
        path.write_text("first")
    assert store.exists("a")
    with store.write("a") as path:
        path.write_text("second")
    with store.read("a") as path:
        assert path.read_text() == "second"
    store.remove("a")
    store.remove("a")
    assert not store.exists("a")


def test_a_failed_write_leaves_the_earlier_file(store):
    with store.write("a") as path:
        path.write_text("complete")
    with pytest.raises(ZeroDivisionError), store.write("a") as path:
        path.write_text(f"half{1 / 0}")
    with store.read("a") as path:
        assert path.read_text() == "complete"


def test_nothing_is_left_beside_the_files(tmp_path):
    for store in (Store(tmp_path), Store(f"file://{tmp_path}")):
        with store.write("a") as path:
            path.write_text("text")
    assert [file.name for file in tmp_path.iterdir()] == ["a"]


def test_an_unknown_protocol_is_refused():
    with pytest.raises(EnfoldError, match="nosuch://"):
        Store("nosuch://bucket").exists("a")


def test_a_place_that_cannot_be_written_is_one_error(tmp_path):
    (tmp_path / "file").write_text("")
    for address in (tmp_path / "file", f"file://{tmp_path}/file"):
        with pytest.raises(WriteError), Store(address).write("a") as path:
            path.write_text("text")

"""Files are complete or absent; seeds are the same everywhere."""

import errno
import hashlib
import json
import os
import stat

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError

import enfold
from enfold.errors import WriteError
from enfold.io.files import append_line, atomic_path, remove_stale_parts, sha256, write_json, write_text
from enfold.seeds import derive, generator
from fresh import run_python


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_file_appears_when_it_is_complete(tmp_path):
    path = tmp_path / "deep" / "er" / "file.txt"
    with atomic_path(path) as temporary:
        temporary.write_text("new")
        assert temporary.parent == path.parent  # a rename across devices would copy
        assert not path.exists()
    assert path.read_text() == "new"
    assert names(path.parent) == ["file.txt"]


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path):
    write_text(tmp_path / "file", "no folder")
    with pytest.raises(WriteError, match=r"er\.txt' must be written.*: choose"):
        write_text(tmp_path / "file" / "deep" / "er.txt", "lost")


def test_an_exception_preserves_the_old_file(tmp_path):
    path = tmp_path / "file.txt"
    write_text(path, "old")
    with pytest.raises(ZeroDivisionError), atomic_path(path) as temporary:
        temporary.write_text(f"half{1 / 0}")
    assert path.read_text() == "old"
    assert names(tmp_path) == ["file.txt"]


def test_a_block_that_writes_nothing_is_an_error(tmp_path):
    with pytest.raises(WriteError), atomic_path(tmp_path / "file.txt"):
        pass
    assert names(tmp_path) == []


def test_a_killed_process_leaves_the_old_file(tmp_path):
    path = tmp_path / "file.txt"
    write_text(path, "old")
    code = (
        "import os, sys; from pathlib import Path; from enfold.io.files import atomic_path\n"
        "with atomic_path(Path(sys.argv[1])) as temporary:\n"
        "    temporary.write_text('half'); os._exit(9)"
    )
    assert run_python(code, path).returncode == 9
    assert path.read_text() == "old"


def test_files_of_killed_processes_are_removed(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / ".old.json.1234.part").write_text("half")
    with atomic_path(tmp_path / "file.txt") as temporary:
        temporary.write_text("new")
        remove_stale_parts(tmp_path)
        assert temporary.exists()
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["deep", "file.txt"]


def test_a_symbolic_link_is_replaced_and_not_followed(tmp_path):
    victim, link = tmp_path / "victim", tmp_path / "link"
    victim.write_text("mine")
    link.symlink_to(victim)
    with pytest.raises(WriteError, match=r"link' must be written.*symbolic link"):
        append_line(link, "more")
    write_text(link, "new")
    assert victim.read_text() == "mine"
    assert not link.is_symlink()


def test_a_truncated_line_is_terminated(tmp_path):
    (tmp_path / "log").write_text('{"a": 1}\n{"b')
    append_line(tmp_path / "log", '{"c": 3}')
    assert (tmp_path / "log").read_text().splitlines() == ['{"a": 1}', '{"b', '{"c": 3}']


def full(*given, **named):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_one_sentence_and_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "file.txt"
    write_text(path, "old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(WriteError, match=r"file\.txt' must be written.*No space left.*: free some space"):
        write_text(path, "new")
    assert path.read_text() == "old"
    assert names(tmp_path) == ["file.txt"]


def test_a_full_disk_is_recognised_in_the_error_of_safetensors(tmp_path):
    with pytest.raises(WriteError, match="No space left") as refused, atomic_path(tmp_path / "file"):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
    assert refused.value.errno == errno.ENOSPC


def test_files_are_synced_before_they_are_renamed(tmp_path, monkeypatch):
    events = []
    sync, replace = os.fsync, type(tmp_path).replace
    monkeypatch.setattr(os, "fsync", lambda descriptor: (events.append("sync"), sync(descriptor)))
    monkeypatch.setattr(type(tmp_path), "replace", lambda *given: (events.append("rename"), replace(*given)))
    write_text(tmp_path / "file.txt", "text")
    assert events == ["sync", "rename", "sync"]  # the file, its name, the folder


def test_json_is_readable_and_in_order(tmp_path):
    write_json(tmp_path / "a.json", {"b": 1, "a": ["é", None, 0.1]})
    text = (tmp_path / "a.json").read_text(encoding="utf-8")
    assert text.endswith("}\n")
    assert "é" in text
    assert list(json.loads(text)) == ["b", "a"]


@given(content=st.binary(max_size=200))
def test_checksums_are_sha256(content, tmp_path_factory):
    path = tmp_path_factory.mktemp("sum") / "file"
    path.write_bytes(content)
    assert sha256(path) == hashlib.sha256(content).hexdigest()


def test_seeds_are_the_same_on_every_machine():
    assert derive(0, "init", 0) == int(hashlib.sha256(b"0/init/0").hexdigest()[:16], 16) // 2
    assert derive(0, "init", 0) == 7_615_695_542_073_086_227


@given(seed=st.integers(), member=st.integers(0, 1000), other=st.integers(0, 1000))
def test_every_purpose_has_its_own_seed(seed, member, other):
    own = derive(seed, "order", member)
    assert 0 <= own < 2**63  # torch takes no more
    assert (own == derive(seed, "order", other)) == (member == other)
    assert own != derive(seed, "init", member)
    assert own != derive(seed + 1, "order", member)


def test_a_generator_does_not_affect_the_global_one():
    state = torch.get_rng_state()
    draws = torch.rand(3, generator=generator(1, "noise", 2))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(draws, torch.rand(3, generator=torch.Generator().manual_seed(derive(1, "noise", 2))))


@pytest.mark.skipif(os.name != "posix", reason="permissions of a POSIX system")
def test_stored_files_are_readable_by_others(tmp_path):
    file = enfold.save(torch.nn.Linear(2, 2), tmp_path / "network.safetensors")
    assert stat.S_IMODE(file.stat().st_mode) == stat.S_IMODE(file.with_suffix(".json").stat().st_mode)

"""One process at a time writes to a run; the second is refused, and what a killed one left is recognised."""

import json
import os
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from enfold.errors import EnfoldError, LockWarning
from enfold.run import RunDirectory, add_step, execute, lock
from enfold.run.lock import FILE, Holder, writing


@contextmanager
def held(folder: Path) -> Iterator[int]:
    """Another process that writes to the folder until it is killed; its id."""
    reading, written = os.pipe()
    child = os.fork()
    if not child:
        with writing(folder):
            os.write(written, b"held")
            time.sleep(60)
        os._exit(0)
    os.close(written)
    assert os.read(reading, 4) == b"held"
    os.close(reading)
    try:
        yield child
    finally:
        killed(child)


def killed(process: int) -> None:
    with suppress(ProcessLookupError, ChildProcessError):
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


def left(folder: Path, age: float = 0.0, **changes: object) -> None:
    """A lock's file of a process that the kernel knows nothing of any more."""
    holder = {**vars(Holder.current()), **changes}
    (folder / FILE).write_text(json.dumps(holder))
    os.utime(folder / FILE, (time.time() - age,) * 2)


def test_a_locked_run_refuses_writers_only(enfold, finished, recipe_file):
    before = {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()}
    enfold("--version")  # what was printed before is none of ours
    with held(finished) as other:
        for words in (
            ["run", recipe_file, finished, "--resume"],
            ["merge", finished, "average", "--label", "other"],
            ["train", finished, "batch_ensemble"],
            ["evaluate", finished],
            ["drop", finished, "average"],
            ["analyse", "alignment", finished],
            ["analyse", "landscape", finished],
        ):
            done = enfold(*words)
            assert (done.code, done.err.count("\n"), done.out) == (2, 1, ""), done.err
            assert f"process {other} on " in done.err
        for words in (["report", finished], ["report", "--card", finished]):
            assert enfold(*words).code == 0
    changed = {path for path, content in before.items() if path.read_bytes() != content}
    assert changed == set()


def test_a_killed_writer_releases_the_lock(enfold, finished):
    with held(finished) as other:
        killed(other)
        assert (finished / FILE).is_file()
        assert enfold("evaluate", finished).code == 0
    assert not (finished / FILE).exists(), "what is over leaves nothing"


@pytest.mark.slow
def test_a_run_is_refused_before_a_second_one_is_made_in_its_folder(enfold, recipe_file, tmp_path):
    with held(tmp_path / "out"):
        done = enfold("run", recipe_file, tmp_path / "out")
        assert (done.code, done.err.count("\n")) == (2, 1)
    assert [path.name for path in (tmp_path / "out").iterdir()] == [FILE]
    assert enfold("run", recipe_file, tmp_path / "out").code == 0


def test_the_lock_applies_to_python_programs(finished):
    run = RunDirectory.open(finished)
    with held(finished):
        with pytest.raises(EnfoldError, match="one process at a time"):
            execute(run, run.recipe())
        with pytest.raises(EnfoldError, match="one process at a time"):
            add_step(run, {"method": "average", "label": "other"})


def test_a_thread_enters_again_and_another_is_refused(tmp_path):
    refused: list[EnfoldError] = []

    def enter() -> None:
        try:
            with writing(tmp_path):
                pass
        except EnfoldError as error:
            refused.append(error)

    with writing(tmp_path), writing(tmp_path / "." / "x" / ".."):
        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
    assert len(refused) == 1
    enter()
    assert len(refused) == 1
    assert not (tmp_path / FILE).exists()


def test_a_forked_child_does_not_hold_the_lock(tmp_path):
    """A loader's worker may live a little longer than the process that was killed."""
    with writing(tmp_path):
        reading, written = os.pipe()
        child = os.fork()
        if not child:
            os.close(written)
            os.read(reading, 1)
            os._exit(0)
    with writing(tmp_path):
        assert json.loads((tmp_path / FILE).read_text())["pid"] == os.getpid()
    os.close(reading)
    os.close(written)
    os.waitpid(child, 0)


OTHERS = {  # what the file says, its age, whether the kernel has locks -> whether the holder counts as gone
    "killed": ({}, 0, True, True),
    "killed, in another container": ({"namespace": "pid:[1]", "host": "container"}, 0, True, True),
    "another machine, alive": ({"boot": "other", "host": "other"}, 5, True, False),
    "another machine, alive, of the same name": ({"boot": "other"}, 5, True, False),
    "another machine, silent": ({"boot": "other", "host": "other"}, 1000, True, True),
    "alive, no locks": ({}, 1000, None, False),
    "another process with that id, no locks": ({"started": "1"}, 0, None, True),
    "ended, no locks": ({"pid": 2**22 + 1, "started": "1"}, 0, None, True),
    "another container with that id, no locks": ({"namespace": "pid:[1]", "started": "1"}, 5, None, False),
    "another container, silent, no locks": ({"namespace": "pid:[1]"}, 1000, None, True),
}


@pytest.mark.filterwarnings("ignore::enfold.errors.LockWarning")
@pytest.mark.parametrize(("changes", "age", "kernel", "gone"), OTHERS.values(), ids=OTHERS)
def test_detection_of_ended_processes(tmp_path, monkeypatch, changes, age, kernel, gone):
    monkeypatch.setattr(lock, "_try_lock", lambda descriptor: kernel)
    monkeypatch.setattr(lock, "SETTLE", 0.0)
    left(tmp_path, age, **changes)
    if gone:
        with writing(tmp_path):
            assert json.loads((tmp_path / FILE).read_text())["pid"] == os.getpid()
        assert not (tmp_path / FILE).exists()
    else:
        before = (tmp_path / FILE).read_text()
        with pytest.raises(EnfoldError, match="is writing to"), writing(tmp_path):
            pass
        assert (tmp_path / FILE).read_text() == before


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 1}'])
def test_a_truncated_lock_file_has_no_holder(tmp_path, text):
    (tmp_path / FILE).write_text(text)
    with writing(tmp_path):
        assert json.loads((tmp_path / FILE).read_text())["pid"] == os.getpid()
    assert not (tmp_path / FILE).exists()


def test_a_writer_gives_signs_of_life(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "BEAT", 0.01)
    with writing(tmp_path):
        os.utime(tmp_path / FILE, (0, 0))
        limit = time.monotonic() + 5
        while (tmp_path / FILE).stat().st_mtime == 0 and time.monotonic() < limit:
            time.sleep(0.01)
        assert (tmp_path / FILE).stat().st_mtime > 0


def test_an_unwritable_folder_is_one_sentence(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(EnfoldError, match="writable folder"), writing(tmp_path / "file"):
        pass
    (tmp_path / FILE).symlink_to(tmp_path / "file")
    with pytest.raises(EnfoldError, match="writable folder"), writing(tmp_path):
        pass
    assert (tmp_path / "file").read_text() == ""


@pytest.mark.parametrize("ahead", [-100_000, 100_000])
def test_the_clock_of_another_machine_may_differ(tmp_path, monkeypatch, ahead):
    """Of a living holder, with a clock that is wrong by a day here."""
    left(tmp_path, 5, boot="other", host="other")
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + ahead)
    says = r"process .* on other .*last sign of life, which was 5 s ago"
    with pytest.raises(EnfoldError, match=says), writing(tmp_path):
        pass


def host(number: int, folder: Path, go: Path, kernel: bool | None) -> int:
    """A process on a machine of its own, whose kernel knows nothing of the locks of others; its id."""
    child = os.fork()
    if child:
        return child
    code = 9
    try:
        warnings.simplefilter("ignore")
        own = Holder(f"host-{number}", f"boot-{number}", "", number, "1", "")
        lock.Holder.current = classmethod(lambda cls: own)
        lock._try_lock = lambda descriptor: kernel
        lock._is_local = lambda folder: False
        lock.SETTLE = 0.5
        while not go.exists():
            time.sleep(0.001)
        try:
            with writing(folder):
                with (folder / "writers").open("a") as file:
                    file.write(f"{number}\n")
                time.sleep(2)
            code = 0
        except EnfoldError as error:
            code = 1 if "is writing to" in str(error) else 8
    finally:
        os._exit(code)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [None, True], ids=["no locks", "locks of one machine"])
def test_of_several_machines_that_start_at_once_one_writes(tmp_path, kernel):
    folder, go = tmp_path / "run", tmp_path / "go"
    folder.mkdir()
    children = [host(number, folder, go, kernel) for number in range(6)]
    go.touch()
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert sorted(codes) == [0, 1, 1, 1, 1, 1]
    assert (folder / "writers").read_text() == f"{codes.index(0)}\n"
    assert not (folder / FILE).exists()


def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "_try_lock", lambda descriptor: None)
    monkeypatch.setattr(lock, "SETTLE", 0.0)
    with pytest.warns(LockWarning, match="has no locks: another process is recognized"), writing(tmp_path):
        pass


MOUNTS = """\
server:/home / nfs4 rw 0 0
/dev/sda1 /data ext4 rw 0 0
lustre@tcp /data/shared lustre rw 0 0
tmpfs /data/with\\040space tmpfs rw 0 0
"""


@pytest.mark.parametrize(
    ("place", "local"),
    [
        ("/x", False),
        ("/data/run", True),
        ("/data/shared/run", False),
        ("/data/with space/run", True),
        ("/database", False),
    ],
)
def test_network_file_systems_are_recognized(monkeypatch, place, local):
    monkeypatch.setattr(lock, "_read", lambda file: MOUNTS)
    assert lock._is_local(Path(place)) == local
    monkeypatch.setattr(lock, "_read", lambda file: "")
    assert lock._is_local(Path(place))

"""What goes wrong around a run: full disks, folders that are read-only, protected or gone, signals, hostile text."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from itertools import count
from pathlib import Path

import pytest
from safetensors.torch import load_file

import enfold.train.loop as loop

ROOT = os.geteuid() == 0 if hasattr(os, "geteuid") else False


def full(*given, **named):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def parts(folder: Path) -> list[Path]:
    return list(folder.rglob("*.part"))


def test_a_full_disk_is_one_sentence_and_the_run_resumes(enfold, recipe_file, finished, tmp_path, monkeypatch):
    out, left = tmp_path / "filled", [9]
    sync = os.fsync

    def filling(descriptor):
        left[0] -= 1
        return sync(descriptor) if left[0] > 0 else full()

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", filling)
        done = enfold("run", recipe_file, out)
    assert done.code == 1
    assert done.err.splitlines()[-1].startswith("enfold: '")
    assert "No space left on device" in done.err.splitlines()[-1]
    assert "Traceback" not in done.err
    assert not parts(out)
    assert enfold("run", recipe_file, out, "--resume").code == 0
    rows = [json.loads((run / "results.json").read_text())["rows"] for run in (finished, out)]
    assert rows[0] == rows[1]


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="the system reserves no space")
def test_a_disk_that_is_full_while_teacher_outputs_are_recorded(enfold, finished, monkeypatch):
    shutil.rmtree(finished / "teacher-logits")
    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        done = enfold("distill", finished, "kd", "--label", "later")
    assert done.code == 1
    assert "No space left on device" in done.err
    assert not parts(finished)
    assert "later" in (finished / "recipe.yaml").read_text()  # interrupted, not refused
    assert enfold("distill", finished, "kd", "--label", "later").code == 0


@pytest.fixture
def small_disk(tmp_path: Path):
    """A file system of 1 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["/bin/mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("file systems cannot be mounted here")
    yield disk
    subprocess.run(["/bin/umount", disk], check=False)


@pytest.mark.slow
@pytest.mark.skipif(not ROOT, reason="needs to mount a file system")
def test_a_full_disk_gives_no_bus_error(small_disk, finished):
    """In a process of its own, which a mapped file would end by a signal."""
    out = small_disk / "out"
    shutil.copytree(finished, out, ignore=shutil.ignore_patterns("teacher-logits"))
    room = shutil.disk_usage(small_disk).free
    (small_disk / "filler").write_bytes(bytes(max(room - 12_000, 0)))
    code = "import sys; from enfold.cli import main; sys.argv = sys.argv[1:]; main()"
    words = [sys.executable, "-c", code, "enfold", "fold", str(out), "kd", "--label", "later"]
    done = subprocess.run(
        words, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False
    )
    assert done.returncode == 1, done.stderr
    assert "teacher-logits" in done.stderr
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr
    assert not parts(out)


@pytest.mark.skipif(ROOT, reason="nothing is forbidden to root")
def test_a_folder_that_may_not_be_written(enfold, recipe_file, tmp_path):
    (tmp_path / "mine").mkdir(mode=0o500)
    done = enfold("run", recipe_file, tmp_path / "mine" / "out")
    assert (done.code, "Permission denied" in done.err) == (1, True)


def refused(number):
    def refuse(*given, **named):
        raise OSError(number, os.strerror(number))

    return refuse


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.EDQUOT])
def test_operating_system_errors_are_one_sentence(enfold, recipe_file, tmp_path, monkeypatch, number):
    monkeypatch.setattr(Path, "replace", refused(number))
    done = enfold("run", recipe_file, tmp_path / "out")
    assert done.code == 1
    assert os.strerror(number) in done.err
    assert len(done.err.splitlines()) == 1
    assert not parts(tmp_path)


@pytest.mark.parametrize("raised", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: 8 bytes")])
def test_too_little_memory_is_one_sentence(enfold, recipe_file, tmp_path, monkeypatch, raised):
    def short(*given):
        raise raised

    monkeypatch.setattr(loop, "backward", short)
    done = enfold("run", recipe_file, tmp_path / "out")
    assert done.code == 1
    assert "must fit into memory" in done.err.splitlines()[-1]
    assert "Traceback" not in done.err


@pytest.fixture
def read_only(finished, monkeypatch):
    """A finished run in which nothing can be written, made or removed."""
    opened, unlinked = os.open, Path.unlink

    def inside(path) -> bool:
        return str(path).startswith(str(finished))

    def only_read(path, flags, *given, **named):
        if inside(path) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)
        return opened(path, flags, *given, **named)

    def keep(path, missing_ok=False):
        if inside(path):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        unlinked(path, missing_ok)

    monkeypatch.setattr(os, "open", only_read)
    monkeypatch.setattr(Path, "unlink", keep)
    return finished


@pytest.mark.slow
def test_a_finished_run_that_is_read_only_can_be_analysed(enfold, read_only, tmp_path):
    for words in (
        ("analyse", "landscape", read_only, "--only", "similarity", "--out", tmp_path / "landscape"),
        ("report", read_only, "--out", tmp_path / "report.html"),
        ("report", "--card", read_only, "--out", tmp_path / "card.md"),
    ):
        done = enfold(*words)
        assert done.code == 0, done.err


def test_a_run_stops_if_its_folder_is_removed(enfold, recipe_file, tmp_path, monkeypatch):
    out, save, number = tmp_path / "out", loop.save_checkpoint, [0]

    def removed(*given):
        save(*given)
        number[0] += 1
        if number[0] == 1:
            shutil.rmtree(out)

    monkeypatch.setattr(loop, "save_checkpoint", removed)
    done = enfold("run", recipe_file, out)
    assert done.code in (1, 2)
    assert len(done.err.splitlines()[-1:]) == 1
    assert "Traceback" not in done.err
    assert not out.exists()


@pytest.mark.slow
def test_the_history_survives_a_kill_after_the_manifest(enfold, recipe_file, tmp_path, monkeypatch):
    out, replace = tmp_path / "out", Path.replace

    def killed(path, target):
        done = replace(path, target)
        if str(target).endswith("steps/distill-fresh.json") and "histories" not in str(target):
            raise KeyboardInterrupt
        return done

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", killed)
        assert enfold("run", recipe_file, out).code == 130
    assert enfold("run", recipe_file, out, "--resume").code == 0
    assert (out / "histories" / "steps" / "distill-fresh.json").is_file()


def test_files_of_killed_processes_are_removed_on_resume(enfold, recipe_file, finished):
    for folder in ("", "steps", "teacher-logits"):
        (finished / folder / ".left.safetensors.77.part").write_bytes(b"half")
    assert enfold("run", recipe_file, finished, "--resume").code == 0
    assert not parts(finished)


def test_writing_follows_no_symbolic_link(enfold, finished, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (finished / "log.jsonl").unlink()
    (finished / "log.jsonl").symlink_to(victim)
    done = enfold("merge", finished, "average", "--label", "second")
    assert (done.code, "log.jsonl" in done.err) == (1, True)
    (finished / "log.jsonl").unlink()
    shutil.move(finished / "predictions", tmp_path / "elsewhere")
    (finished / "predictions").symlink_to(tmp_path / "elsewhere")
    done = enfold("evaluate", finished)
    assert (done.code, "predictions" in done.err) == (2, True)
    assert victim.read_text() == "mine"


@pytest.mark.slow
@pytest.mark.parametrize("label", ["x" * 260, "x" * 101])
def test_a_label_too_long_for_a_file_is_refused_before_anything_is_written(enfold, finished, label):
    before = (finished / "recipe.yaml").read_text()
    done = enfold("merge", finished, "average", "--label", label)
    assert (done.code, "label" in done.err) == (2, True)
    assert (finished / "recipe.yaml").read_text() == before
    assert enfold("merge", finished, "average", "--label", "x" * 100).code == 0


SIGNALS = [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)]


@pytest.fixture(autouse=True)
def signals_are_not_ignored():
    """A shell ignores hangups under nohup, and interrupts of its background jobs: processes inherit both."""
    hangup = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGHUP, hangup)
    signal.signal(signal.SIGINT, interrupt)


def at_step(monkeypatch, number, action):
    """Do something in the training step of that number."""
    step, left = loop.Fit._step, [number]

    def acted(*given):
        left[0] -= 1
        if not left[0]:
            action()
        return step(*given)

    monkeypatch.setattr(loop.Fit, "_step", acted)


@pytest.mark.parametrize(("number", "code"), SIGNALS)
def test_signals_stop_a_run_after_its_batch(enfold, recipe_file, finished, tmp_path, monkeypatch, number, code):
    """In the first epoch; the page of the run can be drawn then, and the run ends as one that was not stopped."""
    out, before = tmp_path / "stopped", signal.getsignal(number)
    with monkeypatch.context() as patched:
        at_step(patched, 3, lambda: os.kill(os.getpid(), number))
        done = enfold("run", recipe_file, out)
    assert done.code == code
    assert f"continue with  enfold run {recipe_file} {out} --resume" in done.err
    assert load_file(out / "members" / "members.checkpoint.safetensors")["place/sizes"].shape == (3,)
    assert not parts(tmp_path)
    assert signal.getsignal(number) == before
    assert enfold("report", out).code == 0
    assert enfold("run", recipe_file, out, "--resume").code == 0
    rows = [json.loads((run / "results.json").read_text())["rows"] for run in (finished, out)]
    assert rows[0] == rows[1]


def test_a_second_signal_stops_at_once(enfold, recipe_file, tmp_path, monkeypatch):
    def twice():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("the step goes on")

    with monkeypatch.context() as patched:
        at_step(patched, 3, twice)
        done = enfold("run", recipe_file, tmp_path / "out")
    assert done.code == 130
    assert not list((tmp_path / "out").rglob("*.checkpoint.safetensors"))


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), SIGNALS)
def test_signals_between_trainings_stop_at_once(enfold, recipe_file, tmp_path, monkeypatch, number, code):
    def signalled(*given, **named):
        os.kill(os.getpid(), number)
        time.sleep(1)

    with monkeypatch.context() as patched:
        patched.setattr(sys.modules["enfold.run.execute"], "evaluate_seed", signalled)
        done = enfold("run", recipe_file, tmp_path / "out")
    assert done.code == code
    assert "--resume" in done.err


def test_resuming_names_another_environment(enfold, recipe_file, finished):
    manifest = json.loads((finished / "run.json").read_text())
    assert manifest["environment"]["threads"]
    manifest["environment"]["threads"] = "77"
    (finished / "run.json").write_text(json.dumps(manifest))
    done = enfold("run", recipe_file, finished, "--resume")
    assert (done.code, "threads (77, now " in done.err, "OMP_NUM_THREADS=77" in done.err) == (0, True, True)
    assert '"resumed"' in (finished / "log.jsonl").read_text()


@pytest.mark.slow
def test_a_clock_that_runs_backwards_changes_no_result(enfold, recipe_file, finished, tmp_path, monkeypatch):
    """Neither of the system, nor the one that measures times."""
    ticks = count()
    for name in ("time", "perf_counter"):
        monkeypatch.setattr(time, name, lambda: 1e9 - 10.0 * next(ticks))
    out = tmp_path / "backwards"
    done = enfold("run", recipe_file, out)
    assert done.code == 0, done.err
    assert enfold("run", recipe_file, out, "--resume").code == 0
    assert enfold("report", out).code == 0
    rows = [json.loads((run / "results.json").read_text())["rows"] for run in (finished, out)]
    assert rows[0] == rows[1]


def test_ignored_signals_remain_ignored(enfold):
    """As nohup has it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert enfold("doctor").code == 0
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


HOSTILE = ["[/x]", "[bold red]x", "\x1b]0;title\x07\x1b[2J", "\x9b2J", "a\rb", "\u202eright to left"]


@pytest.mark.slow
@pytest.mark.parametrize("text", HOSTILE)
def test_user_text_is_printed_literally(enfold, finished, text):
    """As the name of a run, as a warning that a received run holds, and in what goes wrong."""
    recipe = finished / "recipe.yaml"
    lines = [line for line in recipe.read_text().splitlines() if not line.startswith("name:")]
    recipe.write_text("\n".join([f"name: {json.dumps(text)}", *lines]) + "\n")
    results = json.loads((finished / "results.json").read_text())
    results["rows"]["average"]["warning"] = text
    (finished / "results.json").write_text(json.dumps(results))
    shown, as_json = enfold("evaluate", finished), enfold("evaluate", finished, "--json")
    for done in (shown, as_json):
        assert "Traceback" not in done.err
        assert not set("\x1b\x07\x9b\r\u202e") & set(done.out + done.err)
    assert text in shown.out if text.isascii() and text.isprintable() else "\\u" in shown.out


def test_doctor_shows_the_complete_install_command(enfold, monkeypatch):
    monkeypatch.setattr("enfold.cli.listings.PACKAGES", (("no-such-package", "report", "nothing"),))
    assert "pip install 'enfold[report]'" in enfold("doctor").out


def test_progress_titles_are_printed_literally(monkeypatch, capsys):
    from enfold.progress import progress

    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress("[/x]\x1b[2J", 1) as bar:
        bar.advance(1)
        bar.say("[/y]")
    printed = capsys.readouterr().err
    assert "[/x]" in printed
    assert "\x1b[2J" not in printed

"""Readers beside writers: a report of a run at any moment is of whole files."""

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from enfold.cli import main
from enfold.run import RunDirectory, directory
from enfold.run.collect import collect
from enfold.run.watch import Live


@contextmanager
def beside(work: Callable[[], object]) -> Iterator[Callable[[], bool]]:
    """A process that does some work; whether it is still at it."""
    child = os.fork()
    if not child:
        code = 1
        try:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            os.dup2(null, 2)
            work()
            code = 0
        except SystemExit as stopped:
            code = int(stopped.code or 0)
        finally:
            os._exit(code)
    ended: list[int] = []

    def is_running() -> bool:
        if not ended:
            done, status = os.waitpid(child, os.WNOHANG)
            ended.extend([os.waitstatus_to_exitcode(status)] if done else [])
        return not ended

    try:
        yield is_running
        assert ended in ([], [0])
    finally:
        if is_running():
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


@pytest.mark.slow
def test_readers_never_see_half_a_file(finished):
    """While every file that a report reads is written again and again."""
    run = RunDirectory.open(finished)
    recipe, files = run.recipe(), {name: run.read_json(name) for name in ("summary.json", "results.json", "run.json")}
    stored = {label: run.read_predictions(label) for label in ("ensemble", "average", "distill-fresh")}
    padding = {"padding": ["x" * 100] * 2000}  # for several writes of the system

    def write() -> None:
        for number in range(10**9):
            for name, content in files.items():
                run.write_json(name, content | (padding if number % 2 else {}))
            for label, parts in stored.items():
                run.write_predictions(label, parts)
            run.write_recipe(recipe)
            run.log("again", **padding)

    with beside(write) as is_running:
        until, seen = time.monotonic() + 3, 0
        while time.monotonic() < until or seen < 20:
            assert collect(finished).summary["rows"].keys() == files["summary.json"]["rows"].keys()
            for name in files:
                assert files[name].items() <= json.loads((finished / name).read_text()).items()
            seen += 1
            assert is_running()


def enfold(*words: object) -> Callable[[], None]:
    def call() -> None:
        sys.argv = ["enfold", *map(str, words)]
        main()

    return call


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["run", "drop", "distill"])
def test_a_run_in_progress_can_be_read_at_any_moment(recipe_file, finished, tmp_path, verb, monkeypatch):
    """From its first file to the last, by what `enfold report` and `enfold watch` do."""
    out = tmp_path / "live" if verb == "run" else finished
    words = {"run": (recipe_file, out), "drop": (out, "distill-fresh"), "distill": (out, "kd", "--label", "other")}
    refused: list[str] = []
    monkeypatch.setattr("enfold.run.watch.render_page", lambda contents, live: f"page {len(contents)}")
    monkeypatch.setattr("enfold.run.watch.render_error_page", lambda text, live: refused.append(text) or "error")
    with beside(enfold(verb, *words[verb])) as is_running:
        seen = 0
        while is_running() or not seen:
            if (out / "run.json").is_file() and (out / "recipe.yaml").is_file():
                Live(out).page()
                collect(out)
                seen += 1
    assert refused == []
    assert seen


def test_a_folder_that_is_removed_while_it_is_read_is_one_sentence(finished, tmp_path):
    page = Live(finished)
    shutil.move(finished, tmp_path / "elsewhere")
    assert "must contain run.json" in page.page()


def test_a_file_that_vanishes_while_it_is_read_is_missing(finished, monkeypatch):
    run = RunDirectory.open(finished)
    opened = directory.safe_open

    def gone(path, framework):
        path.unlink()
        return opened(path, framework)

    monkeypatch.setattr(directory, "safe_open", gone)
    assert run.read_predictions("average") is None

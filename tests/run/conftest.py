"""A small data set on disk, a recipe for it, finished runs of it, and the command line in this process."""

import contextlib
import io
import shutil
import sys
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import numpy as np
import pytest

import enfold.train.loop as loop
from enfold.cli import main

RECIPE = """\
name: small
data: {source: DATA, val_size: 60}
network: {name: mlp, widths: [16]}
members: 3
sizes: [2, 3]
cost: false
train: {epochs: 3, batch_size: 32, lr: 0.01}
steps:
  - average
  - {method: kd, label: distill-fresh, init: random}
"""


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


def write_data(path: Path) -> Path:
    """Four classes of noisy 4 x 4 images."""
    rng = np.random.default_rng(0)
    labels = rng.integers(4, size=400)
    centres = rng.integers(0, 200, size=(4, 1, 4, 4))
    images = (centres[labels] + rng.integers(0, 55, size=(400, 1, 4, 4))).astype(np.uint8)
    np.savez(path, x_train=images[:300], y_train=labels[:300], x_test=images[300:], y_test=labels[300:])
    return path


@pytest.fixture
def small_data(tmp_path: Path) -> Path:
    """The data, which a test may change."""
    return write_data(tmp_path / "small.npz")


@pytest.fixture
def recipe_file(tmp_path: Path, small_data: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(RECIPE.replace("DATA", str(small_data)))
    return path


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory):
    """Finished runs of the recipe, each made once: by whether costs were measured."""
    folder = tmp_path_factory.mktemp("finished")
    data, recipe = write_data(folder / "small.npz"), folder / "small.yaml"
    recipe.write_text(RECIPE.replace("DATA", str(data)))

    def finished(cost: bool) -> Path:
        out = folder / f"cost-{cost}".lower()
        if not out.exists():
            with pytest.MonkeyPatch.context() as patched, contextlib.redirect_stdout(io.StringIO()):
                patched.setattr("enfold.cost._synchronised_clock", ticking(0.004))
                words = ["run", str(recipe), str(out), "--set", f"cost={cost}".lower()]
                patched.setattr(sys, "argv", ["enfold", *words])
                with contextlib.suppress(SystemExit):
                    main()
        return out

    return finished


def ticking(seconds: float):
    """A clock by which every call takes a fixed time."""
    ticks = count()
    return lambda: seconds * next(ticks)


def taken(run: Path, tmp_path: Path, data: Path) -> Path:
    """A copy of a run for one test, about that test's own copy of the data."""
    out = tmp_path / "out"
    shutil.copytree(run, out)
    recipe = out / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace(str(run.parent / "small.npz"), str(data)))
    return out


@pytest.fixture
def finished(runs, tmp_path: Path, small_data: Path) -> Path:
    """`enfold run` of the recipe, done."""
    return taken(runs(cost=False), tmp_path, small_data)


@pytest.fixture
def costed(runs, tmp_path: Path, small_data: Path) -> Path:
    """The same with costs measured."""
    return taken(runs(cost=True), tmp_path, small_data)


@pytest.fixture
def enfold(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Run the command line and return its exit code and what it printed."""

    def call(*arguments: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["enfold", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            main()
        printed = capsys.readouterr()
        return Outcome(int(stopped.value.code or 0), printed.out, printed.err)

    return call


@pytest.fixture
def interrupted(enfold, monkeypatch):
    """Run the command line and stop it by Ctrl-C at the checkpoint of that number."""

    def call(number: int, *arguments: object) -> None:
        left, save = [number], loop.save_checkpoint

        def stop(*given: object) -> None:
            left[0] -= 1
            if not left[0]:
                raise KeyboardInterrupt
            save(*given)

        with monkeypatch.context() as patched:
            patched.setattr(loop, "save_checkpoint", stop)
            assert enfold(*arguments).code == 130

    return call

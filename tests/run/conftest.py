"""A small data set on disk, a recipe for it, and the command line in this process."""

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from enfold.cli import main

RECIPE = """\
name: small
data: {source: DATA, validation: 60}
network: {name: mlp, widths: [16]}
members: 3
sizes: [2, 3]
cost: false
plan: {epochs: 3, batch_size: 32, learning_rate: 0.01}
folds:
  - average
  - {method: distill, label: distill-fresh, start: fresh}
"""


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


@pytest.fixture
def small_data(tmp_path: Path) -> Path:
    """Four classes of noisy 4 x 4 images."""
    rng = np.random.default_rng(0)
    labels = rng.integers(4, size=400)
    centres = rng.integers(0, 200, size=(4, 1, 4, 4))
    images = (centres[labels] + rng.integers(0, 55, size=(400, 1, 4, 4))).astype(np.uint8)
    path = tmp_path / "small.npz"
    np.savez(path, x_train=images[:300], y_train=labels[:300], x_test=images[300:], y_test=labels[300:])
    return path


@pytest.fixture
def recipe_file(tmp_path: Path, small_data: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(RECIPE.replace("DATA", str(small_data)))
    return path


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

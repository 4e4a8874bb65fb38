"""A small run on disk, with models that were never trained: their predictions are made up."""

import shutil
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from enfold.metrics.predictions import Predictions
from enfold.report import curves, sections, uncertainty_blocks
from enfold.report.svg import draw_svg
from enfold.run import RunDirectory
from enfold.run.execute import seed_runs
from enfold.run.recipe import make_recipe
from enfold.run.results import evaluate_seed, summarise
from enfold.run.seed_run import SeedRun
from enfold.saving import versions

CLASSES, TEST, VALIDATION = 4, 150, 120
SHARPNESS = {"ensemble": 1.6, "control": 1.5, "average": 0.4, "kd": 2.2}


def images(folder: Path) -> Path:
    """Noisy 4 x 4 images with three channels."""
    rng = np.random.default_rng(0)
    labels = rng.integers(CLASSES, size=300 + TEST)
    pixels = rng.integers(0, 255, size=(300 + TEST, 3, 4, 4)).astype(np.uint8)
    path = folder / "small.npz"
    np.savez(path, x_train=pixels[:300], y_train=labels[:300], x_test=pixels[300:], y_test=labels[300:])
    return path


def _predictions(labels: torch.Tensor, members: int, sharpness: float, seed: int) -> Predictions:
    """Predictions that are right more often the sharper they are."""
    rng = torch.Generator().manual_seed(seed)
    logits = torch.randn(members, len(labels), CLASSES, generator=rng)
    logits += sharpness * nn.functional.one_hot(labels, CLASSES)
    return Predictions.from_logits(logits, labels)


def _cost(ratio: float) -> dict[str, Any]:
    seconds = {batch: {"median": 1e-3, "lower": 9e-4, "upper": 2e-3, "p95": 2e-3} for batch in ("1", "128")}
    ratios = {"flops": ratio, "parameters": ratio, "bytes": ratio, "latency": {"1": ratio, "128": ratio}}
    return {"parameters": 1000, "bytes": 4000, "flops": 2e6 * ratio, "latency": seconds, "ratios": ratios}


def _write_predictions(seed_run: SeedRun) -> None:
    """Predictions of every model, and the files of a model."""
    test, validation = seed_run.data.test.labels, seed_run.data.val.labels
    for number, (label, sharpness) in enumerate(SHARPNESS.items()):
        members, seed = 3 if label == "ensemble" else 1, 100 * seed_run.seed + number
        parts = {
            "test": _predictions(test, members, sharpness, seed),
            "validation": _predictions(validation, members, sharpness, seed + 50),
        }
        seed_run.run.write_predictions(label, parts)
        kind = {"ensemble": "members/members", "control": "controls/control"}.get(label, f"steps/{label}")
        file = seed_run.run.path / f"{kind}.safetensors"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch(), file.with_suffix(".json").write_text("{}")
        seed_run.run.log("started", stage=kind, seed=seed_run.seed)
        seed_run.run.log("finished", stage=kind, seed=seed_run.seed, seconds=12.5)


def _write_history(seed_run: SeedRun) -> None:
    epochs = [
        {
            "epoch": number,
            "train_loss": [1.0 / (number + 1)] * 3,
            "validation_loss": [1.2 / (number + 1)] * 3,
            "validation_score": [0.6] * 3,
            "ensemble_loss": 1.0 / (number + 1),
            "lr": 0.1,
            "seconds": 2.0,
            "steps": 5,
        }
        for number in range(3)
    ]
    seed_run.run.write_json("members/history.json", {"epochs": epochs, "chosen": [3, 3, 3]})


def write_run(path: Path, data: Path, seeds: tuple[int, ...] = (0, 1), **changes: Any) -> Path:
    """A finished run of three members, two steps and a control."""
    content = {
        "name": "small",
        "data": {"source": str(data), "val_size": VALIDATION},
        "network": {"name": "mlp", "widths": [8]},
        "members": 3,
        "sizes": [2],
        "seeds": list(seeds),
        "train": {"epochs": 3},
        "steps": ["average", {"method": "kd", "label": "kd"}],
        **changes,
    }
    recipe = make_recipe(content, "the test")
    run = RunDirectory.create(path, recipe)
    results = []
    for seed_run in seed_runs(run, recipe):
        _write_predictions(seed_run)
        _write_history(seed_run)
        costs = {each: _cost(1.0) for each in ("mean member", *SHARPNESS)}
        seed_run.run.write_json("cost.json", {**costs, "ensemble": _cost(3.0)})
        results.append(evaluate_seed(seed_run, {label: nn.Identity() for label in SHARPNESS}))
    summary = {
        "name": recipe.name,
        "date": time.strftime("%Y-%m-%d"),
        "seeds": list(seeds),
        "versions": versions(),
        "recipe": recipe.model_dump(mode="json"),
        "rows": summarise(results),
    }
    run.write_json("summary.json", summary)
    return path


@pytest.fixture
def drawn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures of one kind are drawn by the first test that needs them; others are about the page around them."""
    for module in (curves, sections, uncertainty_blocks):
        monkeypatch.setattr(module, "draw_svg", _drawn_once)


@cache
def _first(purpose: str) -> list[str]:
    return []


def _drawn_once(make: Callable[[], Any], purpose: str) -> str:
    kept = _first(purpose)
    if not kept:
        kept.append(draw_svg(make, purpose))
    return kept[0]


@pytest.fixture(scope="session")
def stored_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run that tests only read."""
    folder = tmp_path_factory.mktemp("stored")
    return write_run(folder / "run", images(folder))


@pytest.fixture(scope="session")
def _one_seed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one")
    return write_run(folder / "run", images(folder), seeds=(0,))


@pytest.fixture
def own_run(tmp_path: Path, _one_seed: Path) -> Path:
    """A run of one seed that a test may damage."""
    return Path(shutil.copytree(_one_seed, tmp_path / "run"))

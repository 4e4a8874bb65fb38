"""The ImageNet recipe: the published training as written, and a run of it on a generated folder."""

from __future__ import annotations

import json
import sys

import pytest
import yaml

import enfold
from enfold.cli import main
from imagenet_folders import tiny
from studies.definition import ROOT

FILE = ROOT / "mixture" / "recipes" / "imagenet.yaml"


def test_the_training_is_the_published_one():
    recipe = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    config = enfold.TrainConfig(**{name: tuple(v) if isinstance(v, list) else v for name, v in recipe["train"].items()})
    factors = [config.rate_factor(10 * epoch, 10) for epoch in (0, 9, 10, 29, 30, 59, 60, 79, 80, 89)]
    assert factors == pytest.approx([0.01, 0.91, 1, 1, 0.1, 0.1, 0.01, 0.01, 0.001, 0.001])
    assert (config.lr, config.batch_size, config.epochs, config.nesterov) == (1.6, 1024, 90, False)
    assert recipe["members"] == 4
    mixtures = [step for step in recipe["steps"] if step["method"] == "mixture_ensemble"]
    assert {step["assignment"] for step in mixtures} == {"disjoint_greedy"}


@pytest.mark.slow
def test_it_runs_on_a_generated_folder(tmp_path, monkeypatch, capsys):
    data, out = tiny(tmp_path / "tiny", size=16), tmp_path / "out"
    changes = {
        "data.source": data, "data.size": 16, "network.width": 2, "network.stem": "small", "network.blocks": "[2,2]",
        "members": 2, "train.epochs": 2, "train.warmup_epochs": 1, "train.batch_size": 18, "train.lr": 0.05,
        "train.precision": "float32",
    }  # fmt: skip
    flags = [word for name, value in changes.items() for word in ("--set", f"{name}={value}")]
    monkeypatch.setattr(sys, "argv", ["enfold", "run", str(FILE), str(out), *flags, "--json"])
    with pytest.raises(SystemExit) as stopped:
        main()
    printed = capsys.readouterr()
    assert not stopped.value.code, printed.err
    rows = json.loads(printed.out)["rows"]
    assert {"ensemble", "mixture-1.0", "mixture-2.0", "batch-ensemble", "mimo"} <= rows.keys()
    assert all(0 <= row["scores"]["accuracy"]["mean"] <= 1 for row in rows.values())

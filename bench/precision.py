"""What bf16 costs in quality: NLL of 4 members trained on 3,000 images, in float32 and bf16.

A CNN with batch norm on fashion-mini; the difference of the precisions beside that of three seeds.
Writes results/bench-precision.json after each seed, and continues from it.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from enfold import DeepEnsemble, evaluate, fit
from enfold.data import Split, load
from enfold.io.files import write_json
from enfold.saving import versions

RESULT = Path(__file__).parent.parent / "results" / "bench-precision.json"
SEEDS, IMAGES = (0, 1, 2), 3000
METRICS = ("accuracy", "nll", "ece", "brier")


def small_cnn() -> nn.Module:
    """Return three convolutions with batch norm for images of one channel."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((1, 16), (16, 32), (32, 64)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def scores(seed: int) -> dict[str, dict[str, float]]:
    """Return test scores of members trained in either precision and evaluated in either."""
    data = load("fashion-mini")
    assert isinstance(data.train, Split)
    data = dataclasses.replace(data, train=Split(data.train.inputs[:IMAGES], data.train.targets[:IMAGES]))
    found = {}
    for trained in ("float32", "bf16"):
        members = DeepEnsemble(small_cnn, 4, seed=seed)
        fit(members, data, epochs=8, lr=3e-3, batch_size=64, seed=seed, precision=trained, select="last", quiet=True)
        for used in ("float32", "bf16"):
            row = evaluate(members, data, precision=used).scores
            found[f"trained {trained}, evaluated {used}"] = {name: row[name] for name in METRICS}
    return found


def main() -> None:
    """Train all seeds and write the record."""
    torch.set_num_threads(1)
    record: dict[str, Any] = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.exists() else {"seeds": {}}
    record |= {"command": "python bench/precision.py", "versions": versions(), "date": time.strftime("%Y-%m-%d")}
    for seed in SEEDS:
        if str(seed) not in record["seeds"]:
            record["seeds"][str(seed)] = scores(seed)
            write_json(RESULT, record)
    names = list(record["seeds"]["0"])
    nll = {name: [record["seeds"][str(seed)][name]["nll"] for seed in SEEDS] for name in names}
    full = nll["trained float32, evaluated float32"]
    record["nll"] = {
        name: {
            "mean": statistics.mean(values),
            "standard deviation over seeds": statistics.stdev(values),
            "mean difference to float32": statistics.mean(a - b for a, b in zip(values, full, strict=True)),
            "largest difference to float32": max(abs(a - b) for a, b in zip(values, full, strict=True)),
        }
        for name, values in nll.items()
    }
    write_json(RESULT, record)
    print(json.dumps(record["nll"], indent=2))


if __name__ == "__main__":
    main()

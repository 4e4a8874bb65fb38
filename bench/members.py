"""Cost of M members, as ratios to one network in its default memory format.

Writes results/bench-members.json and a figure.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from enfold import DeepEnsemble
from enfold.io.files import write_json
from enfold.networks import MLP
from enfold.saving import versions
from timing import BATCH, PythonLoop, cnn, inference, mlp, ratios, show, training_step

RESULTS = Path(__file__).parent.parent / "results"
GROWTH = (1, 2, 4, 8, 16, 32)


def tiny_mlp() -> nn.Module:
    """Return an MLP 32-64-64-10."""
    return MLP(32, [64, 64], 10)


def four_members() -> dict[str, Any]:
    """Measure training step, inference at batch 128 and at batch 1 of 4 members with each engine."""
    tables: dict[str, Any] = {}
    for name, make, shape, engines in (
        ("mlp", mlp, (784,), ("auto", "stacked", "loop", "vmap")),
        ("cnn", cnn, (3, 32, 32), ("auto", "loop", "vmap")),
    ):
        inputs, labels = torch.randn(BATCH, *shape), torch.randint(10, (BATCH,))
        for task in ("train", "infer", "infer at batch 1"):
            cases: dict[str, Callable[[], object]] = {}
            for label in ("one network", "python loop", *engines):
                model = _model(label, make)
                if task == "train":
                    cases[label] = training_step(model, inputs, labels)
                else:
                    cases[label] = inference(model, inputs if task == "infer" else inputs[:1])
            tables[f"{name}, {task}"] = ratios(cases)
            show(f"{name}, {task}", tables[f"{name}, {task}"])
    return tables


def _model(label: str, make: Callable[[], nn.Module], num_members: int = 4) -> nn.Module:
    if label == "one network":
        return make()
    if label == "python loop":
        return PythonLoop(make, num_members)
    return DeepEnsemble(make, num_members, engine=label)  # type: ignore[arg-type]


def growth() -> dict[str, Any]:
    """Measure a training step for growing M."""
    tables: dict[str, Any] = {}
    for name, make, width in (("784-256-256-10", mlp, 784), ("32-64-64-10", tiny_mlp, 32)):
        inputs, labels = torch.randn(BATCH, width), torch.randint(10, (BATCH,))
        for engine in ("stacked", "python loop"):
            cases = {"one network": training_step(make(), inputs, labels)}
            for num_members in GROWTH:
                cases[str(num_members)] = training_step(_model(engine, make, num_members), inputs, labels)
            tables[f"{name}, {engine}"] = ratios(cases, rounds=9)
            show(f"{name}, {engine}", tables[f"{name}, {engine}"])
    return tables


def figure(tables: Mapping[str, Any]) -> None:
    """Draw the cost by M as SVG."""
    import matplotlib.pyplot as plt

    from enfold.report.figure import STYLE

    with plt.rc_context(STYLE):
        drawn, axes = plt.subplots(figsize=(6.5, 4), layout="constrained")
        for (name, table), colour in zip(tables.items(), ("#D55E00", "#E69F00", "#0072B2", "#56B4E9"), strict=True):
            points = [table[str(num_members)] for num_members in GROWTH]
            axes.plot(GROWTH, [point["median"] for point in points], "o-", color=colour, label=name)
            low, high = [p["lower"] for p in points], [p["upper"] for p in points]
            axes.fill_between(GROWTH, low, high, color=colour, alpha=0.15, lw=0)
        axes.plot(GROWTH, GROWTH, ":", color="#999999", label="M networks")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xticks(GROWTH, [str(m) for m in GROWTH])
        axes.set_yticks(GROWTH, [str(m) for m in GROWTH])
        axes.set_xlabel("members M")
        axes.set_ylabel("training step (ratio to one network)")
        axes.set_title("What M members cost in training", loc="left")
        axes.legend(frameon=False)
        drawn.savefig(RESULTS / "bench-growth.svg", metadata={"Date": None})
        drawn.savefig(RESULTS / "bench-growth.png", dpi=150)


def main() -> None:
    """Measure all tables, draw the figure and write the record."""
    import warnings

    warnings.filterwarnings("ignore", message="There is a performance drop")  # vmap's own, about pooling
    torch.manual_seed(0)
    torch.set_num_threads(2)
    record = {
        "command": "make bench",
        "date": time.strftime("%Y-%m-%d"),
        "threads": torch.get_num_threads(),
        "batch": BATCH,
        "versions": versions(),
        "four members": four_members(),
        "growth": growth() if "--quick" not in sys.argv else {},
    }
    if record["growth"]:
        figure(record["growth"])  # type: ignore[arg-type]
        write_json(RESULTS / "bench-members.json", record)


if __name__ == "__main__":
    main()

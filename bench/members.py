"""How much M members cost, as ratios to one plain network in its default memory format.

Every case runs in this process; each round runs all cases of a table in rotated order; the ratio is taken within the
round; the median over rounds is given with its quartiles. Writes results/bench-members.json and a figure.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from enfold import Stacked
from enfold.cost import time_rounds
from enfold.data.batches import Batch
from enfold.files import write_json
from enfold.networks import MLP
from enfold.store import versions
from enfold.train import CrossEntropy
from enfold.train.backward import backward

RESULTS = Path(__file__).parent.parent / "results"
BATCH = 128
ROUNDS = 11
SAMPLE = 0.05  # seconds: many steps a sample, as in training
GROWTH = (1, 2, 4, 8, 16, 32)


def mlp() -> nn.Module:
    """784-256-256-10."""
    return MLP(784, [256, 256], 10)


def tiny_mlp() -> nn.Module:
    """32-64-64-10."""
    return MLP(32, [64, 64], 10)


def cnn() -> nn.Module:
    """Three convolutions with batch norm on 32 x 32."""

    def block(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]

    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10)]
    return nn.Sequential(*block(3, 32), *block(32, 64), *block(64, 128), *head)


def training_step(model: nn.Module, inputs: Tensor, labels: Tensor) -> Callable[[], object]:
    """Forward, cross-entropy, backward, SGD with momentum: what `fit` does for members, plain PyTorch for the rest."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    batch, objective = Batch(inputs, labels), CrossEntropy()

    def step() -> None:
        optimizer.zero_grad()
        if isinstance(model, Stacked):
            backward(model, batch, objective)
        elif isinstance(model, PythonLoop):
            for network in model.networks:
                F.cross_entropy(network(inputs), labels).backward()
        else:
            F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()

    return step


def inference(model: nn.Module, inputs: Tensor) -> Callable[[], object]:
    """One forward pass in eval mode."""
    model.eval()

    def call() -> None:
        with torch.inference_mode():
            model(inputs)

    return call


def ratios(cases: Mapping[str, Callable[[], object]], rounds: int = ROUNDS) -> dict[str, dict[str, float]]:
    """Median and quartiles, over rounds, of each case's time divided by the first case's in the same round."""
    times = time_rounds(cases, rounds, shortest=SAMPLE)
    first = times[next(iter(cases))]
    found = {}
    for name, samples in times.items():
        within = [own / one for own, one in zip(samples, first, strict=True)]
        lower, median, upper = statistics.quantiles(within, n=4)
        found[name] = {
            "median": median,
            "lower": lower,
            "upper": upper,
            "milliseconds": 1e3 * statistics.median(samples),
        }
    return found


def four_members() -> dict[str, Any]:
    """Training step, inference at batch 128 and at batch 1, of 4 members by each engine."""
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
            _print(f"{name}, {task}", tables[f"{name}, {task}"])
    return tables


class PythonLoop(nn.Module):
    """What one would write: a list of networks, called one after the other."""

    def __init__(self, make: Callable[[], nn.Module], num_members: int) -> None:
        super().__init__()
        self.networks = nn.ModuleList(make() for _ in range(num_members))

    def forward(self, inputs: Tensor) -> Tensor:
        """(M, B, C)."""
        return torch.stack([network(inputs) for network in self.networks])


def _model(label: str, make: Callable[[], nn.Module], num_members: int = 4) -> nn.Module:
    if label == "one network":
        return make()
    if label == "python loop":
        return PythonLoop(make, num_members)
    return Stacked.make(make, num_members, engine=label)  # type: ignore[arg-type]


def growth() -> dict[str, Any]:
    """A training step for growing M."""
    tables: dict[str, Any] = {}
    for name, make, width in (("784-256-256-10", mlp, 784), ("32-64-64-10", tiny_mlp, 32)):
        inputs, labels = torch.randn(BATCH, width), torch.randint(10, (BATCH,))
        for engine in ("stacked", "python loop"):
            cases = {"one network": training_step(make(), inputs, labels)}
            for num_members in GROWTH:
                cases[str(num_members)] = training_step(_model(engine, make, num_members), inputs, labels)
            tables[f"{name}, {engine}"] = ratios(cases, rounds=9)
            _print(f"{name}, {engine}", tables[f"{name}, {engine}"])
    return tables


def figure(tables: Mapping[str, Any]) -> None:
    """How the cost grows with M, as SVG."""
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


def _print(title: str, table: Mapping[str, Mapping[str, float]]) -> None:
    cells = [f"{name} {row['median']:.2f} [{row['lower']:.2f}, {row['upper']:.2f}]" for name, row in table.items()]
    print(f"{title}: " + "   ".join(cells), flush=True)


def main() -> None:
    """All tables, the figure, and the record."""
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

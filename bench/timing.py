"""Common parts of the benchmarks: networks, a training step, inference, and ratios taken within rounds.

Every case runs in one process; each round runs all cases of a table in rotated order; the ratio is taken within the
round; the median over rounds is given with its quartiles.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from enfold.cost import time_rounds
from enfold.data.batches import Batch
from enfold.ensemble import Ensemble
from enfold.io.files import write_json
from enfold.networks import MLP
from enfold.saving import versions
from enfold.train import Objective, cross_entropy
from enfold.train.backward import backward

BATCH = 128
ROUNDS = 11
SAMPLE = 0.05  # seconds: many steps a sample, as in training

Table = dict[str, dict[str, float]]


def mlp() -> nn.Module:
    """Return an MLP 784-256-256-10."""
    return MLP(784, [256, 256], 10)


def cnn() -> nn.Module:
    """Return three convolutions with batch norm for 32 x 32 images."""

    def block(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]

    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10)]
    return nn.Sequential(*block(3, 32), *block(32, 64), *block(64, 128), *head)


def training_step(
    model: nn.Module,
    inputs: Tensor,
    labels: Tensor,
    *,
    own: bool = False,
    objective: Objective | None = None,
    precision: str = "float32",
) -> Callable[[], object]:
    """Return a training step: forward, cross-entropy, backward, SGD with momentum; that of `fit` for members.

    With `own`, inputs and labels carry a member axis.
    """
    bf16 = torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16")

    def loss_of(network: nn.Module) -> Tensor:
        with bf16:
            return F.cross_entropy(network(inputs), labels)

    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3, momentum=0.9)
    batch, minimised = Batch(inputs, labels, own), objective or cross_entropy()
    model.train()

    def step() -> None:
        optimizer.zero_grad()
        if isinstance(model, Ensemble):
            backward(model, batch, minimised, bf16 if precision == "bf16" else None)
        elif isinstance(model, PythonLoop):
            for network in model.networks:
                loss_of(network).backward()
        elif isinstance(model, FactorsByHand):
            F.cross_entropy(model(inputs).flatten(0, 1), labels.repeat(len(model.r[0]))).backward()
        else:
            loss_of(model).backward()
        optimizer.step()

    return step


def inference(model: nn.Module, inputs: Tensor) -> Callable[[], object]:
    """Return a forward pass in eval mode."""
    model.eval()

    def call() -> None:
        with torch.inference_mode():
            model(inputs)

    return call


def ratios(cases: Mapping[str, Callable[[], object]], rounds: int = ROUNDS) -> Table:
    """Return median and quartiles, over rounds, of each case's time divided by the first case's in the same round."""
    return table_of(time_rounds(cases, rounds, shortest=SAMPLE))


def table_of(times: Mapping[str, Sequence[float]]) -> Table:
    """Return the same from seconds by case, round by round."""
    first = times[next(iter(times))]
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


class FactorsByHand(nn.Module):
    """BatchEnsemble of `mlp()` as one would write it: factors on a repeated batch, gradients by autograd."""

    def __init__(self, num_members: int) -> None:
        super().__init__()
        widths = ((784, 256), (256, 256), (256, 10))
        self.layers = nn.ModuleList(nn.Linear(*size, bias=False) for size in widths)
        self.r = nn.ParameterList(torch.randn(num_members, 1, size).sign() for size, _ in widths)
        self.s = nn.ParameterList(torch.randn(num_members, 1, size).sign() for _, size in widths)
        self.bias = nn.ParameterList(torch.zeros(num_members, 1, size) for _, size in widths)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits, (M, B, C)."""
        hidden = inputs
        for index, (layer, r, s, bias) in enumerate(zip(self.layers, self.r, self.s, self.bias, strict=True)):
            hidden = layer((torch.relu(hidden) if index else hidden) * r) * s + bias
        return hidden


class PythonLoop(nn.Module):
    """A list of networks that are called one after the other."""

    def __init__(self, make: Callable[[], nn.Module], num_members: int) -> None:
        super().__init__()
        self.networks = nn.ModuleList(make() for _ in range(num_members))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits, (M, B, C)."""
        return torch.stack([network(inputs) for network in self.networks])


def show(title: str, table: Table) -> None:
    """Print one line per table."""
    cells = [f"{name} {row['median']:.2f} [{row['lower']:.2f}, {row['upper']:.2f}]" for name, row in table.items()]
    print(f"{title}: " + "   ".join(cells), flush=True)


def write_record(name: str, tables: Mapping[str, Table], **more: object) -> None:
    """Write results/bench-NAME.json: the tables and the conditions of the measurement."""
    about = {"command": "make bench", "date": time.strftime("%Y-%m-%d"), "threads": torch.get_num_threads()}
    results = Path(__file__).parent.parent / "results"
    write_json(results / f"bench-{name}.json", {**about, **more, "versions": versions(), "tables": dict(tables)})

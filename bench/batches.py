"""Training and inference with dictionary batches, relative to tensors; writes results/bench-batches.json.

The same network is trained by the same steps on the same batches of a loader: pairs (x, y), and dictionaries with
`labels`. A training step includes what `fit` does with a batch: splitting it into inputs and target,
moving it to the device, the call of the members and the loss. With --quick nothing is written.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from enfold.data import Data
from enfold.data.batches import Order
from enfold.data.convert import as_data
from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.io.files import write_json
from enfold.saving import versions
from enfold.tasks import as_task
from enfold.train.backward import backward
from enfold.train.config import TrainConfig
from enfold.train.objective import default_loss
from timing import ROUNDS, Table, cnn, mlp, ratios, show

MEMBERS, BATCH, BATCHES = 4, 128, 4
RESULTS = Path(__file__).parent.parent / "results"


class Named(nn.Module):
    """A network that takes its input by the name `pixels`."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, pixels: Tensor) -> Tensor:
        """Return the logits."""
        logits: Tensor = self.network(pixels)
        return logits


def epoch(make: Callable[[], nn.Module], train: Any) -> Callable[[], object]:
    """Return an epoch of the training of `fit`, without validation."""
    ensemble = DeepEnsemble(lambda: Named(make()), MEMBERS)
    data: Data = as_data(train, network=ensemble.skeleton.network)
    optimizer = torch.optim.SGD(ensemble.parameters(), lr=1e-3, momentum=0.9)
    objective = default_loss(TrainConfig(task=as_task("classification")), MEMBERS)
    order = Order(BATCH)
    ensemble.train()

    def run() -> None:
        for batch in order.batches(data, 0):
            optimizer.zero_grad()
            backward(ensemble, batch.to("cpu"), objective)
            optimizer.step()

    return run


def inference(make: Callable[[], nn.Module], inputs: Any) -> Callable[[], object]:
    """Return the predictions of the members for a batch."""
    ensemble = DeepEnsemble(lambda: Named(make()), MEMBERS).eval()

    def call() -> None:
        with torch.inference_mode():
            ensemble(inputs)

    return call


def measure(make: Callable[[], nn.Module], shape: tuple[int, ...], rounds: int) -> dict[str, Table]:
    """Return the ratios of training and inference."""
    pixels, labels = torch.randn(BATCH * BATCHES, *shape), torch.randint(10, (BATCH * BATCHES,))
    chunks = list(zip(pixels.split(BATCH), labels.split(BATCH), strict=True))
    named = [{"pixels": inputs, "labels": targets} for inputs, targets in chunks]
    training = {"tensors": epoch(make, chunks), "dictionaries": epoch(make, named)}
    first = pixels[:BATCH]
    return {
        "training": ratios(training, rounds),
        "inference": ratios(
            {"tensors": inference(make, first), "dictionaries": inference(make, {"pixels": first})}, rounds
        ),
    }


def main() -> None:
    """Measure, and write the record."""
    rounds = 3 if "--quick" in sys.argv else ROUNDS
    tables = {}
    for name, make, shape in (("MLP", mlp, (784,)), ("CNN", cnn, (3, 32, 32))):
        for what, table in measure(make, shape, rounds).items():
            tables[f"{name}, {what}"] = table
            show(f"{name}, {what}, {MEMBERS} members, batch {BATCH}", table)
    if "--quick" not in sys.argv:
        record = {"command": "python bench/batches.py", "date": time.strftime("%Y-%m-%d"), "rounds": rounds}
        write_json(RESULTS / "bench-batches.json", {**record, "versions": versions(), "tables": tables})


if __name__ == "__main__":
    main()

"""The rate of this machine for the study: python -m studies.accuracy.rate

Trains the network for some steps in float32 and in bfloat16, and prints operations per second, the accuracy reached,
and the time that one network of the study needs. Two minutes on two cores.
"""

from __future__ import annotations

import json
import statistics
import time
from itertools import pairwise
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from enfold.data import Split
from enfold.evaluate import predict
from enfold.metrics import accuracy
from enfold.networks import make
from enfold.train import Epoch, TrainConfig, fit
from studies.definition import make_recipes

STEPS = {"float32": 20, "bfloat16": 60}
EPOCHS = 3  # of which the first is not timed


def measure(precision: str, steps: int) -> dict[str, Any]:
    """Return the rate of training steps and what the network has learned after them."""
    (recipe,) = make_recipes("accuracy-cifar10", "laptop").values()
    data = recipe.data.load()
    train, test = data.train, data.test
    if not isinstance(train, Split) or not isinstance(test, Split):
        raise TypeError("CIFAR-10 must be in memory")
    torch.manual_seed(0)
    network = make(recipe.network, data.shape, data.num_classes)
    with FlopCounterMode(display=False) as counter:
        network(torch.zeros(1, *data.shape))
    per_image = 3 * counter.get_total_flops()  # forward, and twice as much backward
    config = TrainConfig(**{**recipe.train, "precision": precision, "epochs": EPOCHS, "warmup_epochs": 1})
    small = data.replace(train=train[: steps * config.batch_size], val=None)
    ends = [time.perf_counter()]
    fit(network, small, config=config, on_epoch=lambda epoch: _note(epoch, ends), quiet=True)
    seconds = statistics.median(after - before for before, after in pairwise(ends[1:]))
    images = steps * config.batch_size / seconds
    return {
        "images per second": round(images),
        "GFLOP/s": round(per_image * images / 1e9),
        "minutes per network": round(recipe.train["epochs"] * len(train) / images / 60, 1),
        "accuracy after these steps": accuracy(predict(network, test[:2000])),
    }


def _note(epoch: Epoch, ends: list[float]) -> None:
    ends.append(time.perf_counter())


if __name__ == "__main__":
    for precision, steps in STEPS.items():
        print(json.dumps({precision: measure(precision, steps)}), flush=True)

"""Predicted and measured cost of trainings: how it grows with data, epochs, parameters, members and processes.

Short trainings measure the rate of this machine and the start of a training, before and after each case; the case is
predicted from them by the equations of `enfold.run.cluster`, as a run on a cluster is. Times are those of the CPU, with
one thread. Writes results/bench-predictions.json.
"""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn

import enfold
from enfold.executors import LocalExecutor, Parallel
from enfold.io.files import write_json
from enfold.run.cluster import Network
from enfold.saving import versions

RESULT = Path(__file__).parent.parent / "results" / "bench-predictions.json"
BATCH, SHAPE, ROUNDS = 64, (3, 16, 16), 3


def network(width: int = 32) -> nn.Module:
    """Return four convolutions for 16 x 16 images."""
    sizes = [3, width, width, 2 * width, 2 * width]
    layers = [
        layer
        for index, (before, after) in enumerate(pairwise(sizes))
        for layer in (nn.Conv2d(before, after, 3, padding=1, stride=1 + index % 2), nn.ReLU())
    ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(sizes[-1], 10))


def wide() -> nn.Module:
    """Return a network of twice the width, with four times as many parameters."""
    return network(64)


def processor_seconds() -> float:
    """Return the CPU time of this process and of those that it has started and that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def train(make: Callable[[], nn.Module], examples: int, epochs: int, members: int = 1, processes: int = 0) -> float:
    """Return the CPU time of a training; members are trained one by one."""
    inputs = torch.randn(examples, *SHAPE, generator=torch.Generator().manual_seed(0))
    targets = torch.arange(examples) % 10
    ensemble = enfold.DeepEnsemble(make, members)
    started = processor_seconds()
    executor = LocalExecutor(processes, 1) if processes else "serial"
    where = Parallel(executor) if members > 1 else None
    enfold.fit(ensemble, (inputs, targets), epochs=epochs, batch_size=BATCH, select="last", executor=where, quiet=True)
    if isinstance(executor, LocalExecutor):
        executor.shutdown()
    return processor_seconds() - started


def calibrate(needs: Network) -> tuple[float, float]:
    """Return the operations per second of this machine, and the seconds in which a training starts."""
    short, longer = train(network, 512, 1), train(network, 512, 5)
    epoch = needs.training(train=512, epochs=1, batch_size=BATCH).operations
    rate = 4 * epoch / (longer - short)
    return rate, max(0.0, short - epoch / rate)


def start_seconds(processes: int) -> float:
    """Return the CPU time in which processes start and do nothing."""
    started = processor_seconds()
    executor = LocalExecutor(processes, 1)
    list(executor.map(torch.set_num_threads, [1] * processes))
    list(executor.map(_import, range(processes)))
    executor.shutdown()
    return processor_seconds() - started


def _import(_: int) -> None:
    import enfold.train.blocks  # noqa: F401


def main() -> None:
    """Measure, predict and write the record."""
    torch.set_num_threads(1)
    cases = {
        "4 times the examples": (network, 2048, 2, 1, 0),
        "4 times the epochs": (network, 512, 8, 1, 0),
        "4 times the parameters": (wide, 512, 4, 1, 0),
        "4 members": (network, 512, 4, 4, 0),
        "4 members in 2 processes": (network, 2048, 2, 4, 2),
    }
    inputs = torch.randn(8, *SHAPE)
    needs = {make: Network.measure(make(), inputs) for make in (network, wide)}
    train(network, 128, 1)  # the first call is slower
    rows: list[dict[str, str | float]] = []
    for _ in range(ROUNDS):
        for name, (make, examples, epochs, members, processes) in cases.items():
            one = needs[make].training(train=examples, epochs=epochs, batch_size=BATCH).operations
            before = calibrate(needs[network])
            start = start_seconds(processes) if processes else 0.0
            actual = train(make, examples, epochs, members, processes)
            after = calibrate(needs[network])
            rate, begin = ((x + y) / 2 for x, y in zip(before, after, strict=True))
            predicted = members * (one / rate + begin) + start
            rows.append({"case": name, "predicted": predicted, "actual": actual, "ratio": predicted / actual})
            print(json.dumps(rows[-1]), flush=True)
    ratios = {name: sorted(float(row["ratio"]) for row in rows if row["case"] == name) for name in cases}
    summary = {
        name: {"median": found[len(found) // 2], "least": found[0], "most": found[-1]} for name, found in ratios.items()
    }
    about = {"command": "python bench/predictions.py", "date": time.strftime("%Y-%m-%d"), "versions": versions()}
    write_json(RESULT, {**about, "predicted / measured CPU time": summary, "rows": rows})


if __name__ == "__main__":
    main()

"""The choice between this process and local processes, from a measurement of a few steps and of the start of a worker.

    in process       blocks x steps x t(all threads)
    local processes  ceil(blocks / workers) x steps x t(threads of a worker) + start

It ignores that processes share memory bandwidth, so it is optimistic about processes.
"""

from __future__ import annotations

import math
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from enfold.data import Data
from enfold.engines.copying import copy_network
from enfold.executors import Parallel
from enfold.progress import announce
from enfold.train.loop import Fit

if TYPE_CHECKING:
    from enfold.train.blocks import Block

STEPS = 6
LEAST = 2.0  # seconds; a worker does not start faster


def choose(parallel: Parallel, blocks: Sequence[Block], data: Data) -> Parallel:
    """Return the faster of "serial" and "local", and print which it is and why.

    Args:
        parallel: The options of the call.
        blocks: What is to be trained.
        data: The examples.
    """
    workers, threads = parallel.sizes(len(blocks))
    count = blocks[0].config.epochs * (_steps(blocks[0], data) or 0)
    here = len(blocks) * count * step_seconds(blocks[0], data, torch.get_num_threads())
    there = math.ceil(len(blocks) / workers) * count * step_seconds(blocks[0], data, threads)
    start = 0.0
    if here - there > LEAST:
        start = worker_start_seconds()
    kind = "local" if here - there > max(start, LEAST) else "serial"
    where = "in local processes" if kind == "local" else "in this process"
    announce(
        f"enfold: {len(blocks)} blocks are trained {where}: estimated {here:.1f} s in this process, {there:.1f} s in "
        f"{workers} processes and {max(start, LEAST):.1f} s to start them"
    )
    return replace(parallel, executor=kind)


def step_seconds(block: Block, data: Data, threads: int) -> float:
    """Return the median duration of a training step of a block with a number of threads."""
    training = Fit(copy_network(block.members), data, block.config, block.objective, None)
    training.model.train()
    taken = []
    with _threads(threads), torch.enable_grad():
        for number, batch in zip(range(STEPS), training.order.batches(data, 0), strict=False):
            started = time.perf_counter()
            training._step(batch.to(block.config.device), 0, number)
            taken.append(time.perf_counter() - started)
    return statistics.median(taken[1:] or taken)


def worker_start_seconds() -> float:
    """Return the time in which a process imports enfold."""
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import enfold"], check=False, capture_output=True)
    return time.perf_counter() - started


def _steps(block: Block, data: Data) -> int | None:
    return Fit(block.members, data, block.config, block.objective, None).order.steps(data.train)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)

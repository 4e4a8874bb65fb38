"""Measure one row in this process and print its samples as JSON: python -m versus.measure ROW ROUNDS CLOCK."""

from __future__ import annotations

import contextlib
import json
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from enfold.cost import time_rounds
from versus.rows import Row, all_rows

LIMITS = ("products, float32", "products, bf16", "convolutions, float32", "convolutions, bf16")


def limits() -> dict[str, tuple[Callable[[], object], float]]:
    """Return large matrix products and convolutions, with their operations: what this machine reaches at most."""
    found: dict[str, tuple[Callable[[], object], float]] = {}
    for name, dtype in (("float32", torch.float32), ("bf16", torch.bfloat16)):
        left, right = torch.randn(1024, 2048, dtype=dtype), torch.randn(2048, 1024, dtype=dtype)
        images = torch.randn(32, 128, 32, 32, dtype=dtype).to(memory_format=torch.channels_last)
        kernels = torch.randn(128, 128, 3, 3, dtype=dtype).to(memory_format=torch.channels_last)

        def multiply(left: torch.Tensor = left, right: torch.Tensor = right) -> object:
            with torch.inference_mode():
                return left @ right

        def convolve(images: torch.Tensor = images, kernels: torch.Tensor = kernels) -> object:
            with torch.inference_mode():
                return F.conv2d(images, kernels, padding=1)

        found[f"products, {name}"] = (multiply, 2.0 * 1024 * 2048 * 1024)
        found[f"convolutions, {name}"] = (convolve, 2.0 * 32 * 32 * 32 * 128 * 128 * 9)
    return found


def measure(row: Row, rounds: int, clock: Callable[[], float]) -> dict[str, object]:
    """Return the seconds of each case in every round, what failed, and the share of the CPUs that others used."""
    calls, failed = {}, {}
    for name, make in row.cases.items():
        try:
            call = make()
            call()
            calls[name] = call
        except Exception as error:  # of another package, whatever it is
            failed[name] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    bounds = limits() if row.flops else {}
    calls |= {name: call for name, (call, _) in bounds.items()}
    before, started = _cpu_seconds(), time.perf_counter()
    samples = time_rounds(calls, rounds, warmup=1, clock=clock, shortest=row.shortest)
    passed, used = time.perf_counter() - started, [now - then for now, then in zip(_cpu_seconds(), before, strict=True)]
    for name, (_, operations) in bounds.items():
        samples[name] = [seconds * row.flops / operations for seconds in samples[name]]
    return {"samples": samples, "failed": failed, "others": max(0.0, used[0] - used[1]) / passed}


def _cpu_seconds() -> tuple[float, float]:
    """Return the CPU seconds of all processes and of this one; 0 where the system does not tell."""
    with contextlib.suppress(OSError):
        ticks = [int(part) for part in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
        return (sum(ticks[:3]) + sum(ticks[5:7])) / 100, time.process_time()
    return 0.0, 0.0


def main() -> None:
    """Measure the row that is named."""
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    torch.set_num_threads(1 if sys.argv[3] == "cpu" else 2)
    clock = time.process_time if sys.argv[3] == "cpu" else time.perf_counter
    row = dict(all_rows())[sys.argv[1]]()
    with contextlib.redirect_stdout(sys.stderr):
        found = measure(row, int(sys.argv[2]), clock)
    print(json.dumps(found))


if __name__ == "__main__":
    main()

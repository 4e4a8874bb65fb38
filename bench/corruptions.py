"""How long 1,000 images of 32 x 32 x 3 take through each corruption at severity 3; results/bench-corruptions.json.

CPU seconds with one thread, which other work on the machine hardly changes, and wall-clock seconds with two, which are
left out with --cpu. With --quick nothing is written.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from enfold.data.corruptions import KINDS, STANDARD, corrupt
from enfold.files import write_json
from enfold.store import versions

RESULTS = Path(__file__).parent.parent / "results"
IMAGES, SEVERITY, ROUNDS = 1000, 3, 5


def smooth_images() -> Tensor:
    """Bytes that vary slowly over the image, as in photographs: (1000, 3, 32, 32)."""
    coarse = torch.rand(IMAGES, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    return F.interpolate(coarse, (32, 32), mode="bilinear").mul(255).byte()


def seconds(images: Tensor, clock: Callable[[], float], threads: int) -> dict[str, float]:
    """The median over rounds for each kind, after one call that fills the caches."""
    torch.set_num_threads(threads)
    found = {}
    for kind in KINDS:
        corrupt(images[:10], kind, SEVERITY)
        samples = []
        for _ in range(ROUNDS):
            start = clock()
            corrupt(images, kind, SEVERITY)
            samples.append(clock() - start)
        found[kind] = statistics.median(samples)
    return found


def main() -> None:
    """Both clocks and the record."""
    images = smooth_images()
    clocks = {"cpu_seconds_one_thread": seconds(images, time.process_time, 1)}
    if "--cpu" not in sys.argv:
        clocks["wall_seconds_two_threads"] = seconds(images, time.perf_counter, 2)
    for times in clocks.values():
        times["the 15 standard"] = sum(times[kind] for kind in STANDARD)
    for kind in (*KINDS, "the 15 standard"):
        print(f"{kind:18} " + ", ".join(f"{name} {times[kind]:.3f}" for name, times in clocks.items()))
    if "--quick" in sys.argv:
        return
    record = {
        "command": " ".join(["python bench/corruptions.py", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "images": IMAGES,
        "shape": list(images.shape[1:]),
        "severity": SEVERITY,
        "rounds": ROUNDS,
        "versions": versions(),
        **clocks,
    }
    write_json(RESULTS / "bench-corruptions.json", record)


if __name__ == "__main__":
    main()

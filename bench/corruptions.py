"""Time of each corruption at severity 3 for 1,000 images of 32 x 32 x 3; writes results/bench-corruptions.json.

CPU seconds with one thread, which other work on the machine hardly changes, and wall-clock seconds with two, which are
left out with --cpu. Where the package imagecorruptions is installed, 200 of the images go through the standard kinds by
both, round by round in one process. To have that, pip install --target FOLDER imagecorruptions opencv-python-headless
'setuptools<81' and PYTHONPATH=FOLDER. With --quick nothing is written.
"""

from __future__ import annotations

import importlib
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from enfold.cost import round_ratio
from enfold.data.corruptions import KINDS, STANDARD, corrupt
from enfold.io.files import write_json
from enfold.saving import versions

RESULTS = Path(__file__).parent.parent / "results"
IMAGES, SEVERITY, ROUNDS = 1000, 3, 5
RIVAL = "imagecorruptions"
RIVAL_IMAGES, RIVAL_ROUNDS = 200, 3  # the same images by both; a thousand would take it a quarter of a minute a round
DIFFERS = (
    f"{RIVAL} takes one image at a time and has the parameters for 224 x 224, so its blurs reach farther; "
    "its frost reads a photograph from the disk for every image, where enfold's is generated"
)
Times = dict[str, list[float]]  # side -> seconds of each round


def smooth_images() -> Tensor:
    """Return bytes that vary slowly over the image, as in photographs: (1000, 3, 32, 32)."""
    coarse = torch.rand(IMAGES, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    return F.interpolate(coarse, (32, 32), mode="bilinear").mul(255).byte()


def elapsed(call: Callable[[], object], clock: Callable[[], float]) -> float:
    """Return the seconds of one call."""
    start = clock()
    call()
    return clock() - start


def seconds(images: Tensor, clock: Callable[[], float], threads: int) -> dict[str, float]:
    """Return the median over rounds for each kind, after one call that fills the caches."""
    torch.set_num_threads(threads)
    found = {}
    for kind in KINDS:
        corrupt(images[:10], kind, SEVERITY)
        call = partial(corrupt, images, kind, SEVERITY)
        found[kind] = statistics.median(elapsed(call, clock) for _ in range(ROUNDS))
    return found


def rival() -> Callable[[np.ndarray, str], object] | str:
    """Return a function that corrupts one image (H, W, 3) with the package, or why there is none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it imports names that SciPy and setuptools give up
            package = importlib.import_module(RIVAL)
            importlib.import_module("cv2").setNumThreads(1)
    except ImportError as error:
        return f"not compared with {RIVAL}: {error}"
    return lambda image, kind: package.corrupt(image, SEVERITY, kind)


def beside(images: Tensor, theirs: Callable[[np.ndarray, str], object]) -> dict[str, Any]:
    """Measure CPU seconds of enfold and the package for the standard kinds, and their ratio."""
    torch.set_num_threads(1)
    np.random.seed(0)  # the package draws from this one
    arrays = list(images.permute(0, 2, 3, 1).contiguous().numpy())
    times: dict[str, Times] = {}
    fails = {}
    for kind in STANDARD:
        try:
            theirs(arrays[0], kind)
        except Exception as error:  # whatever newer versions of what it builds on make of it
            fails[kind] = f"{type(error).__name__}: {error}"
            continue
        times[kind] = both(images, arrays, kind, theirs)
    sums = {"all that work": list(times), "all that work but frost": [kind for kind in times if kind != "frost"]}
    for name, kinds in sums.items():
        rounds = {side: zip(*(times[kind][side] for kind in kinds), strict=True) for side in ("enfold", RIVAL)}
        times[name] = {side: [sum(each) for each in found] for side, found in rounds.items()}
    packages = {name: version(name) for name in (RIVAL, "opencv-python-headless", "scikit-image")}
    about = {"versions": packages, "images": RIVAL_IMAGES, "rounds": RIVAL_ROUNDS, "clock": "CPU time, one thread"}
    return {
        **about,
        "differs": DIFFERS,
        "fails": fails,
        "kinds": {kind: compared(each) for kind, each in times.items()},
    }


def both(images: Tensor, arrays: list[np.ndarray], kind: str, theirs: Callable[[np.ndarray, str], object]) -> Times:
    """Measure one kind with enfold and the package, alternately in every round."""
    corrupt(images[:10], kind, SEVERITY)
    found: Times = {"enfold": [], RIVAL: []}
    for _ in range(RIVAL_ROUNDS):
        found["enfold"].append(elapsed(lambda: corrupt(images, kind, SEVERITY), time.process_time))
        found[RIVAL].append(elapsed(lambda: [theirs(image, kind) for image in arrays], time.process_time))
    return found


def compared(times: Times) -> dict[str, float]:
    """Return medians, and the ratio within rounds: median, minimum and maximum."""
    within = [their / own for own, their in zip(times["enfold"], times[RIVAL], strict=True)]
    medians = {f"{side} seconds": statistics.median(found) for side, found in times.items()}
    return {**medians, "times": round_ratio(times[RIVAL], times["enfold"]), "least": min(within), "most": max(within)}


def print_comparison(comparison: dict[str, Any] | str) -> None:
    """Print the comparison."""
    if isinstance(comparison, str):
        print(comparison)
        return
    for kind, found in comparison["kinds"].items():
        print(f"{kind:24} " + ", ".join(f"{name} {value:.3f}" for name, value in found.items()))
    for kind, error in comparison["fails"].items():
        print(f"{kind:24} fails in {RIVAL}: {error}")


def main() -> None:
    """Measure with both clocks, compare with the package, and write the record."""
    images = smooth_images()
    clocks = {"cpu_seconds_one_thread": seconds(images, time.process_time, 1)}
    if "--cpu" not in sys.argv:
        clocks["wall_seconds_two_threads"] = seconds(images, time.perf_counter, 2)
    for times in clocks.values():
        times["the 15 standard"] = sum(times[kind] for kind in STANDARD)
    for kind in (*KINDS, "the 15 standard"):
        print(f"{kind:18} " + ", ".join(f"{name} {times[kind]:.3f}" for name, times in clocks.items()))
    theirs = rival()
    comparison = theirs if isinstance(theirs, str) else beside(images[:RIVAL_IMAGES], theirs)
    print_comparison(comparison)
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
        RIVAL: comparison,
    }
    write_json(RESULTS / "bench-corruptions.json", record)


if __name__ == "__main__":
    main()

"""Packages, megabytes and import time of each package beside torch and numpy."""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution

from packaging.requirements import Requirement

IMPORTS = {
    "enfold": "enfold", "torch-uncertainty": "torch_uncertainty", "probly": "probly", "tabm": "tabm",
    "torchensemble": "torchensemble", "rebasin": "rebasin", "torchmetrics": "torchmetrics",
}  # fmt: skip
NEEDED = {"torch-uncertainty": ("lightning", "timm")}  # imported, but not among its requirements
ROUNDS = 7
CODE = """import time, torch, numpy
from versus.neighbours import load
before = time.process_time()
load({name!r})
print(time.process_time() - before)"""


def requirements(name: str, found: set[str] | None = None) -> set[str]:
    """Return the names of a distribution and of all that it requires and that are installed."""
    found = set() if found is None else found
    key = re.sub(r"[-_.]+", "-", name).lower()
    try:
        own = distribution(key)
    except PackageNotFoundError:
        return found
    if key not in found:
        found.add(key)
        for line in own.requires or ():
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                requirements(requirement.name, found)
        for more in NEEDED.get(key, ()):
            requirements(more, found)
    return found


def megabytes(name: str) -> float:
    """Return the size of the files of a distribution, with compiled files."""
    own = distribution(name)
    return sum(path.stat().st_size for path in map(own.locate_file, own.files or ()) if path.is_file()) / 1e6  # type: ignore[attr-defined]


def measure_installs() -> dict[str, dict[str, float]]:
    """Return the number of added distributions, their megabytes, and CPU seconds of the import, in turns."""
    common = requirements("torch") | requirements("numpy")
    seconds: dict[str, list[float]] = {name: [] for name in IMPORTS}
    for _ in range(ROUNDS + 1):
        for name, module in IMPORTS.items():
            again = [sys.executable, "-c", CODE.format(name=module)]
            output = subprocess.run(again, check=True, stdout=subprocess.PIPE, text=True).stdout  # noqa: S603
            seconds[name].append(float(output.split()[-1]))
    found = {}
    for name in IMPORTS:
        added = requirements(name) - common
        lower, median, upper = statistics.quantiles(seconds[name][1:], n=4)  # the first reads files from the disk
        sizes = {"packages": len(added), "megabytes": sum(map(megabytes, added))}
        found[name] = {**sizes, "import seconds": median, "lower": lower, "upper": upper}
    return found

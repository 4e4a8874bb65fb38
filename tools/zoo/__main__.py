"""Run every check on every network of the zoo: writes results/zoo.json and docs/compatibility.md.

make zoo                                      in a separate environment with all packages
python -m tools.zoo [--only NAME] [--package P] [--capability C] [--held-out] [--limit SECONDS] [--output FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from enfold.io.files import write_json
from enfold.saving import versions
from tools.zoo import runner
from tools.zoo.catalogue import NETWORKS
from tools.zoo.checks import CHECKS
from tools.zoo.held_out import HELD_OUT
from tools.zoo.page import PAGE, page

RESULT = Path(__file__).parents[2] / "results" / "zoo.json"
BAD = ("wrong", "crash", "abort", "slow", "broken")


def arguments() -> argparse.Namespace:
    """Return the command-line arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="networks whose name contains this")
    parser.add_argument("--package", default="", help="networks of this package")
    parser.add_argument("--capability", default="", help="capabilities whose name contains this")
    parser.add_argument("--held-out", action="store_true", help="use the held-out networks")
    parser.add_argument("--output", type=Path, help="another file than results/zoo.json; no page is written then")
    parser.add_argument("--limit", type=float, default=runner.SECONDS, help="time limit of a check in seconds")
    parser.add_argument("--resume", action="store_true", help="retain the results of other networks in the file")
    return parser.parse_args()


def main() -> None:
    """Run the selected checks; a selection is printed, and stored only with --output."""
    options = arguments()
    entries = [
        entry
        for entry in (HELD_OUT if options.held_out else NETWORKS)
        if options.only.lower() in entry.name.lower() and options.package in ("", entry.package)
    ]
    names = [name for name in CHECKS if options.capability.lower() in name.lower()]
    complete = not (options.only or options.package or options.capability or options.held_out)
    file = options.output or (RESULT if complete else None)
    record: dict[str, Any] = {"networks": {}}
    if options.resume and file is not None and file.exists():
        record = json.loads(file.read_text(encoding="utf-8"))
    for entry in entries:
        if options.resume and entry.name in record["networks"]:
            continue
        started = time.perf_counter()
        results = runner.tried(entry, names, options.limit)
        seconds = round(time.perf_counter() - started, 1)
        record["networks"][entry.name] = {"package": entry.package, "seconds": seconds, "capabilities": results}
        show(entry.name, entry.package, seconds, results)
        if file is not None:
            write_json(file, {**about(), **record})
    if file is not None and options.output is None:
        PAGE.write_text(page({**about(), **record}), encoding="utf-8")


def show(name: str, package: str, seconds: float, results: dict[str, Any]) -> None:
    """Print one line per network, and one for every failure."""
    counts = Counter(result["outcome"] for result in results.values())
    print(f"{name:42} {package:28} {seconds:6.1f} s  {dict(counts)}", flush=True)
    for capability, result in results.items():
        if result["outcome"] in BAD:
            place = result.get("where", "")
            print(f"    {result['outcome']:7} {capability:36} {result['message'][:200]}  {place}", flush=True)


def about() -> dict[str, Any]:
    """Return the versions and the date."""
    packages = sorted({entry.package for entry in NETWORKS if entry.package != "by hand"})
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "missing"
    return {
        "command": "python -m tools.zoo",
        "date": time.strftime("%Y-%m-%d"),
        "versions": {**versions(), **found},
    }


if __name__ == "__main__":
    sys.exit(main())

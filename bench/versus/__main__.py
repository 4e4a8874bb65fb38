"""Measure enfold beside its neighbours: python -m versus [WORDS IN NAMES OF ROWS ...] [--cpu] [--again] [--list].

Every row is measured in fresh processes, all of its functions in turns in every round; the ratio to the first function
is taken within a round; median and quartiles over the rounds of all processes are stored in results/versus.json after
each row, so an interrupted run goes on where it stopped. Without words, all rows; then docs/versus.md is written.

With --cpu, CPU seconds of one thread in place of wall-clock seconds of two, which other work hardly changes.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from enfold.io.files import write_json
from enfold.saving import versions
from timing import show, table_of
from versus.install import measure_installs
from versus.neighbours import PACKAGES
from versus.page import write_page
from versus.rows import all_rows

ROOT = Path(__file__).parent.parent.parent
RESULT = ROOT / "results" / "versus.json"
PROCESSES, ROUNDS = 2, 4
CLOCKS = {"wall": "wall time, two threads", "cpu": "CPU time, one thread"}


def machine() -> dict[str, object]:
    """Return the processor, its number of threads in use and whether it computes in bf16."""
    info = Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").exists() else ""
    fields = dict(line.split(":", 1) for line in info.split("\n\n", 1)[0].splitlines() if ":" in line)
    found = {key.strip(): value.strip() for key, value in fields.items()}
    flags = found.get("flags", "").split()
    family = ", ".join(f"{key} {found[key]}" for key in ("cpu family", "model") if key in found)
    return {
        "processor": f"{found.get('model name', platform.machine())} ({family})",
        "cores": os.cpu_count(),
        "bf16": next((flag for flag in ("amx_bf16", "avx512_bf16") if flag in flags), "no"),
    }


def measure_row(name: str, clock: str) -> dict[str, Any]:
    """Measure a row in fresh processes."""
    samples: dict[str, list[float]] = {}
    failed: dict[str, str] = {}
    others = []
    for _ in range(PROCESSES):
        again = [sys.executable, "-m", "versus.measure", name, str(ROUNDS), clock]
        found = json.loads(subprocess.run(again, check=True, stdout=subprocess.PIPE, text=True).stdout)  # noqa: S603
        failed |= found["failed"]
        others.append(found["others"])
        for case, seconds in found["samples"].items():
            samples.setdefault(case, []).extend(seconds)
    table = table_of(samples)
    show(name, table)
    about = {"date": time.strftime("%Y-%m-%d"), "clock": CLOCKS[clock], "rounds": PROCESSES * ROUNDS}
    return {**about, "cores used by others": max(others), "failed": failed, "table": table}


def installed() -> dict[str, str]:
    """Return the versions of the packages that are compared."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return {**versions(), **found}


def main() -> None:
    """Measure the rows that are asked for and not yet stored, and write the page."""
    words = [word for word in sys.argv[1:] if not word.startswith("--")]
    wanted = [name for name, _ in all_rows() if not words or all(word in name.split(", ") for word in words)]
    if "--list" in sys.argv:
        print("\n".join(wanted))
        return
    record = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.exists() else {"rows": {}}
    record |= {"command": "make versus", "machine": machine(), "versions": installed(), "rounds": PROCESSES * ROUNDS}
    record["processes"] = PROCESSES
    if ("install" not in record and (not words or words == ["install"])) or ("--again" in sys.argv and not wanted):
        record["install"] = measure_installs()
        write_json(RESULT, record)
    for name in wanted:
        if name not in record["rows"] or "--again" in sys.argv:
            record["rows"][name] = measure_row(name, "cpu" if "--cpu" in sys.argv else "wall")
            write_json(RESULT, record)
    write_page(record)


if __name__ == "__main__":
    main()

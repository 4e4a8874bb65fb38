"""Time and size of the report of a small demo run; writes results/bench-report.json.

Two members, one epoch, one seed: the cost of a page does not depend on the length of the training. With --quick nothing
is written; with the folder of a run as argument, the report of that run is measured instead.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from enfold.io.files import write_json
from enfold.report.page import render_page
from enfold.run.collect import collect
from enfold.saving import versions

RESULTS = Path(__file__).parent.parent / "results"
ROUNDS, LIMIT = 5, 10.0  # seconds


def demo_run(folder: Path) -> Path:
    """Run the demo with two members."""
    words = ["demo", str(folder), "--set", "members=2", "--set", "train.epochs=1", "--seed", "0"]
    script = Path(sys.executable).with_name("enfold")
    subprocess.run([script, *words], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # noqa: S603
    return folder


def measured(run: Path) -> dict[str, float]:
    """Return the median over rounds of collecting the content and of rendering the page, in CPU seconds."""
    collecting, drawing, size = [], [], 0
    for _ in range(ROUNDS + 1):
        start = time.process_time()
        content = collect(run)
        middle = time.process_time()
        size = len(render_page([content]).encode())
        collecting.append(middle - start)
        drawing.append(time.process_time() - middle)
    # The first round fills caches: fonts, templates, the draw of the bootstrap.
    found = {"collect": statistics.median(collecting[1:]), "page": statistics.median(drawing[1:])}
    return {**found, "first": collecting[0] + drawing[0], "kilobytes": size / 1e3}


def main() -> None:
    """Measure, and write the record."""
    given = [word for word in sys.argv[1:] if not word.startswith("--")]
    with tempfile.TemporaryDirectory() as folder:
        found = measured(Path(given[0]) if given else demo_run(Path(folder) / "demo"))
    total = found["first"]
    print(", ".join(f"{name} {value:.2f}" for name, value in found.items()), f"({total:.1f} of {LIMIT:.0f} s)")
    assert total < LIMIT, f"a report must take less than {LIMIT} s, took {total:.1f}"
    if not given and "--quick" not in sys.argv:
        record = {"command": "python bench/report.py", "date": time.strftime("%Y-%m-%d"), "rounds": ROUNDS}
        write_json(RESULTS / "bench-report.json", {**record, "versions": versions(), "cpu_seconds": found})


if __name__ == "__main__":
    main()

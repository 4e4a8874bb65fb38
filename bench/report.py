"""How long the report of a small demo run takes, and how large it is; results/bench-report.json.

Two members, one epoch, one seed: what a page costs does not depend on how long networks were trained. With --quick
nothing is written; with a run's folder as argument, that run is shown instead.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from enfold.run.gather import gather

from enfold.io.files import write_json
from enfold.report.page import page
from enfold.saving import versions

RESULTS = Path(__file__).parent.parent / "results"
ROUNDS, LIMIT = 5, 10.0  # seconds


def demo_run(folder: Path) -> Path:
    """A demo run of two members."""
    words = ["demo", str(folder), "--set", "members=2", "--set", "plan.epochs=1", "--seed", "0"]
    script = Path(sys.executable).with_name("enfold")
    subprocess.run([script, *words], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # noqa: S603
    return folder


def measured(run: Path) -> dict[str, float]:
    """The median over rounds of reading and comparing, and of drawing and writing the page, in seconds of one CPU."""
    gathering, drawing, size = [], [], 0
    for _ in range(ROUNDS + 1):
        start = time.process_time()
        content = gather(run)
        middle = time.process_time()
        size = len(page([content]).encode())
        gathering.append(middle - start)
        drawing.append(time.process_time() - middle)
    # The first round fills caches: fonts, templates, the draw of the bootstrap.
    found = {"gather": statistics.median(gathering[1:]), "page": statistics.median(drawing[1:])}
    return {**found, "first": gathering[0] + drawing[0], "kilobytes": size / 1e3}


def main() -> None:
    """The measurement and the record."""
    given = [word for word in sys.argv[1:] if not word.startswith("--")]
    with tempfile.TemporaryDirectory() as folder:
        found = measured(Path(given[0]) if given else demo_run(Path(folder) / "demo"))
    whole = found["first"]
    print(", ".join(f"{name} {value:.2f}" for name, value in found.items()), f"({whole:.1f} of {LIMIT:.0f} s)")
    assert whole < LIMIT, f"a report must take less than {LIMIT} s, took {whole:.1f}"
    if not given and "--quick" not in sys.argv:
        record = {"command": "python bench/report.py", "date": time.strftime("%Y-%m-%d"), "rounds": ROUNDS}
        write_json(RESULTS / "bench-report.json", {**record, "versions": versions(), "cpu_seconds": found})


if __name__ == "__main__":
    main()

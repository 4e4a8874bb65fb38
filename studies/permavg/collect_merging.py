"""Write results/cifar10-merging.json from runs of several widths: python -m studies.permavg.collect_merging RUN ...

    enfold run studies/permavg/recipes/cifar10-merging.yaml runs/resnet-8 --set network.width=8
    python -m studies.permavg.collect_merging runs/resnet-8 ...

Other networks in the file are left unchanged. The barrier is the accuracy that the network halfway
between two members loses relative to their mean accuracy.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from enfold.io.files import write_json
from enfold.run.directory import RunDirectory
from enfold.run.execute import seed_runs
from studies.evidence import MEAN_MEMBER, Evidence
from studies.measured import HALFWAY

METRICS = ("accuracy", "nll")


def collect(run: Path) -> dict[str, Any]:
    """Return the recipe of a run, accuracy and NLL of every row, and the barriers."""
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    rows = summary["rows"]
    opened = RunDirectory.open(run)
    ends = Evidence({"": seed_runs(opened, opened.recipe())}).row(f"{MEAN_MEMBER} of ensemble of 2", "accuracy")
    if ends is None:
        raise SystemExit(f"'{run}' must contain predictions of all its seeds: run  enfold evaluate {run}")
    return {
        **{key: summary[key] for key in ("recipe", "seeds", "versions")},
        "rows": {label: {key: row["scores"][key] for key in METRICS} for label, row in rows.items()},
        "barriers": {label: _drop(ends.values, rows[label]["scores"]["accuracy"]["values"]) for label in HALFWAY},
    }


def _drop(ends: list[float], merged: list[float]) -> dict[str, Any]:
    values = [one - other for one, other in zip(ends, merged, strict=True)]
    return {
        "mean": statistics.mean(values),
        "std": statistics.stdev(values) if len(values) > 1 else None,
        "values": values,
    }


if __name__ == "__main__":
    paths = [Path(each) for each in sys.argv[1:]]
    file = Path(__file__).parent / "results" / "cifar10-merging.json"
    known = json.loads(file.read_text(encoding="utf-8"))["networks"] if file.exists() else {}
    about = {
        "command": "enfold run studies/permavg/recipes/cifar10-merging.yaml RUN, with --set for each network",
        "date": time.strftime("%Y-%m-%d"),
    }
    write_json(file, {**about, "networks": {**known, **{path.name: collect(path) for path in paths}}})

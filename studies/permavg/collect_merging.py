"""Write results/cifar10-merging.json: merges of networks of several widths, and how far they fall below their members.

    enfold run recipes/cifar10-merging.yaml runs/resnet-8 --set network.width=8
    python tools/collect_merging.py runs/resnet-8 ...

Networks that are in the file already and not among the runs stay there. The barrier is what the network halfway between
two members loses to their mean accuracy.
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
from enfold.run.evidence import MEAN_MEMBER, Evidence
from enfold.run.execute import cells
from measured_tables import HALFWAY

KEPT = ("accuracy", "nll")


def collected(run: Path) -> dict[str, Any]:
    """One run: its network, accuracy and NLL of every row, and barriers."""
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    rows = summary["rows"]
    opened = RunDirectory.open(run)
    ends = Evidence({"": cells(opened, opened.recipe())}).row(f"{MEAN_MEMBER} of ensemble of 2", "accuracy")
    if ends is None:
        raise SystemExit(f"'{run}' must hold predictions of all its seeds: make them by enfold evaluate {run}")
    return {
        **{key: summary[key] for key in ("recipe", "seeds", "versions")},
        "rows": {label: {key: row["scores"][key] for key in KEPT} for label, row in rows.items()},
        "barriers": {label: _below(ends.values, rows[label]["scores"]["accuracy"]["values"]) for label in HALFWAY},
    }


def _below(ends: list[float], merged: list[float]) -> dict[str, Any]:
    values = [one - other for one, other in zip(ends, merged, strict=True)]
    return {
        "mean": statistics.mean(values),
        "std": statistics.stdev(values) if len(values) > 1 else None,
        "values": values,
    }


if __name__ == "__main__":
    paths = [Path(each) for each in sys.argv[1:]]
    file = Path(__file__).parent.parent / "results" / "cifar10-merging.json"
    known = json.loads(file.read_text(encoding="utf-8"))["networks"] if file.exists() else {}
    about = {
        "command": "enfold run recipes/cifar10-merging.yaml RUN, with what is set of the recipe for each network",
        "date": time.strftime("%Y-%m-%d"),
    }
    write_json(file, {**about, "networks": {**known, **{path.name: collected(path) for path in paths}}})

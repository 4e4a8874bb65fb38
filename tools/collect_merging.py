"""Write results/cifar10-merging.json: merges of networks of several widths, and how far they fall below their members.

    enfold run recipes/cifar10-merging.yaml runs/resnet-8 --set network.width=8
    python tools/collect_merging.py runs/resnet-8 ...

Networks that are in the file already and not among the runs stay there. The barrier is what the network halfway between
two members loses to the mean accuracy of members.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from enfold.files import write_json
from measured_tables import HALFWAY

KEPT = ("accuracy", "nll")


def collected(run: Path) -> dict[str, Any]:
    """One run: its network, accuracy and NLL of every row, and barriers."""
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    rows = summary["rows"]
    members = rows["mean member"]["scores"]["accuracy"]["values"]
    return {
        "network": summary["recipe"]["network"],
        "plan": summary["recipe"]["plan"],
        "seeds": summary["seeds"],
        "rows": {label: {key: row["scores"][key] for key in KEPT} for label, row in rows.items()},
        "barriers": {label: _below(members, rows[label]["scores"]["accuracy"]["values"]) for label in HALFWAY},
    }


def _below(members: list[float], merged: list[float]) -> dict[str, Any]:
    values = [one - other for one, other in zip(members, merged, strict=True)]
    return {
        "mean": statistics.mean(values),
        "std": statistics.stdev(values) if len(values) > 1 else None,
        "values": values,
    }


if __name__ == "__main__":
    paths = [Path(each) for each in sys.argv[1:]]
    first = json.loads((paths[0] / "summary.json").read_text(encoding="utf-8"))
    about = {
        "command": "enfold run recipes/cifar10-merging.yaml RUN --set network.width=W (and plain convolutions)",
        "date": time.strftime("%Y-%m-%d"),
        **{key: first[key] for key in ("seeds", "versions", "recipe")},
    }
    file = Path(__file__).parent.parent / "results" / "cifar10-merging.json"
    known = json.loads(file.read_text(encoding="utf-8")) if file.exists() else about
    networks = {**known.get("networks", {}), **{path.name: collected(path) for path in paths}}
    write_json(file, {**known, "date": about["date"], "networks": networks})

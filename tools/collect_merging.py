"""Write results/cifar10-merging.json: merges of networks of several widths, and barriers between two of their members.

    enfold run recipes/cifar10-merging.yaml runs/resnet-8 --set network.width=8
    enfold alignment runs/resnet-8 --only line --points 5 --epochs 3 --set matched=4 --set alpha=1.0 --set order=joint
    python tools/collect_merging.py runs/resnet-8 ...

The lines are wanted of every seed (`--seed`).
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from enfold.files import write_json

KEPT = ("accuracy", "nll")


def collected(run: Path) -> dict[str, Any]:
    """One run: its network, accuracy and NLL of every row, and barriers by batch norm and kind of line."""
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    rows = {label: {key: row["scores"][key] for key in KEPT} for label, row in summary["rows"].items()}
    lines = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(run.glob("seed-*/alignment/line.json"))]
    if len(lines) != len(summary["seeds"]):
        raise SystemExit(
            f"{run}: lines of {len(lines)} of {len(summary['seeds'])} seeds: enfold alignment RUN --seed S"
        )
    found = [line["found"] for line in lines]
    barriers = {
        mode: {kind: _spread([each[mode][kind]["barrier"]["error"]["height"] for each in found]) for kind in kinds}
        for mode, kinds in found[0].items()
    }
    return {"network": summary["recipe"]["network"], "rows": rows, "barriers": barriers}


def _spread(values: list[float]) -> dict[str, Any]:
    return {"mean": statistics.mean(values), "std": statistics.stdev(values), "values": values}


if __name__ == "__main__":
    paths = [Path(each) for each in sys.argv[1:]]
    first = json.loads((paths[0] / "summary.json").read_text(encoding="utf-8"))
    about = {
        "command": "enfold run recipes/cifar10-merging.yaml RUN --set network.width=W; enfold alignment RUN --seed S "
        "--only line --points 5 --epochs 3 --set matched=4 --set alpha=1.0 --set order=joint",
        "date": time.strftime("%Y-%m-%d"),
        **{key: first[key] for key in ("seeds", "versions", "recipe")},
    }
    write_json(
        Path(__file__).parent.parent / "results" / "cifar10-merging.json",
        {**about, "networks": {path.name: collected(path) for path in paths}},
    )

"""Write results/alignment.json from a run with an alignment analysis: python -m studies.permavg.collect_alignment RUN

enfold run recipes/fashion-mlp.yaml runs/fashion --set 'seeds=[0]' --set 'steps=[]' --set cost=false
enfold analyse alignment runs/fashion --set matched=12 --epochs 2 --examples 2560
python -m studies.permavg.collect_alignment runs/fashion
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from enfold.io.files import write_json

if __name__ == "__main__":
    run = Path(sys.argv[1])
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    parts = [json.loads(file.read_text(encoding="utf-8")) for file in sorted((run / "alignment").glob("*.json"))]
    about = {
        "command": "enfold analyse alignment RUN --set matched=12 --epochs 2 --examples 2560",
        "date": time.strftime("%Y-%m-%d"),
        **{key: summary[key] for key in ("seeds", "versions", "recipe")},
    }
    by_name = {part.pop("part"): part for part in parts if "part" in part}
    write_json(Path(__file__).parent / "results" / "alignment.json", {**about, "parts": by_name})

"""Train members and the networks that replace them, and store the scores: python -m studies.compress SETTING ...

python -m studies.compress mlp --seed 0 --seed 1 --output runs/compress --rows control,distill
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path

import torch

from enfold.io.files import write_json
from studies.compress.rows import ROWS
from studies.compress.run import Cells
from studies.compress.settings import SETTINGS
from studies.compress.tables import METRICS, RESULTS, summarize


def main() -> None:
    """Run what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("setting", choices=list(SETTINGS))
    parser.add_argument("--seed", type=int, action="append", help="default: 0, 1 and 2")
    parser.add_argument("--rows", default="control,distill,compress", help=f"of compress, {', '.join(ROWS)}")
    parser.add_argument("--output", type=Path, default=Path("runs/compress"))
    parser.add_argument("--write", action="store_true", help="write the results of the study")
    chosen = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    for seed in chosen.seed or (0, 1, 2):
        cells = Cells(chosen.setting, seed, chosen.output)
        found = cells.cell("references")
        member, ensemble = found["mean member"], found["ensemble"]
        metrics = [name for name in METRICS if name in member]
        for name in metrics:
            print(f"{seed} {name}: mean member {member[name]:.4f}, ensemble {ensemble[name]:.4f}", flush=True)
        for name in (each.strip() for each in chosen.rows.split(",")):
            row, texts = cells.cell(name), []
            for which in ("last", "best"):
                own = row[which]["test"]
                gains = [100 * (member[key] - own[key]) / (member[key] - ensemble[key]) for key in metrics]
                texts.append(f"{which} " + " ".join(f"{each:6.0f}" for each in gains))
            print(
                f"{seed} {name:18} {'  '.join(texts)}  {row['processor seconds']:.0f} s {row.get('name', '')}",
                flush=True,
            )
    if chosen.write:
        write_json(RESULTS / f"compress-{chosen.setting}.json", summarize(chosen.setting, chosen.output))


if __name__ == "__main__":
    main()

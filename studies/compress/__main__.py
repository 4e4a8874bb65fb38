"""Train members and the networks that replace them, and store the scores: python -m studies.compress SETTING ...

python -m studies.compress mlp --seed 0 --seed 1 --output runs/compress --rows control,distill
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path

import torch

from studies.compress.rows import ROWS
from studies.compress.run import Cells
from studies.compress.settings import SETTINGS


def main() -> None:
    """Run what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("setting", choices=list(SETTINGS))
    parser.add_argument("--seed", type=int, action="append", help="default: 0, 1 and 2")
    parser.add_argument("--rows", default="control,distill,compress", help=f"of compress, {', '.join(ROWS)}")
    parser.add_argument("--output", type=Path, default=Path("runs/compress"))
    chosen = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    for seed in chosen.seed or (0, 1, 2):
        cells = Cells(chosen.setting, seed, chosen.output)
        found = cells.cell("references")
        member, ensemble, train = (found[key] for key in ("mean member", "ensemble", "mean member on training"))
        for name in ("accuracy", "nll", "cnll"):
            if name in member:
                print(f"{name:9} {member[name]:.4f} -> {ensemble[name]:.4f}   train {train.get(name, 0):.4f}", flush=True)
        for name in (each.strip() for each in chosen.rows.split(";")):
            row = cells.cell(name)
            texts = []
            for which in ("last", "best"):
                gains = [
                    100 * (member[key] - row[which]["test"][key]) / (member[key] - ensemble[key])
                    for key in ("accuracy", "nll", "cnll")
                    if key in member
                ]
                texts.append(f"{which} " + " ".join(f"{each:6.0f}" for each in gains))
            print(f"{chosen.setting} {seed} {name:18} {'   '.join(texts)}   {row['processor seconds']:.0f} s  {row.get('name', '')}", flush=True)


if __name__ == "__main__":
    main()

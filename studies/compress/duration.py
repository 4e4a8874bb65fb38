"""Duration of compress on the data of the demo, without further arguments and with a limit.

python -m studies.compress.duration --output runs/compress

On an idle machine, seconds are those of the processor. Members are those of the study's setting "cnn", seed 0.
"""

from __future__ import annotations

import argparse
import time
import warnings
from pathlib import Path
from typing import Any

import torch

import enfold
from enfold.io.files import write_json
from enfold.saving import versions
from studies.compress.run import Cells, Timer, machine
from studies.compress.tables import METRICS, RESULTS


def main() -> None:
    """Measure both, and write the results of the study."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/compress"))
    parser.add_argument("--limit", default="2 min")
    chosen = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    cells = Cells("cnn", 0, chosen.output)
    found = cells.references()
    settings: dict[str, Any] = {
        "no further argument": {},
        f"time={chosen.limit}, settings of the members": {"time": chosen.limit, "config": cells.setting.members},
    }
    rows = {}
    for name, given in settings.items():
        timer = Timer()
        result = enfold.compress(cells.ensemble, cells.data.train, cells.data.val, quiet=True, **given)
        seconds = timer.read()
        test, member, ensemble = cells.scores(result.network)["test"], found["mean member"], found["ensemble"]
        gains = {key: (member[key] - test[key]) / (member[key] - ensemble[key]) for key in METRICS}
        rows[name] = {**seconds, "recommendation": result.recommendation, "test": test, "gain": gains}
        print(f"{name}: {seconds}, {gains}\n{result}", flush=True)
    record = {"command": "python -m studies.compress.duration", "seed": 0, "date": time.strftime("%Y-%m-%d")}
    write_json(RESULTS / "duration.json", {**record, "versions": versions(), "machine": machine(), "rows": rows})


if __name__ == "__main__":
    main()

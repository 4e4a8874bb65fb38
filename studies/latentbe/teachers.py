"""How much members still differ on the images they were trained on: results/teachers-on-training-data.json.

python tools/teachers_on_training_data.py RUN
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from statistics import fmean

from enfold.evaluate import predict
from enfold.io.files import write_json
from enfold.metrics import accuracy, disagreement, nll, pairwise_kl, per_member
from enfold.metrics.predictions import Predictions
from enfold.run import RunDirectory
from enfold.run.execute import cells
from enfold.saving import versions

RESULT = Path(__file__).parent.parent / "results" / "teachers-on-training-data.json"


def figures(said: Predictions) -> dict[str, float]:
    """Of the members alone, and between two of them."""
    return {
        "member_accuracy": float(per_member(accuracy, said).mean()),
        "member_nll": float(per_member(nll, said).mean()),
        "disagreement": disagreement(said),
        "pairwise_kl": pairwise_kl(said),
    }


def main(path: Path) -> None:
    """Training and test part of every seed, and their means."""
    run = RunDirectory.open(path)
    recipe = run.recipe()
    found: dict[str, list[dict[str, float]]] = {"train": [], "test": []}
    for cell in cells(run, recipe):
        members = cell.members()
        for part, data in (("train", cell.data.replace(test=cell.data.train)), ("test", cell.data)):
            found[part].append(figures(predict(members, data.test)))
    means = {part: {name: fmean(each[name] for each in rows) for name in rows[0]} for part, rows in found.items()}
    about = {"recipe": recipe.name, "seeds": list(recipe.seeds), "date": time.strftime("%Y-%m-%d")}
    command = "python tools/teachers_on_training_data.py RUN"
    write_json(RESULT, {"command": command, **about, "versions": versions(), "mean": means, "by_seed": found})


if __name__ == "__main__":
    main(Path(sys.argv[1]))

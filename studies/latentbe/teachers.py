"""Measure how much the members of a run differ on their training images: python -m studies.latentbe.teachers RUN"""

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
from enfold.run.execute import seed_runs
from enfold.saving import versions

RESULT = Path(__file__).parent / "results" / "teachers-on-training-data.json"


def measure(predictions: Predictions) -> dict[str, float]:
    """Return scores of single members and the differences between two of them."""
    return {
        "member_accuracy": float(per_member(accuracy, predictions).mean()),
        "member_nll": float(per_member(nll, predictions).mean()),
        "disagreement": disagreement(predictions),
        "pairwise_kl": pairwise_kl(predictions),
    }


def main(path: Path) -> None:
    """Measure the training and the test split of every seed and write the results with their means."""
    run = RunDirectory.open(path)
    recipe = run.recipe()
    by_seed: dict[str, list[dict[str, float]]] = {"train": [], "test": []}
    for seed_run in seed_runs(run, recipe):
        members = seed_run.members()
        for split, rows in by_seed.items():
            rows.append(measure(predict(members, getattr(seed_run.data, split))))
    means = {split: {name: fmean(each[name] for each in rows) for name in rows[0]} for split, rows in by_seed.items()}
    about = {"recipe": recipe.name, "seeds": list(recipe.seeds), "date": time.strftime("%Y-%m-%d")}
    command = "python -m studies.latentbe.teachers RUN"
    write_json(RESULT, {"command": command, **about, "versions": versions(), "mean": means, "by_seed": by_seed})


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""What the docs say in words of results/*.json."""

import json
from pathlib import Path

RESULTS = Path(__file__).parent.parent / "results"


def test_perm_avg_at_its_best_does_not_fall_with_the_number_of_members():
    record = json.loads((RESULTS / "reproduce-permavg-table.json").read_text(encoding="utf-8"))
    rows = {row["label"]: row["metrics"] for row in record["rows"]}

    def ours(run: str, label: str, metric: str) -> float:
        mean: float = rows[f"{run}/{label}"][metric]["ours"]["mean"]
        return mean

    converged = [run for run in record["runs"] if not run.endswith("-brief")]
    assert set(converged) == {f"{data}-{layers}" for data in ("fashion-mnist", "cifar10") for layers in (2, 3, 4)}
    for run in converged:
        assert ours(run, "perm-avg-best-6", "accuracy") >= ours(run, "perm-avg-best-2", "accuracy"), run
        assert ours(run, "perm-avg-best-6", "nll") <= ours(run, "perm-avg-best-2", "nll"), run
        for size in range(2, 7):
            best, member = f"perm-avg-best-{size}", f"mean member of ensemble of {size}"
            assert ours(run, best, "accuracy") >= ours(run, member, "accuracy"), (run, size)
            assert ours(run, best, "nll") < ours(run, member, "nll"), (run, size)
            assert ours(run, best, "nll") < ours(run, f"kd-{size}", "nll"), (run, size)
            assert ours(run, best, "nll") < ours(run, f"average-tuned-{size}", "nll"), (run, size)

"""Simulate how often the intervals of the studies contain the truth: python -m studies.coverage

The difference of two rows for seed s and test example n is μ + a_s + b_n + c_sn. a has a share of the variance of the
mean over seeds and examples, and b the rest but a tenth, which is c's. Of each interval we count how often it does not
contain μ; at the level of 95 % it should be 5 %. The bootstrap is the one over seeds and examples of
`enfold.metrics.bootstrap.paired_difference`, with the same draws of examples for all seeds.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from enfold.metrics.bootstrap import draw_counts
from enfold.saving import versions
from enfold.seeds import generator
from studies.intervals import student_interval
from studies.markdown import Content, make_table

SEEDS = (3, 4, 5)
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
INTERACTION = 0.1  # the share of c in the variance that is not a's
EXAMPLES, REPLICATES = 200, 1000
FILE = Path(__file__).parent.parent / "results" / "interval-coverage.json"


def simulate(num_seeds: int, share: float, trials: int, level: float = 0.95) -> dict[str, float]:
    """Return the fraction of intervals that do not contain the true difference, by the kind of interval.

    Args:
        num_seeds: S.
        share: The fraction of the variance of the mean that comes from seeds.
        trials: The number of simulated studies.
        level: The nominal coverage.
    """
    source = generator(num_seeds, "coverage", int(1000 * share))
    scales = math.sqrt(num_seeds * share), *_example_scales(num_seeds, share)
    counts = draw_counts(EXAMPLES, REPLICATES, seed=0).double()
    counts /= counts.sum(1, keepdim=True)
    chosen = torch.randint(num_seeds, (REPLICATES, num_seeds), generator=source)
    missed = {"bootstrap": 0, "student": 0}
    for _ in range(trials):
        values = _draw(num_seeds, scales, source)
        drawn = counts @ values.T  # (R, S)
        means = drawn.gather(1, chosen).mean(1)
        tail = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)
        lower, upper = means.quantile(tail).tolist()
        missed["bootstrap"] += not lower <= 0 <= upper
        found = student_interval(values.mean(1).tolist(), float(drawn.mean(1).var()), level)
        missed["student"] += not found.lower <= 0 <= found.upper
    return {kind: count / trials for kind, count in missed.items()}


def _example_scales(num_seeds: int, share: float) -> tuple[float, float]:
    """Return the standard deviations of b and c, whose means over seeds and examples have the variance 1 - share."""
    rest = EXAMPLES * (1 - share)
    return math.sqrt((1 - INTERACTION) * rest), math.sqrt(INTERACTION * rest * num_seeds)


def _draw(num_seeds: int, scales: Sequence[float], source: torch.Generator) -> Tensor:
    """Return the differences (S, N) of one study; the true one is 0."""
    of_seeds, of_examples, of_both = scales
    values = of_seeds * torch.randn(num_seeds, 1, generator=source, dtype=torch.float64)
    values = values + of_examples * torch.randn(1, EXAMPLES, generator=source, dtype=torch.float64)
    return values + of_both * torch.randn(num_seeds, EXAMPLES, generator=source, dtype=torch.float64)


def coverage_table(content: Content) -> str:
    """Return one line for each number of seeds and kind of interval."""
    names = {"student": "Student, seeds and examples (used)", "bootstrap": "bootstrap over seeds and examples"}
    shares = list(dict.fromkeys(row["share"] for row in content["rows"]))
    lines = [["seeds", "interval", *(f"{100 * share:.0f} %" for share in shares)]]
    for seeds in dict.fromkeys(row["seeds"] for row in content["rows"]):
        of_seeds = [row for row in content["rows"] if row["seeds"] == seeds]
        for kind, name in names.items():
            lines.append([str(seeds), name, *(f"{100 * row['missed'][kind]:.1f}" for row in of_seeds)])
    return make_table(lines, left=2)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the simulation and write its results."""
    parser = argparse.ArgumentParser(prog="python -m studies.coverage", description=__doc__)
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--out", type=Path, default=FILE)
    given = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = []
    for seeds in SEEDS:
        for share in SHARES:
            rows.append({"seeds": seeds, "share": share, "missed": simulate(seeds, share, given.trials)})
            print(rows[-1])
    content = {
        "command": "python -m studies.coverage",
        "date": time.strftime("%Y-%m-%d"),
        "versions": versions(),
        "trials": given.trials,
        "level": 0.95,
        "rows": rows,
    }
    given.out.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

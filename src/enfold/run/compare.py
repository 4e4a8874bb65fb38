"""Compare the rows of a run with its mean member by one bootstrap over seeds and test examples.

Like `enfold.metrics.paired_difference`, but each row is resampled once for all comparisons.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor

from enfold.metrics import (
    PointPredictions,
    QuantilePredictions,
    RegressionPredictions,
    draw_counts,
    example_correct,
    example_density_nll,
    example_nll,
    example_pinball,
    example_squared_error,
    per_member,
)
from enfold.metrics.predictions import Predictions, RowPredictions
from enfold.report.content import ONE, Difference
from enfold.seeds import generator

REPLICATES, LEVEL = 1000, 0.95
Scores = Callable[[Any], Tensor]
METRICS: dict[str, Scores] = {"accuracy": example_correct, "nll": example_nll}  # means, so a replicate is a product
ALL_METRICS = ("accuracy", "nll", "pinball", "mse")
AT_MOST = 50_000  # targets: more pixels or tokens are not resampled, as those of an image are not independent


def comparable_metrics(p: RowPredictions) -> dict[str, Scores]:
    """Return the metrics of a task that are means over independent targets."""
    if len(p) > AT_MOST or not (type(p) is Predictions or isinstance(p, RegressionPredictions)):
        return {}
    if isinstance(p, Predictions):
        return METRICS
    if isinstance(p, QuantilePredictions):
        return {"pinball": example_pinball, "mse": example_squared_error}
    point: dict[str, Scores] = {"mse": example_squared_error}
    return point if isinstance(p, PointPredictions) else {"nll": example_density_nll, **point}


class Comparison:
    """The predictions of each row on test data, a list over seeds, and differences between rows."""

    def __init__(
        self, predictions: Mapping[str, Sequence[RowPredictions]], sizes: Sequence[int] = (), seed: int = 0
    ) -> None:
        self._predictions, self._seed = dict(predictions), seed
        if "ensemble" in predictions:
            self._predictions |= {
                f"ensemble of {k}": [each.subset(range(k)) for each in predictions["ensemble"]] for k in sizes
            }
        self._resampled = cache(self._resample)

    def to_mean_member(self, rows: Iterable[str]) -> dict[str, dict[str, Difference]]:
        """Return the difference of each metric of each row from that of the mean member."""
        found = {}
        for row in rows:
            each = {metric: self.difference(row, ONE, metric) for metric in ALL_METRICS}
            found[row] = {metric: difference for metric, difference in each.items() if difference is not None}
        return {row: differences for row, differences in found.items() if differences}

    def difference(self, first: str, second: str, metric: str) -> Difference | None:
        """Return the difference of a metric between two rows, with its interval.

        Args:
            first: The name of a row.
            second: The name of the row to subtract.
            metric: "accuracy", "nll", or the criterion of another task.

        Returns:
            The difference, or None if the rows are the same, one was not evaluated, or a value is infinite.
        """
        known = {*self._predictions, *([ONE] if "ensemble" in self._predictions else [])}
        if first == second or not {first, second} <= known:
            return None
        if not all(metric in comparable_metrics(self._of(row)[0]) for row in (first, second)):
            return None
        one, other = self._resampled(first, metric), self._resampled(second, metric)
        values, moved = one[0] - other[0], one[1] - other[1]  # (S,), (S, R)
        means = moved.T.gather(1, self._drawn_seeds(len(values))).mean(1)
        if not bool(means.isfinite().all()):
            return None
        tail = (1 - LEVEL) / 2
        lower, upper = means.quantile(torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
        return Difference(float(values.mean()), lower, upper)

    def _of(self, row: str) -> Sequence[RowPredictions]:
        return self._predictions["ensemble" if row == ONE else row]

    def _drawn_seeds(self, count: int) -> Tensor:
        return torch.randint(count, (REPLICATES, count), generator=generator(self._seed, "bootstrap", "seeds"))

    @cached_property
    def _weights(self) -> Tensor:
        """The weight of each example in each replicate (R, N)."""
        size = len(self._predictions["ensemble"][0])
        return draw_counts(size, REPLICATES, self._seed).double() / size

    def _resample(self, row: str, metric: str) -> tuple[Tensor, Tensor]:
        """Return the metric of each seed (S,) and of each replicate (S, R)."""
        predictions = self._of(row)
        score = comparable_metrics(predictions[0])[metric]
        each = torch.stack([per_member(score, p).mean(0) if row == ONE else score(p) for p in predictions])  # (S, N)
        return each.mean(1), each @ self._weights.T

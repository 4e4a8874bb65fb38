"""Metric: a function of predictions, with what tables and reports need to display its value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Metric:
    """A scalar metric of an ensemble, with what tables and reports need to display it.

    Args:
        name: Name of the metric.
        function: Function that computes it from predictions.
        unit: Unit of its values.
        higher_is_better: Whether larger values are better.
        description: What it measures, for tables and reports.
    """

    name: str
    function: Callable[[Any], float]
    unit: Literal["%", "nats", ""]
    higher_is_better: bool
    description: str

    def __call__(self, p: Any) -> float:
        """Return the metric of these predictions."""
        return self.function(p)

    @property
    def scale(self) -> float:
        """The factor that converts a value to the metric's unit."""
        return 100.0 if self.unit == "%" else 1.0

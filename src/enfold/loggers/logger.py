"""The interface of loggers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Logger(Protocol):
    """An object with these three methods can be passed as `logger=`; it needs no base class."""

    def log_settings(self, settings: Mapping[str, Any]) -> None:
        """Record settings: numbers, text, booleans or None by name; further calls add settings."""

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Record metrics by name; the step is the number of complete epochs, 0 before training."""

    def close(self) -> None:
        """Write what is pending; called at the end of `fit`, `distill` or `compress`, also after an error."""

"""Regression."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from enfold.tasks.classification import Classification


@dataclass(frozen=True)
class Regression(Classification):
    """Numbers for each example."""

    name: ClassVar[str] = "regression"

"""Multi-label classification."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from enfold.tasks.classification import Classification


@dataclass(frozen=True)
class Multilabel(Classification):
    """Any number of L labels for each example."""

    name: ClassVar[str] = "multilabel"

"""Binary classification with one logit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from enfold.tasks.classification import Classification


@dataclass(frozen=True)
class Binary(Classification):
    """One of two classes from one logit."""

    name: ClassVar[str] = "binary"

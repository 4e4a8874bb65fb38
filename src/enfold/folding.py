"""What every fold keeps to."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from torch import nn

from enfold.data import Data
from enfold.errors import EnfoldError
from enfold.members import Members, Predictor


class Fold(Protocol):
    """A frozen dataclass whose fields are the method's hyper-parameters."""

    def __call__(self, members: Members, data: Data, *, checkpoint: Path | None = None) -> nn.Module:
        """One network of the user's own class; members are left untouched; training resumes from `checkpoint`."""


def require_members(model: Predictor, purpose: str) -> Members:
    """Members of one architecture, which is what can be merged or started from."""
    if isinstance(model, Members):
        return model
    raise EnfoldError(
        f"{purpose} needs members of one architecture, got {type(model).__name__}: use Stacked, or give a student"
    )

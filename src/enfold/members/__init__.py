"""Members: M networks behind one call."""

from enfold.members.base import Members, Mixed, Predictor, share_of, trained_members
from enfold.members.skeleton import State
from enfold.members.stacked import Stacked

__all__ = ["Members", "Mixed", "Predictor", "Stacked", "State", "share_of", "trained_members"]

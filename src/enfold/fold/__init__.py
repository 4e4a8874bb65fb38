"""Fold: M members become one network of the user's own class. One file is one method."""

from enfold.fold.average import Average
from enfold.fold.distill import Distill

__all__ = ["Average", "Distill"]

"""Merging: what turns members' weights into one network's."""

from enfold.merging.repair import Repair
from enfold.merging.sinkhorn import sinkhorn, softness
from enfold.merging.solve import condition, divide, divide_each

__all__ = ["Repair", "condition", "divide", "divide_each", "sinkhorn", "softness"]

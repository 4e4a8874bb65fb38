"""To be removed: moved to enfold.engines.parameters."""

from enfold.engines.parameters import Tree

__all__ = ["Tree"]

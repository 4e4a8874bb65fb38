"""To be removed: moved to enfold.engines.joint."""

from enfold.engines.joint import Merged

__all__ = ["Merged"]

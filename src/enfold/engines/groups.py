"""To be removed: moved to enfold.engines.parameters."""

from enfold.engines.parameters import Decay, decay_groups

__all__ = ["Decay", "decay_groups"]

"""To be removed: moved to enfold.engines.parameters."""

from enfold.engines.parameters import record_used as note_used
from enfold.engines.parameters import take_used

__all__ = ["note_used", "take_used"]

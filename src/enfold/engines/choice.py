"""To be removed: moved to enfold.engines.choose."""

from enfold.engines.choose import choose_engine, require_engine
from enfold.engines.choose import disable_dropout as without_draws

__all__ = ["choose_engine", "require_engine", "without_draws"]

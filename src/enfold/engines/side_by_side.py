"""To be removed: moved to enfold.engines.joint and enfold.engines.examples."""

from enfold.engines.examples import vary_own as shared_varied
from enfold.engines.joint import choose_joint_engine as preferred

__all__ = ["preferred", "shared_varied"]

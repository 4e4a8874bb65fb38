"""To be removed: moved to enfold.engines.examples."""

from enfold.engines.examples import EXAMPLES, Example

__all__ = ["EXAMPLES", "Example"]

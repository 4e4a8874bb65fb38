"""To be removed: moved to enfold.engines.base and enfold.engines.stacked."""

from enfold.engines.base import CannotRun
from enfold.engines.stacked import StackedProgram
from enfold.engines.stacked import trace_forward as traced

__all__ = ["CannotRun", "StackedProgram", "traced"]

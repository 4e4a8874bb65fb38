"""To be removed: moved to enfold.engines.inputs."""

from enfold.engines.inputs import refuse_shape

__all__ = ["refuse_shape"]

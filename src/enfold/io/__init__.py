"""Files: atomic writes, content digests, checkpoints, and references to user code."""

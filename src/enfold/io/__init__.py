"""Files: atomic writes, content digests, checkpoints, and Python code that a user names."""

"""The networks, one file a package or family."""

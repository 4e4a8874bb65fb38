"""Adapters to other packages, one file each; nothing else in enfold imports them, and each needs an extra."""

"""The command line: one verb per stage."""

from enfold.cli.app import main

__all__ = ["main"]

"""Tiny data and members for merges."""

from tiny_members import data, members, networks, snapshot

__all__ = ["data", "members", "networks", "snapshot"]

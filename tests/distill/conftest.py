"""Tiny data and members for distillation."""

from tiny_members import data, members, networks, snapshot

__all__ = ["data", "members", "networks", "snapshot"]

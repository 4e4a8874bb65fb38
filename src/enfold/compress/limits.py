"""Limits of a search as users write them: budgets relative to one member, and durations."""

from __future__ import annotations

import re

from enfold.errors import EnfoldError

UNITS = {"s": 1, "sec": 1, "second": 1, "m": 60, "min": 60, "minute": 60, "h": 3600, "hour": 3600}
ROUNDING = 1.001  # factor by which a cost may exceed a budget


def parse_budget(budget: str | float, name: str = "budget") -> float:
    """Return a budget as a factor on one member.

    Args:
        budget: What the user passed.
        name: The name of the argument.

    Raises:
        EnfoldError: If it is not a positive number such as "1x" or 0.5.
    """
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*x?\s*", str(budget)) if not isinstance(budget, bool) else None
    if match is None or not float(match[1]) > 0:
        raise EnfoldError(f'{name} must be a positive factor such as "1x" or 0.5, got {budget!r}: change {name}')
    return float(match[1])


def parse_memory(memory: str | float | None) -> float:
    """Return the largest size relative to one member; infinite for None."""
    return float("inf") if memory is None else parse_budget(memory, "memory")


def parse_time(limit: str | float | None) -> float | None:
    """Return a duration in seconds.

    Raises:
        EnfoldError: If it is not a positive duration such as "30 min", "2h" or a number of seconds.
    """
    if limit is None:
        return None
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([a-z]*)\s*", str(limit)) if not isinstance(limit, bool) else None
    unit = "" if match is None else match[2].removesuffix("s") or "s"
    if match is None or unit not in UNITS or not float(match[1]) > 0:
        raise EnfoldError(
            f'time must be a duration such as "30 min" or a number of seconds, got {limit!r}: change time'
        )
    return float(match[1]) * UNITS[unit]

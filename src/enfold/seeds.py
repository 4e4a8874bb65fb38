"""Seeds: every random draw has its own, derived from the run's seed and from what it is for.

Draws for member k depend on k and not on M, so M members are the first M of M + 1.
"""

from __future__ import annotations

import hashlib

import torch


def derive(seed: int, *purpose: str | int) -> int:
    """A seed for one purpose, for example ``derive(0, "order", member, epoch)``; stable across machines.

    >>> derive(0, "init", 1) == derive(0, "init", 1) != derive(0, "init", 2)
    True
    """
    text = "/".join(str(part) for part in (seed, *purpose))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1  # 63 bits: torch takes int64


def generator(seed: int, *purpose: str | int) -> torch.Generator:
    """A CPU generator for one purpose; draws on the CPU are the same for every device."""
    return torch.Generator().manual_seed(derive(seed, *purpose))

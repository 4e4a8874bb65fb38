"""Where the analyses of a run are stored."""

from __future__ import annotations

import json
from pathlib import Path

from enfold.errors import EnfoldError
from enfold.run.seed_run import SeedRun


def home(name: str, run: SeedRun, out: Path | None = None) -> Path:
    """The folder of an analysis: with its seed, unless it is to be elsewhere; one that holds another seed's is refused.

    A run of one seed is its own seed's folder.
    """
    folder = run.run.path / name if out is None else out
    if folder.exists() and not folder.is_dir():
        raise EnfoldError(f"an analysis needs a folder, got the file '{folder}': choose another --out")
    others = sorted(_seeds_in(folder) - {run.seed})
    if others:
        raise EnfoldError(
            f"a folder holds the {name} of one seed, but '{folder}' has that of seed {others[0]}, got seed "
            f"{run.seed}: choose another --out, or leave it out"
        )
    return folder


def _seeds_in(folder: Path) -> set[int]:
    """Of the parts that lie there; files that are none, or are damaged, are not asked here."""
    found = set()
    for file in folder.glob("*.json"):
        try:
            found.add(json.loads(file.read_text(encoding="utf-8"))["settings"]["seed"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return {seed for seed in found if isinstance(seed, int)}

"""Folders of the analyses of a run."""

from __future__ import annotations

import json
from pathlib import Path

from enfold.errors import EnfoldError
from enfold.run.seed_run import SeedRun


def require_classes(name: str, run: SeedRun) -> None:
    """Refuse a run whose data do not have one class per example.

    Raises:
        EnfoldError: With the name of the analysis.
    """
    if not run.has_classes:
        raise EnfoldError(
            f"`enfold analyse {name}` needs a run with one class per example, got '{run.data.source}'"
            f"{'' if run.task is None else f' with the task {run.task.name}'}: use the functions of enfold.analysis"
        )


def home(name: str, run: SeedRun, out: Path | None = None) -> Path:
    """Return the folder of an analysis: that of its seed, or `out`.

    Raises:
        EnfoldError: If the path is a file, or the folder contains the results of another seed.
    """
    if name in ("alignment", "landscape"):
        require_classes(name, run)
    folder = run.run.path / name if out is None else out
    if folder.exists() and not folder.is_dir():
        raise EnfoldError(f"--out must be a folder, got the file '{folder}': choose another folder")
    others = sorted(_seeds_in(folder) - {run.seed})
    if others:
        raise EnfoldError(
            f"a folder must contain the {name} of one seed, but '{folder}' has that of seed {others[0]}, got seed "
            f"{run.seed}: choose another --out, or omit it"
        )
    return folder


def _seeds_in(folder: Path) -> set[int]:
    """Return the seeds of the parts in a folder; damaged and other files are ignored."""
    found = set()
    for file in folder.glob("*.json"):
        try:
            found.add(json.loads(file.read_text(encoding="utf-8"))["settings"]["seed"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return {seed for seed in found if isinstance(seed, int)}

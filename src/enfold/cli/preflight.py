"""Checks before a command does anything."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

import torch

from enfold.errors import EnfoldError
from enfold.io.usercode import describe_code
from enfold.run import Recipe, RunDirectory, open_run


def check_device(device: str) -> None:
    """Refuse a device that this machine does not have."""
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise EnfoldError(
            f"the device must be one that this machine has, got '{device}' ({reason}): use cpu"
        ) from error


def open_trusted(path: Path, trust_code: bool) -> tuple[RunDirectory, Recipe]:
    """Return an existing run with trained members and its recipe; code that it names must be trusted and is shown."""
    run, recipe = open_run(path, trust_code=trust_code)
    show_code(run, run.code(recipe))
    return run, recipe


def show_code(run: RunDirectory, references: Iterable[str]) -> None:
    """Print the files of code that is imported, because a relative name may be found in several folders."""
    with run.context():
        show_references(references)


def show_references(references: Iterable[str]) -> None:
    """Print the files of code; to be called where relative names are found."""
    for reference in references:
        print(f"enfold: running {reference} ({describe_code(reference)})", file=sys.stderr)

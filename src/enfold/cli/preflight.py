"""What can be checked before anything is done."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from enfold.errors import EnfoldError
from enfold.io.usercode import code_words
from enfold.run import Recipe, RunDirectory, open_run


def check_device(device: str) -> None:
    """A device must be there."""
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise EnfoldError(
            f"the device must be one that this machine has, got '{device}' ({reason}): use cpu"
        ) from error


def open_trusted(path: Path, trust_code: bool) -> tuple[RunDirectory, Recipe]:
    """An existing run with trained members; the code that it names is refused, or told where it is trusted."""
    run, recipe = open_run(path, trust_code=trust_code)
    tell_code(run, recipe)
    return run, recipe


def tell_code(run: RunDirectory, recipe: Recipe) -> None:
    """Print the files that run, since a relative name may be found in several folders."""
    run.require_trust(recipe)
    with run.context():
        for reference in run.code(recipe):
            print(f"enfold: running {reference} ({code_words(reference)})", file=sys.stderr)

"""Show what a perturbation does to LatentBE's members: python tools/make_mechanism_figure.py RUN [--seed 0] [--keep F]

For every fold of the run made by latent_be: how much teachers, and the latent members before and after training, differ
on clean and on TDiv-SDiv-perturbed training inputs. A run stores the folded network alone, so the latent members are
trained here again by the same plan, to the same bits, and kept in a folder. Writes results/mechanism.json and
docs/images/mechanism.png.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from torch import nn

from enfold.data import Split
from enfold.distill.losses.latent_be import LatentBE
from enfold.distill.mechanism import mechanism
from enfold.distill.perturb.tdiv_sdiv import TDivSDiv
from enfold.engines.initialization import initialised
from enfold.io.files import write_json
from enfold.report.mechanism import mechanism_figure
from enfold.run.execute import cells, open_run
from enfold.run.stages import Cell
from enfold.saving import load, save, versions

ROOT = Path(__file__).parent.parent
EXAMPLES = 2000  # of the training part


def latent_members(cell: Cell, fold: LatentBE, label: str, keep: Path) -> nn.Module:
    """The latent members after training, from the folder if they are there."""
    file = keep / f"latent-{label}.safetensors"
    if not file.with_suffix(".json").exists():
        checkpoint = keep / f"latent-{label}.checkpoint.safetensors"
        save(fold.latent(cell.members(), cell.data, checkpoint=checkpoint), file, about=cell.about)
        checkpoint.unlink(missing_ok=True)
    return load(file, cell.make_network)


def measured(cell: Cell, keep: Path) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """By the label of the fold: before and after training."""
    if not isinstance(cell.data.train, Split):
        raise SystemExit("the training part must be in memory")
    data, members = cell.data.replace(train=cell.data.train[:EXAMPLES]), cell.members()
    found = {}
    for spec in cell.recipe.folds:
        fold = cell.chosen_fold(spec)
        if isinstance(fold, LatentBE):
            fresh, _ = initialised(cell.make_network, fold.plan.seed, -1)
            before = fold.student_share(members.num_members)(fresh)
            after = latent_members(cell, fold, spec.label, keep)
            found[spec.label] = tuple(mechanism(TDivSDiv(), members, one, data, "train") for one in (before, after))
    return found  # type: ignore[return-value]


def main() -> None:
    """Measure one seed of a run, store the numbers and draw them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, default=Path("latent"), help="folder of the latent members")
    given = parser.parse_args()
    run, recipe = open_run(given.run)
    cell = next(each for each in cells(run, recipe) if each.seed == given.seed)
    found = measured(cell, given.keep)
    command = f"python tools/make_mechanism_figure.py RUN --seed {given.seed}"
    content = {"command": command, "recipe": recipe.name, "seed": given.seed, "versions": versions(), "rows": found}
    write_json(ROOT / "results" / "mechanism.json", json.loads(json.dumps(content)))
    for file in mechanism_figure(found, ROOT / "docs" / "images"):
        print(f"written: {file}")


if __name__ == "__main__":
    main()

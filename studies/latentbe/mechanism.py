"""Measure the effect of perturbations on LatentBE: python -m studies.latentbe.mechanism RUN [--seed 0] [--cache FOLDER]

For every latent_be step of the run, measure how much the teachers and the latent members, before and after training,
differ on clean training inputs and on inputs perturbed by TDiv-SDiv. A run stores only the resulting network, so the
latent members are trained again with the same configuration and seed, and cached. Writes results/mechanism.json and
images/mechanism.png.
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
from enfold.run.execute import seed_runs
from enfold.run.execute import open_run
from enfold.run.seed_run import SeedRun
from enfold.saving import load, save, versions
from studies.latentbe.figure import mechanism_figure

ROOT = Path(__file__).parent
EXAMPLES = 2000  # of the training split


def latent_members(seed_run: SeedRun, fold: LatentBE, label: str, cache: Path) -> nn.Module:
    """Return the latent members after training, from the cache if they are there."""
    file = cache / f"latent-{label}.safetensors"
    if not file.with_suffix(".json").exists():
        checkpoint = cache / f"latent-{label}.checkpoint.safetensors"
        save(fold.latent(seed_run.members(), seed_run.data, checkpoint=checkpoint), file, about=seed_run.about)
        checkpoint.unlink(missing_ok=True)
    return load(file, seed_run.make_network)


def measure(seed_run: SeedRun, cache: Path) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Return the measurements before and after training, by label."""
    if not isinstance(seed_run.data.train, Split):
        raise SystemExit("the training split must be in memory")
    data, members = seed_run.data.replace(train=seed_run.data.train[:EXAMPLES]), seed_run.members()
    found = {}
    for spec in seed_run.recipe.folds:
        fold = seed_run.chosen_fold(spec)
        if isinstance(fold, LatentBE):
            fresh, _ = initialised(seed_run.make_network, fold.plan.seed, -1)
            before = fold.student_share(members.num_members)(fresh)
            after = latent_members(seed_run, fold, spec.label, cache)
            found[spec.label] = tuple(mechanism(TDivSDiv(), members, one, data, "train") for one in (before, after))
    return found  # type: ignore[return-value]


def main() -> None:
    """Measure one seed of a run, store the numbers and draw them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cache", type=Path, default=Path("latent"), help="folder of the latent members")
    given = parser.parse_args()
    run, recipe = open_run(given.run)
    seed_run = next(each for each in seed_runs(run, recipe) if each.seed == given.seed)
    found = measure(seed_run, given.cache)
    command = f"python -m studies.latentbe.mechanism RUN --seed {given.seed}"
    content = {"command": command, "recipe": recipe.name, "seed": given.seed, "versions": versions(), "rows": found}
    write_json(ROOT / "results" / "mechanism.json", json.loads(json.dumps(content)))
    for file in mechanism_figure(found, ROOT / "images"):
        print(f"written: {file}")


if __name__ == "__main__":
    main()

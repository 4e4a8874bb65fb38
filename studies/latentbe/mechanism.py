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
from enfold.distill import distill
from enfold.distill.losses.latent_be import LatentBE
from enfold.distill.perturb.tdiv_sdiv import TDivSDiv
from enfold.engines.initialization import initialize_member
from enfold.io.files import write_json
from enfold.run.execute import open_run, seed_runs
from enfold.run.seed_run import SeedRun
from enfold.run.specs import StepSpec
from enfold.run.step_methods import make_perturbation
from enfold.saving import load, save, versions
from studies.latentbe.disagreement import measure_mechanism
from studies.latentbe.figure import mechanism_figure

ROOT = Path(__file__).parent
EXAMPLES = 2000  # of the training split


def train_latent_members(seed_run: SeedRun, step: StepSpec, cache: Path) -> nn.Module:
    """Return the latent members of a step after training, from the cache if they are there."""
    file = cache / f"latent-{step.label}.safetensors"
    if not file.with_suffix(".json").exists():
        checkpoint = cache / f"latent-{step.label}.checkpoint.safetensors"
        trained = distill(
            seed_run.members(),
            seed_run.data,
            loss=LatentBE(**{**step.options, "average": "none"}),
            perturb=make_perturbation(step.perturb),
            config=seed_run.recipe.step_config(step, seed_run.seed, seed_run.device),
            checkpoint=checkpoint,
        )
        save(trained, file, about=seed_run.about)
        checkpoint.unlink(missing_ok=True)
    return load(file, seed_run.make_network)


def measure(seed_run: SeedRun, cache: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the measurements before and after training, by label."""
    if not isinstance(seed_run.data.train, Split):
        raise SystemExit("the training split must be in memory")
    data, members = seed_run.data.replace(train=seed_run.data.train[:EXAMPLES]), seed_run.members()
    measured = {}
    for step in (step for step in seed_run.recipe.steps if step.method == "latent_be"):
        config = seed_run.recipe.step_config(step, seed_run.seed, seed_run.device)
        network, _ = initialize_member(seed_run.make_network, config.seed, -1)
        before = LatentBE(**step.options).build_student(network, members.num_members, config)
        after = train_latent_members(seed_run, step, cache)
        measured[step.label] = [measure_mechanism(TDivSDiv(), members, one, data, "train") for one in (before, after)]
    return measured


def main() -> None:
    """Measure one seed of a run, store the numbers and draw them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cache", type=Path, default=Path("latent"), help="folder of the latent members")
    given = parser.parse_args()
    run, recipe = open_run(given.run)
    seed_run = next(each for each in seed_runs(run, recipe) if each.seed == given.seed)
    measured = measure(seed_run, given.cache)
    command = f"python -m studies.latentbe.mechanism RUN --seed {given.seed}"
    content = {"command": command, "recipe": recipe.name, "seed": given.seed, "versions": versions(), "rows": measured}
    write_json(ROOT / "results" / "mechanism.json", json.loads(json.dumps(content)))
    pairs = {label: (before, after) for label, (before, after) in measured.items()}
    for file in mechanism_figure(pairs, ROOT / "images"):
        print(f"written: {file}")


if __name__ == "__main__":
    main()

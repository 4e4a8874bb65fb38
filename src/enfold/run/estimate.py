"""Estimate time and memory of a recipe from a few training steps of its networks, before anything is written."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from enfold.cost import peak_memory, stored_bytes
from enfold.data.batches import Order
from enfold.data.dataset import Split
from enfold.ensemble import Ensemble
from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.run.directory import RunDirectory
from enfold.run.recipe import Recipe
from enfold.run.seed_run import SeedRun
from enfold.run.step_methods import is_trained
from enfold.run.steps import build_ensemble, trial_network
from enfold.tasks import first_batch_task
from enfold.train import Objective, TrainConfig
from enfold.train.backward import backward
from enfold.train.objective import default_loss
from enfold.train.optimize import Optimizer, trained_members

STEPS = 5


@dataclass(frozen=True)
class Estimate:
    """Time and memory of a recipe."""

    seconds: float
    memory_bytes: int
    members_step_seconds: float
    network_step_seconds: float
    trainings: int

    def __str__(self) -> str:
        trainings = f"{self.trainings} training{'' if self.trainings == 1 else 's'}"
        return (
            f"about {self.seconds / 60:.1f} min for {trainings} and {self.memory_bytes / 2**20:.0f} MiB of memory "
            f"(a step of the members takes {1e3 * self.members_step_seconds:.1f} ms, of one network "
            f"{1e3 * self.network_step_seconds:.1f} ms)"
        )


def estimate(recipe: Recipe, device: str = "cpu", beside: Path | None = None, *, trust_code: bool = False) -> Estimate:
    """Run a few training steps and extrapolate; nothing is written.

    Args:
        recipe: The recipe.
        device: The device of the run.
        beside: The folder of the recipe's file.
        trust_code: Whether code that the recipe names may run.
    """
    run = SeedRun(RunDirectory(Path("dry-run"), beside, trust_code=trust_code), recipe, recipe.seeds[0], device)
    members = DeepEnsemble(run.make_network, recipe.members, seed=0).to(device)
    config = recipe.members_config(0, device)
    of_members = _step_seconds(members, run, config)
    single = config.replace(lr=1e-3, weight_decay=0.0)  # values that vary between members do not change the cost
    of_network = _step_seconds(members[:1], run, single)
    of_steps = [recipe.control_config(step, 0) for step in recipe.steps if recipe.chain(step) == [step]]
    of_steps += [recipe.step_config(s, 0) for s in recipe.steps if len(recipe.chain(s)) > 1 and is_trained(s)]
    extra = [*(each for each in of_steps if each is not None), *run.controls.values()]
    trained = 0 if recipe.checkpoints else 1
    seconds = trained * _steps(run, config) * of_members + sum(_steps(run, each) * of_network for each in extra)
    ensembles = [step for step in recipe.steps if step.family == "ensemble"]
    for step in ensembles:
        with run.run.context():
            ensemble = build_ensemble(run, step, trial_network(run, step)()).to(device)
        own = ensemble.configure(recipe.step_config(step, 0, device))
        once = _steps(run, own) * _step_seconds(ensemble, run, own, ensemble.objective(own))
        seconds += ensemble.training_cost * once
    states = 3 + (1 if config.optimizer == "sgd" else 2)  # weights, selected weights, gradients, optimizer state
    memory = stored_bytes(members) * states + _data_bytes(run) + _step_bytes(members, run, config)
    return Estimate(
        seconds * len(recipe.seeds),
        memory,
        of_members,
        of_network,
        (trained + len(extra) + len(ensembles)) * len(recipe.seeds),
    )


def _steps(run: SeedRun, config: TrainConfig) -> int:
    return (Order(config.batch_size).steps(run.data.train) or 0) * config.epochs


def _step_seconds(model: nn.Module, run: SeedRun, config: TrainConfig, objective: Objective | None = None) -> float:
    optimizer = Optimizer(model, config)
    objective = objective or default_loss(_resolve(config), trained_members(model))
    scaler = torch.amp.GradScaler(config.device, enabled=False)
    separate = isinstance(model, Ensemble) and model.is_expandable and config.order != "shared"
    own = range(trained_members(model)) if separate else None
    order = Order(config.batch_size, own, augment=config.augment, split=config.order == "split")
    taken = []
    model.train()
    batches = order.batches(run.data, epoch=0)
    for _ in range(STEPS):
        started = time.perf_counter()
        batch = next(batches, None)
        if batch is None:
            break
        backward(model, batch.to(config.device), objective)
        optimizer.step(0.0, scaler)
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


def _step_bytes(members: DeepEnsemble, run: SeedRun, config: TrainConfig) -> int:
    """Return the bytes of activations and temporary buffers at the peak of one step."""
    order = Order(config.batch_size, range(members.num_members), augment=config.augment)
    batch = next(order.batches(run.data, epoch=0)).to(config.device)
    objective = default_loss(_resolve(config), members.num_members)
    return peak_memory(lambda: backward(members, batch, objective), config.device) or 0


def _resolve(config: TrainConfig) -> TrainConfig:
    """Return settings whose task keeps what follows from the first batch."""
    return config.replace(task=first_batch_task(config.task))


def _data_bytes(run: SeedRun) -> int:
    parts = [run.data.train, run.data.val, run.data.test]
    return sum(part.inputs.nbytes + part.targets.nbytes for part in parts if isinstance(part, Split))

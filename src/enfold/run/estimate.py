"""Estimate: what a recipe will take, from a few real training steps of its own networks, before anything is written."""

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
from enfold.run.stages import Cell
from enfold.train import CrossEntropy, Objective, TrainConfig
from enfold.train.backward import backward
from enfold.train.optimize import Optimizer, trained_members

STEPS = 5


@dataclass(frozen=True)
class Estimate:
    """Time and memory of a whole recipe."""

    seconds: float
    memory_bytes: int
    members_step_seconds: float
    network_step_seconds: float
    trainings: int

    def __str__(self) -> str:
        minutes = self.seconds / 60
        return (
            f"about {minutes:.1f} min for {self.trainings} trainings and {self.memory_bytes / 2**20:.0f} MiB of memory "
            f"(a step of the members takes {1e3 * self.members_step_seconds:.1f} ms, of one network "
            f"{1e3 * self.network_step_seconds:.1f} ms)"
        )


def estimate(recipe: Recipe, device: str = "cpu", beside: Path | None = None, *, trust_code: bool = False) -> Estimate:
    """Run a few steps and multiply; data and networks are made, nothing is written.

    `beside` is the folder of the recipe's file.
    """
    cell = Cell(RunDirectory(Path("dry-run"), beside, trust_code=trust_code), recipe, recipe.seeds[0], device)
    members = DeepEnsemble(cell.make_network, recipe.members, seed=0).to(device)
    plan = recipe.members_plan(0, device)
    of_members = _step_seconds(members, cell, plan)
    alone = plan.replace(lr=1e-3, weight_decay=0.0)  # what varies between members costs the same
    of_network = _step_seconds(members[:1], cell, alone)
    fold_plans = [long for fold in recipe.folds if (long := recipe.as_long(fold, 0)) is not None]
    extra = [*fold_plans, *cell.controls().values()]
    trained = 0 if recipe.checkpoints else 1
    seconds = trained * _steps(cell, plan) * of_members + sum(_steps(cell, each) * of_network for each in extra)
    for spec in recipe.shares:
        share, own = cell.chosen_share(spec), recipe.method_plan(spec, 0, device)
        network = cell.network_of(spec)()
        model = share(network).to(device)
        adapted = model.configure(own)
        once = _steps(cell, adapted) * _step_seconds(model, cell, adapted, model.objective(adapted))
        seconds += model.training_cost * once
    states = 2 + (1 if plan.optimizer == "sgd" else 2)  # weights, gradients, the optimizer's memory
    memory = (
        stored_bytes(members) * (states + 1) + _data_bytes(cell) + _step_bytes(members, cell, plan)
    )  # and the chosen
    return Estimate(
        seconds * len(recipe.seeds),
        memory,
        of_members,
        of_network,
        (trained + len(extra) + len(recipe.shares)) * len(recipe.seeds),
    )


def _steps(cell: Cell, plan: TrainConfig) -> int:
    return (Order(plan.batch_size).steps(cell.data.train) or 0) * plan.epochs


def _step_seconds(model: nn.Module, cell: Cell, plan: TrainConfig, objective: Objective | None = None) -> float:
    optimizer, objective = Optimizer(model, plan), objective or CrossEntropy()
    scaler = torch.amp.GradScaler(plan.device, enabled=False)
    own = (
        range(trained_members(model))
        if isinstance(model, Ensemble) and model.is_expandable and plan.order != "shared"
        else None
    )
    order = Order(plan.batch_size, own, augment=plan.augment, split=plan.order == "split")
    taken = []
    model.train()
    batches = order.batches(cell.data, epoch=0)
    for _ in range(STEPS):
        started = time.perf_counter()
        batch = next(batches, None)
        if batch is None:
            break
        backward(model, batch.to(plan.device), objective)
        optimizer.step(0.0, scaler)
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


def _step_bytes(members: DeepEnsemble, cell: Cell, plan: TrainConfig) -> int:
    """Activations and temporary buffers of one step at its peak."""
    order = Order(plan.batch_size, range(members.num_members), augment=plan.augment)
    batch = next(order.batches(cell.data, epoch=0)).to(plan.device)
    return peak_memory(lambda: backward(members, batch, CrossEntropy()), plan.device) or 0


def _data_bytes(cell: Cell) -> int:
    parts = [cell.data.train, cell.data.val, cell.data.test]
    return sum(part.inputs.nbytes + part.labels.nbytes for part in parts if isinstance(part, Split))

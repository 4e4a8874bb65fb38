"""Basin check: whether members lie in one basin of the loss, so that their weights can be averaged without matching.

    θ(α) = (1 - α) θ_m + α θ_n,   barrier(m, n) = max over α of  L(θ(α)) - [(1 - α) L(θ_m) + α L(θ_n)], at least 0 (1)
    L_0 = loss of the mean output, the same for every example,   s = L_0 - (1/M) Σ_m L(θ_m)                       (2)
    one basin:   largest barrier <= threshold × s                                                                 (3)

J. Frankle, G. K. Dziugaite, D. Roy, M. Carbin: Linear Mode Connectivity and the Lottery Ticket Hypothesis, ICML 2020,
arXiv:1912.05671. R. Entezari, H. Sedghi, O. Saukh, B. Neyshabur: The Role of Permutation Invariance in Linear Mode
Connectivity of Neural Networks, ICLR 2022, arXiv:2110.06296.

(2) is what members have learned, in nats or the unit of the task's loss, so that the limit (3) has a meaning for
every task: with the default threshold of 5 %, ten classes and a loss of 0.3, it is 0.1 nats. In `studies/finetuned`,
the limit is 0.06 nats, members fine-tuned from one network have barriers of 0, and those of different ones of 1.2 nats.

Differs from the papers: the limit (3); the loss is that of some validation examples.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from enfold.arguments import checked
from enfold.data.batches import count_targets
from enfold.data.convert import Examples, as_data, require
from enfold.data.dataset import Data, Part, Split, evaluation_batches, has_examples
from enfold.data.tree import to_device
from enfold.data.unpack import Unpack, Unpacked
from enfold.engines.modes import eval_mode
from enfold.engines.outputs import at_least_float32
from enfold.engines.skeleton import State
from enfold.ensemble import Ensemble, called_network
from enfold.errors import EnfoldError
from enfold.evaluate import member_logits
from enfold.merge.common.inputs import Models, choose_task, require_members
from enfold.merge.common.states import mean_of, states_of
from enfold.seeds import generator
from enfold.tasks import Rows, Task, TaskLike
from enfold.train.batch_norm import has_running_statistics, reestimate

BATCH = 256


@dataclass(frozen=True)
class BasinReport:
    """The result of `basin_check`.

    Args:
        barriers: Barrier of each pair of members, equation (1), by their indices.
        losses: Loss of each member.
        mean_loss: Loss of the network with the mean of all weights.
        scale: s of equation (2).
        limit: Largest barrier in one basin, equation (3).
        unit: The unit of losses: "nats", or the name of the task's loss.
        examples: Number of validation examples.
        seconds: Duration.
    """

    barriers: dict[tuple[int, int], float]
    losses: tuple[float, ...]
    mean_loss: float
    scale: float
    limit: float
    unit: str
    examples: int
    seconds: float

    @property
    def largest(self) -> float:
        """The largest barrier of all pairs; 0 for one member."""
        return max(self.barriers.values(), default=0.0)

    @property
    def is_one_basin(self) -> bool:
        """Return whether the members lie in one basin."""
        return self.largest <= self.limit

    def __str__(self) -> str:
        numbers = f"largest barrier {self.largest:.3g} {self.unit}, limit {self.limit:.3g}"
        if self.is_one_basin:
            return f"members lie in one basin ({numbers}): their weights can be averaged"
        return f"members lie in different basins ({numbers}): match or distill them"


@checked
@torch.no_grad()
def basin_check(
    models: Models,
    val: Examples,
    train: Examples | None = None,
    *,
    points: Annotated[int, Field(ge=3)] = 5,
    examples: Annotated[int, Field(ge=2)] = 512,
    threshold: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.05,
    task: TaskLike = None,
    seed: int = 0,
    unpack: Unpack | None = None,
) -> BasinReport:
    """Return the barriers of the loss on the straight lines between all members.

    Args:
        models: An ensemble, or networks of one architecture; they are not modified.
        val: Validation examples, or a built-in data set, whose training examples are then used, too.
        train: Training examples, on which batch-norm statistics are measured for every network between two members;
            without them, statistics are averaged.
        points: Number of networks on a line, with both ends.
        examples: Number of validation examples, and of training examples for statistics.
        threshold: Largest barrier in one basin, as a fraction of what members have learned, equation (3).
        task: What outputs mean; None for the task that an ensemble was trained for, or to infer it.
        seed: Seed of the choice of examples.
        unpack: Function that splits a batch into (inputs, target); None for the usual structures of batches.

    Returns:
        The barriers, and whether members lie in one basin.

    Raises:
        EnfoldError: If the networks differ in architecture, or there are no validation examples.
    """
    start = time.perf_counter()
    require(val, "val", "basin_check")
    ensemble = require_members(models, "basin_check")
    data = _sample(ensemble, val, train, examples, seed, unpack)
    measure = _Measure(ensemble, data, choose_task(task, ensemble), seed)
    states = states_of(ensemble)
    found = [measure(state, is_member=True) for state in states]
    losses = [loss for loss, _ in found]
    scale = sum(constant for _, constant in found) / len(found) - sum(losses) / len(found)  # (2)
    alphas = [index / (points - 1) for index in range(1, points - 1)]
    barriers = {}
    for one, other in combinations(range(len(states)), 2):
        excess = [0.0]
        for alpha in alphas:
            state = mean_of([states[one], states[other]], [1 - alpha, alpha])
            excess.append(measure(state)[0] - (1 - alpha) * losses[one] - alpha * losses[other])
        barriers[one, other] = max(excess)  # (1)
    mean_loss = measure(mean_of(states))[0] if len(states) > 1 else losses[0]
    limit = threshold * max(scale, 0.0)  # (3)
    seconds = time.perf_counter() - start
    return BasinReport(barriers, tuple(losses), mean_loss, scale, limit, measure.unit, measure.examples, seconds)


class _Measure:
    """The loss of a network with given values on the chosen examples."""

    def __init__(self, ensemble: Ensemble, data: Data, task: Task, seed: int) -> None:
        self.ensemble, self.data, self.task, self.seed = ensemble, data, task, seed
        self.resets = has_examples(data.train) and has_running_statistics(ensemble.skeleton.network)
        self.examples, self.unit = 0, "nats"

    def __call__(self, state: State, *, is_member: bool = False) -> tuple[float, float]:
        """Return the loss, and that of the mean output for every example.

        Args:
            state: The values.
            is_member: Whether statistics of batch norms belong to these weights.
        """
        network = self.ensemble.network(state)
        if self.resets and not is_member:
            reestimate(network, self.data, seed=self.seed)
        device = next((tensor.device for tensor in network.parameters()), torch.device("cpu"))
        values: list[Tensor] = []
        targets: list[Tensor] = []
        weights: list[Tensor] = []
        self.examples = 0
        with eval_mode(network):
            for inputs, target, weight in evaluation_batches(self.data.val, BATCH):
                outputs = at_least_float32(member_logits(network, to_device(inputs, device)))
                self.task = self.task.resolve(outputs, target)
                rows = self.task.flatten(outputs, to_device(target, device), weight)
                values.append(rows.values)
                targets.append(rows.targets)
                weights += [] if rows.weights is None else [rows.weights]
                self.examples += count_targets(target)
        if not values:
            raise EnfoldError("basin_check needs val examples, got none: pass at least two")
        self.unit = "nats" if self.task.criterion == "nll" else self.task.criterion
        weighted = torch.cat(weights, -1) if weights else None
        rows = Rows(torch.cat(values, 1), torch.cat(targets), weighted)
        constant = Rows(rows.values.mean(1, keepdim=True).expand_as(rows.values), rows.targets, weighted)
        return float(self.task.loss(rows)[0]), float(self.task.loss(constant)[0])


def _sample(
    ensemble: Ensemble, val: Examples, train: Examples | None, examples: int, seed: int, unpack: Unpack | None
) -> Data:
    """Return lists of a few batches of both splits, which are the same in every pass."""
    network = called_network(ensemble)
    train = val if isinstance(val, Data) and train is None else train
    data = as_data(train, val, unpack=unpack, network=network)
    with torch.random.fork_rng(devices=[]):
        parts = [list(_batches(part, examples, seed)) for part in (data.train, data.val)]
    return Data(parts[0], parts[1], [], None, data.shape)


def _batches(part: Part, examples: int, seed: int) -> Iterator[Unpacked]:
    """Yield batches with at least a number of examples if there are as many: random ones if they are in memory."""
    if isinstance(part, Split):
        part = part[torch.randperm(len(part), generator=generator(seed, "basin"))[:examples]]
    seen = 0
    for batch in evaluation_batches(part, BATCH):
        yield batch
        seen += count_targets(batch.target)
        if seen >= examples:
            break

"""Straight-through matching: permutations are learned from the loss at the mid-point of two members.

    π = argmax over permutations <θ̃, π(θ_m)>      θ̃: free parameters, at first θ_r                               (1)
    L(½ (θ_r + π(θ_m)))                            loss of the mid-point on training data                         (2)
    θ̃ ← θ̃ - η ∂L/∂π(θ_m)                          as if (1) were the identity: straight through                  (3)
    θ̄ = (1/M) Σ_m π_m(θ_m)                         with the π_m of the lowest loss (2) of an epoch                (4)

S. K. Ainsworth, J. Hayase, S. Srinivasa: Git Re-Basin: Merging Models modulo Permutation Symmetries, ICLR 2023,
arXiv:2209.04836, section 3.3.

The first result of (1) is weight matching; the loss (2) on training examples can then only fall. It is slow: units are
matched at every step.

Differs from the paper: more than two members are each matched to the reference; each matching starts from the original
orders instead of the last ones; training ends early when the loss has not fallen for `patience` epochs; members that
are permuted copies of the reference are not trained; batch norms use the statistics of each batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn

from enfold.arguments import checked
from enfold.data.batches import Batch, Order
from enfold.data.content import content
from enfold.data.convert import Examples
from enfold.data.unpack import Unpack
from enfold.engines.modes import eval_mode
from enfold.engines.outputs import at_least_float32
from enfold.engines.skeleton import State
from enfold.ensemble import Ensemble
from enfold.evaluate import member_logits
from enfold.io.files import digest, part_file
from enfold.loggers import Log, LoggerLike, as_log, with_log
from enfold.merge.common.alignment import Alignment
from enfold.merge.common.inputs import Models, choose_task, prepare_inputs, require_reference
from enfold.merge.common.merging import merge_aligned
from enfold.merge.repair import RepairKind
from enfold.seeds import derive
from enfold.symmetry import match_state
from enfold.tasks import Task, TaskName
from enfold.train import TaskLoss, TrainConfig
from enfold.train.batch_norm import TRACKING, several_examples
from enfold.train.descent import Descent
from enfold.train.history import Epoch


@checked
@with_log
def straight_through(
    models: Models,
    train: Examples,
    *,
    reference: Annotated[int, Field(ge=0)] = 0,
    epochs: Annotated[int, Field(ge=0)] = 250,
    patience: Annotated[int, Field(ge=1)] = 10,
    lr: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1e-2,
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9,
    batch_size: Annotated[int, Field(ge=2)] = 1000,
    repair: RepairKind = "reset",
    seed: int = 0,
    task: TaskName | Task | None = None,
    checkpoint: str | Path | None = None,
    on_epoch: Callable[[Epoch], None] | None = None,
    logger: LoggerLike | Log = None,
    unpack: Unpack | None = None,
) -> nn.Module:
    """Return the mean of the members in the orders whose mid-points with one member have the lowest loss.

    The loss is that of the task: cross-entropy for classes.

    Args:
        models: An ensemble, or networks of one architecture; they are not modified.
        train: Training examples with targets.
        reference: Index of the member whose order the others are put in.
        epochs: Maximum number of epochs.
        patience: Number of epochs without a lower loss after which training stops.
        lr: Learning rate of SGD.
        momentum: Momentum of SGD.
        batch_size: Examples in a step.
        repair: Statistics of the merged network: "reset" measures batch norms again, "none" averages them, "repair",
            "rescale" and "closed_form" also correct hidden units as `enfold.merge.repair` does.
        seed: Seed of the order of the examples and of matching.
        task: What the outputs mean, by name or with options; None for the task that an ensemble was trained for, or to
            infer it from outputs and targets.
        checkpoint: A file that is written after every epoch; if it exists, training continues from it.
        on_epoch: Called with the record of every epoch, an `Epoch`.
        logger: Where settings and metrics are logged to, as for `fit`, with a part for each member.
        unpack: Function that splits a batch into (inputs, target); None for the usual structures of batches.

    Returns:
        A network of the members' class in eval mode; a single member is returned unchanged.

    Raises:
        EnfoldError: If the networks cannot be matched, or examples are needed and missing.
    """
    log = as_log(logger)
    log.log_settings({"title": "straight_through", "epochs": epochs, "lr": lr, "momentum": momentum, "seed": seed})
    inputs = prepare_inputs("straight_through", models, train, needs_train=True, unpack=unpack)
    options: dict[str, Any] = {"epochs": epochs, "patience": patience, "lr": lr, "momentum": momentum}
    match = partial(
        match_members,
        reference=reference,
        batch_size=batch_size,
        seed=seed,
        task=task,
        on_epoch=on_epoch,
        log=log,
        **options,
    )
    return merge_aligned(inputs, match, repair, seed, checkpoint)  # (4)


def match_members(
    alignment: Alignment,
    *,
    reference: int,
    epochs: int,
    patience: int,
    lr: float,
    momentum: float,
    batch_size: int,
    seed: int,
    task: TaskName | Task | None = None,
    on_epoch: Callable[[Epoch], None] | None = None,
    log: Log | None = None,
) -> list[State]:
    """Return each member in the order of equation (4).

    Args:
        alignment: The members and their groups of units.
        reference: The member whose order the others are matched to.
        epochs: The maximum number of epochs.
        patience: Epochs without a lower loss after which the training ends.
        lr: The learning rate.
        momentum: The momentum.
        batch_size: The number of examples in a batch.
        seed: The seed.
        task: What the outputs mean.
        on_epoch: Function called with the record of every epoch.
        log: Where metrics are logged to, with a part for each member.
    """
    states, ensemble, checkpoint = alignment.states, alignment.ensemble, alignment.checkpoint
    target = states[require_reference(reference, len(states))]
    config = TrainConfig(epochs, batch_size, "sgd", lr, momentum, seed=seed)
    config = config.replace(nesterov=False, weight_decay=0.0, patience=patience)
    known = choose_task(task, ensemble)
    others = [index for index, state in enumerate(states) if state is not target]
    files = {index: checkpoint and part_file(checkpoint, index) for index in others[:-1]} | {others[-1]: checkpoint}
    found = list(states)
    with eval_mode(ensemble.skeleton.network), _batch_statistics(ensemble), several_examples():
        for index, file in files.items():
            found[index] = _Pair(alignment, target, states[index], config, known, on_epoch, log or Log()).learn(
                index, file
            )
    for file in list(files.values())[:-1]:
        if file is not None:
            file.unlink(missing_ok=True)
    return found


@dataclass(frozen=True)
class _Pair:
    """The reference, and a member whose order is learned."""

    alignment: Alignment
    target: State
    state: State
    config: TrainConfig
    task: Task
    on_epoch: Callable[[Epoch], None] | None = None
    log: Log = field(default_factory=Log)

    def learn(self, index: int, file: Path | None) -> State:
        """Return member `index` in its order; a checkpoint is written after every epoch."""
        free = nn.ParameterList([self.target[name].clone() for name in self.names])
        first = self.match(free)
        if all(torch.equal(first[name], self.target[name]) for name in self.names):
            return first
        values = digest((*self.target.values(), *self.state.values()))
        options = {
            name: getattr(self.config, name) for name in ("epochs", "patience", "lr", "momentum", "batch_size", "seed")
        }
        identity = {**options, "member": index, "members' weights": values}
        identity |= {} if repr(self.task) == "None" else {"task": repr(self.task)}
        identity |= content(self.alignment.data, ("train",))
        descent = Descent(free, self.config, identity, file, self.on_epoch, self.log.part(f"member_{index}"))
        steps = Order(self.config.batch_size).steps(self.alignment.data.train)
        label = f"member {index}: "
        for epoch in descent.epochs(lambda: self.mean_loss(self.match(free)), steps, "straight_through", label):
            for batch in self.batches(epoch):
                descent.step(self.gradients(self.match(free), batch))  # (3)
        return self.match(free)

    @property
    def names(self) -> list[str]:
        """The names of the parameters."""
        return list(self.alignment.ensemble.skeleton.parameters)

    def match(self, free: Iterable[Tensor]) -> State:
        """Return the member in the order of equation (1)."""
        goal = {**self.target, **{name: tensor.detach() for name, tensor in zip(self.names, free, strict=True)}}
        learned, seed = set(self.names), self.config.seed
        return match_state(goal, self.state, self.alignment.symmetry, seed=seed, learned=learned)

    def mean_loss(self, moved: State) -> float:
        """Return the mean of equation (2) over the training examples."""
        total, count = 0.0, 0
        for batch in self.batches(epoch=0):
            loss = self.loss(_midpoint(self.target, moved), batch)
            total, count = total + float(loss) * len(batch), count + len(batch)
        return total / count

    def gradients(self, moved: State, batch: Batch) -> list[Tensor]:
        """Return ∂L/∂π(θ_m) of equation (2), half of the gradient at the mid-point."""
        state = _midpoint(self.target, moved)
        leaves = [state[name].requires_grad_() for name in self.names]
        with torch.enable_grad():
            found = torch.autograd.grad(self.loss(state, batch), leaves, allow_unused=True)
        return [torch.zeros_like(leaf) if g is None else g / 2 for leaf, g in zip(leaves, found, strict=True)]

    def loss(self, state: State, batch: Batch) -> Tensor:
        """Return the loss of one network."""
        device = next(iter(state.values())).device
        with self.alignment.ensemble.skeleton.use_values(state) as network:
            batch = batch.to(device)
            outputs = at_least_float32(member_logits(network, batch.inputs))
        return TaskLoss(self.task).of_outputs(outputs, batch)[0]

    def batches(self, epoch: int) -> Iterator[Batch]:
        """Yield the training examples in the order of an epoch."""
        seed = self.config.seed
        torch.manual_seed(derive(seed, "loader", epoch))  # for loaders that shuffle
        return Order(self.config.batch_size, seed=seed).batches(self.alignment.data, epoch)


def _midpoint(one: State, other: State) -> State:
    return {
        name: (tensor + other[name]) / 2 if tensor.is_floating_point() else tensor.clone()
        for name, tensor in one.items()
    }


@contextmanager
def _batch_statistics(ensemble: Ensemble) -> Iterator[None]:
    """Let norms use the statistics of each batch, as those of two members do not fit their mid-point."""
    for layer in ensemble.skeleton.network.modules():
        if isinstance(layer, TRACKING):
            layer.training = True
    yield

"""Fisher merging: each weight is the mean of the members' weights, weighted by how certain each member is of its own.

    F_m = (1/N) Σ_x E_(y ~ p_m(y|x)) [ (∂ log p_m(y|x) / ∂θ)² ]       targets="model"                             (1)
    F_m = (1/N) Σ_(x, y) (∂ log p_m(y|x) / ∂θ)²                       targets="labels"                            (2)
    θ = Σ_m (F_m + ε) θ_m / Σ_m (F_m + ε),   ε = floor × mean of all entries of all F_m                           (3)

M. Matena, C. Raffel: Merging Models with Fisher-Weighted Averaging, NeurIPS 2022, arXiv:2111.09832.

The posterior of each member is taken as a Gaussian with the diagonal precision F_m; (3) is the mode of their product.
Gradients are those of single examples, one after the other: about three forward passes of one example each. -log p is
the loss of the task, summed over the rows of an example, so that F_m is defined for every task by (2).

Differs from the paper: (1) draws `samples` labels for each example, or takes the exact expectation over classes with
samples=None; ε is relative, so that weights that no example depends on are averaged; members have equal weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from enfold.arguments import checked
from enfold.data.batches import Batch, Order
from enfold.data.convert import Examples
from enfold.data.dataset import Data
from enfold.data.tree import select_examples
from enfold.data.unpack import Unpack
from enfold.engines.modes import eval_mode
from enfold.engines.skeleton import State
from enfold.errors import EnfoldError
from enfold.merge.common.fine_tuned import finish, wide
from enfold.merge.common.inputs import Models, choose_task, prepare_inputs
from enfold.merge.common.states import mean_of, states_of
from enfold.merge.repair import RepairKind
from enfold.seeds import seed_scope
from enfold.tasks import Rows, Task, TaskLike
from enfold.train.objective import batch_outputs


@checked
def fisher(
    models: Models,
    train: Examples,
    *,
    targets: Literal["model", "labels"] = "model",
    samples: Annotated[int, Field(ge=1)] | None = 1,
    examples: Annotated[int, Field(ge=1)] = 512,
    floor: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1e-6,
    task: TaskLike = None,
    repair: RepairKind = "reset",
    seed: int = 0,
    unpack: Unpack | None = None,
) -> nn.Module:
    """Return the mean of the members, weighted by the diagonal of their Fisher information.

    Args:
        models: An ensemble, or networks of one architecture; they are not modified.
        train: Training examples, on which the Fisher information is measured.
        targets: Labels in the gradients: those that a member predicts ("model"), or those of the examples ("labels").
        samples: Labels drawn for each example with targets="model"; None for the exact expectation over classes.
        examples: Number of training examples.
        floor: ε of equation (3), relative to the mean information.
        task: What outputs mean; None to infer it.
        repair: Statistics of the result: "reset" measures batch norms again, "none" averages their statistics,
            "repair", "rescale" and "closed_form" also correct hidden units as `enfold.merge.repair` does.
        seed: Seed of the choice of examples and of labels that are drawn.
        unpack: Function that splits a batch into (inputs, target); None for the usual structures of batches.

    Returns:
        A network of the members' class in eval mode; a single member is returned unchanged.

    Raises:
        EnfoldError: If the networks cannot be averaged, examples are missing, or the task has no labels to draw.
    """
    inputs = prepare_inputs("fisher", models, train, repair=repair, unpack=unpack, needs_train=True)
    states = states_of(inputs.ensemble)
    if len(states) == 1:
        return inputs.ensemble.member(0).eval()
    known = choose_task(task, inputs.ensemble)
    options = {"targets": targets, "samples": samples, "examples": examples, "seed": seed}
    found = [information(inputs.ensemble.network(state), inputs.data, known, **options) for state in states]  # type: ignore[arg-type]
    with torch.no_grad():
        values = [tensor for each in found for tensor in each.values()]
        epsilon = floor * float(sum(tensor.sum() for tensor in values)) / sum(tensor.numel() for tensor in values)
        epsilon = max(epsilon, torch.finfo(torch.float32).tiny)
        state = mean_of(states)
        for name in found[0]:
            weights = torch.stack([each[name] for each in found]).double() + epsilon
            each = torch.stack([own[name] for own in states]).double()
            state[name] = ((weights * each).sum(0) / weights.sum(0)).to(state[name])  # (3)
    return finish(inputs, state, repair, seed)


def information(
    network: nn.Module,
    data: Data,
    task: Task,
    *,
    targets: Literal["model", "labels"] = "model",
    samples: int | None = 1,
    examples: int = 512,
    seed: int = 0,
) -> State:
    """Return the diagonal of the Fisher information by the names of the parameters, equation (1) or (2).

    Args:
        network: The network.
        data: Data whose training examples are used.
        task: What outputs mean.
        targets: "model" or "labels".
        samples: Labels drawn for each example; None for the exact expectation over classes.
        examples: Number of examples.
        seed: Seed of the choice of examples and of labels.
    """
    owned = {name: tensor for name, tensor in network.named_parameters() if tensor.is_floating_point()}
    frozen = [tensor for tensor in owned.values() if not tensor.requires_grad]
    found = {name: torch.zeros_like(wide(tensor)) for name, tensor in owned.items()}
    device, count = next(iter(owned.values())).device, 0
    for tensor in frozen:
        tensor.requires_grad_()
    with eval_mode(network), seed_scope(seed), torch.enable_grad():  # a loader may draw, too
        for batch, example in _single_examples(data, examples, seed):
            if not count:  # one example may leave open what outputs mean
                first = batch.to(device)
                task = task.resolve(batch_outputs(network, first).detach(), first.targets)
            one = example.to(device)
            outputs = batch_outputs(network, one)
            rows = task.flatten(outputs, one.targets)
            losses = _losses(task, rows, targets, samples)
            for index, (weight, loss) in enumerate(losses):
                more = index < len(losses) - 1
                gradients = torch.autograd.grad(loss, list(owned.values()), retain_graph=more, allow_unused=True)
                for name, gradient in zip(owned, gradients, strict=True):
                    if gradient is not None:
                        found[name] += weight * gradient.to(found[name]).square()
            count += 1
    for tensor in frozen:
        tensor.requires_grad_(False)
    if not count:
        raise EnfoldError("fisher needs at least one train example, got none: pass more")
    return {name: tensor / count for name, tensor in found.items()}


def _single_examples(data: Data, examples: int, seed: int) -> Iterator[tuple[Batch, Batch]]:
    """Yield training examples in random order: the batch that they are in, and each as a batch."""
    count = 0
    for batch in Order(256, seed=seed).batches(data, epoch=0):
        for index in range(len(batch)):
            if count == examples:
                return
            own = torch.tensor([index])
            yield batch, Batch(select_examples(batch.inputs, own), select_examples(batch.targets, own))
            count += 1


def _losses(task: Task, rows: Rows, targets: str, samples: int | None) -> list[tuple[float, Tensor]]:
    """Return -log p of one example with the weight of its square: one pair for each label."""
    if targets == "labels":
        return [(1.0, _negative(task, rows, rows.targets))]  # (2)
    values = rows.values.detach().float()[0]
    if samples is None and task.is_categorical and len(values) == 1:
        probabilities = values[0].softmax(0).tolist()
        classes = torch.arange(len(probabilities), device=values.device)
        return [(p, _negative(task, rows, own[None])) for p, own in zip(probabilities, classes, strict=True)]
    count = 1 if samples is None else samples
    return [(1 / count, _negative(task, rows, _draw(task, values))) for _ in range(count)]  # (1)


def _draw(task: Task, values: Tensor) -> Tensor:
    """Return labels drawn from the predictions of one example, in the shape of its targets."""
    if task.is_categorical:
        drawn: Tensor = torch.multinomial(values.softmax(-1), 1)[:, 0]
        return drawn
    head = getattr(task, "head", None) or "point"
    if head not in ("point", "gaussian", "uncertainty"):
        raise EnfoldError(
            f"targets='model' needs a task with labels to draw, got task='{task.name}' with head=\"{head}\": pass "
            "targets='labels'"
        )
    # A squared error is the likelihood of a Gaussian of variance 1/2.
    variance = torch.full_like(values[:, 0], 0.5) if head == "point" else values[:, 1:].exp().sum(-1)
    return values[:, 0] + torch.randn_like(variance) * variance.sqrt()


def _negative(task: Task, rows: Rows, labels: Tensor) -> Tensor:
    """Return -log p of all rows of an example."""
    return task.row_losses(Rows(rows.values, labels)).sum()

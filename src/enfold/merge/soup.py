"""Model soups: the mean of networks fine-tuned from one checkpoint: of all, of those that help, or weighted.

    uniform   θ = (1/M) Σ_m θ_m                                                                                   (1)
    greedy    in the order of the members' validation scores: θ_m is added if the mean of the ingredients and θ_m (2)
              scores at least as well as the mean of the ingredients
    learned   θ = Σ_m α_m θ_m,  α = softmax(a),   min over a, β of  Σ_(x,y) CE(y, softmax(β f(x; θ)))             (3)

M. Wortsman, G. Ilharco, S. Y. Gadre, R. Roelofs, R. Gontijo-Lopes, A. S. Morcos, H. Namkoong, A. Farhadi, Y. Carmon,
S. Kornblith, L. Schmidt: Model soups: averaging weights of multiple fine-tuned models improves accuracy without
increasing inference time, ICML 2022, arXiv:2203.05482.

Greedy and learned soups are chosen on validation examples, so that a greedy soup is never worse there than the best
member; a soup of one ingredient is that member. Members that were trained independently cannot be mixed, because their
units are in different orders (see `weight_matching`).

Differs from the paper: members may also be ordered by their NLL; batch-norm statistics are measured again, or hidden
units repaired, for every candidate of a greedy soup; the temperature β is dropped after training, as the network has no
place for it. The learned soup's settings are those of the public code. For tasks other than classification, soups are
chosen by the task's own score, and (3) is the task's loss, without β for numbers.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from enfold.arguments import checked
from enfold.data import Data
from enfold.data.convert import Examples
from enfold.data.dataset import evaluation_batches, has_examples
from enfold.data.tree import to_device
from enfold.data.unpack import Unpack
from enfold.engines.modes import eval_mode
from enfold.engines.outputs import at_least_float32
from enfold.engines.skeleton import State
from enfold.ensemble import Ensemble
from enfold.errors import EnfoldError, level_outside
from enfold.evaluate import member_logits, predict
from enfold.loggers import Log, LoggerLike, as_log, with_log
from enfold.merge.common.inputs import MergeInputs, Models, choose_task, prepare_inputs
from enfold.merge.common.states import mean_of, states_of
from enfold.merge.repair import RepairKind, repair_network
from enfold.metrics import TABLES, metrics_for
from enfold.tasks import Task, TaskLike, TaskName
from enfold.train.history import Epoch, History

Kind = Literal["uniform", "greedy", "learned"]


class SingleModelWarning(UserWarning):
    """A greedy soup has one ingredient."""


@checked
@with_log
def soup(
    models: Models,
    val: Examples | None = None,
    train: Examples | None = None,
    *,
    kind: Kind = "greedy",
    score: str | None = None,
    epochs: Annotated[int, Field(ge=0)] = 5,
    lr: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.05,
    batch_size: Annotated[int, Field(ge=1)] = 256,
    repair: RepairKind = "reset",
    seed: int = 0,
    task: TaskName | Task | None = None,
    on_epoch: Callable[[Epoch], None] | None = None,
    logger: LoggerLike | Log = None,
    unpack: Unpack | None = None,
) -> nn.Module:
    """Return the mean of members that were fine-tuned from one network.

    Args:
        models: An ensemble, or networks of one architecture; they are not modified.
        val: Validation examples on which a greedy or learned soup is chosen; a uniform soup needs none.
        train: Training examples, needed to correct statistics: with batch norm, or `repair` other than "reset".
        kind: All members ("uniform"), those that help ("greedy"), or all with "learned" weights.
        score: The validation score of a greedy soup, a metric of the task such as "accuracy" or "nll"; None for the
            accuracy, or for the criterion of a task without it.
        epochs: Passes over the validation examples for a learned soup.
        lr: Learning rate of AdamW for a learned soup.
        batch_size: Batch size for a learned soup.
        repair: Statistics of the soup: "reset" measures batch norms again, "none" averages them, "repair", "rescale"
            and "closed_form" also correct hidden units as `enfold.merge.repair` does, weighted like the soup.
        seed: Seed of the order of the training examples.
        task: What the outputs mean, by name or with options; None for the task that an ensemble was trained for, or to
            infer it from outputs and targets.
        on_epoch: Called with the record of every epoch of a learned soup, an `Epoch`.
        logger: Where the metrics of a learned soup are logged to, as for `fit`.
        unpack: Function that splits a batch into (inputs, target); None for the usual structures of batches.

    Returns:
        A network of the members' class in eval mode; a soup of one ingredient is that member, unchanged.

    Raises:
        EnfoldError: If the networks cannot be averaged, or examples are needed and missing.
    """
    _require_score(score)
    inputs = _prepare(models, val, train, kind, repair, unpack)
    ensemble = inputs.ensemble
    if kind == "learned" and ensemble.num_members > 1:
        follow = _follower(epochs, lr, on_epoch, as_log(logger))
        weights = learn_weights(ensemble, inputs.data, epochs, lr, batch_size, task, follow).tolist()
        network = ensemble.network(mean_of(states_of(ensemble), weights))  # (3)
        return repair_network(network, ensemble, inputs.data, repair, seed=seed, weights=weights).eval()
    chosen = _choose(inputs, kind, score, repair, seed, task)
    if kind == "greedy" and len(chosen) == 1 < ensemble.num_members:
        warnings.warn(
            f"the soup is member {chosen[0]} only: with any other member its validation {score or 'score'} is worse, "
            "as for members that were not fine-tuned from one network; see enfold.merge.weight_matching",
            SingleModelWarning,
            stacklevel=level_outside(),
        )
    return _uniform(chosen, ensemble, inputs.data, repair, seed)


@checked
def soup_weights(
    models: Models,
    val: Examples | None = None,
    train: Examples | None = None,
    *,
    kind: Kind = "greedy",
    score: str | None = None,
    epochs: Annotated[int, Field(ge=0)] = 5,
    lr: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.05,
    batch_size: Annotated[int, Field(ge=1)] = 256,
    repair: RepairKind = "reset",
    seed: int = 0,
    task: TaskName | Task | None = None,
    unpack: Unpack | None = None,
) -> list[float]:
    """Return the weight of each member in the soup that `soup` makes with the same arguments; they sum to 1.

    Args:
        models: An ensemble, or networks of one architecture; they are not modified.
        val: Validation examples on which a greedy or learned soup is chosen.
        train: Training examples, needed to correct statistics of the candidates of a greedy soup.
        kind: "uniform", "greedy" or "learned".
        score: The validation score of a greedy soup, a metric of the task such as "accuracy" or "nll"; None for the
            accuracy, or for the criterion of a task without it.
        epochs: Passes over the validation examples for a learned soup.
        lr: Learning rate of AdamW for a learned soup.
        batch_size: Batch size for a learned soup.
        repair: The correction with which candidates of a greedy soup are scored.
        seed: Seed of the order of the training examples.
        task: What the outputs mean, by name or with options; None for the task that an ensemble was trained for, or to
            infer it from outputs and targets.
        unpack: Function that splits a batch into (inputs, target); None for the usual structures of batches.
    """
    _require_score(score)
    inputs = _prepare(models, val, train, kind, repair, unpack)
    if kind == "learned" and inputs.ensemble.num_members > 1:
        learned: list[float] = learn_weights(inputs.ensemble, inputs.data, epochs, lr, batch_size, task).tolist()
        return learned
    chosen = _choose(inputs, kind, score, repair, seed, task)
    return [(index in chosen) / len(chosen) for index in range(inputs.ensemble.num_members)]


def _require_score(score: str | None) -> None:
    """Refuse a score that is a metric of no task."""
    known = dict.fromkeys(name for table in TABLES.values() for name in table)
    if score is not None and score not in known:
        raise EnfoldError(f"score must be one of {', '.join(known)} or None, got {score!r}: change score")


def _prepare(
    models: Models,
    val: Examples | None,
    train: Examples | None,
    kind: Kind,
    repair: RepairKind,
    unpack: Unpack | None,
) -> MergeInputs:
    if train is None and isinstance(val, Data):
        train = val
    inputs = prepare_inputs("soup", models, train, val, repair=repair, unpack=unpack)
    if kind != "uniform" and inputs.ensemble.num_members > 1 and not has_examples(inputs.data.val):
        raise EnfoldError(f"soup with kind={kind!r} needs val examples, got none: pass val, or kind='uniform'")
    return inputs


def _choose(
    inputs: MergeInputs, kind: Kind, score: str | None, repair: RepairKind, seed: int, task: TaskLike
) -> list[int]:
    """Return the members in a soup, in the order in which they are averaged."""
    ensemble, data = inputs.ensemble, inputs.data
    if kind == "uniform" or ensemble.num_members == 1:
        return list(range(ensemble.num_members))
    return choose_ingredients(ensemble, data, score, repair, seed, task)


def choose_ingredients(
    ensemble: Ensemble,
    data: Data,
    score: str | None = None,
    repair: RepairKind = "reset",
    seed: int = 0,
    task: TaskLike = None,
) -> list[int]:
    """Return the members in a greedy soup, in the order in which they are added, equation (2).

    Args:
        ensemble: The ensemble.
        data: The data.
        score: The metric on validation data; None for the accuracy, or for the criterion of a task without it.
        repair: The kind of repair of each average.
        seed: The seed.
        task: What the outputs mean; None to infer it.
        follow: Function called after every epoch with its number, from 0, and the mean loss.
    """

    known = choose_task(task, ensemble)

    def evaluate(*ingredients: int) -> float:
        """Return the validation score, higher is better."""
        network = _uniform(ingredients, ensemble, data, repair, seed)
        found = predict(network, data.val, task=known)
        table = metrics_for(found)
        metric = table.get(score or ("accuracy" if "accuracy" in table else found.criterion))
        if metric is None:
            raise EnfoldError(
                f"score must be a metric of the task, one of {', '.join(table)}, got {score!r}: choose one, or leave "
                "it out"
            )
        return metric(found) if metric.higher_is_better else -metric(found)

    scores = [evaluate(index) for index in range(ensemble.num_members)]
    order = sorted(range(len(scores)), key=lambda index: -scores[index])
    chosen, best = [order[0]], scores[order[0]]
    for index in order[1:]:
        value = evaluate(*chosen, index)
        if value >= best:
            chosen, best = [*chosen, index], value
    return chosen


def _uniform(ingredients: Sequence[int], ensemble: Ensemble, data: Data, repair: RepairKind, seed: int) -> nn.Module:
    """Return the mean of these members, equation (1)."""
    if len(ingredients) == 1:
        return ensemble.member(ingredients[0]).eval()
    states = states_of(ensemble)
    network = ensemble.network(mean_of([states[index] for index in ingredients]))
    members = ensemble if len(ingredients) == ensemble.num_members else ensemble[list(ingredients)]
    return repair_network(network, members, data, repair, seed=seed).eval()


def learn_weights(
    ensemble: Ensemble,
    data: Data,
    epochs: int = 5,
    lr: float = 0.05,
    batch_size: int = 256,
    task: TaskLike = None,
    follow: Callable[[int, float], None] | None = None,
) -> Tensor:
    """Return α of equation (3), (M,), learned on validation examples with members in eval mode.

    Args:
        ensemble: The ensemble.
        data: The data.
        epochs: The number of epochs.
        lr: The learning rate.
        batch_size: The number of examples in a batch.
        task: What the outputs mean; None to infer it.
    """
    known = choose_task(task, ensemble)
    stacked = {name: tensor.detach() for name, tensor in ensemble.expand().items()}
    device = next(iter(stacked.values())).device
    raw = torch.zeros(ensemble.num_members, device=device, requires_grad=True)
    beta = torch.ones((), device=device, requires_grad=True)
    optimizer = torch.optim.AdamW([raw, beta], lr=lr, weight_decay=0.0)
    skeleton = ensemble.skeleton
    with eval_mode(skeleton.network):
        for epoch in range(epochs):
            losses = []
            for batch in evaluation_batches(data.val, batch_size):
                inputs, targets, weights = (to_device(each, device) for each in batch)
                with torch.enable_grad(), skeleton.use_values(_mix(ensemble, stacked, raw.softmax(0))) as network:
                    outputs = at_least_float32(member_logits(network, inputs))
                    current = known.resolve(outputs, targets)
                    rows = current.flatten(outputs, targets, weights)
                    if current.is_categorical:
                        rows = replace(rows, values=beta * rows.values)
                    loss = current.loss(rows)[0]  # (3)
                    raw.grad, beta.grad = torch.autograd.grad(loss, [raw, beta], materialize_grads=True)
                optimizer.step()
                losses.append(float(loss.detach()))
            if follow is not None:
                follow(epoch, sum(losses) / len(losses))
    return raw.detach().softmax(0)


def _follower(
    epochs: int, lr: float, on_epoch: Callable[[Epoch], None] | None, log: Log
) -> Callable[[int, float], None]:
    """Return what reports an epoch of a learned soup."""
    history, started = History(), [time.perf_counter()]
    log.log_settings({"title": "learned soup", "epochs": epochs, "lr": lr})

    def follow(epoch: int, loss: float) -> None:
        seconds = time.perf_counter() - started[0]
        record = Epoch(epoch, [loss], [], [], None, lr, seconds, training="learned soup")
        log.log_metrics(history.metrics(record), epoch + 1)
        if on_epoch is not None:
            on_epoch(record)
        started[0] = time.perf_counter()

    return follow


def _mix(ensemble: Ensemble, stacked: State, weights: Tensor) -> State:
    """Return Σ_m α_m θ_m; gradients reach α through parameters only, not through running statistics."""
    found: State = {}
    for name, tensor in stacked.items():
        given = weights if name in ensemble.skeleton.parameters else weights.detach()
        is_float = tensor.is_floating_point()
        found[name] = torch.tensordot(given.to(tensor.dtype), tensor, dims=1) if is_float else tensor[0].clone()
    return found

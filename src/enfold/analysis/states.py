"""Predictions and mixtures of many networks of one architecture, the basis of all analyses in this package."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from enfold.data import Data, Split
from enfold.data.convert import Examples, as_data
from enfold.data.dataset import PartName, evaluation_batches
from enfold.data.tree import clone, to_device
from enfold.engines.base import EngineName
from enfold.engines.inputs import in_type_of, refuse_shape
from enfold.engines.modes import eval_mode
from enfold.engines.skeleton import State, read_state
from enfold.ensemble import Ensemble
from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.errors import EnfoldError, UnsupportedOutput
from enfold.metrics.multilabel import MultilabelPredictions
from enfold.metrics.predictions import Predictions, RowPredictions
from enfold.seeds import generator
from enfold.tasks import Rows, Task, TaskLike, as_task
from enfold.train.batch_norm import TRACKING, Norm, reestimate

BatchNorm = Literal["stored", "train", "reset"]
States = Ensemble | Iterable[State | nn.Module]
AT_ONCE = 16  # networks in one stacked product: more are not faster and need more memory
ROWS = 1024  # batch size


def predict_in_batches(
    network: nn.Module,
    states: States,
    data: Data | Examples,
    *,
    part: PartName = "test",
    examples: int | None = None,
    batch_norm: BatchNorm = "stored",
    at_once: int = AT_ONCE,
    task: TaskLike = None,
) -> Iterator[Predictions]:
    """Yield the predictions of networks of one architecture, `at_once` networks at a time.

    Args:
        network: The architecture; it is not modified.
        states: Parameters and buffers of each network: an ensemble, networks, or dictionaries by name.
        data: `Data`, or test examples as `enfold.evaluate` takes them.
        part: The split of `data` that is predicted.
        examples: The number of examples, drawn at random with a fixed seed; None for all.
        batch_norm: "stored" statistics, those of each batch ("train"), or statistics estimated on training data for
            every network ("reset"). Stored statistics are wrong for mixtures of networks.
        at_once: How many networks run together.
        task: What the outputs mean; None to infer it from the first batch.

    Yields:
        Predictions with one member per network.

    Raises:
        UnsupportedOutput: If the task has no classes.
    """
    check_batch_norm(batch_norm)
    data = data if isinstance(data, Data) else as_data(test=data, network=network)
    subset, remaining = sample_split(data, part, examples), iter(to_states(states))
    if batch_norm == "train":
        subset = _shuffle(subset, part)
    batch: _NetworkBatch | None = None
    known = as_task(task)
    while chunk := list(islice(remaining, at_once)):
        if batch is None:
            # Choosing an engine takes as long as running about ten small networks in the loop.
            batch = _NetworkBatch(network, len(chunk), "auto" if len(chunk) == at_once else "loop")
        batch.fill(chunk)
        if batch_norm == "reset":
            batch.reset_batch_norm(data)
        yield _predict(batch, subset, part, batch_norm, known)


class _NetworkBatch:
    """Storage for several networks; the engine is selected once and verified with two of them."""

    def __init__(self, network: nn.Module, size: int, engine: EngineName) -> None:
        # Selection and verification run all networks several times; two are sufficient.
        self.sample = DeepEnsemble([network] * min(size, 2), engine=engine).eval()
        self.ensemble = DeepEnsemble([network] * size, engine=engine).eval()
        self.count = size

    @torch.no_grad()
    def fill(self, states: Sequence[State]) -> None:
        """Set the values of the networks, at most as many as there is space for."""
        self.count = len(states)
        for name, tensor in self.ensemble.expand().items():
            for index, state in enumerate(states):
                tensor[index].copy_(state[name])

    @property
    def norms(self) -> list[Norm]:
        """Return the batch norms, and similar layers, whose mode applies to all networks."""
        networks = [code.network for code in self.sample.codes]
        return [layer for network in networks for layer in network.modules() if isinstance(layer, TRACKING)]

    @torch.no_grad()
    def reset_batch_norm(self, data: Data) -> None:
        """Estimate the batch-norm statistics of every network on training data."""
        held = self.ensemble.expand()
        for index in range(self.count if self.norms else 0):
            network = self.ensemble.member(index)
            reestimate(network, data)
            buffers = dict(network.named_buffers())
            for name in self.ensemble.skeleton.buffers:
                held[name][index].copy_(buffers[name])

    def __call__(self, inputs: Any) -> Tensor:
        """Return the logits: (B, ...) -> (networks, B, C)."""
        inputs = in_type_of(self.ensemble, inputs)
        held = {name: tensor[: self.count] for name, tensor in self.ensemble.expand().items()}
        try:
            return self.sample.choose_engine(inputs)(held, inputs, False)
        except Exception as error:
            refuse_shape(self.sample, inputs, error)
            raise


def predict_states(network: nn.Module, states: States, data: Data | Examples, **settings: object) -> Predictions:
    """Return the predictions of all networks; arguments as for `predict_in_batches`.

    Args:
        network: A network of the architecture.
        states: State dicts of networks of one architecture.
        data: Examples; of a data set, its test split.
        settings: Further arguments of `predict_in_batches`.
    """
    found = list(predict_in_batches(network, states, data, **settings))  # type: ignore[arg-type]
    if not found:
        raise EnfoldError("states must contain at least 1 network, got none: pass its parameters and buffers")
    return replace(found[0], log_probs=torch.cat([predictions.log_probs for predictions in found]), weights=None)


def to_state(network: State | nn.Module) -> State:
    """Return the parameters and buffers of a network by name; a state is returned as it is."""
    return read_state(network) if isinstance(network, nn.Module) else network


def to_states(models: States) -> Iterable[State]:
    """Return the states of an ensemble, of networks or of states."""
    return unstack_states(models) if isinstance(models, Ensemble) else (to_state(model) for model in models)


def check_batch_norm(batch_norm: str) -> None:
    """Raise an error if `batch_norm` is unknown."""
    if batch_norm not in get_args(BatchNorm):
        raise EnfoldError(
            f"batch_norm must be one of {', '.join(get_args(BatchNorm))}, got {batch_norm!r}: pass one of them"
        )


def sample_indices(total: int, examples: int | None) -> Tensor:
    """Return the indices of all examples in order, or of a random subset with a fixed seed.

    The first examples of sorted data could all be of one class.
    """
    if examples is None or examples >= total:
        return torch.arange(total)
    return torch.randperm(total, generator=generator(0, "examples"))[:examples]


def sample_split(data: Data, part: PartName, examples: int | None) -> Data:
    """Return the data with a random subset of one split; a loader is not changed."""
    held = getattr(data, part)
    if not isinstance(held, Split) or examples is None or examples >= len(held):
        return data
    return data.replace(**{part: held[sample_indices(len(held), examples)]})


def _shuffle(data: Data, part: PartName) -> Data:
    """Return the split in random order: in sorted data, the statistics of a batch would depend on its class."""
    held = getattr(data, part)
    if not isinstance(held, Split):
        return data
    order = torch.randperm(len(held), generator=generator(0, "batch statistics"))
    if len(held) % ROWS == 1 and len(held) > 1:
        order = order[1:]  # a last batch of one example has no variance
    return data.replace(**{part: held[order]})


def select_parameters(network: nn.Module, state: State) -> State:
    """Return the parameters of a state, without buffers."""
    names = {name for name, _ in network.named_parameters()}
    return {name: tensor for name, tensor in state.items() if name in names}


def copy_state(network: nn.Module) -> State:
    """Return a copy of the parameters and buffers of a network.

    Args:
        network: A network.
    """
    return {name: tensor.detach().clone() for name, tensor in read_state(network).items()}


@torch.no_grad()
def unstack_states(stacked: State | Ensemble) -> list[State]:
    """Return the states of the networks in a stacked state or an ensemble, as views.

    Args:
        stacked: An ensemble, or a state whose tensors have a leading member axis.
    """
    held = stacked.expand() if isinstance(stacked, Ensemble) else stacked
    count = len(next(iter(held.values())))
    return [{name: tensor.detach()[index] for name, tensor in held.items()} for index in range(count)]


@torch.no_grad()
def mix_states(states: Sequence[State], weights: Tensor) -> State:
    """Return Σ_k w_k θ_k; integer buffers are those of the first state.

    If one weight is 1 and the others are 0, the result is exactly that network.

    Args:
        states: State dicts of networks of one architecture.
        weights: Weight of each state, (K,).
    """
    nonzero = [index for index, weight in enumerate(weights.tolist()) if weight]
    if len(nonzero) == 1 and float(weights[nonzero[0]]) == 1.0:
        return dict(states[nonzero[0]])
    found: State = {}
    for name, first in states[0].items():
        if not first.is_floating_point():
            found[name] = first
            continue
        found[name] = torch.zeros_like(first)
        for state, weight in zip(states, weights.tolist(), strict=True):
            found[name].add_(state[name], alpha=weight)
    return found


@torch.no_grad()
def _predict(batch: _NetworkBatch, data: Data, part: PartName, batch_norm: BatchNorm, task: Task) -> Predictions:
    device = next(batch.ensemble.parameters()).device
    values, targets = [], []
    with eval_mode(batch.sample):
        if batch_norm == "train":
            for layer in batch.norms:
                layer.train()
        for inputs, batch_targets, _ in evaluation_batches(getattr(data, part), ROWS):
            outputs = batch(to_device(clone(inputs), device)).float()
            task = task.resolve(outputs, batch_targets)
            rows = task.flatten(outputs, to_device(batch_targets, device))
            values.append(rows.values.cpu())
            targets.append(rows.targets.cpu())
    if not values:
        raise EnfoldError(f"the {part} split must contain examples, got none: pass at least one")
    found = task.predictions(Rows(torch.cat(values, dim=1), torch.cat(targets)))
    return require_classes(found, "an analysis of weights")


def require_classes(found: RowPredictions, purpose: str) -> Predictions:
    """Return predictions of one of several classes, for which loss, accuracy and disagreement are defined.

    Raises:
        UnsupportedOutput: If they are of another task.
    """
    if isinstance(found, Predictions) and not isinstance(found, MultilabelPredictions):
        return found
    raise UnsupportedOutput(
        f"{purpose} needs probabilities of classes, got {type(found).__name__}: pass a classification or binary "
        "problem, or score the networks with enfold.evaluate"
    )

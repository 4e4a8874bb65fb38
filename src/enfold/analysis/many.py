"""Many networks of one architecture, run a few at a time: what every map, path and matrix of this room is made from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from enfold.data import Data, Split
from enfold.data.dataset import PartName, evaluation_batches
from enfold.engines.base import EngineName
from enfold.engines.inputs import in_type_of
from enfold.engines.modes import evaluating
from enfold.engines.shapes import refuse_shape
from enfold.engines.skeleton import State, read_state
from enfold.ensemble import Ensemble
from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.errors import EnfoldError
from enfold.metrics.predictions import Predictions
from enfold.seeds import generator
from enfold.train.batch_norm import TRACKING, Norm, reestimate

BatchNorm = Literal["stored", "train", "reset"]
AT_ONCE = 16  # networks in one stacked product: more do not run faster, and need more memory
ROWS = 1024  # examples of a pass


def answers(
    network: nn.Module,
    states: Iterable[State],
    data: Data,
    *,
    part: PartName = "test",
    examples: int | None = None,
    batch_norm: BatchNorm = "stored",
    at_once: int = AT_ONCE,
) -> Iterator[Predictions]:
    """What networks like this one say with these values in it, a few networks at a time, on some `examples` of a part.

    Between networks, stored batch-norm statistics fit nothing: "train" takes those of each batch that is asked, "reset"
    measures them on the training part for every network. The network is left as it is.
    """
    require_batch_norm(batch_norm)
    few, states = some_examples(data, part, examples), iter(states)
    if batch_norm == "train":
        few = _shuffled(few, part)
    crowd: _Crowd | None = None
    while held := list(islice(states, at_once)):
        if crowd is None:
            # Choosing an engine takes as long as asking some ten small networks one after the other.
            crowd = _Crowd(network, len(held), "auto" if len(held) == at_once else "loop")
        crowd.fill(held)
        if batch_norm == "reset":
            crowd.measure(data)
        yield _ask(crowd, few, part, batch_norm)


class _Crowd:
    """Room for a few networks at a time; the engine that runs them is chosen once, and checked with two of them."""

    def __init__(self, network: nn.Module, size: int, engine: EngineName) -> None:
        # Choosing and checking run all networks that are there several times: two tell as much as many.
        self.tried = DeepEnsemble([network] * min(size, 2), engine=engine).eval()
        self.room = DeepEnsemble([network] * size, engine=engine).eval()
        self.count = size

    @torch.no_grad()
    def fill(self, states: Sequence[State]) -> None:
        """Put these in, at most as many as there is room for."""
        self.count = len(states)
        for name, tensor in self.room.expand().items():
            for index, state in enumerate(states):
                tensor[index].copy_(state[name])

    @property
    def norms(self) -> list[Norm]:
        """The batch norms, and what is like them, by whose mode all networks run."""
        networks = [code.network for code in self.tried.codes]
        return [layer for network in networks for layer in network.modules() if isinstance(layer, TRACKING)]

    @torch.no_grad()
    def measure(self, data: Data) -> None:
        """Batch-norm statistics of every network, on the training part."""
        held = self.room.expand()
        for index in range(self.count if self.norms else 0):
            network = self.room.member(index)
            reestimate(network, data)
            buffers = dict(network.named_buffers())
            for name in self.room.skeleton.buffers:
                held[name][index].copy_(buffers[name])

    def __call__(self, inputs: Tensor) -> Tensor:
        """(B, ...) -> (networks, B, C)."""
        inputs = in_type_of(self.room, inputs)
        held = {name: tensor[: self.count] for name, tensor in self.room.expand().items()}
        try:
            return self.tried.choose_engine(inputs)(held, inputs, False)
        except Exception as error:
            refuse_shape(self.tried, inputs, error)
            raise


def predictions(network: nn.Module, states: Iterable[State], data: Data, **settings: object) -> Predictions:
    """`answers` of all networks in one."""
    found = list(answers(network, states, data, **settings))  # type: ignore[arg-type]
    if not found:
        raise EnfoldError("there must be at least 1 network to ask, got none: pass its state")
    return Predictions(torch.cat([said.log_probs for said in found]), found[0].labels)


def require_batch_norm(batch_norm: str) -> None:
    """The word, if it is known."""
    if batch_norm not in get_args(BatchNorm):
        raise EnfoldError(
            f"batch_norm must be one of {', '.join(get_args(BatchNorm))}, got {batch_norm!r}: choose one of them"
        )


def chosen_examples(total: int, examples: int | None) -> Tensor:
    """Which of so many examples are asked about: all in their order, else always the same ones, drawn at random.

    The first ones of data that lie class by class would be of one class.
    """
    if examples is None or examples >= total:
        return torch.arange(total)
    return torch.randperm(total, generator=generator(0, "examples"))[:examples]


def some_examples(data: Data, part: PartName, examples: int | None) -> Data:
    """The data with `chosen_examples` of one part; a loader is taken whole."""
    held = getattr(data, part)
    if not isinstance(held, Split) or examples is None or examples >= len(held):
        return data
    return data.replace(**{part: held[chosen_examples(len(held), examples)]})


def _shuffled(data: Data, part: PartName) -> Data:
    """The part in another order: where data are sorted, a batch's statistics would tell its class."""
    held = getattr(data, part)
    if not isinstance(held, Split):
        return data
    order = torch.randperm(len(held), generator=generator(0, "batch statistics"))
    if len(held) % ROWS == 1 and len(held) > 1:
        order = order[1:]  # one example alone in the last batch has no variance
    return data.replace(**{part: held[order]})


def parameters_of(network: nn.Module, state: State) -> State:
    """What is learned: weights and biases, without buffers."""
    names = {name for name, _ in network.named_parameters()}
    return {name: tensor for name, tensor in state.items() if name in names}


def state_of(network: nn.Module) -> State:
    """A network's values, copied."""
    return {name: tensor.detach().clone() for name, tensor in read_state(network).items()}


@torch.no_grad()
def each(stacked: State | Ensemble) -> list[State]:
    """The networks of a stacked state, or of members, one by one; views, not copies."""
    held = stacked.expand() if isinstance(stacked, Ensemble) else stacked
    count = len(next(iter(held.values())))
    return [{name: tensor.detach()[index] for name, tensor in held.items()} for index in range(count)]


@torch.no_grad()
def mixture(states: Sequence[State], weights: Tensor) -> State:
    """Σ_k w_k θ_k; counters and index buffers, which cannot be mixed, are the first state's.

    A weight of 1 beside zeros gives that network to the bit.
    """
    alone = [index for index, weight in enumerate(weights.tolist()) if weight]
    if len(alone) == 1 and float(weights[alone[0]]) == 1.0:
        return dict(states[alone[0]])
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
def _ask(crowd: _Crowd, data: Data, part: PartName, batch_norm: BatchNorm) -> Predictions:
    device = next(crowd.room.parameters()).device
    log_probs, labels = [], []
    with evaluating(crowd.tried):
        if batch_norm == "train":
            for layer in crowd.norms:
                layer.train()
        for inputs, batch_labels in evaluation_batches(getattr(data, part), ROWS):
            log_probs.append(torch.log_softmax(crowd(inputs.to(device, copy=True)).float(), dim=-1).cpu())
            labels.append(batch_labels.cpu())
    if not labels:
        raise EnfoldError(f"the {part} part must hold examples to ask about, got none: pass a Split")
    return Predictions(torch.cat(log_probs, dim=1), torch.cat(labels))

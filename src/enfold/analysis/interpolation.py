"""Linear interpolation between two networks: loss, accuracy and barrier.

    θ(α) = α θ_1 + (1 - α) θ_2                                                                (1)
    excess(α) = L(θ(α)) - (α L(θ_1) + (1 - α) L(θ_2)),   barrier = max over α                 (2)

Activations of interpolated weights differ from those of both networks, so interpolated batch-norm statistics are wrong.
They are used as they are ("stored"), taken from each batch ("train") or estimated on training data per α ("reset").
With `repair`, all hidden units have the interpolated means and standard deviations of the two networks.

J. Frankle, G. K. Dziugaite, D. Roy, M. Carbin: Linear Mode Connectivity and the Lottery Ticket Hypothesis, ICML 2020,
arXiv:1912.05671. The barrier (2) is that of R. Entezari et al., ICLR 2022, arXiv:2110.06296.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from enfold.analysis.states import BatchNorm, check_batch_norm, mix_states, predict_in_batches, to_state
from enfold.data import Data
from enfold.data.convert import Examples, as_data
from enfold.data.dataset import PartName
from enfold.engines.skeleton import State, read_state
from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.errors import EnfoldError
from enfold.merge.common.inputs import first_inputs
from enfold.merge.common.states import find_units
from enfold.merge.repair import layers_to_repair, repair_layers
from enfold.metrics import accuracy, nll, per_member
from enfold.train.batch_norm import reestimate


@dataclass(frozen=True)
class Line:
    """Scores along equation (1), one entry per α."""

    alphas: Tensor  # (A,), from 0, the second network, to 1, the first
    loss: Tensor  # (A,), mean cross-entropy in nats
    total_loss: Tensor  # (A,), sum over examples
    accuracy: Tensor  # (A,)

    def as_dict(self) -> dict[str, list[float]]:
        """Return lists for JSON."""
        return {name: getattr(self, name).tolist() for name in ("alphas", "loss", "total_loss", "accuracy")}


@dataclass(frozen=True)
class Barrier:
    """Equation (2) of one quantity."""

    height: float  # the largest excess over the chord, at least 0
    at: float  # α at the maximum
    area: float  # integral of the excess over α; negative if the line is mostly better than its ends


@torch.no_grad()
def interpolate(
    network: nn.Module,
    first: State | nn.Module,
    second: State | nn.Module,
    data: Data | Examples,
    *,
    points: int = 21,
    part: PartName = "test",
    batch_norm: BatchNorm = "stored",
    repair: bool = False,
) -> Line:
    """Return loss and accuracy of the networks on the line between two networks.

    Args:
        network: The architecture; it is not modified.
        first: The network at α = 1, or its state.
        second: The network at α = 0, or its state.
        data: `Data`, or test examples as `enfold.evaluate` takes them ("reset" and `repair` need training data too).
        points: The number of values of α.
        part: The split that is evaluated.
        batch_norm: "stored", "train" or "reset", see above.
        repair: Whether hidden units are repaired for every α; batch-norm statistics are then estimated again.

    Returns:
        The scores for every α.

    Raises:
        EnfoldError: If the states do not fit the network, or `points` is below 2.
    """
    first, second = to_state(first), to_state(second)
    data = data if isinstance(data, Data) else as_data(test=data, network=network)
    _check(read_state(network), first, second, points, batch_norm)
    alphas = torch.linspace(0, 1, points, dtype=torch.float64)
    states: Iterator[State]
    states = (mix_states([first, second], torch.stack([alpha, 1 - alpha])) for alpha in alphas)  # (1)
    if repair and batch_norm != "stored":
        raise EnfoldError(
            f"repair=True estimates batch-norm statistics itself, got batch_norm={batch_norm!r}: omit one of them"
        )
    if repair:
        states = _repair_states(network, first, second, alphas, states, data)
    loss, correct, examples = [], [], 0
    for predictions in predict_in_batches(network, states, data, part=part, batch_norm=batch_norm):
        loss.append(per_member(nll, predictions))
        correct.append(per_member(accuracy, predictions))
        examples = len(predictions)
    return Line(alphas, torch.cat(loss), examples * torch.cat(loss), torch.cat(correct))


def _repair_states(
    network: nn.Module, first: State, second: State, alphas: Tensor, states: Iterable[State], data: Data
) -> Iterator[State]:
    """Yield every state with the interpolated statistics of the two networks in all hidden units."""
    model = DeepEnsemble([network])
    names = layers_to_repair(network, find_units(network, first_inputs(data)), data)
    ends = [model.network(end) for end in (first, second)]
    for alpha, state in zip(alphas.tolist(), states, strict=True):
        one = model.network(state)
        repair_layers(one, ends, data, names, weights=(alpha, 1 - alpha))
        reestimate(one, data)
        yield read_state(one)


def compute_barriers(line: Line) -> dict[str, Barrier]:
    """Return the barriers (2) of loss and error.

    Args:
        line: Loss and accuracy along a path.
    """
    return {"loss": compute_barrier(line.alphas, line.loss), "error": compute_barrier(line.alphas, 1 - line.accuracy)}


def compute_barrier(alphas: Tensor, values: Tensor) -> Barrier:
    """Return equation (2) for any quantity along a line for which lower is better."""
    chord = alphas * values[-1] + (1 - alphas) * values[0]
    over = values - chord  # (2)
    over[[0, -1]] = 0.0  # exact at the ends, without rounding errors
    highest = int(over.argmax())
    return Barrier(float(over[highest]), float(alphas[highest]), float(torch.trapezoid(over, alphas)))


def _check(own: State, first: State, second: State, points: int, batch_norm: str) -> None:
    if points < 2:
        raise EnfoldError(f"points must be at least 2, got {points}: the default is 21")
    check_batch_norm(batch_norm)
    for state in (first, second):
        unfit = sorted(own.keys() ^ state.keys()) or [name for name in own if own[name].shape != state[name].shape]
        if unfit:
            raise EnfoldError(
                f"first and second must be states of network, but '{unfit[0]}' differs: pass all parameters and "
                "buffers, or the networks themselves"
            )

"""The straight line between two networks: what lies on it says whether they are in one valley of the loss.

    θ(α) = α θ_1 + (1 - α) θ_2                                                                (1)
    excess(α) = L(θ(α)) - (α L(θ_1) + (1 - α) L(θ_2)),   barrier = max over α                 (2)

Weights between two networks have other activations than both, so batch norm's stored statistics, interpolated, are
wrong there. They may be taken as they are ("stored"), from each batch ("train") or measured again on the training part
for every α ("reset"). All hidden units may be given the ends' means and spreads for every α (`repair`).

J. Frankle, G. K. Dziugaite, D. Roy, M. Carbin: Linear Mode Connectivity and the Lottery Ticket Hypothesis, ICML 2020,
arXiv:1912.05671. The barrier (2) is that of R. Entezari et al., ICLR 2022, arXiv:2110.06296.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from enfold.analysis.many import BatchNorm, answers, mixture, require_batch_norm
from enfold.data import Data
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
    """Networks along equation (1), one entry for each α."""

    alphas: Tensor  # (A,), from 0, the second network, to 1, the first
    loss: Tensor  # (A,), mean cross-entropy in nats
    total_loss: Tensor  # (A,), its sum over the examples
    accuracy: Tensor  # (A,)

    def as_dict(self) -> dict[str, list[float]]:
        """As JSON holds it."""
        return {name: getattr(self, name).tolist() for name in ("alphas", "loss", "total_loss", "accuracy")}


@dataclass(frozen=True)
class Barrier:
    """Equation (2) of one quantity."""

    height: float  # the largest excess over the chord of the ends, never below 0
    at: float  # the α of it
    area: float  # of the excess over α, by trapezia; below 0 where the line is mostly better than its ends


@torch.no_grad()
def interpolation(
    network: nn.Module,
    first: State,
    second: State,
    data: Data,
    *,
    points: int = 21,
    part: PartName = "test",
    batch_norm: BatchNorm = "stored",
    repair: bool = False,
) -> Line:
    """Loss and accuracy of the networks on the line between two states, as many at once as memory allows.

    `network` says what the states are values of; it is left untouched. With `repair`, batch norms are measured again.
    """
    _check(read_state(network), first, second, points, batch_norm)
    alphas = torch.linspace(0, 1, points, dtype=torch.float64)
    states: Iterator[State]
    states = (mixture([first, second], torch.stack([alpha, 1 - alpha])) for alpha in alphas)  # (1)
    if repair and batch_norm != "stored":
        raise EnfoldError(
            f"a repaired line measures batch norms again by itself, got batch_norm={batch_norm!r}: leave that out"
        )
    if repair:
        states = _repaired(network, first, second, alphas, states, data)
    loss, correct, examples = [], [], 0
    for said in answers(network, states, data, part=part, batch_norm=batch_norm):
        loss.append(per_member(nll, said))
        correct.append(per_member(accuracy, said))
        examples = len(said)
    return Line(alphas, torch.cat(loss), examples * torch.cat(loss), torch.cat(correct))


def _repaired(
    network: nn.Module, first: State, second: State, alphas: Tensor, states: Iterable[State], data: Data
) -> Iterator[State]:
    """Every state of the line with the statistics of the ends, unit by unit, in the same proportions."""
    model = DeepEnsemble([network])
    names = layers_to_repair(network, find_units(network, first_inputs(data)), data)
    ends = [model.network(end) for end in (first, second)]
    for alpha, state in zip(alphas.tolist(), states, strict=True):
        one = model.network(state)
        repair_layers(one, ends, data, names, weights=(alpha, 1 - alpha))
        reestimate(one, data)
        yield read_state(one)


def barrier(line: Line) -> dict[str, Barrier]:
    """How far loss and error rise above the chord of the line's ends."""
    return {"loss": excess(line.alphas, line.loss), "error": excess(line.alphas, 1 - line.accuracy)}


def excess(alphas: Tensor, values: Tensor) -> Barrier:
    """Equation (2) for any quantity along a line, lower being better."""
    chord = alphas * values[-1] + (1 - alphas) * values[0]
    over = values - chord  # (2)
    over[[0, -1]] = 0.0  # the ends are on their chord, whatever rounding says
    highest = int(over.argmax())
    return Barrier(float(over[highest]), float(alphas[highest]), float(torch.trapezoid(over, alphas)))


def _check(own: State, first: State, second: State, points: int, batch_norm: str) -> None:
    if points < 2:
        raise EnfoldError(f"a line needs its two ends, got {points} points: use 2 or more, 21 are usual")
    require_batch_norm(batch_norm)
    for state in (first, second):
        unfit = sorted(own.keys() ^ state.keys()) or [name for name in own if own[name].shape != state[name].shape]
        if unfit:
            raise EnfoldError(
                f"both ends of a line must be states of its network, but '{unfit[0]}' differs: pass all parameters and "
                "buffers, as states_of(members) gives them"
            )

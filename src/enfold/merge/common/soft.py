"""The soft average: members mixed by soft permutations and averaged, as one network that is a function of scores.

    W̄ = Σ_n w_n P_n W_n Q_n^-1                                                                (1)

P_n mixes the units that a tensor produces and Q_n those that it consumes, both by `sinkhorn` from learned scores.
As an `Ensemble` of one member, the model is trained, selected and stored like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from enfold.data import Data
from enfold.data.tree import device_of
from enfold.engines.modes import eval_mode
from enfold.engines.parameters import Tree
from enfold.engines.skeleton import State, read_state
from enfold.ensemble import Ensemble
from enfold.evaluate import member_logits
from enfold.merge.common.lazy import Lazy, Terms, lazy_weights
from enfold.merge.common.sinkhorn import Gradient, sinkhorn, softness
from enfold.merge.common.solve import Inverse, condition, divide
from enfold.merge.common.states import mean_of
from enfold.symmetry import Axis, Group
from enfold.train.batch_norm import reestimate


@dataclass(frozen=True)
class Balance:
    """The conversion of scores to doubly stochastic matrices."""

    iterations: int = 100
    tolerance: float = 0.0
    gradient: Gradient = "unrolled"
    warm: bool = False  # start iterations from the result of the last step
    ridge: float = 0.0  # ε of (P + ε Π) / (1 + ε), Π the permutation nearest to the scores at the start


def mix_units(state: State, groups: Sequence[Group], matrices: Sequence[Tensor], inverse: Inverse = "exact") -> State:
    """Return a state with each group's units mixed by its matrix, and divided by it where they are consumed.

    Args:
        state: Parameters of a network.
        groups: The groups of units.
        matrices: One matrix for each group.
        inverse: What stands for the inverse of a matrix; see `enfold.merge.common.solve.divide_each`.
    """
    found = dict(state)
    for group, matrix in zip(groups, matrices, strict=True):
        present = [axis for axis in group.axes if axis.name in found]  # not the other names of tied tensors
        _apply(found, [axis for axis in present if not axis.divided], partial(torch.matmul, matrix))
        divided = [axis for axis in present if axis.divided]
        _apply(found, divided, partial(_divide_units, matrix, f"that of '{group.name}'", inverse))
    return found


def _divide_units(matrix: Tensor, name: str, inverse: Inverse, units: Tensor) -> Tensor:
    """Return P^-T U, as (Uᵀ P^-1)ᵀ."""
    return divide(units.mT, matrix, name, inverse).mT


def _apply(found: State, axes: Sequence[Axis], change: Callable[[Tensor], Tensor]) -> None:
    """Change units, (d, ...), along these axes together; axes of one tensor are changed one after the other."""
    while axes:
        now = list({axis.name: axis for axis in reversed(axes)}.values())
        axes = [axis for axis in axes if axis not in now]
        units = [axis.units_first(found[axis.name]) for axis in now]
        flat = [each.flatten(1) for each in units]
        changed = change(flat[0] if len(flat) == 1 else torch.cat(flat, 1))
        for axis, each, part in zip(now, units, changed.split([rows.shape[1] for rows in flat], 1), strict=True):
            found[axis.name] = axis.with_units(found[axis.name], part.reshape(each.shape))


def nearest_permutations(matrices: Tensor) -> Tensor:
    """Return the nearest permutation matrices, (n, d, d), by linear assignment."""
    from scipy.optimize import linear_sum_assignment

    found = torch.zeros_like(matrices)
    for each, matrix in zip(found, matrices, strict=True):
        rows, columns = linear_sum_assignment(matrix.detach().cpu().numpy(), maximize=True)
        each[torch.as_tensor(rows), torch.as_tensor(columns)] = 1.0
    return found


class SoftAverage(Ensemble):
    """Equation (1) as a model of one member, whose parameters are scores, (members, d, d) for each group.

    `settled` are soft permutations that are no longer learned, one (members, d, d) for each group. The order of members
    is: unchanged ones (`fixed`), those with settled matrices, those whose matrices are learned.
    """

    made_from = ""  # digest of the start, for the identity of a checkpoint that a later stage continues from

    def __init__(
        self,
        members: Ensemble,
        states: Sequence[Mapping[str, Tensor]],
        weights: Sequence[float],
        groups: Sequence[Group],
        scores: Sequence[Tensor],
        settled: Sequence[Tensor],
        gains: Sequence[Tensor] = (),
        *,
        temperature: float = 1.0,
        balance: Balance | None = None,
        inverse: Inverse = "exact",
    ) -> None:
        network = members.network(dict(states[0]))
        super().__init__(network, 1, "loop")
        self.groups, self.balance, self.inverse = tuple(groups), balance or Balance(), inverse
        self.learned = len(scores[0])
        self.num_settled = len(settled[0])
        self.names = list(self.skeleton.parameters)
        for index, name in enumerate(self.names):
            given = torch.stack([state[name].detach() for state in states])
            self.register_buffer(f"given{index}", given, persistent=False)
        self.register_buffer("weights", torch.tensor(weights, dtype=torch.float64), persistent=False)
        self.register_buffer("temperature", torch.tensor(float(temperature), dtype=torch.float64))
        self.scores = nn.ParameterList([nn.Parameter(each.clone()) for each in scores])
        self.gains = nn.ParameterList([nn.Parameter(each.clone()) for each in gains])
        for index in range(len(groups)):
            self.register_buffer(f"settled{index}", settled[index].clone())
            if self.balance.ridge:
                self.register_buffer(f"anchor{index}", nearest_permutations(scores[index]), persistent=False)
            if self.balance.warm:
                self.register_buffer(f"columns{index}", scores[index].new_zeros(scores[index].shape[:2]))
        self.held = Tree(self._statistics(states, weights))
        self.lazy = {} if gains else lazy_weights(self.skeleton, self.groups)
        self.drawn: list[float] | None = None  # weights of the members in a training step
        self._retained: tuple[object, list[State]] | None = None

    @torch.no_grad()
    def _statistics(self, states: Sequence[Mapping[str, Tensor]], weights: Sequence[float]) -> State:
        """Return buffers by equation (1) at the start, (1, *shape): statistics are mixed like their units."""
        buffers = [{name: state[name].detach() for name in self.skeleton.buffers} for state in states]
        if buffers[0]:
            matrices = self.all_matrices()
            for index, own in enumerate(zip(*matrices, strict=True), start=len(states) - len(matrices[0])):
                buffers[index] = self._mix(buffers[index], own)
        return {name: tensor.unsqueeze(0).clone() for name, tensor in mean_of(buffers, weights).items()}

    def matrices(self) -> list[Tensor]:
        """Return the learned soft permutations, (members, d, d) for each group."""
        with torch.autocast(self.scores[0].device.type, enabled=False):  # half precision is too coarse to balance
            found, ridge = self.balanced_matrices(), self.balance.ridge
        if not ridge:
            return found
        return [(each + ridge * self.get_buffer(f"anchor{k}")) / (1 + ridge) for k, each in enumerate(found)]

    def balanced_matrices(self) -> list[Tensor]:
        """Return the learned matrices without the ridge; groups of one width are balanced together."""
        widths: dict[int, list[int]] = {}
        for index, group in enumerate(self.groups):
            widths.setdefault(group.size, []).append(index)
        found: dict[int, Tensor] = {}
        for indices in widths.values():
            chosen = [self.scores[index] for index in indices]
            scores = (chosen[0] if len(chosen) == 1 else torch.cat(chosen)) / float(self.get_buffer("temperature"))
            found.update(zip(indices, self._balance(scores, indices), strict=True))
        return [found[index] for index in range(len(self.groups))]

    def _balance(self, scores: Tensor, indices: Sequence[int]) -> Sequence[Tensor]:
        how, before = self.balance, None
        if how.warm:
            before = torch.cat([self.get_buffer(f"columns{index}") for index in indices])
        matrices, columns = sinkhorn(scores, how.iterations, how.tolerance, gradient=how.gradient, start=before)
        if how.warm and self.training:
            with torch.no_grad():
                for index, part in zip(indices, columns.split(self.learned), strict=True):
                    self.get_buffer(f"columns{index}").copy_(part)
        parts: tuple[Tensor, ...] = matrices.split(self.learned)
        return parts

    def all_matrices(self) -> list[Tensor]:
        """Return fixed and learned matrices, (members, d, d) for each group, without a graph."""
        with torch.no_grad():
            learned = self.matrices()
        return [torch.cat([self.get_buffer(f"settled{i}"), each]) for i, each in enumerate(learned)]

    def figures(self) -> dict[str, float]:
        """Return softness, row error, condition number and fraction of assigned columns of the learned matrices."""
        with torch.no_grad(), eval_mode(self):
            found = self.matrices()
        taken = [len(matrix.argmax(-1).unique()) / len(matrix) for each in found for matrix in each]
        return {
            "softness": float(torch.cat([softness(each) for each in found]).mean()),
            "row error": max(float((each.sum(-1) - 1).abs().max()) for each in found),
            "condition": max(float(condition(each).max()) for each in found),
            "columns taken": sum(taken) / len(taken),  # by a row's largest entry; 1 for permutations
        }

    def _mix(self, state: State, matrices: Sequence[Tensor]) -> State:
        return mix_units(state, self.groups, matrices, self.inverse)

    def _select_state(self, index: int) -> State:
        return {name: self.get_buffer(f"given{k}")[index] for k, name in enumerate(self.names)}

    def _constant(self) -> list[State]:
        """Return the members that do not change in this training: fixed ones and those with fixed matrices."""
        settled = [self.get_buffer(f"settled{index}") for index in range(len(self.groups))]
        key = [(each.data_ptr(), each._version) for each in (self.get_buffer("given0"), *settled)]
        if self._retained is None or self._retained[0] != key:
            count = len(self.get_buffer("weights")) - self.learned
            with (
                torch.inference_mode(False),
                torch.no_grad(),
            ):  # evaluation may compute it first, and training uses it again
                states = [self._select_state(index) for index in range(count - self.num_settled)]
                for index in range(self.num_settled):
                    given = self._select_state(len(states))
                    states.append(self._mix(given, [each[index] for each in settled]))
            self._retained = (key, states)
        return self._retained[1]

    def _weights(self) -> list[float]:
        if self.training and self.drawn is not None:
            return self.drawn
        weights: list[float] = self.get_buffer("weights").tolist()
        return weights

    def average(self, matrices: Sequence[Tensor], without: Collection[str] = ()) -> State:
        """Return equation (1) for the parameters, without some, with these matrices for the learned members."""
        with torch.autocast(self.scores[0].device.type, enabled=False):
            return self._average(matrices, [name for name in self.names if name not in without])

    def _average(self, matrices: Sequence[Tensor], names: Sequence[str]) -> State:
        states = list(self._constant())
        for index, own in enumerate(zip(*(each.unbind() for each in matrices), strict=True), start=len(states)):
            given = self._select_state(index)
            states.append(self._mix({name: given[name] for name in names}, own))
        weights = self._weights()
        found = {name: weights[0] * states[0][name] for name in names}
        for weight, state in zip(weights[1:], states[1:], strict=True):
            found = {name: torch.add(found[name], state[name], alpha=weight) for name in names}
        for group, gain in zip(self.groups if self.gains else (), self.gains, strict=True):
            for axis in (axis for axis in group.axes if axis.divided and axis.name in found):
                units = axis.units_first(found[axis.name])
                found[axis.name] = axis.with_units(found[axis.name], units * gain.view(-1, *[1] * (units.ndim - 1)))
        return found

    @torch.no_grad()
    def project(self) -> State:
        """Return equation (1) with the permutations nearest to all matrices; fixed matrices are replaced by theirs."""
        for index in range(len(self.groups)):
            settled = self.get_buffer(f"settled{index}")
            settled.copy_(nearest_permutations(settled))
        return self.average([nearest_permutations(each) for each in self.balanced_matrices()])

    @torch.no_grad()
    def measure_statistics(self, data: Data) -> None:
        """Measure batch-norm statistics of the current network."""
        network = self.member(0)
        reestimate(network, data)
        measured = read_state(network)
        for name, held in self.held.state().items():
            held.copy_(measured[name].unsqueeze(0))

    def options(self) -> dict[str, Any]:
        """Return no options: this model is not saved."""
        return {}

    def _run(self, inputs: Any, *, each: bool) -> Tensor:
        """Run the network; in training, linear layers apply their factors one by one where a batch is small."""
        whole = torch.is_autocast_enabled(device_of(inputs).type)  # factors would be rounded one by one
        if whole or not (self.training and self.lazy and torch.is_grad_enabled()):
            return super()._run(inputs, each=each)
        matrices = self.matrices()
        state: dict[str, Any] = {name: tensor[0] for name, tensor in self.held.state().items()}
        state |= self.average(matrices, without=self.lazy)
        state |= {name: self._lazily(name, matrices) for name in self.lazy}
        try:
            with self.skeleton.use_values(state, again=False) as network:
                return member_logits(network, inputs[0] if each else inputs)
        except Exception:  # code of the network may need tensors
            self.lazy = {}
            return super()._run(inputs, each=each)

    def _lazily(self, name: str, matrices: Sequence[Tensor]) -> Lazy:
        left, right = self.lazy[name]
        weights, states = self._weights(), self._constant()
        constant = sum((w * state[name] for w, state in zip(weights, states, strict=False)), torch.zeros(()))
        given = self.get_buffer(f"given{self.names.index(name)}")[len(states) :]
        if not states:
            constant = torch.zeros_like(given[0])
        called = "" if right is None else f"that of '{self.groups[right].name}'"
        factors = torch.tensor(weights[len(states) :], dtype=given.dtype, device=given.device)
        outer = None if left is None else matrices[left]
        inner = None if right is None else matrices[right]
        return Lazy(torch.as_tensor(constant), Terms(factors, given, outer, inner, called, self.inverse))

    def is_looped(self, inputs: Any) -> bool:
        """Return False where weights are applied factor by factor: there are no weights to differentiate."""
        return not self.lazy and super().is_looped(inputs)

    def expand(self) -> State:
        """Return the values of the one network, (1, *shape)."""
        values = {name: tensor.unsqueeze(0) for name, tensor in self.average(self.matrices()).items()}
        return {**values, **self.held.state()}

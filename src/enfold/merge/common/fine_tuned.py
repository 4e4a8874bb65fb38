"""Members that were fine-tuned from one network: the base, task vectors, and the network of merged values.

τ_m = θ_m - θ_0                                                                                  (1)
θ(λ) = θ_0 + λ (1/M) Σ_m τ_m = (1 - λ) θ_0 + λ θ̄                                                 (2)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from enfold.data.convert import Examples
from enfold.data.dataset import has_examples
from enfold.data.unpack import Unpack
from enfold.engines.skeleton import State, read_state
from enfold.ensemble import Ensemble
from enfold.errors import EnfoldError
from enfold.evaluate import predict
from enfold.io.checkpoints import load_into, matching_files
from enfold.io.files import digest
from enfold.merge.common.inputs import MergeInputs, Models, choose_task, prepare_inputs
from enfold.merge.common.states import states_of
from enfold.merge.repair import RepairKind, repair_network
from enfold.metrics import metrics_for
from enfold.tasks import TaskLike
from enfold.train.batch_norm import has_running_statistics

Base = nn.Module | Mapping[str, Tensor] | str | Path
"""The network that members were fine-tuned from: a network, its state dict, or the file of one."""


@dataclass(frozen=True)
class FineTuned:
    """Members and the network that they were fine-tuned from.

    Args:
        inputs: The members and data.
        states: Parameters and buffers of each member.
        base: Parameters and buffers of the base.
    """

    inputs: MergeInputs
    states: list[State]
    base: State

    @property
    def ensemble(self) -> Ensemble:
        """The members."""
        return self.inputs.ensemble

    @property
    def learned(self) -> list[str]:
        """The names of the parameters in floating point, which have task vectors."""
        return [name for name in self.ensemble.skeleton.parameters if self.base[name].is_floating_point()]

    def vectors(self, index: int) -> State:
        """Return the task vector of a member, equation (1), in float32 or better."""
        return {name: wide(self.states[index][name]) - wide(self.base[name]) for name in self.learned}

    def along(self, target: State, weight: float) -> State:
        """Return the point on the line from the base to a target; both ends are exact.

        Running statistics stay between those of the ends, as a variance cannot be extrapolated.

        Args:
            target: The values at weight 1; counters and index buffers are taken from it.
            weight: λ of equation (2).
        """
        parameters, found = self.ensemble.skeleton.parameters, dict(target)
        for name, end in target.items():
            if end.is_floating_point() or end.is_complex():
                own = weight if name in parameters else min(max(weight, 0.0), 1.0)
                found[name] = torch.lerp(self.base[name], end, own)  # (2)
        return found


def prepare_fine_tuned(
    method: str,
    models: Models,
    base: Base | None,
    train: Examples | None = None,
    val: Examples | None = None,
    *,
    repair: RepairKind = "reset",
    unpack: Unpack | None = None,
) -> FineTuned:
    """Convert and check the inputs of a merge with a base.

    Args:
        method: The name of the method in messages.
        models: An ensemble, or networks of one architecture.
        base: The network that they were fine-tuned from.
        train: Training examples.
        val: Validation examples.
        repair: The kind of repair.
        unpack: Function that splits a batch of a loader; None for the usual structures of batches.

    Raises:
        EnfoldError: If networks cannot be averaged, the base does not fit them, or examples are missing.
    """
    inputs = prepare_inputs(method, models, train, val, repair=repair, unpack=unpack)
    state = base_state(inputs.ensemble, base, method)
    measures = has_running_statistics(inputs.ensemble.skeleton.network) if repair == "reset" else repair != "none"
    if measures and not has_examples(inputs.data.train):  # also for a single member
        raise EnfoldError(
            f"{method} with repair={repair!r} measures statistics, which needs train examples, got none: pass train, "
            "or repair='none'"
        )
    return FineTuned(inputs, states_of(inputs.ensemble), state)


@torch.no_grad()
def base_state(ensemble: Ensemble, base: Base | None, method: str) -> State:
    """Return the parameters and buffers of a base, in the types and on the device of the members.

    Args:
        ensemble: The members.
        base: The base.
        method: The name of the method in messages.

    Raises:
        EnfoldError: If there is no base, or a name or a shape differs from the members', or a value is not finite.
    """
    if base is None:
        raise EnfoldError(
            f"{method} needs the network that the members were fine-tuned from, got base=None: pass base=network, its "
            "state dict or the file of one"
        )
    network = ensemble.network(states_of(ensemble)[0])
    if isinstance(base, str | Path):
        load_into(network, matching_files(base)[0])
    else:
        _load(network, _state_dict_of(base))
    found = {name: tensor.detach() for name, tensor in read_state(network).items()}
    bad = next((name for name, t in found.items() if t.is_floating_point() and not bool(t.isfinite().all())), None)
    if bad is not None:
        raise EnfoldError(f"base must have finite values, but '{bad}' is not: pass the network before it diverged")
    return found


def _state_dict_of(base: object) -> dict[str, Tensor]:
    given = base.state_dict(keep_vars=True) if isinstance(base, nn.Module) else base
    if isinstance(base, Ensemble) or not isinstance(given, Mapping):
        raise EnfoldError(
            f"base must be one network, its state dict or the file of one, got {type(base).__name__}: pass the network "
            "that the members were fine-tuned from"
        )
    return {str(name): tensor for name, tensor in given.items() if isinstance(tensor, Tensor)}


def _load(network: nn.Module, given: dict[str, Tensor]) -> None:
    """Load a state dict into a network, in place; tied tensors may have one name or all."""
    own = {name: t for name, t in network.state_dict(keep_vars=True).items() if isinstance(t, Tensor)}
    known = {**read_state(network), **own}
    first: dict[int, str] = {}
    for name, tensor in known.items():
        if name in given:
            first.setdefault(id(tensor), name)
    missing = next((name for name, tensor in own.items() if id(tensor) not in first), None)
    unknown = next((name for name in given if name not in known), None)
    if missing is not None or unknown is not None:
        what = f"it lacks '{missing}'" if missing is not None else f"it has the unknown '{unknown}'"
        raise EnfoldError(
            f"base must have the parameters and buffers of the members, but {what}: pass the network that they were "
            "fine-tuned from"
        )
    for name, value in given.items():
        tensor = known[name]
        if tensor.shape != value.shape:
            raise EnfoldError(
                f"base must have the shapes of the members, but '{name}' is {tuple(value.shape)} instead of "
                f"{tuple(tensor.shape)}: pass the network that they were fine-tuned from"
            )
        if first[id(tensor)] == name:
            tensor.copy_(value)
        elif not torch.equal(tensor, value.to(tensor)):
            raise EnfoldError(
                f"base must be tied as the members are, but '{first[id(tensor)]}' and '{name}' differ: pass the "
                "network that they were fine-tuned from"
            )


def wide(tensor: Tensor) -> Tensor:
    """Return a tensor in float32 or better."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def flatten(vectors: State, names: Sequence[str]) -> Tensor:
    """Return all parameters of these names as one vector, (P,)."""
    return torch.cat([vectors[name].flatten() for name in names]) if names else torch.zeros(0)


def unflatten(vector: Tensor, like: State, names: Sequence[str]) -> State:
    """Invert `flatten`.

    Args:
        vector: The vector, (P,).
        like: Tensors with the shapes and types of the result.
        names: The names of the parameters, in order.
    """
    pieces = vector.split([like[name].numel() for name in names])
    return {name: piece.view(like[name].shape).to(like[name]) for name, piece in zip(names, pieces, strict=True)}


def seeds_by_content(states: Sequence[State], names: Sequence[str]) -> list[str]:
    """Return a text for each member from which its draws are seeded, independent of the order of the members.

    Args:
        states: Parameters and buffers of each member.
        names: The names of the parameters that identify a member.
    """
    seen: dict[str, int] = {}
    found = []
    for state in states:
        own = digest([state[name] for name in names])
        found.append(f"{own}/{seen.get(own, 0)}")  # equal members have draws of their own
        seen[own] = seen.get(own, 0) + 1
    return found


@torch.no_grad()
def finish(
    inputs: MergeInputs, state: State, repair: RepairKind, seed: int, known: Sequence[State] | None = None
) -> nn.Module:
    """Return the network of merged values in eval mode, after correcting statistics.

    Values that are exactly those of a member, or of another known network, give that network with its statistics.

    Args:
        inputs: The members and data.
        state: The merged values.
        repair: The kind of repair.
        seed: Seed of the order of the training examples.
        known: Networks to recognise; the members if None.
    """
    parameters = inputs.ensemble.skeleton.parameters
    for other in states_of(inputs.ensemble) if known is None else known:
        if all(torch.equal(state[name], other[name]) for name in parameters):
            return inputs.ensemble.network(other).eval()
    network = inputs.ensemble.network(state)
    return repair_network(network, inputs.ensemble, inputs.data, repair, seed=seed).eval()


def finish_with_base(given: FineTuned, state: State, repair: RepairKind, seed: int) -> nn.Module:
    """Return the same as `finish`; values that are exactly those of the base give the base.

    Args:
        given: The members and the base.
        state: The merged values.
        repair: The kind of repair.
        seed: Seed of the order of the training examples.
    """
    return finish(given.inputs, state, repair, seed, [*given.states, given.base])


def choose_on_val(
    given: FineTuned, candidates: Mapping[float, Callable[[], nn.Module]], option: str, task: TaskLike
) -> nn.Module:
    """Return the network with the best criterion on validation examples, NLL for classes; the first of equal ones.

    Args:
        given: The members and the base.
        candidates: Functions that make the networks, by the value of the option.
        option: The name of the option in messages.
        task: What outputs mean.

    Raises:
        EnfoldError: If there are no validation examples.
    """
    data, method = given.inputs.data, given.inputs.method
    if not has_examples(data.val):
        raise EnfoldError(f"{method} chooses {option} on val examples, got none: pass val, or a value of {option}")
    known = choose_task(task, given.ensemble)
    best: tuple[float, nn.Module] | None = None
    for make in candidates.values():
        network = make()
        found = predict(network, data.val, task=known)
        value = float(metrics_for(found)[found.criterion](found))
        if best is None or value < best[0]:
            best = value, network
    assert best is not None  # noqa: S101 - there are candidates
    return best[1]

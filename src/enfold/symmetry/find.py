"""Find the permutation symmetries of a network from its graph, and verify them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from enfold.data.tree import describe, detach, map_tensors, tensors, to_device
from enfold.engines.call import require_network
from enfold.engines.modes import eval_mode
from enfold.engines.outputs import get_logits
from enfold.engines.skeleton import Skeleton, State, read_state
from enfold.errors import EnfoldError
from enfold.seeds import generator
from enfold.symmetry import rules  # noqa: F401 - importing registers the rules
from enfold.symmetry.axes import Fixed, Group, Symmetry
from enfold.symmetry.bilinear import assign_bilinear_roles
from enfold.symmetry.candidates import Candidate, find_candidates, find_fixed_axes, name_groups
from enfold.symmetry.execution import TraceError
from enfold.symmetry.tracer import AxisTracer, TensorAxis
from enfold.symmetry.verify import VerificationError, Verifier, run

CHANGED = "a random order along it changes the outputs"
SINGLE_ORDER = "all its blocks have one order of units, as one for each could not be verified"
UNREACHED = "the outputs do not depend on it"


def symmetries(network: nn.Module, example: Any, *, seed: int = 0, logits_only: bool = False) -> Symmetry:
    """Find which axes of which parameters and buffers can be permuted together, and verify each group in float64.

    The network is not modified. Where the control flow of a module depends on values, only groups inside the modules
    that it calls are found, and `Symmetry.note` gives the reason.

    Args:
        network: The network to analyse.
        example: A small batch of inputs, a tensor (B, ...) or any structure that the network takes; its values do not
            matter unless they are integers.
        seed: Seed of the random weights and permutations of the verification.
        logits_only: Ignore outputs other than the logits, such as returned features.

    Returns:
        The verified groups and the fixed axes.

    Raises:
        EnfoldError: If the network does not run on the example.
    """
    require_network(network, "network")
    skeleton = Skeleton(network)
    if logits_only:
        skeleton.network.register_forward_hook(_logits)
    state = {name: tensor.detach().cpu() for name, tensor in read_state(network).items()}
    with eval_mode(skeleton.network), torch.random.fork_rng(devices=[]):
        example = _running(skeleton, state, example)
        tracer = AxisTracer()
        try:
            tracer.trace(skeleton, state, example)
            verifier = Verifier.create(skeleton, state, example, generator(seed, "symmetry"))
        except TraceError as error:
            return _nothing(state, f"the graph cannot be recorded: {error}")
        except VerificationError as error:
            return _nothing(state, f"nothing could be verified: {error}")
        if tracer.branches:
            verifier = verifier.with_variants()
        found = _verify(verifier, tracer, find_candidates(tracer, _aliases(network, skeleton)))
        return replace(found, note=_decisions(tracer), deciding=tuple(tracer.decisions))


def _logits(network: nn.Module, _: object, output: object) -> object:
    """Reduce the output to its logits."""
    return get_logits(output, network)


def require_batch(example: Any) -> None:
    """Raise an error if an example has no tensors, or is a tensor without examples."""
    is_batch = bool(example.ndim and len(example)) if isinstance(example, Tensor) else bool(tensors(example))
    if not is_batch:
        raise EnfoldError(
            f"example must be a batch of inputs, (B, ...), got {describe(example)}: pass one or two inputs, as a "
            "tensor or in the structure that the network takes"
        )


def _running(skeleton: Skeleton, state: State, example: Any) -> Any:
    """Return the example on the CPU after checking that the network runs on it."""
    require_batch(example)
    numbers = next((tensor.dtype for tensor in state.values() if tensor.is_floating_point()), None)

    def convert(tensor: Tensor) -> Tensor:
        return tensor.to(numbers) if tensor.is_floating_point() and numbers is not None else tensor

    example = map_tensors(convert, to_device(detach(example), "cpu"))
    try:
        run(skeleton, state, example, exact=False)
    except EnfoldError:
        raise
    except Exception as error:
        message = (str(error).strip() or type(error).__name__).splitlines()[0]
        kind = f" and type {example.dtype}" if isinstance(example, Tensor) else ""
        raise EnfoldError(
            f"the network must run on the example, but {describe(example)}{kind} failed ({message}): pass a few inputs "
            "of the right shape as example"
        ) from error
    return example


def _nothing(state: State, note: str) -> Symmetry:
    axes = [(name, axis) for name, tensor in state.items() for axis in range(tensor.ndim) if tensor.shape[axis] > 1]
    return Symmetry((), tuple(Fixed(name, axis, note) for name, axis in axes), note)


def _decisions(tracer: AxisTracer) -> str:
    if not tracer.decisions:
        return ""
    found = list(tracer.decisions.values())
    more = f" ({len(found) - 1} more modules do)" if len(found) > 1 else ""
    return f"the graph depends on values, so only units inside other modules are permuted: {found[0]}{more}"


def _aliases(network: nn.Module, skeleton: Skeleton) -> dict[str, list[str]]:
    """Return the other names of tied tensors in a state dict."""
    first: dict[int, str] = {}
    found: dict[str, list[str]] = {}
    named = [*network.named_parameters(remove_duplicate=False), *network.named_buffers(remove_duplicate=False)]
    for name, tensor in sorted(named, key=lambda pair: pair[0] not in skeleton.names):
        if first.setdefault(id(tensor), name) != name:
            found.setdefault(first[id(tensor)], []).append(name)
    return found


def _verify(verifier: Verifier, tracer: AxisTracer, proposed: list[Candidate]) -> Symmetry:
    """Verify all groups together, and one by one only if that fails."""
    refused: dict[TensorAxis, str] = {}

    def refuse(groups: tuple[Group, ...], reason: str) -> None:
        for axis in (axis for group in groups for axis in group.axes):
            refused.setdefault((axis.name, axis.axis), reason)

    reached = verifier.find_used(proposed)
    for candidate, reaches in zip(proposed, reached, strict=True):
        if not reaches:
            refused.update((place, refused.get(place, UNREACHED)) for place in candidate.places)
    proposed = [candidate for candidate, reaches in zip(proposed, reached, strict=True) if reaches]
    groups: list[Group] = []
    whole = verifier.is_invariant([group for candidate in proposed for group in candidate.options[0]])
    for candidate in proposed:
        way = 0 if whole else next((k for k, way in enumerate(candidate.options) if verifier.is_invariant(way)), None)
        if way is None:
            refuse(candidate.options[0], CHANGED)
            continue
        groups += candidate.options[way]
        if way or candidate.single_order:
            refuse(candidate.options[way], SINGLE_ORDER)
    return Symmetry(
        tuple(name_groups(assign_bilinear_roles(verifier, groups))), tuple(find_fixed_axes(tracer, groups, refused))
    )

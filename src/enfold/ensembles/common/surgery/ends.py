"""Ends: the layers that receive the inputs of a network, and those that give its outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import fx, nn

from enfold.engines.base import CannotRun
from enfold.engines.copying import copy_network
from enfold.engines.tracing import trace_forward
from enfold.ensembles.common.surgery.layers import LAYERS
from enfold.errors import EnfoldError, UnsuitableNetwork


def first_and_last(network: nn.Module, first: str | None = None, last: str | None = None) -> tuple[str, str]:
    """Return the names of the layer that receives the inputs and of the one that gives the outputs.

    Args:
        network: The network; its traced graph is searched or, if it cannot be traced, the order of registration.
        first: The name of the first layer, if it is known.
        last: The name of the last layer, if it is known.

    Raises:
        EnfoldError: If it is not a single linear layer or convolution, a name is wrong, or a layer is called twice.
    """
    inputs, outputs = ends(network)
    names = _choose_name(network, first, inputs, "first"), _choose_name(network, last, outputs, "last")
    _require_single_use(network, names)
    return names


def _require_single_use(network: nn.Module, names: Sequence[str]) -> None:
    graph = _graph(network)
    called = [] if graph is None else [str(node.target) for node in graph.nodes if node.op == "call_module"]
    for name in names:
        if called.count(name) > 1:
            raise EnfoldError(
                f"the first and the last layer must be called once in forward, but '{name}' is called "
                f"{called.count(name)} times: use a layer of its own for each call"
            )


def _choose_name(network: nn.Module, given: str | None, found: list[str], which: str) -> str:
    modules = dict(network.named_modules())
    if given is not None:
        if not isinstance(modules.get(given), LAYERS):
            known = ", ".join(name for name, module in modules.items() if isinstance(module, LAYERS))
            raise EnfoldError(
                f"{which}_layer= must name a linear layer or a convolution, got {given!r}: choose one of "
                f"{known or 'none'}"
            )
        return given
    if len(found) == 1 and isinstance(modules.get(found[0]), LAYERS):
        return found[0]
    kinds = [f"'{name}' ({type(modules[name]).__name__ if name in modules else 'a tensor'})" for name in found]
    raise UnsuitableNetwork(
        f"the {which} layer must be one linear layer or convolution, got {' and '.join(kinds) or 'none'}: name the "
        f"right one with {which}_layer=, or use a method that changes no layers"
    )


def ends(network: nn.Module, through: tuple[type[nn.Module], ...] = ()) -> tuple[list[str], list[str]]:
    """Return the names of the first layers with parameters that receive the inputs, and of the last before the outputs.

    Names may also be of parameters and buffers that are used outside of layers. The search continues behind layers of
    the classes in `through` and, if there are any, behind buffers.
    """
    modules = dict(network.named_modules())
    graph = _graph(network)
    if graph is None:
        order = list(_leaves(network))
        return _leading(order, modules, through), _leading(order[::-1], modules, through)
    nodes = list(graph.nodes)
    buffers = dict(network.named_buffers())
    own = {**dict(network.named_parameters()), **buffers}

    def holder(node: fx.Node) -> str | None:
        """Return the layer or tensor that a node runs or reads; a single number counts as a constant."""
        name = str(node.target)
        if node.op == "call_module":
            counts = isinstance(modules[name], through) or any(True for _ in modules[name].parameters())
            return name if counts else None
        return name if node.op == "get_attr" and name in own and own[name].numel() > 1 else None

    def entry_name(node: fx.Node) -> str | None:
        used = [holder(source) for source in node.all_input_nodes if source.op == "get_attr"]
        return holder(node) or next((name for name in used if name), None)

    def passes(name: str) -> bool:
        return isinstance(modules.get(name), through) or bool(through and name in buffers)

    start = [node for node in nodes if node.op == "placeholder"]
    inputs = _search(nodes, start, lambda node: node.all_input_nodes, entry_name, passes)
    outputs = _search(nodes[::-1], nodes[-1:], lambda node: list(node.users), holder, passes)
    return inputs, outputs


def _search(
    nodes: Sequence[fx.Node],
    start: Sequence[fx.Node],
    neighbours: Callable[[fx.Node], list[fx.Node]],
    holder: Callable[[fx.Node], str | None],
    passes: Callable[[str], bool],
) -> list[str]:
    """Return the names at which the search from `start` ends, or through which it passes."""
    reached, found = set(start), []
    for node in nodes:
        if node in reached or not reached.intersection(neighbours(node)):
            continue
        name = holder(node)
        if name is not None:
            found.append(name)
        if name is None or passes(name):
            reached.add(node)
    return list(dict.fromkeys(found))


def _graph(network: nn.Module) -> fx.Graph | None:
    if _is_leaf(network):
        return None  # it would be traced into
    try:
        return trace_forward(copy_network(network))
    except CannotRun:
        return None


def _is_leaf(module: nn.Module) -> bool:
    """Return whether a module counts as one layer: a class of torch, or a module without submodules."""
    own = type(module).__module__.startswith("torch.nn") and not isinstance(
        module, nn.Sequential | nn.ModuleList | nn.ModuleDict
    )
    return own or not any(True for _ in module.children())


def _leaves(module: nn.Module, name: str = "") -> Iterator[str]:
    if _is_leaf(module):
        if any(True for _ in module.parameters()):
            yield name
        return
    for key, child in module.named_children():
        yield from _leaves(child, f"{name}.{key}" if name else key)


def _leading(order: Sequence[str], modules: Mapping[str, nn.Module], through: tuple[type[nn.Module], ...]) -> list[str]:
    count = next((k for k, name in enumerate(order) if not isinstance(modules[name], through)), len(order))
    return list(order[: count + 1])

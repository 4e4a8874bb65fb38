"""DeepEnsemble products: a network's graph run once for M members, each linear layer as one batched matrix product.

Values travel *merged*, as (M * B, ...): an operation without parameters treats examples independently, so it runs on
the merged batch unchanged. Layers with parameters split the batch into (M, B, ...) and use the stacked parameters:

    Y_m = X_m W_m^T + b_m   for all m at once: baddbmm(b, X, W^T)                            (1)

Until the first such layer a value is the same for all members and stays (B, ...). What the graph contains beyond this
is refused by name, and `choice.passed` compares the program with the loop before it is used.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.modules.dropout import _DropoutNd

from enfold.engines.factored import Factored
from enfold.engines.skeleton import Skeleton, State
from enfold.engines.tracing import trace

HOOKS = ("forward", "forward_pre", "backward", "backward_pre")


class CannotRun(Exception):
    """An engine is not for this network; the message says why."""


def unmerged(tensor: Tensor, num_members: int) -> Tensor:
    """(M * B, ...) -> (M, B, ...), also for an empty batch."""
    return tensor.view(num_members, len(tensor) // num_members, *tensor.shape[1:])


class Value:
    """A tensor on its way through the graph: (B, ...) if all members share it, (M * B, ...) once they differ.

    What differs may be held as (M, B, ...) instead, and is merged or split when somebody asks.
    """

    __slots__ = ("_rows", "_split", "merged")

    def __init__(self, rows: Tensor | None, merged: bool, split: Tensor | None = None) -> None:
        self._rows, self._split = rows, split
        self.merged = merged

    @property
    def tensor(self) -> Tensor:
        """(B, ...) or (M * B, ...)."""
        if self._rows is None:
            assert self._split is not None  # noqa: S101 - one of the two is there
            self._rows = self._split.flatten(0, 1)
        return self._rows

    def as_merged(self, num_members: int) -> Tensor:
        """(M * B, ...)."""
        return self.tensor if self.merged else self.split(num_members).flatten(0, 1)

    def split(self, num_members: int) -> Tensor:
        """(M, B, ...), without a copy where all members share the value."""
        if self._split is None:
            rows = self.tensor
            self._split = unmerged(rows, num_members) if self.merged else rows.expand(num_members, *rows.shape)
        return self._split


Layer = Callable[[nn.Module, State, Value, int], Value]  # (module, its own stacked tensors, value, M) -> what differs


def linear(layer: nn.Module, own: State, value: Value, num_members: int) -> Value:
    """Equation (1); leading axes between batch and features are part of the batch of the product."""
    weight: Tensor | Factored = own["weight"]  # (M, out, in)
    bias = own.get("bias")  # (M, out)
    if isinstance(weight, Factored):
        return _factored(weight, bias, value, num_members)
    split = value.split(num_members)  # (M, B, ..., in)
    rows = split.flatten(1, -2) if split.ndim > 3 else split  # (M, B', in)
    if bias is None:
        product = torch.bmm(rows, weight.transpose(1, 2))
    else:
        product = torch.baddbmm(bias.unsqueeze(1), rows, weight.transpose(1, 2))  # (1)
    return Value(None, True, product if split.ndim == 3 else product.view(*split.shape[:-1], weight.shape[1]))


def _factored(weight: Factored, bias: Tensor | None, value: Value, num_members: int) -> Value:
    """A product with the shared weight; what all members share is not repeated before it."""
    inputs = value.split(num_members) if value.merged else value.tensor
    plain = 3 if value.merged else 2
    rows = inputs if inputs.ndim == plain else inputs.flatten(plain - 2, -2)
    product = weight.product(rows, bias)  # (M, B', out)
    shape = inputs.shape[1:-1] if value.merged else inputs.shape[:-1]
    return Value(None, True, product if inputs.ndim == plain else product.view(num_members, *shape, -1))


def layer_norm(layer: nn.Module, own: State, value: Value, num_members: int) -> Value:
    """Normalise alike, scale and shift by each member's own affine parameters."""
    assert isinstance(layer, nn.LayerNorm)  # noqa: S101 - chosen by type
    normal = F.layer_norm(value.as_merged(num_members), layer.normalized_shape, None, None, layer.eps)
    return Value(_affine(normal, own, num_members, len(layer.normalized_shape)), merged=True)


def batch_norm(layer: nn.Module, own: State, value: Value, num_members: int) -> Value:
    """(M, B, C) as one batch norm over M * C channels: each member has its own statistics in train and eval mode."""
    assert isinstance(layer, nn.BatchNorm1d)  # noqa: S101 - chosen by type
    split = value.split(num_members)
    if split.ndim != 3:
        raise CannotRun(f"a batch norm gets inputs with {split.ndim - 1} axes")
    tracked = own.get("num_batches_tracked")
    if layer.training and tracked is not None:
        tracked.add_(1)
    mean, variance = own.get("running_mean"), own.get("running_var")
    weight, bias = own.get("weight"), own.get("bias")
    channels = split.transpose(0, 1).flatten(1)  # (B, M * C)
    normal = F.batch_norm(
        channels,
        None if mean is None else mean.view(-1),
        None if variance is None else variance.view(-1),
        None if weight is None else weight.flatten(),
        None if bias is None else bias.flatten(),
        layer.training or mean is None,
        layer.momentum or 0.0,
        layer.eps,
    )
    return Value(None, True, normal.view(len(normal), num_members, -1).transpose(0, 1))


def embedding(layer: nn.Module, own: State, value: Value, num_members: int) -> Value:
    """Look up member m's rows in one table of M * V rows."""
    table = own["weight"]  # (M, V, D)
    split = value.split(num_members)
    offset = torch.arange(num_members, device=split.device) * table.shape[1]
    rows = split + offset.view(-1, *(1,) * (split.ndim - 1))
    return Value(None, True, F.embedding(rows, table.flatten(0, 1)))


def _affine(normal: Tensor, own: State, num_members: int, axes: int) -> Tensor:
    weight, bias = own.get("weight"), own.get("bias")
    if weight is None:
        return normal
    split = unmerged(normal, num_members)
    shape = (num_members, *(1,) * (split.ndim - 1 - axes), *weight.shape[1:])
    scaled = split * weight.view(shape)
    return (scaled if bias is None else scaled + bias.view(shape)).flatten(0, 1)


LAYERS: dict[type[nn.Module], Layer] = {
    nn.Linear: linear,
    nn.LayerNorm: layer_norm,
    nn.BatchNorm1d: batch_norm,
    nn.Embedding: embedding,
}


def obstacle(module: nn.Module) -> str | None:
    """What keeps a layer from being run stacked."""
    if type(module) not in LAYERS:
        stateless = not [*module.parameters(), *module.buffers()]
        return None if stateless else "has no stacked form"
    if isinstance(module, nn.BatchNorm1d) and module.momentum is None and module.track_running_stats:
        return "keeps a cumulative average"
    if isinstance(module, nn.Embedding):
        if module.padding_idx is not None:
            return "keeps a padding row out of training"
        if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
            return "renormalises, rescales or is sparse"
    return None


def traced(network: nn.Module) -> fx.Graph:
    """The graph of the forward, which must be the same in train and eval mode and draw nothing while it is traced."""
    graphs = []
    before = random.getstate(), np.random.get_state()
    try:
        for training in (False, True):
            twin = network.train(training)
            with torch.random.fork_rng(devices=[]):
                drawn = _random_state()
                graphs.append(trace(twin))
                if _random_state() != drawn:  # a draw is traced as a constant
                    raise CannotRun("its forward draws random numbers outside of a layer")
    except CannotRun:
        raise
    except Exception as error:  # tracing runs the user's forward: anything may be raised
        raise CannotRun(f"its forward cannot be traced ({type(error).__name__}: {error})") from error
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
    if str(graphs[0]) != str(graphs[1]):
        raise CannotRun("its forward asks for the mode outside of a layer")
    return graphs[0]


def _random_state() -> tuple[object, ...]:
    return random.getstate(), np.random.get_state(legacy=False)["state"]["pos"], bytes(torch.get_rng_state().numpy())


Step = Callable[[list[Any], State, int], Any]  # (values so far, state, M) -> the next value


class StackedProgram:
    """The network's traced graph, run on merged values; an engine."""

    def __init__(self, skeleton: Skeleton) -> None:
        bare = type(skeleton.network) in LAYERS  # a layer alone has no graph of its own
        root = nn.Sequential(skeleton.network) if bare else skeleton.network
        self.modules = dict(root.named_modules(remove_duplicate=False))
        if not any(type(module) in LAYERS for module in self.modules.values()):
            raise CannotRun("it has no linear layer")
        for name, module in self.modules.items():
            if any(getattr(module, f"_{kind}_hooks") for kind in HOOKS):
                raise CannotRun(f"'{name or type(module).__name__}' has hooks")
        twin = copy.deepcopy(skeleton).network  # tracing may leave things behind
        self.graph = traced(nn.Sequential(twin) if bare else twin)
        self.names = {id(module): skeleton.names_in(module) for module in self.modules.values()}
        position: dict[fx.Node, int] = {}
        self.steps: list[Step] = []
        for node in self.graph.nodes:
            self._check(node)
            self.steps.append(self._step(node, position))
            position[node] = len(position)
        if next(iter(position)).op != "placeholder":
            raise CannotRun("its forward takes no argument")

    def _check(self, node: fx.Node) -> None:
        if node.op == "get_attr":
            raise CannotRun(f"it uses the parameter or buffer '{node.target}' outside of a layer")
        if node.op == "placeholder" and node.prev.op == "placeholder":
            raise CannotRun("its forward takes more than one argument")
        if node.op == "call_module":
            module = self.modules[str(node.target)]
            reason = obstacle(module)
            if reason is not None:
                raise CannotRun(f"'{node.target}', a {type(module).__name__}, {reason}")

    def __call__(self, state: State, inputs: Tensor, each: bool) -> Tensor:
        """(B, ...) or, with `each`, (M, B, ...) -> (M, B, C)."""
        num_members = len(next(iter(state.values())))
        values: list[Any] = []
        for step in self.steps:
            values.append(step(values, state, num_members) if values else _entered(inputs, each))
        if not isinstance(values[-1], Value):
            raise CannotRun("it does not return one tensor")
        return values[-1].split(num_members)

    def _step(self, node: fx.Node, position: dict[fx.Node, int]) -> Step:
        """What computes a node's value from those before it; the usual nodes with as little ado as possible."""
        module = self.modules[str(node.target)] if node.op == "call_module" else None
        layer = LAYERS.get(type(module)) if module is not None else None
        if module is not None and layer is not None:
            if not node.args:
                raise CannotRun(f"'{node.target}' is given its input by keyword")
            return partial(_run_layer, layer, module, self.names[id(module)], position[node.args[0]])  # type: ignore[index]
        if node.op == "output":
            return lambda values, state, size: fx.node.map_arg(node.args[0], lambda used: values[position[used]])
        function = module if module is not None else node.target
        if node.op == "call_method":
            function = partial(_call_method, str(node.target))
        if len(node.all_input_nodes) == 1 and node.args and node.args[0] is node.all_input_nodes[0]:
            if self._may_overwrite(node, function):
                return partial(_run_relu, position[node.args[0]])
            if isinstance(function, _DropoutNd):
                return partial(_run_dropout, function, position[node.args[0]])
            return partial(_run_single, function, node.args[1:], node.kwargs, position[node.args[0]])
        return partial(_run_node, function, node, position)

    def _may_overwrite(self, node: fx.Node, function: object) -> bool:
        """Whether this is a ReLU on a product that nothing else uses."""
        before = node.all_input_nodes[0]
        is_relu = isinstance(function, nn.ReLU) or function in (torch.relu, F.relu)
        fresh = before.op == "call_module" and isinstance(self.modules[str(before.target)], nn.Linear)
        return is_relu and fresh and len(before.users) == 1 and len(node.args) == 1 and not node.kwargs


def _entered(inputs: Tensor, each: bool) -> Value:
    return Value(inputs.flatten(0, 1) if each else inputs, merged=each)


def _call_method(name: str, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    return getattr(tensor, name)(*args, **kwargs)


def _run_layer(
    layer: Layer, module: nn.Module, names: dict[str, str], source: int, values: list[Any], state: State, size: int
) -> Value:
    own = {key: state[name] for key, name in names.items()}
    return layer(module, own, values[source], size)


def _run_relu(source: int, values: list[Any], state: State, size: int) -> Value:
    """In place, unless a gradient is wanted of a view, where an edit would cost copies."""
    product = values[source].split(size)
    copied = torch.is_grad_enabled() and product._is_view()
    return Value(None, True, torch.relu(product) if copied else torch.relu_(product))


def _run_dropout(module: nn.Module, source: int, values: list[Any], state: State, size: int) -> Value:
    """Each member has its own masks, also where all share the value."""
    value: Value = values[source]
    return Value(module(value.as_merged(size)), merged=True) if module.training else value


def _run_single(function: Any, args: Any, kwargs: Any, source: int, values: list[Any], state: State, size: int) -> Any:
    """An operation on one value."""
    value = values[source]
    if not isinstance(value, Value):  # the tuple that `chunk` gives, or a number
        used = _tensors(value)
        merged = any(item.merged for item in used)
        return _wrapped(function(_plain(value, merged, size), *args, **kwargs), merged, _rows(used))
    rows = value.tensor
    return _wrapped(function(rows, *args, **kwargs), value.merged, rows.shape[0])


def _run_node(
    function: Any, node: fx.Node, position: dict[fx.Node, int], values: list[Any], state: State, size: int
) -> Any:
    """An operation on several values, all merged if one is."""
    used = [value for source in node.all_input_nodes for value in _tensors(values[position[source]])]
    merged = any(value.merged for value in used)
    args, kwargs = fx.node.map_arg(
        (node.args, node.kwargs), lambda source: _plain(values[position[source]], merged, size)
    )
    result = function(*args, **kwargs)
    return _wrapped(result, merged, _rows(used))


def _rows(used: list[Value]) -> int | None:
    return next((len(value.tensor) for value in used if value.merged), None)


def _tensors(value: Any) -> list[Value]:
    if isinstance(value, Value):
        return [value]
    return [inner for item in value for inner in _tensors(item)] if isinstance(value, tuple | list) else []


def _plain(value: Any, merged: bool, num_members: int) -> Any:
    if isinstance(value, Value):
        return value.as_merged(num_members) if merged else value.tensor
    return _each(value, lambda item: _plain(item, merged, num_members)) if _tensors(value) else value


def _wrapped(result: Any, merged: bool, rows: int | None) -> Any:
    """Tensors as values, also in the tuple that `chunk` gives; what has lost its examples has mixed them."""
    if isinstance(result, Tensor):
        if merged and result.shape[:1] != (rows,):
            raise CannotRun("an operation mixes the examples of a batch")
        return Value(result, merged)
    if isinstance(result, tuple | list) and any(isinstance(item, Tensor) for item in result):
        return _each(result, lambda item: _wrapped(item, merged, rows))
    return result


def _each(items: Any, function: Callable[[Any], Any]) -> Any:
    """The same kind of tuple or list, `torch.max`'s with its field names among them."""
    return type(items)([function(item) for item in items])

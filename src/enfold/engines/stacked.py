"""StackedProgram: the graph of a network run once for M members, each linear layer as one batched matrix product.

Values are *merged*, (M * B, ...): an operation without parameters processes examples independently, so it runs on the
merged batch unchanged. Layers with parameters split the batch into (M, B, ...) and use the stacked parameters:

    Y_m = X_m W_m^T + b_m   for all m at once: baddbmm(b, X, W^T)                            (1)

Before the first such layer a value is the same for all members and stays (B, ...). A graph with any other operation is
refused with its name, and `choose.check_engine` compares the program with the loop before it is used.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.modules.dropout import _DropoutNd

from enfold.data.tree import count_examples, describe, describe_structure, map_tensors, tensors
from enfold.engines.base import CannotRun
from enfold.engines.factored import Factored
from enfold.engines.skeleton import Skeleton, State
from enfold.engines.tracing import trace_forward

RESHAPES = ("view", "reshape", torch.reshape, "unflatten", torch.unflatten)
HOOKS = ("forward", "forward_pre", "backward", "backward_pre")


def unmerge(tensor: Tensor, num_members: int) -> Tensor:
    """(M * B, ...) -> (M, B, ...), also for an empty batch."""
    return tensor.view(num_members, len(tensor) // num_members, *tensor.shape[1:])


class Value:
    """A value in the graph: (B, ...) if it is the same for all members, otherwise (M * B, ...) or (M, B, ...)."""

    __slots__ = ("_rows", "_split", "merged")

    def __init__(self, rows: Tensor | None, merged: bool, split: Tensor | None = None) -> None:
        self._rows, self._split = rows, split
        self.merged = merged

    @property
    def tensor(self) -> Tensor:
        """The value as (B, ...) or (M * B, ...)."""
        if self._rows is None:
            assert self._split is not None  # noqa: S101 - one of the two is set
            self._rows = self._split.flatten(0, 1)
        return self._rows

    def as_merged(self, num_members: int) -> Tensor:
        """Return the value as (M * B, ...)."""
        return self.tensor if self.merged else self.split(num_members).flatten(0, 1)

    def split(self, num_members: int) -> Tensor:
        """Return the value as (M, B, ...), without a copy if it is the same for all members."""
        if self._split is None:
            rows = self.tensor
            self._split = unmerge(rows, num_members) if self.merged else rows.expand(num_members, *rows.shape)
        return self._split


Layer = Callable[[nn.Module, State, Value, int], Value]  # (module, its stacked tensors, value, M) -> value


def linear(layer: nn.Module, own: State, value: Value, num_members: int) -> Value:
    """Compute equation (1); axes between batch and features belong to the batch of the product.

    Args:
        layer: The layer of the network.
        own: Its stacked tensors, (M, *shape).
        value: The inputs of the members.
        num_members: M.
    """
    weight: Tensor | Factored = own["weight"]  # (M, out, in)
    bias = own.get("bias")  # (M, out)
    if isinstance(weight, Factored):
        return _multiply_factored(weight, bias, value, num_members)
    split = value.split(num_members)  # (M, B, ..., in)
    rows = split.flatten(1, -2) if split.ndim > 3 else split  # (M, B', in)
    if bias is None:
        product = torch.bmm(rows, weight.transpose(1, 2))
    else:
        product = torch.baddbmm(bias.unsqueeze(1), rows, weight.transpose(1, 2))  # (1)
    return Value(None, True, product if split.ndim == 3 else product.view(*split.shape[:-1], weight.shape[1]))


def _multiply_factored(weight: Factored, bias: Tensor | None, value: Value, num_members: int) -> Value:
    """Multiply with the common weight; inputs that are the same for all members are not repeated."""
    inputs = value.split(num_members) if value.merged else value.tensor
    plain = 3 if value.merged else 2
    rows = inputs if inputs.ndim == plain else inputs.flatten(plain - 2, -2)
    product = weight.product(rows, bias)  # (M, B', out)
    shape = inputs.shape[1:-1] if value.merged else inputs.shape[:-1]
    return Value(None, True, product if inputs.ndim == plain else product.view(num_members, *shape, -1))


def layer_norm(layer: nn.Module, own: State, value: Value, num_members: int) -> Value:
    """Normalise all rows, then scale and shift by each member's own affine parameters.

    Args:
        layer: The layer of the network.
        own: Its stacked tensors, (M, *shape).
        value: The inputs of the members.
        num_members: M.
    """
    assert isinstance(layer, nn.LayerNorm)  # noqa: S101 - chosen by type
    normal = F.layer_norm(value.as_merged(num_members), layer.normalized_shape, None, None, layer.eps)
    return Value(_affine(normal, own, num_members, len(layer.normalized_shape)), merged=True)


def batch_norm(layer: nn.Module, own: State, value: Value, num_members: int) -> Value:
    """Run (M, B, C) as one batch norm over M * C channels: each member has its own statistics.

    Args:
        layer: The layer of the network.
        own: Its stacked tensors, (M, *shape).
        value: The inputs of the members.
        num_members: M.
    """
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
    """Look up member m's rows in one table of M * V rows.

    Args:
        layer: The layer of the network.
        own: Its stacked tensors, (M, *shape).
        value: The inputs of the members.
        num_members: M.
    """
    table = own["weight"]  # (M, V, D)
    split = value.split(num_members)
    offset = torch.arange(num_members, device=split.device) * table.shape[1]
    rows = split + offset.view(-1, *(1,) * (split.ndim - 1))
    return Value(None, True, F.embedding(rows, table.flatten(0, 1)))


def _affine(normal: Tensor, own: State, num_members: int, axes: int) -> Tensor:
    weight, bias = own.get("weight"), own.get("bias")
    if weight is None:
        return normal
    split = unmerge(normal, num_members)
    shape = (num_members, *(1,) * (split.ndim - 1 - axes), *weight.shape[1:])
    scaled = split * weight.view(shape)
    return (scaled if bias is None else scaled + bias.view(shape)).flatten(0, 1)


LAYERS: dict[type[nn.Module], Layer] = {
    nn.Linear: linear,
    nn.LayerNorm: layer_norm,
    nn.BatchNorm1d: batch_norm,
    nn.Embedding: embedding,
}


def find_obstacle(module: nn.Module) -> str | None:
    """Return the reason why a layer has no stacked form, or None."""
    if type(module) not in LAYERS:
        stateless = not [*module.parameters(), *module.buffers()]
        return None if stateless else "has no stacked form"
    if isinstance(module, nn.BatchNorm1d) and module.momentum is None and module.track_running_stats:
        return "uses a cumulative average"
    if isinstance(module, nn.Embedding):
        if module.padding_idx is not None:
            return "does not train its padding row"
        if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
            return "renormalises, rescales or is sparse"
    return None


Step = Callable[[list[Any], State, int], Any]  # (values so far, state, M) -> the next value


class StackedProgram:
    """An engine that runs the traced graph of the network on merged values.

    Args:
        skeleton: The network.
        inputs: A batch: a tensor, or tuples, lists and dictionaries of tensors with one row per example. The program
            runs batches of this structure.

    Attributes:
        merges_inputs: Whether inputs are repeated for the members, so that all values have M * B rows.
    """

    def __init__(self, skeleton: Skeleton, inputs: Any) -> None:
        if count_examples(inputs) is None:
            raise CannotRun(f"it gets {describe(inputs)} instead of tensors with one row per example")
        self.structure = describe_structure(inputs)
        self.merges_inputs = False
        bare = type(skeleton.network) in LAYERS  # a single layer has no graph
        root = nn.Sequential(skeleton.network) if bare else skeleton.network
        self.modules = dict(root.named_modules(remove_duplicate=False))
        if not any(type(module) in LAYERS for module in self.modules.values()):
            raise CannotRun("it has no linear layer")
        for name, module in self.modules.items():
            if any(getattr(module, f"_{kind}_hooks") for kind in HOOKS):
                raise CannotRun(f"'{name or type(module).__name__}' has hooks")
        twin = copy.deepcopy(skeleton).network  # tracing may set attributes
        self.graph = trace_forward(nn.Sequential(twin) if bare else twin, inputs)
        self.names = {id(module): skeleton.names_in(module) for module in self.modules.values()}
        position: dict[fx.Node, int] = {}
        self.steps: list[Step] = []
        for node in self.graph.nodes:
            self._check(node)
            self.steps.append(self._step(node, position))
            position[node] = len(position)
        self.num_inputs = sum(node.op == "placeholder" for node in position)

    def accepts(self, inputs: Any) -> bool:
        """Return whether the program runs inputs of this structure."""
        if isinstance(inputs, Tensor):
            return self.structure is Tensor
        return describe_structure(inputs) == self.structure and count_examples(inputs) is not None

    def reads_shapes(self) -> bool:
        """Return whether values are reshaped to sizes of values: all of them must have the same number of rows."""
        nodes = self.graph.nodes
        waiting = [node for node in nodes if node.target == "size" or (node.target is getattr and "shape" in node.args)]
        users = set[fx.Node]()
        while waiting:
            found = set(waiting.pop().users) - users
            users |= found
            waiting.extend(node for node in found if node.target in (operator.getitem, operator.mul, operator.floordiv))
        return any(node.target in RESHAPES for node in users)

    def _check(self, node: fx.Node) -> None:
        if node.op == "get_attr":
            raise CannotRun(f"it uses the parameter or buffer '{node.target}' outside a layer")
        if node.op == "call_module":
            module = self.modules[str(node.target)]
            reason = find_obstacle(module)
            if reason is not None:
                raise CannotRun(f"'{node.target}', a {type(module).__name__}, {reason}")

    def __call__(self, state: State, inputs: Any, each: bool) -> Tensor:
        """Common inputs (B, ...) or, with `each`, a tensor (M, B, ...) -> (M, B, C)."""
        num_members = len(next(iter(state.values())))
        if self.merges_inputs and not each:
            inputs, each = map_tensors(lambda tensor: tensor.expand(num_members, *tensor.shape), inputs), True
        values: list[Any] = [_make_input(tensor, each) for tensor in tensors(inputs)]
        for step in self.steps[self.num_inputs :]:
            values.append(step(values, state, num_members))
        if not isinstance(values[-1], Value):
            raise CannotRun("it does not return one tensor")
        return values[-1].split(num_members)

    def _step(self, node: fx.Node, position: dict[fx.Node, int]) -> Step:
        """Return a function that computes the value of a node; the most frequent kinds have short ones."""
        module = self.modules[str(node.target)] if node.op == "call_module" else None
        layer = LAYERS.get(type(module)) if module is not None else None
        if module is not None and layer is not None:
            if not node.args:
                raise CannotRun(f"'{node.target}' gets its input as a keyword argument")
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
        """Return whether this is a ReLU on a product that no other node uses."""
        before = node.all_input_nodes[0]
        is_relu = isinstance(function, nn.ReLU) or function in (torch.relu, F.relu)
        fresh = before.op == "call_module" and isinstance(self.modules[str(before.target)], nn.Linear)
        return is_relu and fresh and len(before.users) == 1 and len(node.args) == 1 and not node.kwargs


def _make_input(inputs: Tensor, each: bool) -> Value:
    return Value(inputs.flatten(0, 1) if each else inputs, merged=each)


def _call_method(name: str, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    return getattr(tensor, name)(*args, **kwargs)


def _run_layer(
    layer: Layer, module: nn.Module, names: dict[str, str], source: int, values: list[Any], state: State, size: int
) -> Value:
    own = {key: state[name] for key, name in names.items()}
    return layer(module, own, values[source], size)


def _run_relu(source: int, values: list[Any], state: State, size: int) -> Value:
    """Run ReLU in place, unless autograd is enabled and the product is a view, where this would need copies."""
    product = values[source].split(size)
    is_view = torch.is_grad_enabled() and product._is_view()
    return Value(None, True, torch.relu(product) if is_view else torch.relu_(product))


def _run_dropout(module: nn.Module, source: int, values: list[Any], state: State, size: int) -> Value:
    """Run dropout with separate masks for each member, also if the value is the same for all."""
    value: Value = values[source]
    return Value(module(value.as_merged(size)), merged=True) if module.training else value


def _run_single(function: Any, args: Any, kwargs: Any, source: int, values: list[Any], state: State, size: int) -> Any:
    """Run an operation on one value."""
    value = values[source]
    if not isinstance(value, Value):  # the tuple returned by `chunk`, or a number
        used = _tensors(value)
        merged = any(item.merged for item in used)
        return _wrap(function(_plain(value, merged, size), *args, **kwargs), merged, _rows(used))
    rows = value.tensor
    return _wrap(function(rows, *args, **kwargs), value.merged, rows.shape[0])


def _run_node(
    function: Any, node: fx.Node, position: dict[fx.Node, int], values: list[Any], state: State, size: int
) -> Any:
    """Run an operation on several values, all merged if one is."""
    used = [value for source in node.all_input_nodes for value in _tensors(values[position[source]])]
    merged = any(value.merged for value in used)
    args, kwargs = fx.node.map_arg(
        (node.args, node.kwargs), lambda source: _plain(values[position[source]], merged, size)
    )
    result = function(*args, **kwargs)
    return _wrap(result, merged, _rows(used))


def _rows(used: list[Value]) -> int | None:
    return next((len(value.tensor) for value in used if value.merged), None)


def _tensors(value: Any) -> list[Value]:
    if isinstance(value, Value):
        return [value]
    return [inner for item in value for inner in _tensors(item)] if isinstance(value, tuple | list) else []


def _plain(value: Any, merged: bool, num_members: int) -> Any:
    if isinstance(value, Value):
        return value.as_merged(num_members) if merged else value.tensor
    return _map(value, lambda item: _plain(item, merged, num_members)) if _tensors(value) else value


def _wrap(result: Any, merged: bool, rows: int | None) -> Any:
    """Return tensors as values, also in tuples; raises CannotRun if the result has another number of rows."""
    if isinstance(result, Tensor):
        if merged and result.shape[:1] != (rows,):
            raise CannotRun("an operation mixes the examples of a batch")
        return Value(result, merged)
    if isinstance(result, tuple | list) and any(isinstance(item, Tensor) for item in result):
        return _map(result, lambda item: _wrap(item, merged, rows))
    return result


def _map(items: Any, function: Callable[[Any], Any]) -> Any:
    """Return a tuple or list of the same type, also a named tuple such as that of `torch.max`."""
    return type(items)([function(item) for item in items])

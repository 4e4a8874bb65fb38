"""Label the axes of every value that a network computes, with one rule per operation.

Operations are seen as PyTorch dispatches them: linear layers are matrix products, and attention is matrix products and
a softmax. Control flow that depends on values is not visible, so everything that such a module touches is fixed; the
modules that it calls are traced from their inputs to their outputs. Control flow that depends on integer inputs only,
such as masks and lengths, is the same for all orders of units; it is followed as it is for the example, unless some
parameter is not used then, as in a network with a branch for other inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from enfold.data.tree import clone, tensors
from enfold.engines.call import call_network
from enfold.engines.skeleton import RUNNING, Skeleton, State
from enfold.symmetry.execution import (
    ReadDetector,
    TraceError,
    decompose_fused_operations,
    find_tensors,
    float_outputs,
    has_other_values,
    track_modules,
)
from enfold.symmetry.labels import AxisLabels, Term

TensorAxis = tuple[str, int]  # a tensor of the state and one of its axes
NOWHERE: frozenset[TensorAxis] = frozenset()

STATISTICS = (
    *RUNNING,
    "weight",
    "bias",
    "gamma",
    "beta",
)  # buffers like parameters
FILLS = ("full", "zeros", "ones", "full_like", "zeros_like", "ones_like", "new_zeros", "new_ones", "new_full")
MOVES = (
    *("view", "_unsafe_view", "expand", "squeeze", "unsqueeze", "permute", "transpose", "t", "select", "slice"),
    *("clone", "detach", "alias", "_to_copy"),
)  # operations whose results are still indices into an axis
NUMBERED = ("gather", "index", "index_select", "embedding", "scatter", "scatter_add")  # their rules track indices
VALUES = ("_local_scalar_dense", "equal", "is_nonzero", "allclose")  # operations that give Python a value


@dataclass(frozen=True)
class Value:
    """Labels along each axis of a value and, if it depends on parameters only, the parameter axes they come from."""

    terms: tuple[Term, ...]
    origins: tuple[frozenset[TensorAxis], ...]
    data: bool = True  # depends on the network's input
    constant: bool = False  # depends neither on the input nor on permutable axes
    integral: bool = False  # depends on integer inputs and constants only
    numbers: Term | None = None  # its values are indices into this axis
    pending: tuple[tuple[Term, Term], ...] = ()  # axes to unify if the value is used

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.terms)


Values = Value | tuple[Value, ...]
Rule = TypeVar("Rule", bound=Callable[..., Any])
RULES: dict[str, Callable[..., Values]] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a function as the labelling rule of operations with these names."""

    def add(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return add


class AxisTracer(TorchDispatchMode):
    """A dispatch mode that labels all values and records whether a parameter axis produces or consumes units."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.labels = AxisLabels()
        self.tensors: dict[str, Value] = {}  # parameters and buffers by name
        self.produced: set[TensorAxis] = set()
        self.consumed: set[TensorAxis] = set()
        self.name = ""  # name of the operation
        self.all_sizes: list[tuple[int, ...]] = []  # of all its results
        self._values: dict[int, Value] = {}
        self._retained: list[Tensor] = []  # so that no two tensors have the same id
        self.branches: dict[str, str] = {}  # modules that branch on integer inputs, with the location
        self._written: set[int] = set()  # memory into which something else than integer inputs was written
        self._used: set[int] = set()  # tensors that an operation read
        self.decisions: dict[str, str] = {}  # modules whose control flow depends on a value, and the place
        self.strides: tuple[int, ...] = ()  # of the first argument
        self._running: list[str] = []
        self._touched: dict[str, list[Tensor]] = {}  # by each module itself, without the modules that it calls
        self._uniform: set[int] = set()  # memory that holds one value everywhere
        self._mixed: set[tuple[Term, ...]] = set()  # remaining axes of operations that mix the entries of an axis

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # skipping it would import the compiler, which takes seconds

    def trace(self, skeleton: Skeleton, state: State, example: Any) -> None:
        """Label every value of one forward pass; the inputs and outputs of the network are fixed.

        Args:
            skeleton: The network without weights.
            state: The weights.
            example: One batch of inputs; taken from the data by default.
        """
        held = {name: tensor.clone() for name, tensor in state.items()}
        for name, tensor in held.items():
            self.tensors[name] = self._label_parameter(name, tensor.shape, name in skeleton.parameters)
            self._store(tensor, self.tensors[name])
        example = clone(example)
        for tensor in tensors(example):
            value = self.new("they are the network's inputs", tensor.shape)
            self._store(tensor, replace(value, integral=not (tensor.is_floating_point() or tensor.is_complex())))
        try:
            named = track_modules(skeleton.network, self._running, self._touch, self._on_exit)
            with (
                named,
                torch.no_grad(),
                decompose_fused_operations(),
                self,
                ReadDetector(self._read),
                skeleton.use_values(held) as network,
            ):
                outputs = float_outputs(call_network(network, example))
        except Exception as error:  # code of the network and torch may raise any exception under a dispatch mode
            raise TraceError((str(error).strip() or type(error).__name__).splitlines()[0]) from error
        for tensor in outputs:
            self.fix(self.value(tensor), "they are the network's outputs")
        if any(id(tensor) not in self._used for name, tensor in held.items() if name in skeleton.parameters):
            self.decisions = {**self.branches, **self.decisions}
            self.branches = {}
        for name, decision in self.decisions.items():
            for tensor in self._touched[name]:
                self.fix(self.value(tensor), decision)
        self.labels.fix_repeats()

    def _label_parameter(self, name: str, sizes: Sequence[int], learned: bool) -> Value:
        constant = not learned and name.rsplit(".", 1)[-1] not in STATISTICS
        value = self.new("the buffer is a constant" if constant else None, sizes, data=False)
        origins = tuple(frozenset([(name, axis)]) for axis in range(len(sizes)))
        return Value(value.terms, origins, data=False, constant=constant)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and label its result."""
        kwargs = kwargs or {}
        self.name = str(func.overloadpacket).removeprefix("aten.")
        shared = any(one.alias_info is not None for one in (*func._schema.arguments, *func._schema.returns))
        given = tree_map(
            lambda one: self._read_argument(one, shared) if isinstance(one, Tensor) else one, (tuple(args), kwargs)
        )
        self._used |= {id(one) for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)}
        if _gives_python_a_value(func, self.name, args):
            deciding = given[0][1:2] if self.name.startswith("index") else given
            self._record_decision(f"aten.{self.name}", _values_in(deciding))
        integral = self._is_integral(_values_in(given), (args, kwargs))
        if func._schema.is_mutable and not integral:
            self._written |= {_memory(one) for one in _written_by(func, args, kwargs)}
        self._touch(self._module, (args, kwargs))
        carried = self._follow_numbers(*given)
        found = RULES.get(self.name) or RULES.get(self.name.removesuffix("_"))
        if found is None and torch.Tag.pointwise in func.tags:
            found = RULES["pointwise"]
        if found is None and func.namespace == "aten":
            parts = func.decompose(*args, **kwargs) if _composite(func) else NotImplemented
            if parts is not NotImplemented:
                return parts
        self.strides = args[0].stride() if args and isinstance(args[0], Tensor) else ()
        result = func(*args, **kwargs)
        self._touch(self._module, result)
        self._track_uniform(func, (args, kwargs), result)
        several = isinstance(result, tuple | list)
        returned = list(result) if several else [result]
        self.all_sizes = [tuple(one.shape) if isinstance(one, Tensor) else () for one in returned]
        if self.all_sizes and any(isinstance(one, Tensor) for one in returned):
            made = self._apply_rule(found, *given)
            labels = made if isinstance(made, tuple) else (made,)
            constant = all(value.constant for value in _values_in(given))
            for tensor, value in zip(returned, labels, strict=False):
                if isinstance(tensor, Tensor):
                    made = replace(self._check_sizes(tensor, value, given), numbers=carried or value.numbers)
                    made = replace(made, integral=integral or value.integral)
                    self._store(tensor, replace(made, data=False, constant=True) if constant else made)
        return result

    def _follow_numbers(self, args: Any, kwargs: Any) -> Term | None:
        """Return the units indexed by the moved values; units whose indices are used in other ways are fixed."""
        name = self.name.removesuffix("_")
        numbers = [value.numbers for value in _values_in((args, kwargs)) if value.numbers is not None]
        if name in MOVES:
            return numbers[0] if numbers else None
        used = (args[:1], args[3:]) if name in NUMBERED else (args, kwargs)  # the rule handles the index
        for value in _values_in(used):
            if value.numbers is not None:
                self.labels.fix(value.numbers, self.why)
        return None

    def _apply_rule(self, found: Any, args: Any, kwargs: Any) -> Any:
        """Apply a rule; without one, or if it fails on these arguments, fix all arguments."""
        try:
            return self.fix_all(*args, *kwargs.values()) if found is None else found(self, *args, **kwargs)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            self.fix(_values_in((args, kwargs)), self.why)
            return tuple(self.new(self.why, shape) for shape in self.all_sizes)

    def _check_sizes(self, tensor: Tensor, value: Value, given: Any) -> Value:
        """Return the value if the rule's sizes agree with the result; otherwise fix it."""
        if tuple(self.labels.size(term) for term in value.terms) != tuple(tensor.shape):
            self.fix(value, self.why)
            self.fix(_values_in(given), self.why)
            return self.new(self.why, tensor.shape)
        return value

    def _store(self, tensor: Tensor, value: Value) -> None:
        self._values[id(tensor)] = value
        self._retained.append(tensor)

    def _read_argument(self, tensor: Tensor, shared: bool) -> Value:
        """Return the labels of an argument; a uniform tensor that is only read gets new labels."""
        value = self._with_writes(tensor)
        if not shared and _memory(tensor) in self._uniform:
            return replace(value, terms=self.new(None, tensor.shape).terms)
        return value

    def _track_uniform(self, func: Any, given: Any, result: Any) -> None:
        """Record which memory holds a single repeated value: filled, and not written to since."""
        if self.name in FILLS and isinstance(result, Tensor):
            self._uniform.add(_memory(result))
        elif func._schema.is_mutable:
            written = (one for one in tree_leaves(given) if isinstance(one, Tensor))
            self._uniform -= {_memory(one) for one in written}

    def value(self, tensor: Tensor) -> Value:
        """Return the labels of a tensor; a tensor that no traced operation created is a constant."""
        if id(tensor) not in self._values:
            made = self.new("it meets a constant", tensor.shape, data=False)
            self._store(tensor, Value(made.terms, made.origins, data=False, constant=True))
        value = self._values[id(tensor)]
        if value.pending:
            for one, other in value.pending:
                self.unify(one, other)
            self._values[id(tensor)] = value = replace(value, pending=())
        return value

    def _touch(self, module: str, given: Any) -> None:
        self._touched.setdefault(module, []).extend(find_tensors(given))

    def _on_exit(self, module: str, output: Any) -> None:
        """Pass a decision on to the caller if the module returns something other than tensors."""
        if module in self.decisions and has_other_values(output):
            self.decisions.setdefault(self._module, self.decisions[module])

    def _read(self, tensor: Tensor) -> None:
        if not self.value(tensor).constant:
            self._touch(self._module, tensor)
            self._record_decision("reading a tensor", [self._with_writes(tensor)])

    def _with_writes(self, tensor: Tensor) -> Value:
        value = self.value(tensor)
        return replace(value, integral=value.integral and _memory(tensor) not in self._written)

    def _is_integral(self, values: Sequence[Value], given: Any) -> bool:
        """Return whether the arguments of an operation depend on integer inputs and constants only."""
        tensors = (one for one in tree_leaves(given) if isinstance(one, Tensor))
        return all(value.integral or value.constant for value in values) and not any(
            _memory(tensor) in self._written for tensor in tensors
        )

    def _record_decision(self, what: str, by: Sequence[Value]) -> None:
        """Record that the current module decides by these values; constants decide the same in every call."""
        if all(value.constant for value in by):
            return
        found = self.branches if all(value.integral or value.constant for value in by) else self.decisions
        found.setdefault(self._module, f"{what} in {self._place()} decides by a value")

    @property
    def _module(self) -> str:
        return self._running[-1] if self._running else ""

    def _place(self) -> str:
        return f"'{self._module}'" if self._module else "the network itself"

    def _where(self) -> str:
        return f"aten.{self.name} in {self._place()}"

    @property
    def why(self) -> str:
        """The current operation and its module, as a reason for fixing an axis."""
        return f"of {self._where()}"

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of the (first) result of the current operation."""
        return self.all_sizes[0]

    def new(self, reason: str | None, sizes: Sequence[int], *, data: bool = True) -> Value:
        """Return a value with new labels.

        Args:
            reason: Why the axes are treated so, for messages.
            sizes: The shape of the value.
            data: Whether the value depends on the inputs.
        """
        terms = tuple(self.labels.free(n) if reason is None else self.labels.fixed_axis(n, reason) for n in sizes)
        return Value(terms, (NOWHERE,) * len(terms), data)

    def fix(self, value: Any, reason: str) -> None:
        """Fix all axes of a value, or of several."""
        if isinstance(value, Value):
            for term in value.terms:
                self.labels.fix(term, reason)
            self.mark_produced(value)
        elif isinstance(value, tuple | list):
            for one in value:
                self.fix(one, reason)

    def fix_all(self, *args: Any) -> Values:
        """Fix all arguments and results of an operation without a rule."""
        self.fix(args, self.why)
        return tuple(self.new(self.why, sizes) for sizes in self.all_sizes)

    def mark_produced(self, value: Value, axes: Sequence[int] | None = None) -> None:
        """Record that parameters produce units along these axes."""
        for axis in range(value.ndim) if axes is None else axes:
            self.produced |= value.origins[axis]

    def mark_consumed(self, value: Value, axis: int) -> None:
        """Record that parameters consume units along this axis."""
        self.consumed |= value.origins[axis]

    def follow_index(self, index: Value, term: Term) -> None:
        """Unify an axis with the units that an index refers to; fix it if the index is unrelated to units."""
        if index.numbers is None or self.labels.size(index.numbers) != self.labels.size(term):
            self.labels.fix(term if index.numbers is None else index.numbers + term, self.why)
        else:
            self.unify(term, index.numbers)

    def mark_mixed(self, value: Value, axes: Sequence[int]) -> None:
        """Record that entries along these axes are mixed, so that the other axes have one order for all of them."""
        mixed = {axis % value.ndim for axis in axes}
        self._mixed.add(tuple(term for axis, term in enumerate(value.terms) if axis not in mixed))

    def common_labels(self) -> dict[int, set[int]]:
        """Return, by label, the labels that always occur with it; it may have an order for each of their indices."""
        found: dict[int, set[int]] = {}
        for terms in self._mixed | {value.terms for value in (*self.tensors.values(), *self._values.values())}:
            normal = [self.labels.expand(term) for term in terms]
            for axis, products in enumerate(normal):
                others = {label for k, one in enumerate(normal) if k != axis for label in _everywhere(one)}
                for product in products:
                    for label in product:
                        near = others.union(product) - {label}
                        found[label] = near & found.get(label, near)
        return found

    def unify(self, one: Term, other: Term) -> Term:
        """Unify two axes that an operation identifies; an axis of size 1 broadcasts."""
        sizes = self.labels.size(one), self.labels.size(other)
        if sizes[0] != sizes[1]:
            if 1 not in sizes:
                self.labels.fix(one, self.why)
                self.labels.fix(other, self.why)
            return other if sizes[0] == 1 else one
        self.labels.unify(one, other, self.why)
        return one


def _everywhere(term: Term) -> set[int]:
    """Return the labels contained in all parts of an axis."""
    first, *rest = (set(product) for product in term)
    return first.intersection(*rest)


def _values_in(given: Any) -> list[Value]:
    if isinstance(given, Value):
        return [given]
    parts = given.values() if isinstance(given, dict) else given if isinstance(given, tuple | list) else ()
    return [value for part in parts for value in _values_in(part)]


def _written_by(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the arguments into which an operation writes."""
    names = [each.name for each in func._schema.arguments if each.alias_info is not None and each.alias_info.is_write]
    given = dict(zip((each.name for each in func._schema.arguments), args, strict=False)) | kwargs
    return [one for name in names for one in tree_leaves(given.get(name)) if isinstance(one, Tensor)]


def _memory(tensor: Tensor) -> int:
    """Return the address of a tensor's values; a sparse tensor has none."""
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else -id(tensor)


def _composite(func: Any) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"))


def any_data(values: Sequence[Value]) -> bool:
    """Return whether any of the values depends on the network's input."""
    return any(value.data for value in values)


def _gives_python_a_value(func: Any, name: str, args: Any) -> bool:
    """Return whether code can branch on the result: a scalar, or a shape that depends on values."""
    if name in VALUES:
        return True
    if name.startswith("index"):
        return any(
            leaf.dtype in (torch.bool, torch.uint8) for leaf in tree_leaves(args[1:2]) if isinstance(leaf, Tensor)
        )
    return torch.Tag.dynamic_output_shape in func.tags

"""Rules of operations that read or write at indices: index, embedding, gather, scatter.

Indices that refer to an axis of units (such as an argmax) are permuted with the units, and so is every axis that they
index. Axes that are indexed by other values are fixed.
"""

from __future__ import annotations

from collections.abc import Sequence

from enfold.symmetry.labels import Term
from enfold.symmetry.tracer import NOWHERE, AxisTracer, TensorAxis, Value, any_data, rule

INDEXED = "the inputs of the network index them"


@rule("index")
def index_axes(tracer: AxisTracer, x: Value, indices: Sequence[Value | None]) -> Value:
    """Unify indexed axes with the units of their index, or fix them; fix all if they are not adjacent."""
    given = [index for index in indices if index is not None]
    chosen = [axis for axis, index in enumerate(indices) if index is not None]
    is_single = len(given) == 1 and given[0].numbers is not None
    if not is_single:
        tracer.fix(given, tracer.why)
    for axis, index in zip(chosen, given, strict=True):
        tracer.follow_index(index, x.terms[axis])
    if chosen != list(range(chosen[0], chosen[-1] + 1)):
        tracer.fix(x, tracer.why)
        return tracer.new(tracer.why, tracer.sizes)
    new = len(tracer.sizes) - (x.ndim - len(chosen))
    first, behind = chosen[0], chosen[-1] + 1
    made = tuple(tracer.labels.fixed_axis(size, tracer.why) for size in tracer.sizes[first : first + new])
    if is_single:
        made = given[0].terms
    terms = (*x.terms[:first], *made, *x.terms[behind:])
    origins: tuple[frozenset[TensorAxis], ...] = (*x.origins[:first], *((NOWHERE,) * len(made)), *x.origins[behind:])
    if x.data or any_data(given):
        tracer.mark_produced(x)
        return Value(terms, (NOWHERE,) * len(terms))
    return Value(terms, origins, x.data)


@rule("index_select")
def index_select(tracer: AxisTracer, x: Value, dim: int, index: Value) -> Value:
    """Index one axis, as `index_axes`.

    Args:
        tracer: The tracer of the forward pass.
        x: The input.
        dim: The axis.
        index: The indices.
    """
    return index_axes(tracer, x, [None] * (dim % x.ndim) + [index])


@rule("gather")
def gather(tracer: AxisTracer, x: Value, dim: int, index: Value, **_: object) -> Value:
    """Unify the gathered axis with the units of the index, and the other axes with those of the index.

    Args:
        tracer: The tracer of the forward pass.
        x: The input.
        dim: The axis.
        index: The indices.
    """
    dim %= x.ndim
    tracer.follow_index(index, x.terms[dim])
    terms = [
        term if axis == dim else _unify_same_size(tracer, x.terms[axis], term) for axis, term in enumerate(index.terms)
    ]
    tracer.mark_produced(x)
    return Value(tuple(terms), (NOWHERE,) * len(terms), x.data or index.data)


@rule("scatter", "scatter_add", "scatter_reduce")
def scatter(
    tracer: AxisTracer, x: Value, dim: int, index: Value, source: object = None, *_: object, **__: object
) -> Value:
    """Unify the written axis with the units of the index, and the other axes of all arguments.

    Args:
        tracer: The tracer of the forward pass.
        x: The input.
        dim: The axis.
        index: The indices.
        source: The values that are written.
    """
    dim %= x.ndim
    tracer.follow_index(index, x.terms[dim])
    others = [index, source] if isinstance(source, Value) else [index]
    for other in others:
        for axis, term in enumerate(other.terms):
            if axis == dim:
                tracer.labels.fix(term, tracer.why)
            else:
                _unify_same_size(tracer, x.terms[axis], term)
        tracer.mark_produced(other)
    tracer.mark_produced(x)
    return Value(x.terms, (NOWHERE,) * x.ndim, any_data([x, *others]))


def _unify_same_size(tracer: AxisTracer, one: Term, other: Term) -> Term:
    """Unify two axes of the same size; fix both if their sizes differ, as the shorter covers the first entries."""
    if tracer.labels.size(one) != tracer.labels.size(other):
        tracer.labels.fix(one, tracer.why)
        tracer.labels.fix(other, tracer.why)
        return other
    return tracer.unify(other, one)


@rule("index_add", "index_copy", "index_reduce")
def index_write(tracer: AxisTracer, x: Value, dim: int, index: Value, source: Value, *_: object, **__: object) -> Value:
    """Fix the written axis and unify the other axes of both tensors.

    Args:
        tracer: The tracer of the forward pass.
        x: The input.
        dim: The axis.
        index: The indices.
        source: The values that are written.
    """
    tracer.fix(index, tracer.why)
    for axis, (one, other) in enumerate(zip(x.terms, source.terms, strict=True)):
        if axis == dim % x.ndim:
            tracer.labels.fix(one, tracer.why)
            tracer.labels.fix(other, tracer.why)
        else:
            tracer.unify(one, other)
    tracer.mark_produced(x)
    tracer.mark_produced(source)
    return Value(x.terms, (NOWHERE,) * x.ndim)


@rule("embedding")
def embedding(tracer: AxisTracer, weight: Value, indices: Value, *_: object) -> Value:
    """Fix the rows if the inputs index them, or unify them with the units of the index; columns are units."""
    if indices.numbers is None:
        tracer.labels.fix(weight.terms[0], INDEXED)
    else:
        tracer.follow_index(indices, weight.terms[0])
    tracer.mark_produced(weight)
    terms = (*indices.terms, weight.terms[1])
    return Value(terms, (NOWHERE,) * len(terms), indices.data)


@rule("embedding_renorm")
def renorm(tracer: AxisTracer, weight: Value, indices: Value, *_: object) -> Value:
    """Fix the rows, which the inputs index."""
    tracer.labels.fix(weight.terms[0], INDEXED)
    return weight


@rule("_embedding_bag_forward_only", "_embedding_bag", "embedding_bag")
def embedding_bag(tracer: AxisTracer, weight: Value, indices: Value, *rest: object) -> tuple[Value, ...]:
    """Fix the rows, which the inputs index; columns are units."""
    tracer.labels.fix(weight.terms[0], INDEXED)
    tracer.fix([indices, *rest], tracer.why)
    tracer.mark_produced(weight)
    sizes = tracer.all_sizes
    bags = Value((tracer.labels.fixed_axis(sizes[0][0], tracer.why), weight.terms[1]), (NOWHERE,) * 2)
    return (bags, *(tracer.new(tracer.why, shape) for shape in sizes[1:]))

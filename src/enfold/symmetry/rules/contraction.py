"""Rules of operations that contract or normalize axes: matrix products, distances, convolutions, norms, attention."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from enfold.symmetry.labels import ONE, Term
from enfold.symmetry.rules.elementwise import pointwise
from enfold.symmetry.rules.layout import transpose, unsqueeze
from enfold.symmetry.tracer import NOWHERE, AxisTracer, Value, any_data, rule


@rule("mm", "bmm", "matmul")
def product(tracer: AxisTracer, left: Value, right: Value, **_: object) -> Value:
    """Unify and remove k in (..., n, k) x (..., k, m)."""
    tracer.unify(left.terms[-1], right.terms[-2])
    lead = [tracer.unify(a, b) for a, b in zip_longest(left.terms[-3::-1], right.terms[-3::-1], fillvalue=ONE)][::-1]
    _consume(tracer, left, right)
    origins = [NOWHERE] * len(lead) + [left.origins[-2], right.origins[-1]]
    data = left.data or right.data
    terms = (*lead, left.terms[-2], right.terms[-1])
    return Value(terms, (NOWHERE,) * len(terms) if data else tuple(origins), data)


def _consume(tracer: AxisTracer, left: Value, right: Value) -> None:
    """Mark the axis with which a weight consumes units of the other factor."""
    if left.data and right.data:
        return
    weight, axis = (left, left.ndim - 1) if right.data else (right, right.ndim - 2)
    tracer.mark_consumed(weight, axis)
    if left.data or right.data:
        tracer.mark_produced(weight, [other for other in range(weight.ndim) if other != axis])
    else:
        tracer.mark_produced(left, [left.ndim - 1])


@rule("addmm", "baddbmm", "_sparse_addmm")
def add_product(tracer: AxisTracer, bias: Value, left: Value, right: Value, **_: object) -> Value:
    """Add a bias to a matrix product.

    Args:
        tracer: The tracer of the forward pass.
        bias: The bias.
        left: The left factor.
        right: The right factor.
    """
    return pointwise(tracer, bias, product(tracer, left, right))


@rule("addbmm")
def add_products(tracer: AxisTracer, bias: Value, left: Value, right: Value, **_: object) -> Value:
    """Add a bias to a sum of matrix products.

    Args:
        tracer: The tracer of the forward pass.
        bias: The bias.
        left: The left factor.
        right: The right factor.
    """
    found = product(tracer, left, right)
    return pointwise(tracer, bias, Value(found.terms[1:], found.origins[1:], found.data))


@rule("_cdist_forward", "_euclidean_dist", "cdist")
def distances(tracer: AxisTracer, left: Value, right: Value, *_: object) -> Value:
    """Unify and remove k in (..., n, k) and (..., m, k)."""
    return product(tracer, left, transpose(tracer, right, -2, -1))


@rule("_pdist_forward")
def pair_distances(tracer: AxisTracer, x: Value, *_: object) -> Value:
    """Fix the rows, whose pairs are enumerated; the result is invariant to permutations of columns."""
    tracer.labels.fix(x.terms[0], tracer.why)
    tracer.mark_produced(x)
    return tracer.new(tracer.why, tracer.sizes)


@rule("_trilinear")
def trilinear(
    tracer: AxisTracer, first: Value, second: Value, third: Value, *axes: Sequence[int], unroll_dim: int = 1
) -> Value:
    """Unify the axes of three factors after inserting missing ones; weights consume units along summed axes.

    Args:
        tracer: The tracer of the forward pass.
        first: The first factor.
        second: The second factor.
        third: The third factor.
        axes: For each factor the axes to insert, then the axes to sum.
        unroll_dim: Has no effect on the result.
    """
    values = []
    for value, lacking in zip((first, second, third), axes, strict=False):
        for dim in sorted(lacking):
            value = unsqueeze(tracer, value, dim)
        values.append(value)
    ndim, summed = values[0].ndim, axes[3]
    terms = [ONE] * ndim
    for value in values:
        terms = [tracer.unify(one, other) for one, other in zip(terms, value.terms, strict=True)]
        if not value.data:
            tracer.mark_produced(value, [axis for axis in range(ndim) if axis not in summed])
            for axis in summed:
                tracer.mark_consumed(value, axis)
    rest = tuple(term for axis, term in enumerate(terms) if axis not in summed)
    return Value(rest, (NOWHERE,) * len(rest), any_data(values))


@rule("mv", "dot", "vdot")
def vector_product(tracer: AxisTracer, left: Value, right: Value) -> Value:
    """Unify and remove the last axis of a matrix or vector times a vector."""
    tracer.unify(left.terms[-1], right.terms[0])
    weight = right if left.data else left
    if not (left.data and right.data):
        tracer.mark_consumed(weight, weight.ndim - 1)
        tracer.mark_produced(weight, range(weight.ndim - 1))
    data = left.data or right.data
    return Value(left.terms[:-1], (NOWHERE,) * (left.ndim - 1) if data else left.origins[:-1], data)


@rule("addmv")
def add_vector_product(tracer: AxisTracer, bias: Value, matrix: Value, vector: Value, **_: object) -> Value:
    """Add a bias to a matrix-vector product.

    Args:
        tracer: The tracer of the forward pass.
        bias: The bias.
        matrix: The matrix.
        vector: The vector.
    """
    return pointwise(tracer, bias, vector_product(tracer, matrix, vector))


@rule("addr")
def add_outer(tracer: AxisTracer, bias: Value, rows: Value, columns: Value, **_: object) -> Value:
    """Add a bias to an outer product.

    Args:
        tracer: The tracer of the forward pass.
        bias: The bias.
        rows: The vector of the rows.
        columns: The vector of the columns.
    """
    return pointwise(tracer, bias, unsqueeze(tracer, rows, 1), columns)


@rule("linear")
def linear(tracer: AxisTracer, x: Value, weight: Value, bias: Value | None = None) -> Value:
    """Replace the last axis by the outputs of a weight (out, in).

    Args:
        tracer: The tracer of the forward pass.
        x: The input.
        weight: The weight.
        bias: The bias.
    """
    tracer.unify(x.terms[-1], weight.terms[1])
    tracer.mark_consumed(weight, 1)
    tracer.mark_produced(weight, [0])
    tracer.mark_produced(x)
    found = Value((*x.terms[:-1], weight.terms[0]), (NOWHERE,) * x.ndim)
    return found if bias is None else pointwise(tracer, found, bias)


@rule("convolution")
def convolution(
    tracer: AxisTracer,
    x: Value,
    weight: Value,
    bias: Value | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Value:
    """Contract the channels of each group; kernel positions and spatial axes are fixed.

    Args:
        tracer: The tracer of the forward pass.
        x: The input.
        weight: The weight.
        bias: The bias.
        stride: The stride.
        padding: The padding.
        dilation: The dilation.
        transposed: Whether the convolution is transposed.
        output_padding: The padding of the outputs of a transposed convolution.
        groups: The number of groups.
    """
    space, spatial = tracer.labels, weight.ndim - 2
    channels, outputs = x.terms[-spatial - 1], weight.terms[1 if transposed else 0]
    for axis in range(2, weight.ndim):
        space.fix(weight.terms[axis], "they are positions of a kernel")
    if groups == 1:
        tracer.unify(channels, weight.terms[0 if transposed else 1])
    else:
        channels, outputs = _group_channels(tracer, channels, weight, groups, transposed)
    tracer.mark_consumed(weight, 0 if transposed else 1)
    tracer.mark_produced(weight, [1 if transposed else 0, *range(2, weight.ndim)])
    if not transposed and groups > 1:
        tracer.mark_produced(weight, [0])
    terms = [*x.terms[: -spatial - 1], outputs]
    for axis, size in enumerate(tracer.sizes[-spatial:]):
        term = x.terms[axis - spatial]
        if space.size(weight.terms[axis + 2]) == 1 and space.size(term) == size and not any(padding):
            terms.append(term)
        else:
            space.fix(term, tracer.why)
            terms.append(space.fixed_axis(size, tracer.why))
    if bias is not None:
        tracer.unify(outputs, bias.terms[0])
        tracer.mark_produced(bias)
    tracer.mark_produced(x)
    return Value(tuple(terms), (NOWHERE,) * len(terms))


def _group_channels(
    tracer: AxisTracer, channels: Term, weight: Value, groups: int, transposed: bool
) -> tuple[Term, Term]:
    """Unify channels as groups of channels: groups are permuted, and channels within groups."""
    space = tracer.labels
    number, inner = space.free(groups), space.free(space.size(channels) // groups)
    tracer.unify(space.merge([number, inner]), channels)
    if transposed:  # (in, out of one group, ...)
        tracer.unify(space.merge([number, inner]), weight.terms[0])
        return channels, space.merge([number, weight.terms[1]])
    outputs = space.free(space.size(weight.terms[0]) // groups)
    tracer.unify(space.merge([number, outputs]), weight.terms[0])
    tracer.unify(inner, weight.terms[1])
    return channels, weight.terms[0]


@rule("native_batch_norm", "_native_batch_norm_legit_no_training", "_native_batch_norm_legit", "cudnn_batch_norm")
def batch_norm(tracer: AxisTracer, x: Value, *others: object) -> tuple[Value, ...]:
    """Unify scale, shift and statistics with the channels."""
    for other in others:
        if isinstance(other, Value):
            tracer.unify(x.terms[1], other.terms[0])
            tracer.mark_produced(other)
    tracer.mark_produced(x)
    return (Value(x.terms, (NOWHERE,) * x.ndim), *(tracer.new("of statistics", s) for s in tracer.all_sizes[1:]))


@rule("native_layer_norm", "_fused_rms_norm", "rms_norm", "layer_norm")
def layer_norm(tracer: AxisTracer, x: Value, sizes: Sequence[int], *others: object) -> tuple[Value, ...] | Value:
    """Unify scale and shift with the normalized axes."""
    tracer.mark_mixed(x, range(-len(sizes), 0))
    for other in others:
        if isinstance(other, Value):
            for axis in range(1, other.ndim + 1):
                tracer.unify(x.terms[-axis], other.terms[-axis])
            tracer.mark_produced(other)
    tracer.mark_produced(x)
    found = Value(x.terms, (NOWHERE,) * x.ndim)
    rest = tuple(tracer.new("of statistics", shape) for shape in tracer.all_sizes[1:])
    return (found, *rest) if rest else found


@rule("native_group_norm")
def group_norm(
    tracer: AxisTracer,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    n: int,
    c: int,
    hw: int,
    groups: int,
    eps: float,
) -> tuple[Value, ...]:
    """Unify channels as groups of channels: groups are permuted, and channels within groups.

    Args:
        tracer: The tracer of the forward pass.
        x: The input.
        weight: The weight.
        bias: The bias.
        n: The number of examples.
        c: The number of channels.
        hw: The number of spatial positions.
        groups: The number of groups.
        eps: The constant added to variances.
    """
    channels = tracer.labels.merge([tracer.labels.free(groups), tracer.labels.free(c // groups)])
    tracer.unify(channels, x.terms[1])
    for other in (weight, bias):
        if other is not None:
            tracer.unify(x.terms[1], other.terms[0])
            tracer.mark_produced(other)
    tracer.mark_produced(x)
    return (Value(x.terms, (NOWHERE,) * x.ndim), *(tracer.new("of statistics", s) for s in tracer.all_sizes[1:]))


@rule("_scaled_dot_product_flash_attention_for_cpu", "scaled_dot_product_attention")
def attention(
    tracer: AxisTracer,
    query: Value,
    key: Value,
    value: Value,
    *rest: object,
    attn_mask: Value | None = None,
    **_: object,
) -> Values:
    """Contract queries and keys within heads, and attention weights and values over tokens; unify a mask with both.

    Args:
        tracer: The tracer of the forward pass.
        query: The queries.
        key: The keys.
        value: The values.
        attn_mask: The mask, added to the attention weights.
    """
    tracer.fix(list(rest), tracer.why)
    tracer.unify(query.terms[-1], key.terms[-1])
    tracer.unify(key.terms[-2], value.terms[-2])
    lead = [
        _unify_heads(tracer, _unify_heads(tracer, q, k), v)
        for q, k, v in zip(query.terms[:-2], key.terms[:-2], value.terms[:-2], strict=True)
    ]
    if attn_mask is not None:
        scores = (*lead, query.terms[-2], key.terms[-2])
        for one, other in zip(scores[-attn_mask.ndim :], attn_mask.terms, strict=True):
            tracer.unify(one, other)
        tracer.mark_produced(attn_mask)
    found = Value((*lead, query.terms[-2], value.terms[-1]), (NOWHERE,) * query.ndim)
    others = tuple(tracer.new(tracer.why, sizes) for sizes in tracer.all_sizes[1:])
    return (found, *others) if others else found


def _unify_heads(tracer: AxisTracer, queries: Term, keys: Term) -> Term:
    """Unify heads of queries and keys; with fewer heads of keys, adjacent queries use the same one."""
    few, many = tracer.labels.size(keys), tracer.labels.size(queries)
    if few in (1, many) or many % few:
        return tracer.unify(queries, keys)
    tracer.unify(tracer.labels.split(queries, [few, many // few], tracer.why)[0], keys)
    return queries


Values = Value | tuple[Value, ...]

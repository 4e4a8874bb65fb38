"""Rules of operations that move values: reshape, transpose, slice, concatenate, expand, pad."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from enfold.symmetry.labels import ONE, Term
from enfold.symmetry.rules.elementwise import pointwise
from enfold.symmetry.tracer import NOWHERE, AxisTracer, TensorAxis, Value, Values, any_data, rule


@rule("view", "_unsafe_view", "reshape", "_reshape_alias", "flatten", "unflatten", "view_copy", "_reshape_copy")
def reshape(tracer: AxisTracer, x: Value, *_: object) -> Value:
    """Label the axes of the reshaped result."""
    return reshape_to(tracer, x, tracer.sizes)


def reshape_to(tracer: AxisTracer, x: Value, wanted_sizes: Sequence[int]) -> Value:
    """Return the value with other sizes: merge adjacent axes until their size matches, then split them."""
    terms: list[Term] = []
    origins: list[frozenset[TensorAxis]] = []
    old = [(term, origin) for term, origin in zip(x.terms, x.origins, strict=True) if tracer.labels.size(term) != 1]
    sizes = list(wanted_sizes)
    if 0 in sizes:
        return tracer.new(tracer.why, sizes)
    while sizes:
        taken, wanted = 1, [sizes.pop(0)]
        product, merged, origin = wanted[0], [], NOWHERE
        while taken != product:
            if taken < product:
                term, source = old.pop(0)
                merged.append(term)
                origin |= source
                taken *= tracer.labels.size(term)
            else:
                wanted.append(sizes.pop(0))
                product *= wanted[-1]
        found = tracer.labels.split(tracer.labels.merge(merged), _without_ones(wanted), tracer.why) if merged else []
        rest = iter(found)
        terms += [next(rest) if size != 1 else ONE for size in wanted]
        origins += [origin if size != 1 else NOWHERE for size in wanted]
    return Value(tuple(terms), tuple(origins), x.data)


def _without_ones(sizes: list[int]) -> list[int]:
    return [size for size in sizes if size != 1]


@rule("permute", "permute_copy")
def permute(tracer: AxisTracer, x: Value, dims: Sequence[int]) -> Value:
    """Reorder the axes."""
    return Value(tuple(x.terms[dim] for dim in dims), tuple(x.origins[dim] for dim in dims), x.data)


@rule("transpose", "transpose_copy", "t", "swapaxes")
def transpose(tracer: AxisTracer, x: Value, first: int = 0, second: int = 1) -> Value:
    """Exchange two axes.

    Args:
        tracer: The tracer of the forward pass.
        x: The input.
        first: The first axis.
        second: The second axis.
    """
    order = list(range(x.ndim))
    if x.ndim > 1:
        order[first], order[second] = order[second], order[first]
    return permute(tracer, x, order)


@rule("unsqueeze", "unsqueeze_copy")
def unsqueeze(tracer: AxisTracer, x: Value, dim: int) -> Value:
    """Insert an axis of size 1."""
    at = dim % (x.ndim + 1)
    return Value((*x.terms[:at], ONE, *x.terms[at:]), (*x.origins[:at], NOWHERE, *x.origins[at:]), x.data)


@rule("squeeze", "squeeze_copy")
def squeeze(tracer: AxisTracer, x: Value, *_: object) -> Value:
    """Remove the axes of size 1 that the result lacks."""
    left, keep = list(tracer.sizes), []
    for axis, term in enumerate(x.terms):
        size = tracer.labels.size(term)
        if left and left[0] == size and not (size == 1 and x.ndim - axis > len(left) and _is_squeezed(axis, x, _)):
            keep.append(axis)
            left.pop(0)
    return Value(tuple(x.terms[axis] for axis in keep), tuple(x.origins[axis] for axis in keep), x.data)


def _is_squeezed(axis: int, x: Value, args: Sequence[object]) -> bool:
    dims = args[0] if args else range(x.ndim)
    chosen = [dims] if isinstance(dims, int) else list(dims) if isinstance(dims, Sequence | range) else []
    return axis in [dim % x.ndim for dim in chosen]


@rule("expand", "expand_copy", "broadcast_to")
def expand(tracer: AxisTracer, x: Value, *_: object, **__: object) -> Value:
    """Label expanded axes as free: their entries are equal, so that any permutation is a symmetry."""
    sizes = tracer.sizes
    lead = len(sizes) - x.ndim
    terms, origins = [ONE] * lead + list(x.terms), [NOWHERE] * lead + list(x.origins)
    for axis, size in enumerate(sizes):
        if tracer.labels.size(terms[axis]) != size:
            terms[axis] = tracer.labels.free(size)
    return Value(tuple(terms), tuple(origins), x.data)


@rule("as_strided")
def as_strided(tracer: AxisTracer, x: Value, sizes: Sequence[int], strides: Sequence[int], *_: object) -> Values:
    """Return the value unchanged if sizes and strides are unchanged, as in pooling; otherwise fix all axes.

    Args:
        tracer: The tracer of the forward pass.
        x: The input.
        sizes: The sizes.
        strides: The strides.
    """
    before = tuple(tracer.labels.size(term) for term in x.terms)
    if tuple(sizes) == before and all(n == 1 or a == b for n, a, b in zip(sizes, strides, tracer.strides, strict=True)):
        return x
    return tracer.fix_all(x)


@rule("repeat")
def repeat(tracer: AxisTracer, x: Value, times: Sequence[int]) -> Value:
    """Concatenate an axis with itself."""
    lead = len(times) - x.ndim
    terms, origins = [ONE] * lead + list(x.terms), [NOWHERE] * lead + list(x.origins)
    found = [tracer.labels.free(n) if tracer.labels.size(t) == 1 else t * n for t, n in zip(terms, times, strict=True)]
    return Value(tuple(found), tuple(origins), x.data)


@rule("slice", "slice_copy", "narrow")
def slice_(
    tracer: AxisTracer, x: Value, dim: int = 0, start: int | None = 0, end: int | None = None, step: int = 1
) -> Value:
    """Cut an axis; with a step, blocks of `step` entries are permuted as units.

    Args:
        tracer: The tracer of the forward pass.
        x: The input.
        dim: The axis.
        start: The first index.
        end: The index after the last.
        step: The step.
    """
    term, dim = x.terms[dim], dim % x.ndim
    size, new = tracer.labels.size(term), tracer.sizes[dim]
    if size == new:
        return x
    start = min(max((start or 0) + (size if (start or 0) < 0 else 0), 0), size)
    if step == 1:
        found = tracer.labels.cut(term, [start, new, size - start - new], tracer.why)[1]
    elif size % step == 0 and start < step and new == size // step > 1:
        found, inner = tracer.labels.split(term, [new, step], tracer.why)
        tracer.labels.fix(inner, tracer.why)
    else:
        tracer.labels.fix(term, tracer.why)
        found = tracer.labels.fixed_axis(new, tracer.why)
    return Value((*x.terms[:dim], found, *x.terms[dim + 1 :]), x.origins, x.data)


@rule("view_as_real", "view_as_real_copy")
def as_real(tracer: AxisTracer, x: Value) -> Value:
    """Add a fixed axis for real and imaginary parts."""
    return Value((*x.terms, tracer.labels.fixed_axis(2, tracer.why)), (*x.origins, NOWHERE), x.data)


@rule("view_as_complex", "view_as_complex_copy")
def as_complex(tracer: AxisTracer, x: Value) -> Value:
    """Remove the fixed last axis of real and imaginary parts."""
    tracer.labels.fix(x.terms[-1], tracer.why)
    return Value(x.terms[:-1], x.origins[:-1], x.data)


@rule("select", "select_copy")
def select(tracer: AxisTracer, x: Value, dim: int, index: int) -> Value:
    """Remove an axis by selecting one entry.

    Args:
        tracer: The tracer of the forward pass.
        x: The input.
        dim: The axis.
        index: The index of the entry.
    """
    dim %= x.ndim
    terms = tracer.labels.at(x.terms, dim, index % tracer.labels.size(x.terms[dim]), tracer.why)
    return Value(tuple(terms), x.origins[:dim] + x.origins[dim + 1 :], x.data)


@rule("unbind", "unbind_copy")
def unbind(tracer: AxisTracer, x: Value, dim: int = 0) -> tuple[Value, ...]:
    """Select every entry of an axis."""
    return tuple(select(tracer, x, dim, index) for index in range(tracer.labels.size(x.terms[dim])))


@rule("split_with_sizes", "split", "chunk", "tensor_split", "split_with_sizes_copy", "split_copy")
@rule("unsafe_split", "unsafe_chunk", "unsafe_split_with_sizes")
def split(tracer: AxisTracer, x: Value, _: object = None, dim: int = 0) -> tuple[Value, ...]:
    """Cut an axis into parts.

    Args:
        tracer: The tracer of the forward pass.
        x: The input.
        dim: The axis.
    """
    dim %= x.ndim
    sizes = [shape[dim] for shape in tracer.all_sizes]
    if set(sizes) == {1}:  # distinguished like selected entries
        return tuple(unsqueeze(tracer, select(tracer, x, dim, index), dim) for index in range(len(sizes)))
    parts = tracer.labels.cut(x.terms[dim], sizes, tracer.why)
    return tuple(Value((*x.terms[:dim], part, *x.terms[dim + 1 :]), x.origins, x.data) for part in parts)


@rule("glu")
def glu(tracer: AxisTracer, x: Value, dim: int = -1) -> Value:
    """Unify the two halves of an axis, one of which gates the other."""
    dim %= x.ndim
    halves = tracer.labels.cut(x.terms[dim], [tracer.sizes[dim]] * 2, tracer.why)
    return pointwise(
        tracer, *(Value((*x.terms[:dim], half, *x.terms[dim + 1 :]), x.origins, x.data) for half in halves)
    )


@rule("cat", "concat")
def cat(tracer: AxisTracer, values: Sequence[Value], dim: int = 0) -> Value:
    """Concatenate one axis; unifying the other axes is deferred until the result is used, which it may never be."""
    values = [value for value in values if value.ndim == len(tracer.sizes)]
    first, dim = values[0], dim % values[0].ndim
    others = [axis for axis in range(first.ndim) if axis != dim]
    pending = tuple((first.terms[axis], value.terms[axis]) for value in values[1:] for axis in others)
    data = any_data(values)
    terms, origins = (
        list(first.terms),
        [frozenset[TensorAxis]().union(*(v.origins[a] for v in values)) for a in range(first.ndim)],
    )
    terms[dim] = tuple(product for value in values for product in value.terms[dim])
    if data:
        for value in values:
            tracer.mark_produced(value)
    return Value(tuple(terms), (NOWHERE,) * first.ndim if data else tuple(origins), data, pending=pending)


@rule("stack")
def stack(tracer: AxisTracer, values: Sequence[Value], dim: int = 0) -> Value:
    """Concatenate values along a new axis."""
    return cat(tracer, [unsqueeze(tracer, value, dim) for value in values], dim % (values[0].ndim + 1))


@rule("_pack_padded_sequence")
def pack_sequence(tracer: AxisTracer, x: Value, lengths: Value, *_: object) -> Values:
    """Select positions of a batch of sequences (B, T, ...) by their lengths; the other axes are unchanged."""
    for term in x.terms[:2]:
        tracer.labels.fix(term, tracer.why)
    rows, sizes = (tracer.new(tracer.why, shape) for shape in ((tracer.all_sizes[0][0],), tracer.all_sizes[1]))
    packed = Value((*rows.terms, *x.terms[2:]), (NOWHERE,) * (x.ndim - 1), x.data)
    return packed, replace(sizes, integral=lengths.integral)


@rule("constant_pad_nd")
def pad(tracer: AxisTracer, x: Value, widths: Sequence[int], *_: object) -> Value:
    """Concatenate free axes for the padding, whose entries are equal."""
    terms = list(x.terms)
    for index in range(len(widths) // 2):
        axis, before, behind = x.ndim - 1 - index, widths[2 * index], widths[2 * index + 1]
        if before < 0 or behind < 0:
            tracer.labels.fix(terms[axis], tracer.why)
            terms[axis] = tracer.labels.fixed_axis(tracer.sizes[axis], tracer.why)
        else:
            ends = [tracer.labels.free(width) if width else () for width in (before, behind)]
            terms[axis] = (*ends[0], *terms[axis], *ends[1])
    return Value(tuple(terms), x.origins, x.data)


@rule("copy", "fill", "zero", "slice_scatter", "select_scatter")
def write(tracer: AxisTracer, x: Value, source: object = None, *args: int) -> Value:
    """Unify the written values with the axes they are written to."""
    name = tracer.name
    if not isinstance(source, Value):
        return x
    place = slice_like(tracer, x, args) if "slice_scatter" in name else x
    if "select_scatter" in name:
        place = select(tracer, x, args[0], args[1])
    lead = place.ndim - source.ndim
    for axis, term in enumerate(source.terms):
        tracer.unify(place.terms[axis + lead], term)
    if x.data or source.data:
        tracer.mark_produced(x)
        tracer.mark_produced(source)
    return Value(x.terms, (NOWHERE,) * x.ndim, x.data or source.data)


def slice_like(tracer: AxisTracer, x: Value, args: Sequence[int | None]) -> Value:
    """Return the part of the value that `slice_scatter` writes to."""
    given = [*args, *(0, 0, None, 1)[len(args) :]]
    dim, step = given[0] or 0, given[3] or 1
    size = tracer.labels.size(x.terms[dim])
    start, end = (given[1] or 0) % size, min(size if given[2] is None else given[2], size)
    if step != 1:
        tracer.labels.fix(x.terms[dim], tracer.why)
        return Value((*x.terms[:dim], ONE, *x.terms[dim + 1 :]), x.origins, x.data)
    part = tracer.labels.cut(x.terms[dim], [start, end - start, size - end], tracer.why)[1]
    return Value((*x.terms[:dim], part, *x.terms[dim + 1 :]), x.origins, x.data)


def _sizes(tracer: AxisTracer, x: Value) -> tuple[int, ...]:
    return tuple(tracer.labels.size(term) for term in x.terms)


@rule("pixel_shuffle")
def pixel_shuffle(tracer: AxisTracer, x: Value, factor: int) -> Value:
    """Rearrange blocks of channels into the pixels of one channel."""
    *lead, channels, height, width = _sizes(tracer, x)
    parts = reshape_to(tracer, x, [*lead, channels // factor**2, factor, factor, height, width])
    n = len(lead)
    return reshape_to(tracer, permute(tracer, parts, [*range(n + 1), n + 3, n + 1, n + 4, n + 2]), tracer.sizes)


@rule("pixel_unshuffle")
def pixel_unshuffle(tracer: AxisTracer, x: Value, factor: int) -> Value:
    """Rearrange the pixels of a channel into a block of channels."""
    *lead, channels, height, width = _sizes(tracer, x)
    parts = reshape_to(tracer, x, [*lead, channels, height // factor, factor, width // factor, factor])
    n = len(lead)
    return reshape_to(tracer, permute(tracer, parts, [*range(n + 1), n + 2, n + 4, n + 1, n + 3]), tracer.sizes)


@rule("channel_shuffle", "native_channel_shuffle")
def channel_shuffle(tracer: AxisTracer, x: Value, groups: int) -> Value:
    """Transpose groups and the channels within them."""
    batch, channels, *rest = _sizes(tracer, x)
    parts = reshape_to(tracer, x, [batch, groups, channels // groups, *rest])
    return reshape_to(tracer, permute(tracer, parts, [0, 2, 1, *range(3, parts.ndim)]), tracer.sizes)


@rule("im2col")
def im2col(tracer: AxisTracer, x: Value, kernel: Sequence[int], *_: object) -> Value:
    """Expand each channel to a block of kernel positions; spatial axes are fixed."""
    for term in x.terms[-2:]:
        tracer.labels.fix(term, tracer.why)
    block = tracer.labels.merge([x.terms[-3], tracer.labels.fixed_axis(prod(kernel), tracer.why)])
    terms = (*x.terms[:-3], block, tracer.labels.fixed_axis(tracer.sizes[-1], tracer.why))
    tracer.mark_produced(x)
    return Value(terms, (NOWHERE,) * len(terms), x.data)


@rule("col2im")
def col2im(tracer: AxisTracer, x: Value, output: Sequence[int], kernel: Sequence[int], *_: object) -> Value:
    """Reduce blocks of kernel positions to channels; spatial axes are fixed.

    Args:
        tracer: The tracer of the forward pass.
        x: The input.
        output: The shape of the output image.
        kernel: The shape of the kernel.
    """
    *lead, channels, patches = _sizes(tracer, x)
    parts = reshape_to(tracer, x, [*lead, channels // prod(kernel), prod(kernel), patches])
    for term in parts.terms[-2:]:
        tracer.labels.fix(term, tracer.why)
    terms = (*parts.terms[:-2], *(tracer.labels.fixed_axis(size, tracer.why) for size in output))
    tracer.mark_produced(x)
    return Value(terms, (NOWHERE,) * len(terms), x.data)


@rule("unfold", "unfold_copy")
def unfold(tracer: AxisTracer, x: Value, dim: int, size: int, step: int) -> Value:
    """Fix an axis of windows and add a fixed axis of positions in a window.

    Args:
        tracer: The tracer of the forward pass.
        x: The input.
        dim: The axis.
        size: The size of a window.
        step: The step.
    """
    dim %= x.ndim
    tracer.labels.fix(x.terms[dim], tracer.why)
    windows, places = (tracer.labels.fixed_axis(number, tracer.why) for number in (tracer.sizes[dim], size))
    terms = (*x.terms[:dim], windows, *x.terms[dim + 1 :], places)
    return Value(terms, (*x.origins, NOWHERE), x.data)

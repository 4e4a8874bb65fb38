"""Rules of operations that move values: reshape, transpose, slice, concatenate, expand, pad."""

from __future__ import annotations

from collections.abc import Sequence

from enfold.symmetry.elementwise import pointwise
from enfold.symmetry.space import ONE, Term
from enfold.symmetry.walk import NOWHERE, Place, Value, Values, Walk, one_of, rule


@rule("view", "_unsafe_view", "reshape", "_reshape_alias", "flatten", "unflatten", "view_copy", "_reshape_copy")
def reshape(walk: Walk, x: Value, *_: object) -> Value:
    """The axes that the operation gives."""
    return reshaped(walk, x, walk.sizes)


def reshaped(walk: Walk, x: Value, wanted_sizes: Sequence[int]) -> Value:
    """Neighbouring axes are merged until they have as many places as some of the new ones."""
    terms: list[Term] = []
    origins: list[frozenset[Place]] = []
    old = [(term, origin) for term, origin in zip(x.terms, x.origins, strict=True) if walk.space.size(term) != 1]
    sizes = list(wanted_sizes)
    if 0 in sizes:
        return walk.new(walk.why, sizes)
    while sizes:
        taken, wanted = 1, [sizes.pop(0)]
        product, merged, origin = wanted[0], [], NOWHERE
        while taken != product:
            if taken < product:
                term, source = old.pop(0)
                merged.append(term)
                origin |= source
                taken *= walk.space.size(term)
            else:
                wanted.append(sizes.pop(0))
                product *= wanted[-1]
        found = walk.space.split(walk.space.times(merged), _without_ones(wanted), walk.why) if merged else []
        rest = iter(found)
        terms += [next(rest) if size != 1 else ONE for size in wanted]
        origins += [origin if size != 1 else NOWHERE for size in wanted]
    return Value(tuple(terms), tuple(origins), x.data)


def _without_ones(sizes: list[int]) -> list[int]:
    return [size for size in sizes if size != 1]


@rule("permute", "permute_copy")
def permute(walk: Walk, x: Value, dims: Sequence[int]) -> Value:
    """Axes in another order."""
    return Value(tuple(x.terms[dim] for dim in dims), tuple(x.origins[dim] for dim in dims), x.data)


@rule("transpose", "transpose_copy", "t", "swapaxes")
def transpose(walk: Walk, x: Value, first: int = 0, second: int = 1) -> Value:
    """Two axes exchanged."""
    order = list(range(x.ndim))
    if x.ndim > 1:
        order[first], order[second] = order[second], order[first]
    return permute(walk, x, order)


@rule("unsqueeze", "unsqueeze_copy")
def unsqueeze(walk: Walk, x: Value, dim: int) -> Value:
    """An axis of one place."""
    at = dim % (x.ndim + 1)
    return Value((*x.terms[:at], ONE, *x.terms[at:]), (*x.origins[:at], NOWHERE, *x.origins[at:]), x.data)


@rule("squeeze", "squeeze_copy")
def squeeze(walk: Walk, x: Value, *_: object) -> Value:
    """Axes of one place left out: those that the result lacks."""
    left, keep = list(walk.sizes), []
    for axis, term in enumerate(x.terms):
        size = walk.space.size(term)
        if left and left[0] == size and not (size == 1 and x.ndim - axis > len(left) and _is_squeezed(axis, x, _)):
            keep.append(axis)
            left.pop(0)
    return Value(tuple(x.terms[axis] for axis in keep), tuple(x.origins[axis] for axis in keep), x.data)


def _is_squeezed(axis: int, x: Value, args: Sequence[object]) -> bool:
    dims = args[0] if args else range(x.ndim)
    chosen = [dims] if isinstance(dims, int) else list(dims) if isinstance(dims, Sequence | range) else []
    return axis in [dim % x.ndim for dim in chosen]


@rule("expand", "expand_copy", "broadcast_to")
def expand(walk: Walk, x: Value, *_: object, **__: object) -> Value:
    """Along a new axis all values are the same, so it may be permuted at will."""
    sizes = walk.sizes
    lead = len(sizes) - x.ndim
    terms, origins = [ONE] * lead + list(x.terms), [NOWHERE] * lead + list(x.origins)
    for axis, size in enumerate(sizes):
        if walk.space.size(terms[axis]) != size:
            terms[axis] = walk.space.free(size)
    return Value(tuple(terms), tuple(origins), x.data)


@rule("as_strided")
def as_strided(walk: Walk, x: Value, sizes: Sequence[int], strides: Sequence[int], *_: object) -> Values:
    """Axes stay if they are given the steps that they have, as pooling does to say how its result lies in memory."""
    before = tuple(walk.space.size(term) for term in x.terms)
    if tuple(sizes) == before and all(n == 1 or a == b for n, a, b in zip(sizes, strides, walk.strides, strict=True)):
        return x
    return walk.unknown(x)


@rule("repeat")
def repeat(walk: Walk, x: Value, times: Sequence[int]) -> Value:
    """An axis behind itself."""
    lead = len(times) - x.ndim
    terms, origins = [ONE] * lead + list(x.terms), [NOWHERE] * lead + list(x.origins)
    found = [walk.space.free(n) if walk.space.size(t) == 1 else t * n for t, n in zip(terms, times, strict=True)]
    return Value(tuple(found), tuple(origins), x.data)


@rule("slice", "slice_copy", "narrow")
def slice_(walk: Walk, x: Value, dim: int = 0, start: int | None = 0, end: int | None = None, step: int = 1) -> Value:
    """A part of an axis is cut off; of every second place and the like, pairs are permuted as wholes."""
    term, dim = x.terms[dim], dim % x.ndim
    size, new = walk.space.size(term), walk.sizes[dim]
    if size == new:
        return x
    start = min(max((start or 0) + (size if (start or 0) < 0 else 0), 0), size)
    if step == 1:
        found = walk.space.pieces(term, [start, new, size - start - new], walk.why)[1]
    elif size % step == 0 and start < step and new == size // step > 1:
        found, inner = walk.space.split(term, [new, step], walk.why)
        walk.space.fix(inner, walk.why)
    else:
        walk.space.fix(term, walk.why)
        found = walk.space.fixed(new, walk.why)
    return Value((*x.terms[:dim], found, *x.terms[dim + 1 :]), x.origins, x.data)


@rule("view_as_real", "view_as_real_copy")
def as_real(walk: Walk, x: Value) -> Value:
    """Real and imaginary parts beside each other along a new axis."""
    return Value((*x.terms, walk.space.fixed(2, walk.why)), (*x.origins, NOWHERE), x.data)


@rule("view_as_complex", "view_as_complex_copy")
def as_complex(walk: Walk, x: Value) -> Value:
    """Two places of the last axis are one number."""
    walk.space.fix(x.terms[-1], walk.why)
    return Value(x.terms[:-1], x.origins[:-1], x.data)


@rule("select", "select_copy")
def select(walk: Walk, x: Value, dim: int, index: int) -> Value:
    """One place of an axis; the axis goes."""
    dim %= x.ndim
    terms = walk.space.at(x.terms, dim, index % walk.space.size(x.terms[dim]), walk.why)
    return Value(tuple(terms), x.origins[:dim] + x.origins[dim + 1 :], x.data)


@rule("unbind", "unbind_copy")
def unbind(walk: Walk, x: Value, dim: int = 0) -> tuple[Value, ...]:
    """All places of an axis, one by one."""
    return tuple(select(walk, x, dim, index) for index in range(walk.space.size(x.terms[dim])))


@rule("split_with_sizes", "split", "chunk", "tensor_split", "split_with_sizes_copy", "split_copy")
@rule("unsafe_split", "unsafe_chunk", "unsafe_split_with_sizes")
def split(walk: Walk, x: Value, _: object = None, dim: int = 0) -> tuple[Value, ...]:
    """An axis cut into pieces."""
    dim %= x.ndim
    sizes = [shape[dim] for shape in walk.all_sizes]
    if set(sizes) == {1}:  # told apart like places that are selected
        return tuple(unsqueeze(walk, select(walk, x, dim, index), dim) for index in range(len(sizes)))
    parts = walk.space.pieces(x.terms[dim], sizes, walk.why)
    return tuple(Value((*x.terms[:dim], part, *x.terms[dim + 1 :]), x.origins, x.data) for part in parts)


@rule("glu")
def glu(walk: Walk, x: Value, dim: int = -1) -> Value:
    """Half of an axis, times a gate of the other half."""
    dim %= x.ndim
    halves = walk.space.pieces(x.terms[dim], [walk.sizes[dim]] * 2, walk.why)
    return pointwise(walk, *(Value((*x.terms[:dim], half, *x.terms[dim + 1 :]), x.origins, x.data) for half in halves))


@rule("cat", "concat")
def cat(walk: Walk, values: Sequence[Value], dim: int = 0) -> Value:
    """One axis behind the other; the other axes are the same, if it is used: last states of layers often are not."""
    values = [value for value in values if value.ndim == len(walk.sizes)]
    first, dim = values[0], dim % values[0].ndim
    others = [axis for axis in range(first.ndim) if axis != dim]
    pending = tuple((first.terms[axis], value.terms[axis]) for value in values[1:] for axis in others)
    data = one_of(values)
    terms, origins = (
        list(first.terms),
        [frozenset[Place]().union(*(v.origins[a] for v in values)) for a in range(first.ndim)],
    )
    terms[dim] = tuple(product for value in values for product in value.terms[dim])
    if data:
        for value in values:
            walk.producing(value)
    return Value(tuple(terms), (NOWHERE,) * first.ndim if data else tuple(origins), data, pending=pending)


@rule("stack")
def stack(walk: Walk, values: Sequence[Value], dim: int = 0) -> Value:
    """Values beside each other along a new axis."""
    return cat(walk, [unsqueeze(walk, value, dim) for value in values], dim % (values[0].ndim + 1))


@rule("constant_pad_nd")
def pad(walk: Walk, x: Value, widths: Sequence[int], *_: object) -> Value:
    """Constants before and behind; all are the same, so they may be permuted among themselves."""
    terms = list(x.terms)
    for index in range(len(widths) // 2):
        axis, before, behind = x.ndim - 1 - index, widths[2 * index], widths[2 * index + 1]
        if before < 0 or behind < 0:
            walk.space.fix(terms[axis], walk.why)
            terms[axis] = walk.space.fixed(walk.sizes[axis], walk.why)
        else:
            ends = [walk.space.free(width) if width else () for width in (before, behind)]
            terms[axis] = (*ends[0], *terms[axis], *ends[1])
    return Value(tuple(terms), x.origins, x.data)


@rule("copy", "fill", "zero", "slice_scatter", "select_scatter")
def written(walk: Walk, x: Value, source: object = None, *args: int) -> Value:
    """Values written over others: what is written and where it is written are permuted alike."""

    name = walk.name
    if not isinstance(source, Value):
        return x
    place = slice_like(walk, x, args) if "slice_scatter" in name else x
    if "select_scatter" in name:
        place = select(walk, x, args[0], args[1])
    lead = place.ndim - source.ndim
    for axis, term in enumerate(source.terms):
        walk.unify(place.terms[axis + lead], term)
    if x.data or source.data:
        walk.producing(x)
        walk.producing(source)
    return Value(x.terms, (NOWHERE,) * x.ndim, x.data or source.data)


def slice_like(walk: Walk, x: Value, args: Sequence[int | None]) -> Value:
    """The part that a scattered slice is written to."""
    given = [*args, *(0, 0, None, 1)[len(args) :]]
    dim, step = given[0] or 0, given[3] or 1
    size = walk.space.size(x.terms[dim])
    start, end = (given[1] or 0) % size, min(size if given[2] is None else given[2], size)
    if step != 1:
        walk.space.fix(x.terms[dim], walk.why)
        return Value((*x.terms[:dim], ONE, *x.terms[dim + 1 :]), x.origins, x.data)
    part = walk.space.pieces(x.terms[dim], [start, end - start, size - end], walk.why)[1]
    return Value((*x.terms[:dim], part, *x.terms[dim + 1 :]), x.origins, x.data)

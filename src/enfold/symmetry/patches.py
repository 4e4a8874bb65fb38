"""Rules of operations that lay out channels and places anew: shuffled pixels and channels, unfolded patches."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from enfold.symmetry.moves import permute, reshaped
from enfold.symmetry.walk import NOWHERE, Value, Walk, rule


def _sizes(walk: Walk, x: Value) -> tuple[int, ...]:
    return tuple(walk.space.size(term) for term in x.terms)


@rule("pixel_shuffle")
def pixel_shuffle(walk: Walk, x: Value, factor: int) -> Value:
    """Blocks of channels become the pixels of one."""
    *lead, channels, height, width = _sizes(walk, x)
    parts = reshaped(walk, x, [*lead, channels // factor**2, factor, factor, height, width])
    n = len(lead)
    return reshaped(walk, permute(walk, parts, [*range(n + 1), n + 3, n + 1, n + 4, n + 2]), walk.sizes)


@rule("pixel_unshuffle")
def pixel_unshuffle(walk: Walk, x: Value, factor: int) -> Value:
    """The pixels of a channel become a block of channels."""
    *lead, channels, height, width = _sizes(walk, x)
    parts = reshaped(walk, x, [*lead, channels, height // factor, factor, width // factor, factor])
    n = len(lead)
    return reshaped(walk, permute(walk, parts, [*range(n + 1), n + 2, n + 4, n + 1, n + 3]), walk.sizes)


@rule("channel_shuffle", "native_channel_shuffle")
def channel_shuffle(walk: Walk, x: Value, groups: int) -> Value:
    """The first channels of all groups, then the second ones."""
    batch, channels, *rest = _sizes(walk, x)
    parts = reshaped(walk, x, [batch, groups, channels // groups, *rest])
    return reshaped(walk, permute(walk, parts, [0, 2, 1, *range(3, parts.ndim)]), walk.sizes)


@rule("im2col")
def im2col(walk: Walk, x: Value, kernel: Sequence[int], *_: object) -> Value:
    """Each channel becomes a block of the places of a kernel, and the places it moves over are fixed."""
    for term in x.terms[-2:]:
        walk.space.fix(term, walk.why)
    block = walk.space.times([x.terms[-3], walk.space.fixed(prod(kernel), walk.why)])
    terms = (*x.terms[:-3], block, walk.space.fixed(walk.sizes[-1], walk.why))
    walk.producing(x)
    return Value(terms, (NOWHERE,) * len(terms), x.data)


@rule("col2im")
def col2im(walk: Walk, x: Value, output: Sequence[int], kernel: Sequence[int], *_: object) -> Value:
    """Blocks of the places of a kernel become channels."""
    *lead, channels, patches = _sizes(walk, x)
    parts = reshaped(walk, x, [*lead, channels // prod(kernel), prod(kernel), patches])
    for term in parts.terms[-2:]:
        walk.space.fix(term, walk.why)
    terms = (*parts.terms[:-2], *(walk.space.fixed(size, walk.why) for size in output))
    walk.producing(x)
    return Value(terms, (NOWHERE,) * len(terms), x.data)


@rule("unfold", "unfold_copy")
def unfold(walk: Walk, x: Value, dim: int, size: int, step: int) -> Value:
    """Windows along one axis, which is fixed; their places are a new axis."""
    dim %= x.ndim
    walk.space.fix(x.terms[dim], walk.why)
    windows, places = (walk.space.fixed(number, walk.why) for number in (walk.sizes[dim], size))
    terms = (*x.terms[:dim], windows, *x.terms[dim + 1 :], places)
    return Value(terms, (*x.origins, NOWHERE), x.data)

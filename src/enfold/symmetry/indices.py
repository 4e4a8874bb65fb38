"""Rules of operations that take values from numbered places or put them there: indices, embedding, gather, scatter.

Numbers that come from an axis of units (the largest of them, the nearest of some rows) go with the units: what they
number elsewhere is permuted alike. What other numbers choose from is fixed.
"""

from __future__ import annotations

from collections.abc import Sequence

from enfold.symmetry.space import Term
from enfold.symmetry.walk import NOWHERE, Place, Value, Walk, one_of, rule


@rule("index")
def indexed(walk: Walk, x: Value, indices: Sequence[Value | None]) -> Value:
    """Axes that are indexed go with what numbers them, or are fixed; the others stay, if those were neighbours."""
    given = [index for index in indices if index is not None]
    chosen = [axis for axis, index in enumerate(indices) if index is not None]
    alone = len(given) == 1 and given[0].numbers is not None
    if not alone:
        walk.fix(given, walk.why)
    for axis, index in zip(chosen, given, strict=True):
        walk.numbering(index, x.terms[axis])
    if chosen != list(range(chosen[0], chosen[-1] + 1)):
        walk.fix(x, walk.why)
        return walk.new(walk.why, walk.sizes)
    new = len(walk.sizes) - (x.ndim - len(chosen))
    first, behind = chosen[0], chosen[-1] + 1
    made = tuple(walk.space.fixed(size, walk.why) for size in walk.sizes[first : first + new])
    if alone:
        made = given[0].terms
    terms = (*x.terms[:first], *made, *x.terms[behind:])
    origins: tuple[frozenset[Place], ...] = (*x.origins[:first], *((NOWHERE,) * len(made)), *x.origins[behind:])
    if x.data or one_of(given):
        walk.producing(x)
        return Value(terms, (NOWHERE,) * len(terms))
    return Value(terms, origins, x.data)


@rule("index_select")
def selected(walk: Walk, x: Value, dim: int, index: Value) -> Value:
    """Places of one axis."""
    return indexed(walk, x, [None] * (dim % x.ndim) + [index])


@rule("gather")
def gathered(walk: Walk, x: Value, dim: int, index: Value, **_: object) -> Value:
    """Of each place of the other axes, numbered places of one axis."""
    dim %= x.ndim
    walk.numbering(index, x.terms[dim])
    terms = [term if axis == dim else _alike(walk, x.terms[axis], term) for axis, term in enumerate(index.terms)]
    walk.producing(x)
    return Value(tuple(terms), (NOWHERE,) * len(terms), x.data or index.data)


@rule("scatter", "scatter_add", "scatter_reduce")
def scattered(walk: Walk, x: Value, dim: int, index: Value, source: object = None, *_: object, **__: object) -> Value:
    """Values put at numbered places of one axis; along the others all are permuted alike."""
    dim %= x.ndim
    walk.numbering(index, x.terms[dim])
    others = [index, source] if isinstance(source, Value) else [index]
    for other in others:
        for axis, term in enumerate(other.terms):
            if axis == dim:
                walk.space.fix(term, walk.why)
            else:
                _alike(walk, x.terms[axis], term)
        walk.producing(other)
    walk.producing(x)
    return Value(x.terms, (NOWHERE,) * x.ndim, one_of([x, *others]))


def _alike(walk: Walk, one: Term, other: Term) -> Term:
    """Places with the same number; where there are fewer of one, these are the first."""
    if walk.space.size(one) != walk.space.size(other):
        walk.space.fix(one, walk.why)
        walk.space.fix(other, walk.why)
        return other
    return walk.unify(other, one)


@rule("index_add", "index_copy", "index_reduce")
def at_indices(walk: Walk, x: Value, dim: int, index: Value, source: Value, *_: object, **__: object) -> Value:
    """Values put at numbered places of one axis, which is fixed; along the others both are permuted alike."""
    walk.fix(index, walk.why)
    for axis, (one, other) in enumerate(zip(x.terms, source.terms, strict=True)):
        if axis == dim % x.ndim:
            walk.space.fix(one, walk.why)
            walk.space.fix(other, walk.why)
        else:
            walk.unify(one, other)
    walk.producing(x)
    walk.producing(source)
    return Value(x.terms, (NOWHERE,) * x.ndim)


@rule("embedding")
def embedding(walk: Walk, weight: Value, indices: Value, *_: object) -> Value:
    """Rows are numbered by the input, or by other units; columns are units."""
    if indices.numbers is None:
        walk.space.fix(weight.terms[0], "the network's inputs number them")
    else:
        walk.numbering(indices, weight.terms[0])
    walk.producing(weight)
    terms = (*indices.terms, weight.terms[1])
    return Value(terms, (NOWHERE,) * len(terms), indices.data)


@rule("embedding_renorm")
def renormed(walk: Walk, weight: Value, indices: Value, *_: object) -> Value:
    """Rows that the input numbers are scaled by their norm."""
    walk.space.fix(weight.terms[0], "the network's inputs number them")
    return weight


@rule("_embedding_bag_forward_only", "_embedding_bag", "embedding_bag")
def embedding_bag(walk: Walk, weight: Value, indices: Value, *rest: object) -> tuple[Value, ...]:
    """Rows are numbered by the input; columns are units."""
    walk.space.fix(weight.terms[0], "the network's inputs number them")
    walk.fix([indices, *rest], walk.why)
    walk.producing(weight)
    sizes = walk.all_sizes
    bags = Value((walk.space.fixed(sizes[0][0], walk.why), weight.terms[1]), (NOWHERE,) * 2)
    return (bags, *(walk.new(walk.why, shape) for shape in sizes[1:]))

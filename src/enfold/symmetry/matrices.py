"""Rules of operations on square matrices, whose rows and columns are often the same units: diagonals, inverses."""

from __future__ import annotations

from enfold.symmetry.walk import NOWHERE, Value, Values, Walk, rule


@rule("eye")
def eye(walk: Walk, *_: object, **__: object) -> Value:
    """Rows and columns are permuted alike."""
    if walk.sizes[0] != walk.sizes[1]:
        return walk.new(walk.why, walk.sizes, data=False)
    return Value((walk.space.free(walk.sizes[0]),) * 2, (NOWHERE,) * 2, data=False)


@rule("diagonal", "diagonal_copy")
def diagonal(walk: Walk, x: Value, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Value:
    """Two axes are seen as one."""
    axes = [dim1 % x.ndim, dim2 % x.ndim]
    one, other = (x.terms[axis] for axis in axes)
    if offset or walk.space.size(one) != walk.space.size(other):
        walk.fix(Value((one, other), (NOWHERE,) * 2), walk.why)
        one = walk.space.fixed(walk.sizes[-1], walk.why)
    else:
        walk.unify(one, other)
    kept = [axis for axis in range(x.ndim) if axis not in axes]
    origin = x.origins[axes[0]] | x.origins[axes[1]]
    return Value((*(x.terms[axis] for axis in kept), one), (*(x.origins[axis] for axis in kept), origin), x.data)


@rule("diag_embed")
def diag_embed(walk: Walk, x: Value, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Value:
    """One axis becomes two, with zeros between."""
    term, origin = x.terms[-1], x.origins[-1]
    if offset:
        walk.space.fix(term, walk.why)
        term = walk.space.fixed(walk.sizes[dim1], walk.why)
    terms, origins = list(x.terms[:-1]), list(x.origins[:-1])
    for axis in sorted(dim % (x.ndim + 1) for dim in (dim1, dim2)):
        terms.insert(axis, term)
        origins.insert(axis, origin)
    return Value(tuple(terms), tuple(origins), x.data)


@rule("trace", "_linalg_det", "_linalg_slogdet")
def of_square(walk: Walk, x: Value) -> Values:
    """A number of each matrix, if its rows and columns are permuted alike."""
    _mixed(walk, x)
    walk.unify(x.terms[-2], x.terms[-1])
    found = Value(x.terms[:-2], (NOWHERE,) * (x.ndim - 2), x.data)
    if walk.name == "trace":
        return found
    results = 2 if walk.name == "_linalg_slogdet" else 1
    return (*(found,) * results, *(walk.new(walk.why, sizes) for sizes in walk.all_sizes[results:]))


@rule("linalg_matrix_exp")
def matrix_exp(walk: Walk, x: Value) -> Value:
    """Rows and columns are permuted alike."""
    _mixed(walk, x)
    walk.unify(x.terms[-2], x.terms[-1])
    return Value(x.terms, (NOWHERE,) * x.ndim, x.data)


@rule("linalg_inv_ex")
def inverse(walk: Walk, x: Value, **_: object) -> Values:
    """Columns become rows."""
    _mixed(walk, x)
    found = Value((*x.terms[:-2], x.terms[-1], x.terms[-2]), (NOWHERE,) * x.ndim, x.data)
    return found, walk.new(walk.why, walk.all_sizes[1])


@rule("_linalg_solve_ex")
def solution(walk: Walk, x: Value, y: Value, *, left: bool = True, **_: object) -> Values:
    """An inverse times the right side."""
    if not left or y.ndim != x.ndim:
        return walk.unknown(x, y)
    _mixed(walk, x)
    lead = tuple(walk.unify(one, other) for one, other in zip(x.terms[:-2], y.terms[:-2], strict=True))
    walk.unify(x.terms[-2], y.terms[-2])
    walk.producing(y)
    found = Value((*lead, x.terms[-1], y.terms[-1]), (NOWHERE,) * x.ndim, x.data or y.data)
    return (found, *(walk.new(walk.why, sizes) for sizes in walk.all_sizes[1:]))


def _mixed(walk: Walk, x: Value) -> None:
    """All rows and columns are needed for each value."""
    walk.mixing(x, [-1])
    walk.mixing(x, [-2])
    walk.producing(x)

"""Rules of operations on square matrices, whose rows and columns often index the same units: diagonals, inverses."""

from __future__ import annotations

from enfold.symmetry.tracer import NOWHERE, AxisTracer, Value, Values, rule


@rule("eye")
def eye(tracer: AxisTracer, *_: object, **__: object) -> Value:
    """Label rows and columns with the same permutation."""
    if tracer.sizes[0] != tracer.sizes[1]:
        return tracer.new(tracer.why, tracer.sizes, data=False)
    return Value((tracer.labels.free(tracer.sizes[0]),) * 2, (NOWHERE,) * 2, data=False)


@rule("diagonal", "diagonal_copy")
def diagonal(tracer: AxisTracer, x: Value, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Value:
    """Unify two axes into one.

    Args:
        tracer: The tracer of the forward pass.
        x: The input.
        offset: The offset of the diagonal.
        dim1: The first axis.
        dim2: The second axis.
    """
    axes = [dim1 % x.ndim, dim2 % x.ndim]
    one, other = (x.terms[axis] for axis in axes)
    if offset or tracer.labels.size(one) != tracer.labels.size(other):
        tracer.fix(Value((one, other), (NOWHERE,) * 2), tracer.why)
        one = tracer.labels.fixed_axis(tracer.sizes[-1], tracer.why)
    else:
        tracer.unify(one, other)
    rest = [axis for axis in range(x.ndim) if axis not in axes]
    origin = x.origins[axes[0]] | x.origins[axes[1]]
    return Value((*(x.terms[axis] for axis in rest), one), (*(x.origins[axis] for axis in rest), origin), x.data)


@rule("diag_embed")
def diag_embed(tracer: AxisTracer, x: Value, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Value:
    """Duplicate one axis; the other entries are zero.

    Args:
        tracer: The tracer of the forward pass.
        x: The input.
        offset: The offset of the diagonal.
        dim1: The first axis.
        dim2: The second axis.
    """
    term, origin = x.terms[-1], x.origins[-1]
    if offset:
        tracer.labels.fix(term, tracer.why)
        term = tracer.labels.fixed_axis(tracer.sizes[dim1], tracer.why)
    terms, origins = list(x.terms[:-1]), list(x.origins[:-1])
    for axis in sorted(dim % (x.ndim + 1) for dim in (dim1, dim2)):
        terms.insert(axis, term)
        origins.insert(axis, origin)
    return Value(tuple(terms), tuple(origins), x.data)


@rule("trace", "_linalg_det", "_linalg_slogdet")
def matrix_scalar(tracer: AxisTracer, x: Value) -> Values:
    """Unify rows and columns, which leaves the scalar of each matrix invariant."""
    _mark_square(tracer, x)
    tracer.unify(x.terms[-2], x.terms[-1])
    found = Value(x.terms[:-2], (NOWHERE,) * (x.ndim - 2), x.data)
    if tracer.name == "trace":
        return found
    results = 2 if tracer.name == "_linalg_slogdet" else 1
    return (*(found,) * results, *(tracer.new(tracer.why, sizes) for sizes in tracer.all_sizes[results:]))


@rule("linalg_matrix_exp")
def matrix_exp(tracer: AxisTracer, x: Value) -> Value:
    """Unify rows and columns."""
    _mark_square(tracer, x)
    tracer.unify(x.terms[-2], x.terms[-1])
    return Value(x.terms, (NOWHERE,) * x.ndim, x.data)


@rule("linalg_inv_ex")
def inverse(tracer: AxisTracer, x: Value, **_: object) -> Values:
    """Exchange the labels of rows and columns."""
    _mark_square(tracer, x)
    found = Value((*x.terms[:-2], x.terms[-1], x.terms[-2]), (NOWHERE,) * x.ndim, x.data)
    return found, tracer.new(tracer.why, tracer.all_sizes[1])


@rule("_linalg_solve_ex")
def solve(tracer: AxisTracer, x: Value, y: Value, *, left: bool = True, **_: object) -> Values:
    """Label the result as the inverse times the right-hand side.

    Args:
        tracer: The tracer of the forward pass.
        x: The matrix.
        y: The right-hand side.
        left: Whether the inverse is the left factor.
    """
    if not left or y.ndim != x.ndim:
        return tracer.fix_all(x, y)
    _mark_square(tracer, x)
    lead = tuple(tracer.unify(one, other) for one, other in zip(x.terms[:-2], y.terms[:-2], strict=True))
    tracer.unify(x.terms[-2], y.terms[-2])
    tracer.mark_produced(y)
    found = Value((*lead, x.terms[-1], y.terms[-1]), (NOWHERE,) * x.ndim, x.data or y.data)
    return (found, *(tracer.new(tracer.why, sizes) for sizes in tracer.all_sizes[1:]))


def _mark_square(tracer: AxisTracer, x: Value) -> None:
    """Mark rows and columns as mixed: every result depends on all of them."""
    tracer.mark_mixed(x, [-1])
    tracer.mark_mixed(x, [-2])
    tracer.mark_produced(x)

"""Rules of operations that keep axes or reduce them: element-wise functions, sums, softmax, pooling, constants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from enfold.symmetry.space import ONE
from enfold.symmetry.walk import NOWHERE, Value, Values, Walk, one_of, rule

PLACED = ("max", "min", "median", "nanmedian", "mode", "kthvalue")  # they also say where they found it


@rule("pointwise", "where", "masked_fill", "addcmul", "addcdiv", "lerp", "_to_copy", "dropout", "gelu", "to")
@rule(
    "clone", "alias", "detach", "contiguous", "lift_fresh", "lift_fresh_copy", "native_dropout", "copy_to", "add_relu"
)
@rule("hardtanh", "leaky_relu", "elu", "celu", "selu", "softplus", "_prelu_kernel", "prelu", "log_sigmoid_forward")
@rule("complex", "polar", "_conj", "_conj_physical", "_neg_view", "resolve_conj", "resolve_neg")
@rule("cumsum_free", "rsub", "sub", "add", "mul", "div", "pow", "bitwise_and", "type_as", "hardswish", "hardsigmoid")
def pointwise(walk: Walk, *args: object, **_: object) -> Value:
    """Axes are aligned at the end, and where neither has a single place they are permuted alike."""
    values = [value for value in args if isinstance(value, Value)]
    ndim = max((value.ndim for value in values), default=0)
    data = one_of(values)
    terms, origins = [ONE] * ndim, [NOWHERE] * ndim
    for value in values:
        lead = ndim - value.ndim
        for axis, term in enumerate(value.terms):
            terms[axis + lead] = walk.unify(terms[axis + lead], term)
            origins[axis + lead] = origins[axis + lead] | value.origins[axis]
        if data:
            walk.producing(value)
    return Value(tuple(terms), (NOWHERE,) * ndim if data else tuple(origins), data)


@rule("sum", "mean", "amax", "amin", "var", "std", "prod", "logsumexp", "linalg_vector_norm", "any", "all", "norm")
@rule("max", "min", "var_mean", "std_mean", "aminmax", "median", "nanmedian", "mode", "kthvalue", "nansum")
@rule("count_nonzero")
def reduced(walk: Walk, x: Value, *args: object, **kwargs: object) -> Values:
    """What is reduced does not depend on the order; axes that stay keep their labels."""
    sizes = walk.all_sizes
    if args and isinstance(args[0], Value):  # the larger of two
        return pointwise(walk, x, *args)
    keep = _kept(walk, x, sizes[0], args, kwargs)
    if keep is None:
        return walk.unknown([x])
    terms = tuple(ONE if axis is None else x.terms[axis] for axis in keep)
    origins = tuple(NOWHERE if axis is None or x.data else x.origins[axis] for axis in keep)
    found = Value(terms, origins, x.data)
    if len(sizes) == 1:
        return found
    if walk.name in PLACED:  # the second is where it was found
        dim = _dim(args[1:] if walk.name == "kthvalue" else args, kwargs)
        return found, replace(found, numbers=x.terms[dim % x.ndim], data=True, constant=False)
    return (found,) * len(sizes)


def _dim(args: Sequence[object], kwargs: dict[str, object]) -> int:
    dim = args[0] if args else kwargs.get("dim", -1)
    return dim if isinstance(dim, int) else -1


@rule("argmax", "argmin")
def numbered(walk: Walk, x: Value, dim: int | None = None, keepdim: bool = False) -> Values:
    """The place of the largest value numbers an axis."""
    if dim is None:
        return walk.unknown(x)
    dim %= x.ndim
    terms = (*x.terms[:dim], *((ONE,) if keepdim else ()), *x.terms[dim + 1 :])
    return Value(terms, (NOWHERE,) * len(terms), numbers=x.terms[dim])


@rule("topk", "sort")
def ranked(walk: Walk, x: Value, *args: object, **kwargs: object) -> Values:
    """Ranks have an order of their own; where the values came from numbers the axis."""
    given = args[1:] if walk.name == "topk" else args
    dim = _dim(given, kwargs) % x.ndim
    terms = (*x.terms[:dim], walk.space.fixed(walk.sizes[dim], walk.why), *x.terms[dim + 1 :])
    found = Value(terms, (NOWHERE,) * x.ndim)
    return found, replace(found, numbers=x.terms[dim])


@rule("_weight_norm_interface")
def weight_norm(walk: Walk, direction: Value, length: Value, dim: int = 0) -> Values:
    """A length for each place of one axis."""
    return pointwise(walk, direction, length), length


def _kept(
    walk: Walk, x: Value, sizes: Sequence[int], args: Sequence[object], kwargs: dict[str, object]
) -> list[int | None] | None:
    """For each axis of the result, the axis that it was; None for an axis that was reduced to one place."""
    at = 1 if walk.name in ("linalg_vector_norm", "norm", "kthvalue") else 0
    dims = args[at] if len(args) > at else kwargs.get("dim", -1 if walk.name in ("kthvalue", "mode") else None)
    chosen = [dims] if isinstance(dims, int) and not isinstance(dims, bool) else dims
    if not isinstance(chosen, list | tuple) or not chosen:
        chosen = range(x.ndim)
    gone = {int(dim) % x.ndim for dim in chosen if isinstance(dim, int)}
    if len(sizes) == x.ndim:
        return [None if axis in gone else axis for axis in range(x.ndim)]
    kept = [axis for axis in range(x.ndim) if axis not in gone]
    return [*kept] if len(kept) == len(sizes) else None


@rule("_softmax", "_log_softmax", "softmax", "log_softmax", "_safe_softmax")
def softmax(walk: Walk, x: Value, dim: int, *_: object, **__: object) -> Value:
    """A softmax follows any order of what it normalises."""
    walk.mixing(x, [dim])
    return pointwise(walk, x)


@rule("max_pool2d_with_indices", "avg_pool2d", "_adaptive_avg_pool2d", "adaptive_max_pool2d", "upsample_bilinear2d")
@rule(
    "max_pool2d",
    "upsample_nearest2d",
    "reflection_pad2d",
    "replication_pad2d",
    "upsample_bicubic2d",
    "adaptive_avg_pool2d",
)
@rule("_upsample_nearest_exact2d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa", "grid_sampler_2d")
@rule("tril", "triu", "linalg_cholesky_ex", "linalg_qr")
def over_two(walk: Walk, x: Value, *others: object, **_: object) -> Values:
    """Two axes at the end are moved over, and fixed."""
    return _moved_over(walk, x, 2, others)


@rule("max_pool1d", "avg_pool1d", "adaptive_avg_pool1d", "reflection_pad1d", "upsample_nearest1d", "upsample_linear1d")
@rule("replication_pad1d", "_upsample_nearest_exact1d")
def over_one(walk: Walk, x: Value, *others: object, **_: object) -> Values:
    """The last axis is moved over, and fixed."""
    return _moved_over(walk, x, 1, others)


@rule("max_pool3d_with_indices", "avg_pool3d", "_adaptive_avg_pool3d", "upsample_nearest3d", "adaptive_max_pool3d")
@rule("reflection_pad3d", "replication_pad3d", "_upsample_nearest_exact3d", "upsample_trilinear3d", "grid_sampler_3d")
def over_three(walk: Walk, x: Value, *others: object, **_: object) -> Values:
    """Three axes at the end are moved over, and fixed."""
    return _moved_over(walk, x, 3, others)


def _moved_over(walk: Walk, x: Value, number: int, others: Sequence[object]) -> Values:
    walk.fix(list(others), walk.why)
    for term in x.terms[-number:]:
        walk.space.fix(term, walk.why)
    moved = tuple(walk.space.fixed(size, walk.why) for size in walk.sizes[-number:])
    found = Value((*x.terms[:-number], *moved), (NOWHERE,) * x.ndim)
    walk.producing(x)
    rest = (found if sizes == walk.sizes else walk.new(walk.why, sizes) for sizes in walk.all_sizes[1:])
    return (found, *rest) if len(walk.all_sizes) > 1 else found


@rule("max_unpool2d", "max_unpool3d")
def unpooled(walk: Walk, x: Value, places: Value, *_: object) -> Values:
    """Values are put back to where they were found among the places that pooling moved over."""
    return _moved_over(walk, pointwise(walk, x, places), 3 if walk.name.endswith("3d") else 2, ())


@rule("rrelu_with_noise")
def rrelu(walk: Walk, x: Value, noise: Value, *args: object, **kwargs: object) -> Values:
    """Without training it is a leaky ReLU, and the noise is not looked at."""
    training = args[2] if len(args) > 2 else kwargs.get("training", False)
    return walk.unknown(x, noise) if training else pointwise(walk, x)


@rule("mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits", "dist")
def compared(walk: Walk, *args: object, **_: object) -> Value:
    """Differences one by one, or one number for all of them."""
    found = pointwise(walk, *args)
    return found if walk.sizes else Value((), (), found.data)


@rule("bucketize")
def bucketed(walk: Walk, x: Value, bounds: Value, **_: object) -> Value:
    """Where each value lies between bounds, which have an order."""
    walk.fix(bounds, walk.why)
    return pointwise(walk, x)


@rule("renorm")
def renormed(walk: Walk, x: Value, p: float, dim: int, *_: object) -> Value:
    """Each place of one axis is scaled by the norm of what it holds."""
    walk.mixing(x, [axis for axis in range(x.ndim) if axis != dim % x.ndim])
    return pointwise(walk, x)


@rule("linalg_cross")
def cross(walk: Walk, x: Value, y: Value, *, dim: int = -1) -> Value:
    """Three places of one axis, which are fixed; along the others both are permuted alike."""
    found = pointwise(walk, x, y)
    walk.space.fix(found.terms[dim], walk.why)
    return found


@rule("_fft_r2c", "_fft_c2c", "_fft_c2r")
def transformed(walk: Walk, x: Value, dims: Sequence[int], *_: object) -> Values:
    """Axes that are transformed are mixed, and fixed; the others stay."""
    walk.mixing(x, dims)
    return along(walk, x, dims)


@rule("flip", "roll", "cumsum", "cumprod", "logcumsumexp", "cummax", "cummin", "argsort", "diff", "index_fill")
def along(walk: Walk, x: Value, *args: object, **_: object) -> Values:
    """Axes that are named are moved along, and fixed; the others stay."""
    named = args[-1] if walk.name == "roll" else args[0] if args else None
    chosen = [named] if isinstance(named, int) else named if isinstance(named, list | tuple) else []
    dims = {int(dim) % x.ndim for dim in chosen or range(x.ndim)}
    terms = list(x.terms)
    for axis, size in enumerate(walk.sizes):
        if axis in dims or walk.space.size(terms[axis]) != size:
            walk.space.fix(terms[axis], walk.why)
            terms[axis] = walk.space.fixed(size, walk.why)
    walk.fix([one for one in args if isinstance(one, Value)], walk.why)
    found = Value(tuple(terms), x.origins if not x.data else (NOWHERE,) * x.ndim, x.data)
    return (found,) * len(walk.all_sizes) if len(walk.all_sizes) > 1 else found


@rule("full", "zeros", "ones", "full_like", "zeros_like", "ones_like", "new_zeros", "new_ones", "new_full", "empty")
@rule("scalar_tensor", "new_empty", "empty_like", "new_empty_strided", "empty_strided")
def constant(walk: Walk, *_: object, **__: object) -> Value:
    """The same value everywhere may be permuted at will."""
    return walk.new(None, walk.sizes, data=False)

"""Rules of operations that preserve or reduce axes: element-wise functions, sums, softmax, pooling, constants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from enfold.symmetry.labels import ONE
from enfold.symmetry.tracer import NOWHERE, AxisTracer, Value, Values, any_data, rule

WITH_INDICES = ("max", "min", "median", "nanmedian", "mode", "kthvalue")  # they also return indices


@rule("pointwise", "where", "masked_fill", "addcmul", "addcdiv", "lerp", "_to_copy", "dropout", "gelu", "to")
@rule(
    "clone", "alias", "detach", "contiguous", "lift_fresh", "lift_fresh_copy", "native_dropout", "copy_to", "add_relu"
)
@rule("hardtanh", "leaky_relu", "elu", "celu", "selu", "softplus", "_prelu_kernel", "prelu", "log_sigmoid_forward")
@rule("complex", "polar", "_conj", "_conj_physical", "_neg_view", "resolve_conj", "resolve_neg")
@rule("cumsum_free", "rsub", "sub", "add", "mul", "div", "pow", "bitwise_and", "type_as", "hardswish", "hardsigmoid")
def pointwise(tracer: AxisTracer, *args: object, **_: object) -> Value:
    """Unify the axes of all arguments, aligned at the last axis; axes of size 1 broadcast."""
    values = [value for value in args if isinstance(value, Value)]
    ndim = max((value.ndim for value in values), default=0)
    data = any_data(values)
    terms, origins = [ONE] * ndim, [NOWHERE] * ndim
    for value in values:
        lead = ndim - value.ndim
        for axis, term in enumerate(value.terms):
            terms[axis + lead] = tracer.unify(terms[axis + lead], term)
            origins[axis + lead] = origins[axis + lead] | value.origins[axis]
        if data:
            tracer.mark_produced(value)
    return Value(tuple(terms), (NOWHERE,) * ndim if data else tuple(origins), data)


@rule("sum", "mean", "amax", "amin", "var", "std", "prod", "logsumexp", "linalg_vector_norm", "any", "all", "norm")
@rule("max", "min", "var_mean", "std_mean", "aminmax", "median", "nanmedian", "mode", "kthvalue", "nansum")
@rule("count_nonzero")
def reduction(tracer: AxisTracer, x: Value, *args: object, **kwargs: object) -> Values:
    """Remove reduced axes, over which the result is invariant; the labels of other axes are unchanged."""
    sizes = tracer.all_sizes
    if args and isinstance(args[0], Value):  # element-wise maximum or minimum
        return pointwise(tracer, x, *args)
    keep = _result_axes(tracer, x, sizes[0], args, kwargs)
    if keep is None:
        return tracer.fix_all([x])
    terms = tuple(ONE if axis is None else x.terms[axis] for axis in keep)
    origins = tuple(NOWHERE if axis is None or x.data else x.origins[axis] for axis in keep)
    found = Value(terms, origins, x.data)
    if len(sizes) == 1:
        return found
    if tracer.name in WITH_INDICES:
        dim = _dim(args[1:] if tracer.name == "kthvalue" else args, kwargs)
        return found, replace(found, numbers=x.terms[dim % x.ndim], data=True, constant=False)
    return (found,) * len(sizes)


def _dim(args: Sequence[object], kwargs: dict[str, object]) -> int:
    dim = args[0] if args else kwargs.get("dim", -1)
    return dim if isinstance(dim, int) else -1


@rule("argmax", "argmin")
def arg_extremum(tracer: AxisTracer, x: Value, dim: int | None = None, keepdim: bool = False) -> Values:
    """Return indices into the reduced axis.

    Args:
        tracer: The tracer of the forward pass.
        x: The input.
        dim: The axis.
        keepdim: Whether the reduced axis remains, with size 1.
    """
    if dim is None:
        return tracer.fix_all(x)
    dim %= x.ndim
    terms = (*x.terms[:dim], *((ONE,) if keepdim else ()), *x.terms[dim + 1 :])
    return Value(terms, (NOWHERE,) * len(terms), numbers=x.terms[dim])


@rule("topk", "sort")
def sort_values(tracer: AxisTracer, x: Value, *args: object, **kwargs: object) -> Values:
    """Fix the sorted axis; the second result are indices into the original axis."""
    given = args[1:] if tracer.name == "topk" else args
    dim = _dim(given, kwargs) % x.ndim
    terms = (*x.terms[:dim], tracer.labels.fixed_axis(tracer.sizes[dim], tracer.why), *x.terms[dim + 1 :])
    found = Value(terms, (NOWHERE,) * x.ndim)
    return found, replace(found, numbers=x.terms[dim])


@rule("_weight_norm_interface")
def weight_norm(tracer: AxisTracer, direction: Value, length: Value, dim: int = 0) -> Values:
    """Unify the direction with the norms along one axis.

    Args:
        tracer: The tracer of the forward pass.
        direction: The direction of the weight.
        length: The norms.
        dim: The axis.
    """
    return pointwise(tracer, direction, length), length


def _result_axes(
    tracer: AxisTracer, x: Value, sizes: Sequence[int], args: Sequence[object], kwargs: dict[str, object]
) -> list[int | None] | None:
    """Return the original axis of each axis of the result; None for an axis that was reduced to size 1."""
    at = 1 if tracer.name in ("linalg_vector_norm", "norm", "kthvalue") else 0
    dims = args[at] if len(args) > at else kwargs.get("dim", -1 if tracer.name in ("kthvalue", "mode") else None)
    chosen = [dims] if isinstance(dims, int) and not isinstance(dims, bool) else dims
    if not isinstance(chosen, list | tuple) or not chosen:
        chosen = range(x.ndim)
    gone = {int(dim) % x.ndim for dim in chosen if isinstance(dim, int)}
    if len(sizes) == x.ndim:
        return [None if axis in gone else axis for axis in range(x.ndim)]
    rest = [axis for axis in range(x.ndim) if axis not in gone]
    return [*rest] if len(rest) == len(sizes) else None


@rule("_softmax", "_log_softmax", "softmax", "log_softmax", "_safe_softmax")
def softmax(tracer: AxisTracer, x: Value, dim: int, *_: object, **__: object) -> Value:
    """Mark the normalized axis as mixed; softmax is equivariant to its permutations."""
    tracer.mark_mixed(x, [dim])
    return pointwise(tracer, x)


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
def pool_2d(tracer: AxisTracer, x: Value, *others: object, **_: object) -> Values:
    """Fix the last two axes, the spatial ones."""
    return _pool(tracer, x, 2, others)


@rule("max_pool1d", "avg_pool1d", "adaptive_avg_pool1d", "reflection_pad1d", "upsample_nearest1d", "upsample_linear1d")
@rule("replication_pad1d", "_upsample_nearest_exact1d")
def pool_1d(tracer: AxisTracer, x: Value, *others: object, **_: object) -> Values:
    """Fix the last axis, the spatial one."""
    return _pool(tracer, x, 1, others)


@rule("max_pool3d_with_indices", "avg_pool3d", "_adaptive_avg_pool3d", "upsample_nearest3d", "adaptive_max_pool3d")
@rule("reflection_pad3d", "replication_pad3d", "_upsample_nearest_exact3d", "upsample_trilinear3d", "grid_sampler_3d")
def pool_3d(tracer: AxisTracer, x: Value, *others: object, **_: object) -> Values:
    """Fix the last three axes, the spatial ones."""
    return _pool(tracer, x, 3, others)


def _pool(tracer: AxisTracer, x: Value, number: int, others: Sequence[object]) -> Values:
    tracer.fix(list(others), tracer.why)
    for term in x.terms[-number:]:
        tracer.labels.fix(term, tracer.why)
    moved = tuple(tracer.labels.fixed_axis(size, tracer.why) for size in tracer.sizes[-number:])
    found = Value((*x.terms[:-number], *moved), (NOWHERE,) * x.ndim)
    tracer.mark_produced(x)
    rest = (found if sizes == tracer.sizes else tracer.new(tracer.why, sizes) for sizes in tracer.all_sizes[1:])
    return (found, *rest) if len(tracer.all_sizes) > 1 else found


@rule("max_unpool2d", "max_unpool3d")
def unpool(tracer: AxisTracer, x: Value, places: Value, *_: object) -> Values:
    """Fix the spatial axes, as pooling."""
    return _pool(tracer, pointwise(tracer, x, places), 3 if tracer.name.endswith("3d") else 2, ())


@rule("rrelu_with_noise")
def rrelu(tracer: AxisTracer, x: Value, noise: Value, *args: object, **kwargs: object) -> Values:
    """Treat it as a leaky ReLU in eval mode, in which the noise is unused; fix all axes in training."""
    training = args[2] if len(args) > 2 else kwargs.get("training", False)
    return tracer.fix_all(x, noise) if training else pointwise(tracer, x)


@rule("mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits", "dist")
def elementwise_loss(tracer: AxisTracer, *args: object, **_: object) -> Value:
    """Unify the axes of inputs and targets; a reduced loss has no axes."""
    found = pointwise(tracer, *args)
    return found if tracer.sizes else Value((), (), found.data)


@rule("bucketize")
def bucketize(tracer: AxisTracer, x: Value, bounds: Value, **_: object) -> Value:
    """Fix the boundaries, which are ordered."""
    tracer.fix(bounds, tracer.why)
    return pointwise(tracer, x)


@rule("renorm")
def renorm(tracer: AxisTracer, x: Value, p: float, dim: int, *_: object) -> Value:
    """Mark all axes but one as mixed, over which norms are computed.

    Args:
        tracer: The tracer of the forward pass.
        x: The input.
        p: The order of the norm.
        dim: The axis.
    """
    tracer.mark_mixed(x, [axis for axis in range(x.ndim) if axis != dim % x.ndim])
    return pointwise(tracer, x)


@rule("linalg_cross")
def cross(tracer: AxisTracer, x: Value, y: Value, *, dim: int = -1) -> Value:
    """Fix the axis of size 3 and unify the others.

    Args:
        tracer: The tracer of the forward pass.
        x: The input.
        y: The second input.
        dim: The axis.
    """
    found = pointwise(tracer, x, y)
    tracer.labels.fix(found.terms[dim], tracer.why)
    return found


@rule("_fft_r2c", "_fft_c2c", "_fft_c2r")
def fft(tracer: AxisTracer, x: Value, dims: Sequence[int], *_: object) -> Values:
    """Mark the transformed axes as mixed and fix them."""
    tracer.mark_mixed(x, dims)
    return along_axes(tracer, x, dims)


@rule("flip", "roll", "cumsum", "cumprod", "logcumsumexp", "cummax", "cummin", "argsort", "diff", "index_fill")
def along_axes(tracer: AxisTracer, x: Value, *args: object, **_: object) -> Values:
    """Fix the axes that the operation runs along; the others are unchanged."""
    named = args[-1] if tracer.name == "roll" else args[0] if args else None
    chosen = [named] if isinstance(named, int) else named if isinstance(named, list | tuple) else []
    dims = {int(dim) % x.ndim for dim in chosen or range(x.ndim)}
    terms = list(x.terms)
    for axis, size in enumerate(tracer.sizes):
        if axis in dims or tracer.labels.size(terms[axis]) != size:
            tracer.labels.fix(terms[axis], tracer.why)
            terms[axis] = tracer.labels.fixed_axis(size, tracer.why)
    tracer.fix([one for one in args if isinstance(one, Value)], tracer.why)
    found = Value(tuple(terms), x.origins if not x.data else (NOWHERE,) * x.ndim, x.data)
    return (found,) * len(tracer.all_sizes) if len(tracer.all_sizes) > 1 else found


@rule("full", "zeros", "ones", "full_like", "zeros_like", "ones_like", "new_zeros", "new_ones", "new_full", "empty")
@rule("scalar_tensor", "new_empty", "empty_like", "new_empty_strided", "empty_strided")
def constant(tracer: AxisTracer, *_: object, **__: object) -> Value:
    """Label all axes as free: a constant is invariant to permutations."""
    return tracer.new(None, tracer.sizes, data=False)

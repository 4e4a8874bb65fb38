"""Reduced precision: 8-bit integers by ONNX Runtime's quantizer, and weights in half precision.

    dynamic      weights of linear layers as int8; activations are quantized in each call, by their range
    static       weights and activations of linear layers and convolutions as int8, with ranges from calibration data
    fp16, bf16   ONNX: weights are stored in 16 bits and computed with in float32; torch.export: all in 16 bits

What follows the last layer with weights, such as probabilities and entropies, stays in float32.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from enfold.errors import EnfoldError
from enfold.export.trace import quiet

Quantize = Literal["dynamic", "static", "fp16", "bf16"]
KINDS: tuple[Quantize, ...] = ("dynamic", "static", "fp16", "bf16")
HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}
SMALLEST = 256  # numbers in a tensor whose precision is reduced
PRODUCTS = ("Gemm", "MatMul")
LAYERS = (*PRODUCTS, "Conv", "ConvTranspose")
AROUND = ("Add", "Relu", "MaxPool", "AveragePool", "GlobalAveragePool", "Clip")  # between layers: remain in integers


def check_quantize(kind: Any, suffix: str, calibrate_on: Any) -> None:
    """Refuse an unknown precision, one that the format does not have, and missing calibration data.

    Raises:
        EnfoldError: With the argument.
    """
    if kind is None:
        if calibrate_on is not None:
            raise EnfoldError('calibrate_on is for quantize="static", got quantize=None: leave it out')
        return
    if kind not in KINDS:
        raise EnfoldError(f"quantize must be one of {', '.join(KINDS)} or None, got {kind!r}: change quantize")
    if suffix == "safetensors" or (suffix == "pt2" and kind not in HALF):
        raise EnfoldError(f"quantize must be None for .{suffix} files, got {kind!r}: export to .onnx")
    if (kind == "static") != (calibrate_on is not None):
        raise EnfoldError(
            f'calibrate_on must be given for quantize="static" and for no other, got quantize={kind!r}: pass a few '
            "hundred inputs that were not used for testing, or leave it out"
        )


def reduce_onnx(source: Path, target: Path, kind: Quantize, batches: Iterable[Sequence[Tensor]]) -> None:
    """Write an ONNX file in reduced precision.

    Args:
        source: The float file.
        target: The file to write.
        kind: The precision.
        batches: Inputs for "static".

    Raises:
        EnfoldError: If there is nothing to quantize, or a weight is too large for 16 bits.
    """
    import onnx

    if kind in HALF:
        model = onnx.load(source)
        _halve(model, HALF[kind])
        target.write_bytes(model.SerializeToString())
        return
    kinds = {node.op_type for node in onnx.load(source).graph.node}
    needed = PRODUCTS if kind == "dynamic" else LAYERS
    if not kinds & set(needed):
        other = ': pass quantize="static"' if kind == "dynamic" and kinds & set(LAYERS) else ": leave quantize out"
        raise EnfoldError(f"quantize={kind!r} needs layers of the kind {', '.join(needed)}, got none{other}")
    with quiet():
        _quantize(source, target, kind, batches)


def _quantize(source: Path, target: Path, kind: Quantize, batches: Iterable[Sequence[Tensor]]) -> None:
    import onnx
    from onnxruntime.quantization import QuantFormat, QuantType, quantize_dynamic, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    prepared = source.with_name("prepared.onnx")
    _drop_shapes(source)
    quant_pre_process(source, prepared, skip_symbolic_shape=True)  # joins batch norms and convolutions
    _drop_shapes(prepared)  # those of weights that were transposed are wrong
    if kind == "dynamic":
        quantize_dynamic(prepared, target, list(PRODUCTS), per_channel=True, weight_type=QuantType.QInt8)
        return
    model = onnx.load(prepared)
    quantize_static(
        prepared,
        target,
        _Reader([each.name for each in model.graph.input], iter(batches)),
        quant_format=QuantFormat.QDQ,
        op_types_to_quantize=[*LAYERS, *AROUND],
        per_channel=True,
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
        nodes_to_exclude=_after_layers(model),
    )


def _drop_shapes(path: Path) -> None:
    """Remove the stored shapes of intermediate values."""
    import onnx

    model = onnx.load(path)
    del model.graph.value_info[:]
    onnx.save(model, path)


class _Reader:
    """Calibration batches in the form that the quantizer of ONNX Runtime reads."""

    def __init__(self, names: Sequence[str], batches: Iterator[Sequence[Tensor]]) -> None:
        self.names, self.batches = names, batches

    def get_next(self) -> dict[str, Any] | None:
        """Return the next batch; None after the last."""
        values = next(self.batches, None)
        return None if values is None else {n: v.numpy() for n, v in zip(self.names, values, strict=True)}


def _after_layers(model: Any) -> list[str]:
    """Return the names of the nodes from which no layer with weights is reached."""
    needed: set[str] = set()
    after = []
    for node in reversed(model.graph.node):  # in topological order
        if node.op_type in LAYERS or needed.intersection(node.output):
            needed.update(node.input)
        else:
            after.append(node.name)
    return after


def _halve(model: Any, dtype: torch.dtype) -> None:
    """Store large weights in 16 bits, each followed by a conversion to float32."""
    import onnx

    kind = onnx.TensorProto.FLOAT16 if dtype == torch.float16 else onnx.TensorProto.BFLOAT16
    casts = []
    for tensor in model.graph.initializer:
        if tensor.data_type != onnx.TensorProto.FLOAT:
            continue
        values = torch.from_numpy(onnx.numpy_helper.to_array(tensor).copy())
        if values.numel() < SMALLEST:
            continue
        half = values.to(dtype)
        if bool((half.isinf() & ~values.isinf()).any()):
            raise EnfoldError(
                f"quantize must have the range of the weights, but '{tensor.name}' has "
                f'{float(values.abs().max()):.3g}, which is infinite in fp16: pass quantize="bf16"'
            )
        name, stored = tensor.name, f"{tensor.name}_16"
        tensor.CopyFrom(onnx.TensorProto(name=stored, data_type=kind, dims=values.shape))
        tensor.raw_data = half.contiguous().view(torch.int16).numpy().tobytes()
        casts.append(onnx.helper.make_node("Cast", [stored], [name], to=onnx.TensorProto.FLOAT, name=f"{name}_32"))
    nodes = [*casts, *model.graph.node]
    del model.graph.node[:]
    model.graph.node.extend(nodes)

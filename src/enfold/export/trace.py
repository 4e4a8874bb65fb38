"""Tracing by torch.export, and conversion to ONNX; errors name the operation or the line."""

from __future__ import annotations

import io
import logging
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from typing import Any

import torch
from torch import Tensor, nn

from enfold.errors import EnfoldError, MissingExtra
from enfold.io.usercode import describe_error

TRACED = 2  # examples in the traced batch; 0 and 1 would be constants
OPSET = 20
RECENT = 18  # the oldest opset that the converter of torch writes
OPERATION = re.compile(r"OpOverload\(op='([\w.]+)', overload='(\w+)'\)")
LINE = re.compile(r'File "([^"]+)", line (\d+), in \w+\n\s+(.+)')


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress what the exporters of torch print, log and warn of."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def trace(
    graph: nn.Module, inputs: Sequence[Tensor], axes: Sequence[Mapping[int, str]]
) -> torch.export.ExportedProgram:
    """Return the graph of a module for any number of examples.

    Args:
        graph: The module.
        inputs: A batch.
        axes: Of each input, the axes that vary beside the first.

    Raises:
        EnfoldError: If the network cannot be traced, or is specialised to a number of examples; with the operation.
    """
    batch, free = torch.export.Dim("batch"), torch.export.Dim.DYNAMIC  # the range of the latter is that of the network
    shapes = (tuple({0: batch, **dict.fromkeys(each, free)} for each in axes),)

    def run(strict: bool) -> torch.export.ExportedProgram:
        with torch.no_grad(), quiet():
            return torch.export.export(graph, tuple(inputs), dynamic_shapes=shapes, strict=strict)

    try:
        return run(strict=False)
    except EnfoldError:
        raise
    except Exception as error:  # the network may raise anything
        if _is_specialized(str(error)):
            with suppress(Exception):  # the first error is the clearer one
                return run(strict=True)  # reads the code, so that `len(x)` is not a constant
        raise EnfoldError(f"model must be traceable by torch.export, {_reason(error)}") from error


def _is_specialized(text: str) -> bool:
    return "Constraints violated" in text or "specialized" in text


def _reason(error: Exception) -> str:
    """Return why a network cannot be traced, and what to do."""
    text, kind = str(error), type(error).__name__
    line = _line(text)
    if "DataDependent" in kind:
        where = f" at '{line}'" if line else ""
        return f"but its control flow depends on the values of tensors{where}: use torch.where in place of a branch"
    if _is_specialized(text):
        where = f" by '{line}'" if line else ""
        return (
            f"but its code makes the number of examples, or an axis of dynamic_axes, a constant{where}: replace Python "
            "numbers such as "
            "int(x.shape[0]), .tolist() or view(2, ...) by -1 or x.shape[0]"
        )
    return f"but it fails with {describe_error(error)}: change this operation of the network"


def _line(text: str) -> str | None:
    found = [match for match in LINE.findall(text) if "site-packages" not in match[0] and "enfold" not in match[0]]
    return f"{found[-1][2].strip()} (line {found[-1][1]} of {found[-1][0]})" if found else None


def to_onnx(
    program: torch.export.ExportedProgram,
    names: Sequence[str],
    outputs: Sequence[str],
    opset: int,
    axes: Sequence[Mapping[int, str]] = (),
) -> Any:
    """Return the ONNX model of a traced graph.

    Args:
        program: The graph.
        names: The names of the inputs.
        outputs: The names of the outputs.
        opset: The version of the ONNX operators.
        axes: Of each input, the axes that vary beside the first.

    Raises:
        EnfoldError: If an operation cannot be converted, with its name.
        MissingExtra: If a package is missing.
    """
    require_onnx()
    try:
        with torch.no_grad(), quiet():
            converted = torch.onnx.export(
                program,
                input_names=list(names),
                output_names=list(outputs),
                opset_version=opset,
                dynamo=True,
                verbose=False,
            )
            assert converted is not None  # noqa: S101 - it is None for a file name only
            model = converted.model_proto
    except Exception as error:
        raise EnfoldError(_unconvertible(error)) from error
    for node in [*model.graph.node, *(node for function in model.functions for node in function.node)]:
        del node.metadata_props[:]  # the names of the user's files
        node.doc_string = ""
    _name_axes(model.graph, axes)
    return model


def _name_axes(graph: Any, axes: Sequence[Mapping[int, str]]) -> None:
    """Replace the symbols of the axes that vary by their names."""
    names: dict[str, str] = {}
    for entry, own in zip(graph.input, axes, strict=False):
        shape = entry.type.tensor_type.shape.dim
        labelled = {0: "batch", **own}
        names |= {shape[axis].dim_param: name for axis, name in labelled.items() if shape[axis].dim_param}
    for entry in (*graph.input, *graph.output, *graph.value_info):
        for dim in entry.type.tensor_type.shape.dim:
            if dim.dim_param in names:
                dim.dim_param = names[dim.dim_param]


def _unconvertible(error: Exception) -> str:
    chain: list[BaseException] = [error]
    while (cause := chain[-1].__cause__) is not None:
        chain.append(cause)
    text = " ".join(str(each) for each in reversed(chain))
    found = OPERATION.search(text)
    if found:
        name = f"{found[1]}.{found[2]}".removesuffix(".default")
        return (
            f"every operation must exist in ONNX, but '{name}' does not: replace it in the network, or export to .pt2"
        )
    if "2GB" in text or "2 GB" in text or "exceeds maximum protobuf size" in text:
        return "an ONNX file holds at most 2 GB, and this model is larger: export to .pt2 or .safetensors"
    reason = " ".join(str(chain[-1]).split())[:300]
    return (
        f"model must be convertible to ONNX, but that fails with {type(chain[-1]).__name__} ({reason}): export to .pt2"
    )


def require_onnx() -> None:
    """Raise `MissingExtra` if a package for ONNX is missing."""
    for package in ("onnx", "onnxscript", "onnxruntime"):
        _require(package)


def _require(package: str) -> None:
    try:
        if package == "onnx":
            import onnx  # noqa: F401
        elif package == "onnxscript":
            import onnxscript  # noqa: F401
        else:
            import onnxruntime  # noqa: F401
    except ImportError as error:
        raise MissingExtra(package, "onnx", "an export to ONNX") from error

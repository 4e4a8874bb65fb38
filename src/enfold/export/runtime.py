"""Written files, loaded again as functions from tensors to named outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from enfold.errors import EnfoldError
from enfold.export.trace import quiet

Run = Callable[[Sequence[Tensor]], dict[str, Tensor]]


def open_onnx(path: Path, threads: int | None = None) -> Run:
    """Return a function that runs an ONNX file in ONNX Runtime on the CPU.

    Args:
        path: The file.
        threads: The number of threads; None for that of torch.

    Raises:
        EnfoldError: If ONNX Runtime refuses the file; with its reason, which names the operation.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads or torch.get_num_threads()
    options.log_severity_level = 4
    try:
        session = onnxruntime.InferenceSession(path.read_bytes(), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise EnfoldError(
            f"ONNX Runtime must be able to run the file, but it refuses it ({_first_line(error)}): convert the model "
            "with model.float(), or replace the operation"
        ) from error
    names = [each.name for each in session.get_inputs()]
    outputs = [each.name for each in session.get_outputs()]

    def run(values: Sequence[Tensor]) -> dict[str, Tensor]:
        given = {name: tensor.numpy() for name, tensor in zip(names, values, strict=True)}
        try:
            found = session.run(None, given)
        except Exception as error:
            raise EnfoldError(
                f"the file must run for {len(values[0])} examples, but ONNX Runtime fails ({_first_line(error)}): its "
                "graph is specialised to another number of examples, or an operation has no implementation"
            ) from error
        return {name: torch.from_numpy(each) for name, each in zip(outputs, found, strict=True)}

    return run


def open_pt2(path: Path) -> Run:
    """Return a function that runs a file of torch.export.

    Raises:
        EnfoldError: If it fails for a number of examples.
    """
    with quiet(), path.open("rb") as file:
        program: Any = torch.export.load(file)
        module = program.module()

    @torch.no_grad()
    def run(values: Sequence[Tensor]) -> dict[str, Tensor]:
        try:
            return dict(module(*values))
        except Exception as error:
            raise EnfoldError(
                f"the file must run for {len(values[0])} examples, but it fails ({_first_line(error)}): its graph is "
                "specialised to another number of examples"
            ) from error

    return run


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[:300]

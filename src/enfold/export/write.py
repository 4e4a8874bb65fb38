"""Export: one file that predicts as a network or an ensemble, compared with it before it gets its name."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from enfold.calibrate import Calibrated
from enfold.distill.dirichlet import Dirichlet
from enfold.engines.call import require_network
from enfold.ensemble import Ensemble
from enfold.errors import EnfoldError, WriteError
from enfold.export.check import Reference, make_reference
from enfold.export.formats import Job
from enfold.export.graph import source_outputs
from enfold.export.preprocess import make_preprocess
from enfold.export.quantize import Quantize, check_quantize
from enfold.export.result import Artefact, ExportResult
from enfold.export.runtime import Run
from enfold.export.signature import Signature, make_signature
from enfold.export.trace import OPSET, RECENT, require_onnx
from enfold.io.checkpoints import require_tensors
from enfold.io.files import atomic_path
from enfold.saving import save, versions
from enfold.tasks import Inferred, Task, as_task, current_task, task_of
from enfold.tasks.infer import task_to_dict

Format = Literal["onnx", "pt2", "safetensors"]
Kind = Literal["raw", "prediction"]
FORMATS: dict[str, Format] = {".onnx": "onnx", ".pt2": "pt2", ".safetensors": "safetensors"}
KINDS: tuple[Kind, ...] = ("raw", "prediction")


def export(
    model: nn.Module,
    path: str | Path,
    example: Any = None,
    format: Format | None = None,
    *,
    outputs: Kind | None = None,
    task: Any = None,
    preprocess: Any = None,
    dynamic_axes: Mapping[str, Mapping[int, str]] | None = None,
    opset: int = OPSET,
    tolerance: float = 1e-4,
    quantize: Quantize | None = None,
    calibrate_on: Any = None,
    test: Any = None,
) -> ExportResult:
    """Write a network or an ensemble to one file that predicts without enfold.

    The file is loaded again and compared with the model, for three numbers of examples that were not traced, before it
    gets its name. An existing file is replaced only then.

    Args:
        model: A network, an ensemble, or a calibrated model. It is not modified.
        path: The file: .onnx, .pt2 (torch.export) or .safetensors (as `enfold.save` writes it).
        example: A batch of real inputs as the network takes them: a tensor or numpy array, or a tuple or dict of them.
        format: "onnx", "pt2" or "safetensors"; None to take it from the ending of the path.
        outputs: "raw" for the outputs of the network, `logits` or `outputs`, which is the default for a single network;
            "prediction" for `probabilities`, `entropy` and `mutual_information`, or `mean`, `aleatoric` and `epistemic`
            of a regression, which is the default for all others.
        task: What the outputs mean; None for the task that the model was trained for, or logits of classes.
        preprocess: The normalization to include: a data set of `enfold.data`, or a pair (mean, std) of numbers or of
            one number per channel; then `example` holds inputs before it, which may be bytes. It is applied to the
            first input.
        dynamic_axes: Axes of inputs that vary beside that of the examples, by the name of the input, such as
            ``{"input_ids": {1: "tokens"}, "attention_mask": {1: "tokens"}}``; axes with one name have equal lengths.
            The file is compared with the model for half, three quarters and all of their length in `example`.
        opset: The version of the ONNX operators.
        tolerance: The largest accepted difference, relative to the largest value of an output if that is above 1.
        quantize: "dynamic" or "static" for int8 (.onnx), "fp16" or "bf16" for 16 bits. The float file is compared with
            the model first; size, speed and quality of both are in the table of the result.
        calibrate_on: Examples for the ranges of activations with quantize="static", a few hundred: inputs, or examples
            as for `enfold.evaluate`; of a data set, the validation split.
        test: Test examples as for `enfold.evaluate`, on which both files are scored with `quantize`.

    Returns:
        The file, its inputs and outputs, its size, and how close its outputs are to those of the model.

    Raises:
        EnfoldError: If the model cannot be exported, or the file differs from it; no file is left then.
        MissingExtra: If a package is missing.
        WriteError: If the file cannot be written.
    """
    require_network(model)
    path = Path(path)
    chosen = _format(path, format)
    check_quantize(quantize, chosen, calibrate_on)
    if test is not None and quantize is None:
        raise EnfoldError("test is for quantize=, got quantize=None: use enfold.evaluate, or leave test out")
    _check_writable(path)
    if chosen == "safetensors":
        return _export_values(model, path)
    known = _task(model, task)
    if outputs not in (None, *KINDS):
        raise EnfoldError(f"outputs must be one of {', '.join(KINDS)} or None, got {outputs!r}: change outputs")
    raw = outputs == "raw" or (outputs is None and not isinstance(model, Ensemble | Calibrated | Dirichlet))
    if chosen == "onnx":
        require_onnx()
        if opset < RECENT:
            raise EnfoldError(f"opset must be at least {RECENT}, got {opset}: pass a newer opset")
    signature, normal = make_signature(model, example, dynamic_axes), make_preprocess(preprocess)
    source: Run = partial(source_outputs, model, task=known, raw=raw, preprocess=normal, names=signature)
    reference = make_reference(source, signature, lambda found: _class_axis(found, known, raw))
    about = _about(model, known, signature, reference)
    version = opset if chosen == "onnx" else None
    job = Job(model, known, raw, normal, signature, reference, about, version, tolerance)
    with atomic_path(path) as temporary:
        table: tuple[Artefact, ...] = ()
        if quantize is None:
            found = job.write(temporary)
        else:
            found, table = job.write_reduced(temporary, quantize, calibrate_on, test)
        size = temporary.stat().st_size
    return ExportResult(
        path,
        chosen,
        version,
        quantize,
        about["inputs"],
        about["outputs"],
        found.sizes,
        found.difference,
        found.agreement,
        size,
        table,
    )


def _format(path: Path, named: Format | None) -> Format:
    """Return the format of a file."""
    if named is not None and named not in FORMATS.values():
        raise EnfoldError(f"format must be one of {', '.join(FORMATS.values())}, got {named!r}: change format")
    found = FORMATS.get(path.suffix)
    if found is None and named is None:
        raise EnfoldError(f"path must end in {', '.join(FORMATS)}, got '{path}': change the ending, or pass format=")
    if found is not None and named not in (None, found):
        raise EnfoldError(
            f"format must agree with the ending of the path, got {named!r} for '{path}': change one of them"
        )
    return named or found or "onnx"


def _check_writable(path: Path) -> None:
    """Raise an error before the model is traced if the folder of a file cannot be written."""
    if path.is_dir():
        raise EnfoldError(f"path must be a file, got the folder '{path}': add the name of the file")
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if not folder.is_dir():
        raise WriteError(path, NotADirectoryError(20, os.strerror(20)))
    if not os.access(folder, os.W_OK | os.X_OK):
        raise WriteError(path, PermissionError(13, os.strerror(13)))


def _task(model: nn.Module, given: Any) -> Task | None:
    """Return the task of a model."""
    if isinstance(model, Calibrated):
        if given is not None:
            raise EnfoldError(
                f"task must be None for a calibrated model, which has a task, got {given!r}: leave it out"
            )
        return model.model_task
    found = current_task(as_task(given if given is not None else task_of(model)))
    return None if isinstance(found, Inferred) else found


def _class_axis(found: dict[str, Tensor], task: Task | None, raw: bool) -> int | None:
    """Return the axis of the classes in the first output; None without classes."""
    first = next(iter(found.values()))
    if task is not None and (not task.is_categorical or task.name == "multilabel"):
        return None
    axis = getattr(task, "class_axis", None)
    axis = axis if axis is not None else -1 if first.ndim <= 2 or not raw else 1
    return axis if first.ndim > 1 and first.shape[axis] > 1 else None


def _about(model: nn.Module, task: Task | None, signature: Signature, reference: Reference) -> dict[str, Any]:
    """Return what is stored in the file about the model."""
    kind = type(model.model if isinstance(model, Calibrated) else model).__name__
    return {
        "model": kind,
        "calibrated": isinstance(model, Calibrated),
        "task": task_to_dict(task),
        "inputs": signature.describe(reference.batches[0]),
        "outputs": reference.describe(signature),
        "versions": versions(),
    }


def _export_values(model: nn.Module, path: Path) -> ExportResult:
    """Write the parameters and buffers, which another program loads into a network of the same class."""
    from safetensors.torch import load_file

    path = save(model, path)
    stored = load_file(path)
    state = model.state_dict()
    require_tensors(state, "a model is exported")
    changed = [name for name, tensor in state.items() if not torch.equal(stored[name], tensor.cpu())]
    if changed:
        raise EnfoldError(f"the file must have the values of the model, but '{changed[0]}' differs: export it again")
    described = {
        name: {"dtype": str(t.dtype).removeprefix("torch."), "shape": list(t.shape)} for name, t in state.items()
    }
    return ExportResult(path, "safetensors", None, None, {}, described, (), 0.0, None, path.stat().st_size)

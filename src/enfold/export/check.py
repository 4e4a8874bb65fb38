"""The comparison of a written file with its source, on batches of sizes that were not traced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from enfold.errors import EnfoldError
from enfold.export.runtime import Run
from enfold.export.signature import Signature, spec

SIZES = (1, 3, 5, 13, 8)  # of which the first three are used that the source accepts
NUMBER = 3
CLASSES = ("probabilities", "logits", "outputs")


@dataclass(frozen=True)
class Comparison:
    """The difference between a file and its source.

    Args:
        sizes: The numbers of examples of the batches.
        difference: The largest difference of an output, relative to its largest value if that is above 1.
        agreement: The fraction of predictions with the same class; None without classes.
    """

    sizes: tuple[int, ...]
    difference: float
    agreement: float | None


@dataclass(frozen=True)
class Reference:
    """Batches and the outputs of the source for them.

    Args:
        batches: The tensors of each batch.
        outputs: The named outputs for each.
        class_axis: The axis of the classes; None without classes.
    """

    batches: list[list[Tensor]]
    outputs: list[dict[str, Tensor]]
    class_axis: int | None

    def describe(self, signature: Signature) -> dict[str, dict[str, Any]]:
        """Return the type and the shape of each output; an axis that varies has the name of the inputs' axis."""
        lengths = [signature.lengths(batch) for batch in self.batches]
        found = {}
        for name, last in self.outputs[-1].items():
            axes = {}
            for axis in range(1, last.ndim):
                sizes = [outputs[name].shape[axis] for outputs in self.outputs]
                if len(set(sizes)) > 1:
                    fitting = [each for each in lengths[0] if [length[each] for length in lengths] == sizes]
                    axes[axis] = fitting[0] if fitting else "varies"
            found[name] = spec(last, axes)
        return found

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of examples of each batch."""
        return tuple(len(batch[0]) for batch in self.batches)


def make_reference(
    source: Run, signature: Signature, class_axis: Callable[[dict[str, Tensor]], int | None]
) -> Reference:
    """Return the outputs of the source for three batches.

    Raises:
        EnfoldError: If the source fails for all sizes, or returns other outputs in a second call.
    """
    batches: list[list[Tensor]] = []
    outputs: list[dict[str, Tensor]] = []
    failure: Exception | None = None
    for step, size in enumerate(SIZES):
        values = signature.batch(size, step)
        try:
            found = source([value.clone() for value in values])
        except EnfoldError:
            raise
        except Exception as error:  # some networks do not accept one example
            failure = error
            continue
        batches.append(values)
        outputs.append(found)
        if len(batches) == NUMBER:
            break
    if len(batches) < NUMBER:
        varied = f" for half and three quarters of {', '.join(signature.lengths(values))}" if signature.axes else ""
        raise EnfoldError(
            f"example must be inputs that the model takes{varied}, but it fails ({type(failure).__name__}: "
            f"{' '.join(str(failure).split())[:300]}): pass a batch as the network takes it"
        ) from failure
    again = source([value.clone() for value in batches[-1]])
    for name, tensor in outputs[-1].items():
        if difference(again[name], tensor) > 1e-3:
            raise EnfoldError(
                f"model must return the same outputs for the same inputs, got two different '{name}': put it into eval "
                "mode, and remove random numbers from its forward pass"
            )
    return Reference(batches, outputs, class_axis(outputs[0]))


def compare(run: Run, reference: Reference, tolerance: float, explain: Callable[[int], str] | None) -> Comparison:
    """Compare the outputs of a file with those of its source.

    Args:
        run: The file.
        reference: Batches and the outputs of the source.
        tolerance: The largest accepted difference.
        explain: Function that returns the first operation that differs for a batch; None for no explanation.

    Raises:
        EnfoldError: If an output differs; it names the output, the number of examples and the operation.
    """
    largest, same, count = 0.0, 0, 0
    for index, (values, expected) in enumerate(zip(reference.batches, reference.outputs, strict=True)):
        found = run([value.clone() for value in values])
        for name, tensor in expected.items():
            distance = difference(found[name], tensor)
            if not distance <= tolerance:
                what = "" if explain is None else explain(index)
                raise EnfoldError(
                    f"the file must give the outputs of the model, but '{name}' differs by {distance:.2g} for "
                    f"{len(values[0])} examples, more than tolerance={tolerance:g}{what}: replace what differs in the "
                    "network, or pass a larger tolerance"
                )
            largest = max(largest, distance)
        pair = class_pair(found, expected, reference.class_axis)
        if pair is not None:
            same += int((pair[0] == pair[1]).sum())
            count += pair[0].numel()
    return Comparison(reference.sizes, largest, same / count if count else None)


def class_pair(
    found: dict[str, Tensor], expected: dict[str, Tensor], class_axis: int | None
) -> tuple[Tensor, Tensor] | None:
    """Return the predicted classes of a file and of its source; None without classes."""
    name = next((each for each in CLASSES if each in expected), None)
    if name is None or class_axis is None:
        return None
    ours, theirs = found[name], expected[name]
    if ours.shape != theirs.shape or ours.shape[class_axis] < 2:
        return None
    return ours.argmax(class_axis), theirs.argmax(class_axis)


def difference(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to the largest finite value if that is above 1; infinity for a shape."""
    if found.shape != expected.shape:
        return float("inf")
    if not found.numel():
        return 0.0
    first, second = found.double(), expected.double()
    same = (first == second) | (first.isnan() & second.isnan())
    distance = (first - second).abs().masked_fill(same, 0.0).nan_to_num(nan=float("inf"))
    scale = second.masked_fill(~second.isfinite(), 0.0).abs().max().clamp_min(1.0)
    return float(distance.max() / scale)


def first_difference(
    program: torch.export.ExportedProgram, model: Any, values: Sequence[Tensor], tolerance: float
) -> str:
    """Return the first operation whose ONNX form gives another value than torch, as text for a message.

    Args:
        program: The traced graph.
        model: Its ONNX model.
        values: The inputs.
        tolerance: The largest accepted difference.
    """
    import onnx
    import onnxruntime

    expected = _intermediate_values(program, values)
    produced = [name for node in model.graph.node for name in node.output if name in expected]
    twin = onnx.ModelProto()
    twin.CopyFrom(model)
    twin.graph.output.extend(onnx.helper.make_empty_tensor_value_info(name) for name in produced)
    session = onnxruntime.InferenceSession(twin.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]
    found = session.run(produced, {n: value.numpy() for n, value in zip(names, values, strict=True)})
    for name, array in zip(produced, found, strict=True):
        target, tensor = expected[name]
        if difference(torch.from_numpy(array), tensor) > tolerance:
            return f", first in the operation '{target}'"
    return ", as its traced graph depends on the example"


def _intermediate_values(
    program: torch.export.ExportedProgram, values: Sequence[Tensor]
) -> dict[str, tuple[str, Tensor]]:
    """Return the operation and the value of each node of a traced graph."""
    found: dict[str, tuple[str, Tensor]] = {}

    class Recorder(torch.fx.Interpreter):
        def run_node(self, n: torch.fx.Node) -> Any:
            result = super().run_node(n)
            if n.op == "call_function" and isinstance(result, Tensor):
                found[n.name] = (str(n.target).removesuffix(".default"), result.detach().clone())
            return result

    module: Any = program.module()
    with torch.no_grad():
        Recorder(module).run(*values)
    return found

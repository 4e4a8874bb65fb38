"""Features: outputs of a layer inside teachers and students, learned beside the logits.

Teachers and students must have a module at the same path, with outputs of the same shape. Features are too large to be
cached, so they are computed in every step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from enfold.data import Split
from enfold.data.batches import Batch
from enfold.data.convert import first_inputs
from enfold.data.tree import device_of, to_device
from enfold.engines.inputs import in_type_of
from enfold.engines.modes import eval_mode
from enfold.engines.outputs import at_least_float32
from enfold.engines.trunk import OneByOne
from enfold.ensemble import Ensemble
from enfold.errors import EnfoldError, closest
from enfold.train.objective import batch_outputs

if TYPE_CHECKING:
    from enfold.distill.teacher import Teacher


def outputs_and_features(model: nn.Module, batch: Batch, path: str) -> tuple[Tensor, Tensor]:
    """Return the outputs (S, B, ...), and the output of the layer at `path` for each student, (S, B, ...)."""
    networks = [code.network for code in model.codes] if isinstance(model, Ensemble) else [model]
    found: list[Tensor] = []

    def record(module: nn.Module, arguments: Any, output: Any) -> Any:
        if not isinstance(output, Tensor):
            raise EnfoldError(
                f"feature must be a layer that returns a tensor, but '{path}' returns {type(output).__name__}: name "
                "another layer"
            )
        found.append(output)
        return output.clone()  # a layer behind it may work in place

    handles = [layer_at(network, path).register_forward_hook(record) for network in networks]
    try:
        if isinstance(model, Ensemble):  # one by one: other engines run no modules, so no hooks
            inputs = in_type_of(model, batch.inputs)
            logits = at_least_float32(OneByOne(model.codes)(model.expand(), inputs, batch.own))
        else:
            logits = batch_outputs(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    if len(found) != len(logits):
        raise EnfoldError(
            f"feature must be a layer that runs once in a forward pass, but '{path}' ran {len(found)} times for "
            f"{len(logits)} networks: name another layer"
        )
    return logits, torch.stack(found)


@torch.no_grad()
def teacher_features(teacher: Teacher, inputs: Any, path: str) -> Tensor:
    """Return the output of the layer at `path` in each teacher, (T, B, ...)."""
    if teacher.models is None:
        raise EnfoldError("feature needs the teachers' networks, got a CachedTeacher: pass the networks as teacher")
    batch = Batch(to_device(inputs, teacher.device), None)
    models = teacher.models
    networks = list(models) if isinstance(models, Ensemble) and not models.is_expandable else [models]
    found = [outputs_and_features(network, batch, path)[1] for network in networks]
    shapes = {tuple(features.shape[2:]) for features in found}
    if len(shapes) > 1:
        raise EnfoldError(
            f"feature must have one shape in all teachers, but '{path}' gives {' and '.join(map(str, shapes))}: name "
            "another layer, or use members of one architecture"
        )
    return torch.cat(found)


@torch.no_grad()
def check_features(teacher: Teacher, student: nn.Module, path: str) -> None:
    """Raise an error unless teachers and student have the layer, with outputs of one shape."""
    if isinstance(student, Ensemble) and (not student.is_expandable or getattr(student, "joint", False)):
        raise EnfoldError(
            f"feature needs students that can run one by one, got a {type(student).__name__}: use one network, or an "
            "ensemble without joint batch norms"
        )
    train = teacher.data.train
    inputs = teacher.data.prepare(train.inputs[:2]) if isinstance(train, Split) else first_inputs(train)
    target = teacher_features(teacher, inputs, path)
    device = next((tensor.device for tensor in student.parameters()), device_of(inputs))
    batch = Batch(to_device(inputs, device), None)
    with eval_mode(student):
        _, own = outputs_and_features(student, batch, path)
    if own.shape[2:] != target.shape[2:]:
        raise EnfoldError(
            f"feature must have one shape in student and teachers, but '{path}' gives {tuple(own.shape[2:])} in the "
            f"student and {tuple(target.shape[2:])} in the teachers: name another layer, or use a student of their "
            "architecture"
        )


def layer_at(network: nn.Module, path: str) -> nn.Module:
    """Return the module at `path`."""
    known = dict(network.named_modules(remove_duplicate=False))
    if not path or path not in known:
        near = closest(path, known)
        suggestion = f", did you mean '{near}'?" if near else ""
        raise EnfoldError(
            f"feature must be the path of a module of {type(network).__name__}, got '{path}'{suggestion}: "
            f"choose from {', '.join(name for name in known if name)}"
        )
    found: nn.Module = known[path]
    return found

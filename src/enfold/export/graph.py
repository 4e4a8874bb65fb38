"""Graph: a network or an ensemble as one module from named inputs to named outputs, which torch.export can trace.

    probabilities, entropy, mutual_information       classes and labels; without the last for a single network   (1)
    mean, aleatoric, epistemic                       numbers                                                      (2)
    logits or outputs                                a single network by default                                  (3)

Members run one after the other: in ONNX Runtime this is as fast as stacked parameters or faster (docs/design/0017).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from enfold.calibrate import Calibrated
from enfold.data.tree import clone
from enfold.distill.dirichlet import Dirichlet
from enfold.engines.call import call_network
from enfold.engines.copying import copy_network
from enfold.engines.inputs import in_type_of
from enfold.engines.modes import eval_mode
from enfold.engines.outputs import at_least_float32, get_logits
from enfold.ensemble import Ensemble, predict_outputs
from enfold.ensembles.mc_dropout import MCDropout
from enfold.errors import EnfoldError
from enfold.evaluate import member_logits
from enfold.export.preprocess import Preprocess
from enfold.export.signature import Signature
from enfold.metrics.dirichlet import concentrations, dirichlet_uncertainty
from enfold.tasks import Prediction, Regression, Task, as_task

Outputs = dict[str, Tensor]


class Graph(nn.Module):
    """A model as one module without control flow that depends on the number of examples.

    Args:
        model: A network, an ensemble, or a calibrated model.
        signature: Its inputs.
        task: What its outputs mean; None for logits of classes.
        raw: Whether the outputs of a single network are returned unchanged, equation (3).
        preprocess: The normalization of inputs.
    """

    def __init__(
        self, model: nn.Module, signature: Signature, task: Task | None, raw: bool, preprocess: Preprocess | None
    ) -> None:
        super().__init__()
        self.members = nn.ModuleList(_members(model.model if isinstance(model, Calibrated) else model))
        self.has_member_axis = isinstance(self.members[0], Ensemble)
        self.preprocess = preprocess
        # In a tuple, so that nothing of the source is registered as a submodule.
        self.source = (model, signature, task, raw)
        self.eval()

    def forward(self, *values: Tensor) -> Outputs:
        """Return the named outputs."""
        model, signature, task, raw = self.source
        prepared = values if self.preprocess is None else (self.preprocess(values[0]), *values[1:])
        inputs = signature.rebuild(prepared)
        if self.has_member_axis:
            outputs = self.members[0](in_type_of(self.members[0], inputs))
        else:
            outputs = torch.stack([_call(member, inputs) for member in self.members])
        return named_outputs(model, outputs, task, raw=raw)


def _call(network: nn.Module, inputs: Any) -> Tensor:
    # The inputs are copied, as a network may write to them.
    return get_logits(call_network(network, in_type_of(network, clone(inputs))), network)


def _members(model: nn.Module) -> list[nn.Module]:
    """Return copies of the networks whose outputs are stacked, or an ensemble that stacks them itself."""
    if isinstance(model, MCDropout):
        raise EnfoldError(
            "model must predict by fixed parameters, got MCDropout, whose masks depend on the position in the batch: "
            "distill it with enfold.distill, or export the network, model.module"
        )
    if not isinstance(model, Ensemble):
        return [_on_cpu(model)]
    try:
        networks = [_on_cpu(model.member(index)) for index in range(model.num_members)]
    except EnfoldError:  # members are not networks, as in MIMO
        return [_on_cpu(model)]
    _tie_equal(networks)
    return networks


def _on_cpu(network: nn.Module) -> nn.Module:
    return copy_network(network).cpu().eval()


def _tie_equal(networks: Sequence[nn.Module]) -> None:
    """Let members have the parameters in common that are equal in all, such as a trunk, which are then stored once."""
    first, *others = networks
    for name, parameter in list(first.named_parameters()):
        path, _, key = name.rpartition(".")
        for other in others:
            found = dict(other.named_parameters()).get(name)
            if found is not None and found.shape == parameter.shape and torch.equal(found, parameter):
                setattr(other.get_submodule(path), key, parameter)


@torch.no_grad()
def source_outputs(
    model: nn.Module, inputs: Any, task: Task | None, *, raw: bool, preprocess: Preprocess | None, names: Signature
) -> Outputs:
    """Return the named outputs of a model by the functions with which enfold predicts.

    Args:
        model: The network or ensemble.
        inputs: A batch (B, ...).
        task: The task; None for raw outputs.
        raw: Whether outputs are those of the network.
        preprocess: The normalization of the inputs; None for none.
        names: The names of inputs and outputs.
    """
    values = list(inputs)
    if preprocess is not None:
        values[0] = preprocess(values[0])
    device = next((each.device for each in model.parameters()), torch.device("cpu"))
    batch = names.rebuild([value.to(device) for value in values])
    with eval_mode(model):
        inner = model.model if isinstance(model, Calibrated) else model
        found = named_outputs(model, member_logits(inner, batch), task, raw=raw)
    return {name: tensor.cpu() for name, tensor in found.items()}


def named_outputs(model: nn.Module, outputs: Tensor, task: Task | None, *, raw: bool) -> Outputs:
    """Return the outputs of a graph from those of all members, (M, B, ...).

    Args:
        model: The model, of which a temperature or a Dirichlet distribution is applied.
        outputs: The outputs of its members.
        task: What they mean.
        raw: Whether they are returned unchanged.
    """
    if raw:
        name = "logits" if task is not None and task.is_categorical else "outputs"
        if isinstance(model, Calibrated):
            return {name: model.combine_raw(outputs)}
        return {name: at_least_float32(outputs[0] if len(outputs) == 1 else outputs.movedim(0, 1).contiguous())}
    if isinstance(model, Calibrated):
        return _names(model.combine(outputs), model.model_task, single=len(outputs) == 1 and not _has_epistemic(model))
    if isinstance(model, Dirichlet) and not isinstance(model, Ensemble):
        return _of_dirichlet(outputs[0])
    known = as_task(task)
    single = len(outputs) == 1 and not (isinstance(known, Regression) and known.head == "uncertainty")
    return _names(predict_outputs(model, known, outputs), known, single=single)


def _has_epistemic(model: Calibrated) -> bool:
    return isinstance(model.model_task, Regression) and model.model_task.head == "uncertainty"


def _names(found: Prediction, task: Task, *, single: bool) -> Outputs:
    names = ("probabilities", "entropy", "mutual_information")
    values = (found.mean, found.total, found.epistemic)
    if not task.is_categorical:
        names, values = ("mean", "aleatoric", "epistemic"), (found.mean, found.aleatoric, found.epistemic)
    kept = zip(names[: 2 if single else 3], values, strict=False)
    # A copy, as outputs of a graph must not be views of each other.
    return {name: at_least_float32(value).clone() for name, value in kept}


def _of_dirichlet(log_alphas: Tensor) -> Outputs:
    """Return the outputs (1) from ln α, of the expected distribution and of its uncertainty."""
    alphas = concentrations(log_alphas)
    found = dirichlet_uncertainty(alphas, digamma if torch.compiler.is_exporting() else torch.digamma)
    mean = alphas / alphas.sum(-1, keepdim=True)
    return {
        "probabilities": mean.float(),
        "entropy": found.total.float(),
        "mutual_information": found.epistemic.float(),
    }


def digamma(x: Tensor) -> Tensor:
    """Return ψ(x) for x >= 1 in float64 from the series at infinity, as ONNX has no such operation."""
    shift = sum(1 / (x + k) for k in range(6))
    x = x + 6
    inverse = 1 / x.square()
    series = inverse * (1 / 12 - inverse * (1 / 120 - inverse * (1 / 252 - inverse * (1 / 240 - inverse / 132))))
    return x.log() - 0.5 / x - series - shift

"""Mechanism: whether a perturbation does what it is for, measured: do teachers differ more where inputs were moved to?

A student's members are measured on the same inputs; called before and after training, this shows what they took over.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from enfold.data.dataset import Data, PartName, evaluation_batches
from enfold.distill.perturbation import Perturbation
from enfold.engines.modes import evaluating
from enfold.errors import EnfoldError
from enfold.evaluate import member_logits
from enfold.metrics import decomposition, disagreement, pairwise_kl
from enfold.metrics.predictions import Predictions
from enfold.seeds import generator

Place = tuple[str, str]  # whose answers, and where


@torch.no_grad()
def mechanism(
    perturb: Perturbation,
    teachers: nn.Module,
    student: nn.Module,
    data: Data,
    part: PartName = "test",
    batch_size: int = 128,
    seed: int = 0,
) -> dict[str, Any]:
    """How much members differ on the clean and on the perturbed inputs of one part, as plain numbers to be stored.

    `found["teachers"]["clean" | "perturbed"]` holds the `cross_entropy` and the `kl` of two members in nats and the
    `disagreement`, the fraction of examples that they give different classes; each is a mean over ordered pairs and
    examples. `found["student"]` holds the same of the student, and is left out for one network. A part in memory is
    moved by batches as they are in training; a loader's batches are taken as they are.
    """
    log_probs: dict[Place, list[Tensor]] = {}
    labels: list[Tensor] = []
    device = next((tensor.device for tensor in student.parameters()), torch.device("cpu"))
    with evaluating(teachers, student):
        for number, (inputs, classes) in enumerate(evaluation_batches(getattr(data, part), batch_size)):
            inputs = inputs.to(device)
            moved = perturb(inputs, data, teachers, student, generator(seed, "mechanism", number))
            for where, seen in (("clean", inputs), ("perturbed", moved)):
                for who, model in (("teachers", teachers), ("student", student)):
                    log_probs.setdefault((who, where), []).append(_answers(model, seen))
            labels.append(classes.cpu())
    if not labels:
        raise EnfoldError(f"the {part} part must hold examples to be perturbed, got none: name a part that has some")
    about = {"method": type(perturb).__module__.rpartition(".")[2], "settings": asdict(perturb), "part": part, "seed": seed}
    found: dict[str, Any] = {**about, "examples": sum(map(len, labels))}
    for (who, where), pieces in log_probs.items():
        told = Predictions(torch.cat(pieces, dim=1), torch.cat(labels))
        if who == "teachers" or told.num_members > 1:
            found.setdefault(who, {})[where] = differences(told)
    return found


def differences(p: Predictions) -> dict[str, float]:
    """How much two members differ: H[p_i, p_j] = KL(p_i || p_j) + H[p_i], the divergence, and the classes they give."""
    kl = pairwise_kl(p)
    own_entropy = decomposition(p).aleatoric.mean().item()
    return {"cross_entropy": kl + own_entropy, "kl": kl, "disagreement": disagreement(p)}


def _answers(model: nn.Module, inputs: Tensor) -> Tensor:
    device = next((tensor.device for tensor in model.parameters()), inputs.device)
    return torch.log_softmax(member_logits(model, inputs.to(device)).float(), dim=-1).cpu()

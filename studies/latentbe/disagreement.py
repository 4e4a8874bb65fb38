"""Effect of a perturbation: the disagreement of teachers, and of a student's members, before and after it.

Measured before and after training, it shows how much of the teachers' disagreement the student has.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from enfold.data.dataset import Data, PartName, evaluation_batches
from enfold.distill.perturbation import Perturbation
from enfold.engines.modes import eval_mode
from enfold.errors import EnfoldError
from enfold.evaluate import member_logits
from enfold.metrics import decomposition, disagreement, pairwise_kl
from enfold.metrics.predictions import Predictions
from enfold.seeds import generator

Place = tuple[str, str]  # whose predictions, on which inputs


@torch.no_grad()
def measure_mechanism(
    perturb: Perturbation,
    teachers: nn.Module,
    student: nn.Module,
    data: Data,
    part: PartName = "test",
    batch_size: int = 128,
    seed: int = 0,
) -> dict[str, Any]:
    """Measure the disagreement of members on the clean and on the perturbed inputs of one split, as plain numbers.

    Args:
        perturb: The perturbation.
        teachers: The teachers.
        student: The student.
        data: The data.
        part: The split: "train", "val" or "test".
        batch_size: Examples in a batch of a split in memory; batches of a loader are used unchanged.
        seed: The seed of the perturbation.

    Returns:
        `["teachers"]["clean" | "perturbed"]` has the `cross_entropy` and the `kl` of two members in nats and the
        `disagreement`, the fraction of examples with different classes; each is a mean over ordered pairs and examples.
        `["student"]` has the same for the student, and is missing if it is one network.
    """
    log_probs: dict[Place, list[Tensor]] = {}
    labels: list[Tensor] = []
    device = next((tensor.device for tensor in student.parameters()), torch.device("cpu"))
    with eval_mode(teachers, student):
        for number, (inputs, classes, _) in enumerate(evaluation_batches(getattr(data, part), batch_size)):
            inputs = inputs.to(device)
            moved = perturb(inputs, data, teachers, student, generator(seed, "mechanism", number))
            for where, seen in (("clean", inputs), ("perturbed", moved)):
                for who, model in (("teachers", teachers), ("student", student)):
                    log_probs.setdefault((who, where), []).append(_log_probs(model, seen))
            labels.append(classes.cpu())
    if not labels:
        raise EnfoldError(f"part must be a split with examples, got '{part}', which has none: name another split")
    about = {
        "method": type(perturb).__module__.rpartition(".")[2],
        "settings": asdict(perturb),
        "part": part,
        "seed": seed,
    }
    found: dict[str, Any] = {**about, "examples": sum(map(len, labels))}
    for (who, where), pieces in log_probs.items():
        predictions = Predictions(torch.cat(pieces, dim=1), torch.cat(labels))
        if who == "teachers" or predictions.num_members > 1:
            found.setdefault(who, {})[where] = differences(predictions)
    return found


def differences(p: Predictions) -> dict[str, float]:
    """Return cross-entropy, H[p_i, p_j] = KL(p_i || p_j) + H[p_i], divergence and disagreement of two members."""
    kl = pairwise_kl(p)
    own_entropy = decomposition(p).aleatoric.mean().item()
    return {"cross_entropy": kl + own_entropy, "kl": kl, "disagreement": disagreement(p)}


def _log_probs(model: nn.Module, inputs: Tensor) -> Tensor:
    device = next((tensor.device for tensor in model.parameters()), inputs.device)
    return torch.log_softmax(member_logits(model, inputs.to(device)).float(), dim=-1).cpu()

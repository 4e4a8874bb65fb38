"""Model Stock: each layer of the members' mean moves towards the base by as much as the members disagree.

    cos = mean over pairs m < n of  <τ_m, τ_n> / (|τ_m| |τ_n|),   τ_m = θ_m - θ_0,  for each parameter tensor     (1)
    t = M cos / (1 + (M - 1) cos)                                                                                 (2)
    θ = t θ̄ + (1 - t) θ_0                                                                                         (3)

D.-H. Jang, S. Yun, D. Han: Model Stock: All we need is just a few fine-tuned models, ECCV 2024, arXiv:2403.19522.

(3) is the point nearest to the centre of the fine-tuned networks, if these lie on a sphere around it: the less they
agree on the direction, the less of the way from the base is signal. Two members are enough.

Differs from the paper: the angle of more than two members is that of the mean cosine of all pairs; a negative mean
cosine counts as 0, so that a layer lies between the base and the mean; a layer that no member changed stays as it is.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from enfold.arguments import checked
from enfold.data.convert import Examples
from enfold.data.unpack import Unpack
from enfold.merge.common.fine_tuned import Base, finish_with_base, prepare_fine_tuned, wide
from enfold.merge.common.inputs import Models
from enfold.merge.common.states import mean_of
from enfold.merge.repair import RepairKind


@checked
@torch.no_grad()
def model_stock(
    models: Models,
    train: Examples | None = None,
    *,
    base: Base | None = None,
    repair: RepairKind = "reset",
    seed: int = 0,
    unpack: Unpack | None = None,
) -> nn.Module:
    """Return a network between the base and the mean of the members, at a distance of its own in every layer.

    Args:
        models: An ensemble, or networks of one architecture; they are not modified.
        train: Training examples, needed to correct statistics: with batch norm, or `repair` other than "reset".
        base: The network that the members were fine-tuned from, its state dict, or the file of one.
        repair: Statistics of the result: "reset" measures batch norms again, "none" averages their statistics,
            "repair", "rescale" and "closed_form" also correct hidden units as `enfold.merge.repair` does.
        seed: Seed of the order of the training examples.
        unpack: Function that splits a batch into (inputs, target); None for the usual structures of batches.

    Returns:
        A network of the members' class in eval mode; a single member is returned unchanged.

    Raises:
        EnfoldError: If the networks cannot be averaged, the base does not fit, or examples are needed and missing.
    """
    given = prepare_fine_tuned("model_stock", models, base, train, repair=repair, unpack=unpack)
    state = mean_of(given.states)
    for name in given.learned:
        each = torch.stack([wide(own[name]) - wide(given.base[name]) for own in given.states]).flatten(1)
        state[name] = torch.lerp(given.base[name], state[name], ratio(each))  # (3)
    return finish_with_base(given, state, repair, seed)


def ratio(vectors: Tensor) -> float:
    """Return t of equation (2) for the task vectors of one layer, (M, P)."""
    count = len(vectors)
    vectors = vectors.double()
    norms = vectors.norm(dim=1)
    if count == 1 or not bool(norms.any()):
        return 1.0
    units = vectors / norms.clamp(min=torch.finfo(torch.float64).tiny)[:, None]
    products = units @ units.T
    cos = float((products.sum() - products.diagonal().sum()) / (count * (count - 1)))  # (1)
    cos = min(max(cos, 0.0), 1.0)
    return count * cos / (1 + (count - 1) * cos)  # (2)

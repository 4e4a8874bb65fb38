"""DARE: most entries of the members' changes are dropped at random, the rest rescaled, and the result is averaged.

    τ̃_m = b_m τ_m / (1 - p),   b_m ~ Bernoulli(1 - p) for each entry,   τ_m = θ_m - θ_0                           (1)
    θ = θ_0 + λ (1/M) Σ_m τ̃_m                                                                                     (2)
    θ = θ_0 + λ × mean over the members with the elected sign of τ̃_m,   see `ties`                                (3)

L. Yu, B. Yu, H. Yu, F. Huang, Y. Li: Language Models are Super Mario: Absorbing Abilities from Homologous Models as a
Free Lunch, ICML 2024, arXiv:2311.03099.

(1) has the expectation τ_m, so that (2) is the mean of the members with noise, the less of it the smaller the changes
are: the paper drops 90 % of changes of about 0.002. Draws are seeded by the weights of a member, so that the order of
the members does not matter; equal members give themselves with drop=0 only.

Differs from the paper: p = 0.5 instead of 0.9 by default, as networks fine-tuned completely change more; the factor of
members is λ/M as in (2); a single member is not dropped from, as nothing interferes with it; equation (3) does not
trim; buffers are averaged, and batch-norm statistics measured again.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from enfold.arguments import checked
from enfold.data.convert import Examples
from enfold.data.unpack import Unpack
from enfold.merge.common.fine_tuned import (
    Base,
    finish_with_base,
    flatten,
    prepare_fine_tuned,
    seeds_by_content,
)
from enfold.merge.common.inputs import Models
from enfold.merge.common.states import mean_of
from enfold.merge.repair import RepairKind
from enfold.merge.ties import add_to_base, disjoint_mean
from enfold.seeds import generator


@checked
@torch.no_grad()
def dare(
    models: Models,
    train: Examples | None = None,
    *,
    base: Base | None = None,
    drop: Annotated[float, Field(ge=0, lt=1)] = 0.5,
    combine: Literal["average", "ties"] = "average",
    scale: Annotated[float, Field(allow_inf_nan=False)] = 1.0,
    repair: RepairKind = "reset",
    seed: int = 0,
    unpack: Unpack | None = None,
) -> nn.Module:
    """Return the base plus the mean of the members' changes, of which entries were dropped at random.

    Args:
        models: An ensemble, or networks of one architecture; they are not modified.
        train: Training examples, needed to correct statistics: with batch norm, or `repair` other than "reset".
        base: The network that the members were fine-tuned from, its state dict, or the file of one.
        drop: p, the probability that an entry is dropped.
        combine: The mean of all members ("average"), or of those with the elected sign ("ties").
        scale: λ; 0 gives the base.
        repair: Statistics of the result: "reset" measures batch norms again, "none" averages their statistics,
            "repair", "rescale" and "closed_form" also correct hidden units as `enfold.merge.repair` does.
        seed: Seed of the draws, together with the weights of a member, and of the order of the training examples.
        unpack: Function that splits a batch into (inputs, target); None for the usual structures of batches.

    Returns:
        A network of the members' class in eval mode; a single member is returned unchanged at scale 1.

    Raises:
        EnfoldError: If the networks cannot be averaged, the base does not fit, or examples are needed and missing.
    """
    given = prepare_fine_tuned("dare", models, base, train, repair=repair, unpack=unpack)
    state = mean_of(given.states)
    if len(given.states) > 1 and (drop or combine == "ties"):
        texts = seeds_by_content(given.states, given.learned)
        each = torch.stack(
            [
                drop_and_rescale(flatten(given.vectors(index), given.learned), drop, generator(seed, "dare", text))
                for index, text in enumerate(texts)
            ]
        )
        state |= add_to_base(given, each.mean(0) if combine == "average" else disjoint_mean(each))  # (2), (3)
    return finish_with_base(given, given.along(state, scale), repair, seed)


def drop_and_rescale(vector: Tensor, drop: float, source: torch.Generator) -> Tensor:
    """Return equation (1) of one task vector, (P,).

    Args:
        vector: The task vector.
        drop: The probability that an entry is dropped.
        source: A generator on the CPU, so that draws do not depend on the device.
    """
    retained = torch.rand(len(vector), generator=source) >= drop
    return vector * retained.to(vector) / (1 - drop)  # (1)

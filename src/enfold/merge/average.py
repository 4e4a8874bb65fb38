"""The naive average: the mean of the members' weights.

    θ̄ = (1/M) Σ_m θ_m                                                                        (1)

Right for members in one basin of the loss (checkpoints of one run, copies fine-tuned from one network); useless for
members that were trained independently, whose hidden units are in different orders. It is the baseline of all merges.

Batch-norm statistics of the averaged network are not the average of the statistics: they are measured again on training
examples (`repair="reset"`), or averaged like the weights (`repair="none"`).

Differs from the paper: does not apply; averaging is the baseline of all merges, without a paper of its own.
"""

from __future__ import annotations

import torch
from torch import nn

from enfold.arguments import checked
from enfold.data.convert import Examples
from enfold.data.unpack import Unpack
from enfold.merge.common.inputs import Models, prepare_inputs
from enfold.merge.common.merging import build_network
from enfold.merge.repair import RepairKind


@checked
@torch.no_grad()
def average(
    models: Models,
    train: Examples | None = None,
    *,
    repair: RepairKind = "reset",
    seed: int = 0,
    unpack: Unpack | None = None,
) -> nn.Module:
    """Return one network with the mean of the members' weights.

    Args:
        models: An ensemble, or networks of one architecture; they are not modified.
        train: Training examples, needed only to correct statistics: with batch norm, or `repair` other than "reset".
        repair: Statistics of the average: "reset" measures batch norms again, "none" averages their statistics,
            "repair", "rescale" and "closed_form" also correct hidden units as `enfold.merge.repair` does.
        seed: Seed of the order of the examples.
        unpack: Function that splits a batch into (inputs, target); None for the usual structures of batches.

    Returns:
        A network of the members' class in eval mode; a single member is returned unchanged.

    Raises:
        EnfoldError: If the networks cannot be averaged, or training examples are needed and missing.
    """
    inputs = prepare_inputs("average", models, train, repair=repair, unpack=unpack)
    if inputs.ensemble.num_members == 1:
        return inputs.ensemble.member(0).eval()
    return build_network(inputs, inputs.ensemble.mean_state(), repair, seed)  # (1)

"""HydraEnsemble: a common body, and heads that start as copies of a trained head plus noise.

    z_m = head_m(body(x))                                                                    (1)
    θ_m = θ + noise · rms(θ) · ε_m,   ε_m ~ N(0, 1)     for every tensor θ of the head       (2)

L. Tran, B. S. Veeling, K. Roth, J. Swiatkowski, J. V. Dillon, J. Snoek, S. Mandt, T. Salimans, S. Nowozin,
R. Jenatton: Hydra: Preserving Ensemble Diversity for Model Distillation, 2020, arXiv:2001.04694.

This class is the architecture; the distillation loss `Hydra` trains it. Heads of one layer only differ linearly;
`split` gives them a block or more.

Differs from the paper: how copies of the head are made different is not published; (2) is ours.
"""

from __future__ import annotations

from pydantic import PositiveInt
from torch import nn

from enfold.arguments import checked
from enfold.engines.base import EngineName
from enfold.ensembles.common.branching import BranchedEnsemble, last_layer, split_names
from enfold.ensembles.common.options import NonNegative


@checked
class HydraEnsemble(BranchedEnsemble):
    """A common body, and heads that start as copies of the network's head plus noise.

    Args:
        network: The network; its body is common to all members, and its head is copied for each.
        num_members: The number of members.
        split: The path of the first module of the head; the last layer by default.
        noise: The standard deviation of the noise on each copy of the head, relative to the root mean square of a
            tensor; with 0, heads only become different if their targets are.
        seed: The seed of the noise.
        engine: How members are run: auto, measure, stacked, loop or vmap.
    """

    def __init__(
        self,
        network: nn.Module,
        num_members: PositiveInt = 4,
        *,
        split: str | None = None,
        noise: NonNegative = 0.1,
        seed: int = 0,
        engine: EngineName = "auto",
    ) -> None:
        own = split_names(network, last_layer(network) if split is None else split)
        super().__init__(network, num_members, own, engine)
        self.split, self.noise, self.seed = split, noise, seed
        if noise:
            self.perturb_branches(noise)  # (2)

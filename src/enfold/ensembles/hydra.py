"""Hydra: one body for all members, and heads that start as copies of a trained head, set apart by noise.

    z_m = head_m(body(x))                                                                    (1)
    θ_m = θ + noise · rms(θ) · ε_m,   ε_m ~ N(0, 1)     for every tensor θ of the head       (2)

L. Tran, B. S. Veeling, K. Roth, J. Swiatkowski, J. V. Dillon, J. Snoek, S. Mandt, T. Salimans, S. Nowozin,
R. Jenatton: Hydra: Preserving Ensemble Diversity for Model Distillation, 2020, arXiv:2001.04694.

This is the network: train one with the mean of the teachers, give it to Hydra, and train each head with a teacher of
its own. Heads of one layer differ linearly only; `split` gives them a block or more.

Differs from the paper: how copies are set apart is not published; (2) with a tenth of each tensor's size is ours.
Nothing else known.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from enfold.engines.base import EngineName
from enfold.ensembles.common.branching import Branches, Branching, last_layer, require_start, split_names
from enfold.ensembles.common.sharing import require_size


@dataclass(frozen=True)
class Hydra(Branching):
    """One body for all members, and heads that start as copies of a trained head, set apart by noise."""

    num_members: int = 4
    split: str | None = None  # path of the first module of the head; None: the last layer
    noise: float = 0.1  # how far copies of the head start apart; 0: they part only if their targets differ
    seed: int = 0
    engine: EngineName = "auto"

    def __post_init__(self) -> None:
        require_size(self.num_members)
        require_start("copies", self.noise)

    def __call__(self, network: nn.Module) -> Branches:
        """M members whose heads are the network's own, and noise."""
        return Branches(network, self, "copies", self.noise)

    def branch_of(self, network: nn.Module) -> list[str]:
        """The head's tensors."""
        return split_names(network, last_layer(network) if self.split is None else self.split)

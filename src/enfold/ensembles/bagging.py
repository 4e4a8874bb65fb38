"""Bagging: each member is a network of its own, trained on its own draws with replacement from the training part.

    D_m = N draws with replacement from N examples                                       (1)
    p = (1/M) Σ_m p_m,      or the majority of votes: `enfold.metrics.majority_vote`     (2)

L. Breiman: Bagging Predictors, Machine Learning 24, 1996.

A given example is left out of D_m with the probability (1 - 1/N)^N, near 1/e: a member sees 63.2 % of the examples. For
neural networks that loss usually outweighs the added diversity: a deep ensemble, which differs in initialisation and
order alone, is better (S. Lee et al., 2015, arXiv:1511.06314). It costs what a deep ensemble costs.

Differs from the paper: members also start from their own draws of the initialisation.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from enfold.engines.base import EngineName
from enfold.ensembles.common.sharing import Share, refuse_ties, require_size
from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.train import TrainConfig


@dataclass(frozen=True)
class Bagging(Share):
    """M networks, each initialised anew and trained on its own bootstrap sample."""

    num_members: int = 4
    seed: int = 0  # of the members' initialisation; what they see is drawn by the plan's
    engine: EngineName = "auto"

    def __post_init__(self) -> None:
        require_size(self.num_members)

    def __call__(self, network: nn.Module) -> DeepEnsemble:
        """M re-initialised copies."""
        refuse_ties(network)
        members = DeepEnsemble.make(network, self.num_members, seed=self.seed, engine=self.engine)
        members.share = self
        return members

    def adapted(self, plan: TrainConfig) -> TrainConfig:
        """Equation (1)."""
        return plan.replace(bootstrap=True, order="own")

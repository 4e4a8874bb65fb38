"""Bagging: every member is trained on its own bootstrap sample of the training data.

    D_m = N draws with replacement from N examples                                       (1)
    p = (1/M) Σ_m p_m,      or the majority of votes: `enfold.metrics.majority_vote`     (2)

L. Breiman: Bagging Predictors, Machine Learning 24, 1996.

An example is not in D_m with probability (1 - 1/N)^N, about 1/e: a member sees 63.2 % of the examples. For neural
networks that usually costs more than the diversity gains: a deep ensemble, whose members differ in initialisation and
order only, is better (S. Lee et al., 2015, arXiv:1511.06314). The cost is that of a deep ensemble.

Differs from the paper: members also differ in their initialisation.
"""

from __future__ import annotations

from pydantic import PositiveInt
from torch import nn

from enfold.arguments import checked
from enfold.engines.base import EngineName
from enfold.ensembles.common.efficient import refuse_ties
from enfold.ensembles.deep_ensemble import DeepEnsemble, Factory
from enfold.train import TrainConfig


@checked
class Bagging(DeepEnsemble):
    """M networks, each drawn again and trained on its own bootstrap sample.

    Args:
        network: The network, or a function that makes one.
        num_members: The number of members.
        seed: The seed of the members' initialisation; bootstrap samples follow the seed of the training.
        engine: How members are run: auto, measure, stacked, loop or vmap.
    """

    def __init__(
        self,
        network: nn.Module | Factory,
        num_members: PositiveInt = 4,
        *,
        seed: int = 0,
        engine: EngineName = "auto",
    ) -> None:
        if isinstance(network, nn.Module):
            refuse_ties(network)
        super().__init__(network, num_members, seed=seed, engine=engine)

    @property
    def has_independent_members(self) -> bool:
        """A member depends on its own sample only."""
        return True

    def configure(self, config: TrainConfig) -> TrainConfig:
        """Train every member on its own bootstrap sample, (1)."""
        return config.replace(bootstrap=True, order="own")

"""MultiHead: a common body for all members, and a last layer of its own for every member.

    z_m = W_m h(x) + b_m                                                                     (1)
    parameters = body + M · head                                                             (2)

S. Lee, S. Purushwalkam, M. Cogswell, D. Crandall, D. Batra: Why M Heads are Better than One: Training a Diverse
Ensemble of Deep Networks, 2015, arXiv:1511.06314; there it is the TreeNet that splits last.

The head is the layer that was registered last and everything after it; `split` names another. Heads of one layer only
differ linearly: for more diversity, split earlier.

Differs from the paper: the gradient of the body is divided by M, so that it is as large as that of a single network.
"""

from __future__ import annotations

from pydantic import PositiveInt
from torch import nn

from enfold.arguments import checked
from enfold.engines.base import EngineName
from enfold.ensembles.common.branching import BranchedEnsemble, last_layer, split_names


@checked
class MultiHead(BranchedEnsemble):
    """A common body, and a head of its own for every member.

    Args:
        network: The network; its body is common to all members, and heads are drawn again for each.
        num_members: The number of members.
        split: The path of the head; the last layer by default.
        seed: The seed of the heads.
        engine: How members are run: auto, measure, stacked, loop or vmap.
    """

    def __init__(
        self,
        network: nn.Module,
        num_members: PositiveInt = 4,
        *,
        split: str | None = None,
        seed: int = 0,
        engine: EngineName = "auto",
    ) -> None:
        own = split_names(network, last_layer(network) if split is None else split)
        super().__init__(network, num_members, own, engine)
        self.split, self.seed = split, seed
        self.draw_branches(network)

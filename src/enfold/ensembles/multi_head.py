"""MultiHead: one body for all members, and a last layer of their own for each.

    z_m = W_m h(x) + b_m                                                                     (1)
    parameters = body + M · head                                                             (2)

S. Lee, S. Purushwalkam, M. Cogswell, D. Crandall, D. Batra: Why M Heads are Better than One: Training a Diverse
Ensemble of Deep Networks, 2015, arXiv:1511.06314; there it is the TreeNet that splits last.

The head is the layer that was registered last, with all that comes after it; `split` names another. Heads on one
representation differ linearly only: where members should disagree more, split earlier.

Differs from the paper: the body's gradient is divided by M, so that it has the size of one network's; nothing else
known.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from enfold.engines.base import EngineName
from enfold.ensembles.common.branching import Branches, Branching, last_layer, split_names
from enfold.ensembles.common.sharing import require_size


@dataclass(frozen=True)
class MultiHead(Branching):
    """One body for all members, and a last layer of their own for each."""

    num_members: int = 4
    split: str | None = None  # path of the head; None: the last layer
    seed: int = 0
    engine: EngineName = "auto"

    def __post_init__(self) -> None:
        require_size(self.num_members)

    def __call__(self, network: nn.Module) -> Branches:
        """M members whose heads are drawn anew."""
        return Branches(network, self, "fresh")

    def branch_of(self, network: nn.Module) -> list[str]:
        """The head's tensors."""
        return split_names(network, last_layer(network) if self.split is None else self.split)

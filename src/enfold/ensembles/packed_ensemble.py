"""Packed-Ensembles: M narrow networks that together are about as large as one.

    c_m = α c / M                                       hidden width of a member             (1)
    groups of a hidden convolution: γ in a member, M γ in the packed network                 (2)
    parameters ≈ α² / (M γ) of the network's                                                 (3)

O. Laurent, A. Lafage, E. Tartaglione, G. Daniel, J.-M. Martinez, A. Bursuc, G. Franchi: Packed-Ensembles for Efficient
Uncertainty Estimation, ICLR 2023, arXiv:2210.09184.

A grouped convolution with M γ groups computes the same as M convolutions with γ groups each, so the members are what
they are in the paper, stored as M separate networks of your class: each takes the whole input, gives all classes, and
can be taken out. They start anew, from their own seeds; values of the network given cannot survive a change of width.

Widths are rounded up to whole numbers that γ and the attention heads divide, all by one ratio where that costs little
(`ensembles.common.surgery.narrowed`). The first and the last layer are not grouped by γ, as in the authors' code.

Differs from the paper: members may see the data in their own order (order="shared" in the plan is the paper's); γ
groups convolutions alone, because linear layers of a plain network have no groups; it groups all hidden convolutions,
where the authors' code groups some; there is no least number of channels in a group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from enfold.engines.base import EngineName
from enfold.engines.copying import copied
from enfold.engines.initialization import reinitialise
from enfold.ensembles.common.sharing import Share, refuse_ties, require_size
from enfold.ensembles.common.surgery import narrowed
from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.errors import EnfoldError


@dataclass(frozen=True)
class PackedEnsemble(Share):
    """M narrow networks that together are about as large as one."""

    num_members: int = 4
    alpha: float = 2.0  # the width of all members together, as a multiple of the network's
    gamma: int = 1  # groups of a member's hidden convolutions
    seed: int = 0
    engine: EngineName = "auto"

    def __post_init__(self) -> None:
        require_size(self.num_members)
        if not self.alpha > 0:
            raise EnfoldError(f"alpha multiplies the width and must be above 0, got {self.alpha}: 2 is the paper's")
        if self.gamma < 1:
            raise EnfoldError(f"gamma is a number of groups and must be at least 1, got {self.gamma}: 1 or 2 is usual")

    def __call__(self, network: nn.Module) -> PackedMembers:
        """M narrow members of the network's class."""
        refuse_ties(network)
        narrow = narrowed(network, self.alpha / self.num_members, self.gamma)  # (1), (2)

        def make() -> nn.Module:
            return reinitialise(copied(narrow), keep_scale=False)  # values of wider layers say nothing about these

        members = PackedMembers.make(make, self.num_members, seed=self.seed, engine=self.engine)
        members.share = self
        return members


class PackedMembers(DeepEnsemble):
    """The members, which run on the inputs of the network given, if all that is as wide as its layers was resized."""

    def _run(self, inputs: Tensor, *, each: bool) -> Tensor:
        try:
            return super()._run(inputs, each=each)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            fraction = self.share.alpha / self.share.num_members
            raise EnfoldError(
                f"a network is narrowed layer by layer, but with {fraction:.3g} of its hidden widths this "
                f"{type(self.skeleton.network).__name__} does not run on inputs of shape {tuple(inputs.shape)} "
                f"({str(error).splitlines()[0]}): check that shape, put parameters of its own into layers, or use a "
                "method that keeps widths"
            ) from error

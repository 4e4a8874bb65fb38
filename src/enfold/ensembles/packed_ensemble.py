"""Packed-Ensembles: M narrow networks that together are about as large as one.

    c_m = α c / M                                       hidden width of a member             (1)
    groups of a hidden convolution: γ in a member, M γ in the packed network                 (2)
    parameters ≈ α² / (M γ) of the network's                                                 (3)

O. Laurent, A. Lafage, E. Tartaglione, G. Daniel, J.-M. Martinez, A. Bursuc, G. Franchi: Packed-Ensembles for Efficient
Uncertainty Estimation, ICLR 2023, arXiv:2210.09184.

A grouped convolution with M γ groups computes the same as M convolutions with γ groups each, so the members are those
of the paper, stored as M separate networks of the user's class: each takes the complete input, gives all classes, and
can be extracted. They are drawn with their own seeds; values of the network cannot be used in layers of other widths.

Widths are rounded up to integers that γ and the number of attention heads divide, all by one ratio where that costs
little (`ensembles.common.surgery.narrow_network`). The first and the last layer are not grouped, as in the public code.

Differs from the paper: members see the data in their own order (the paper's is order="shared" in the training
configuration); γ groups convolutions only, because linear layers have no groups; it groups all hidden convolutions,
where the public code groups some; there is no minimum number of channels in a group.
"""

from __future__ import annotations

from typing import Any

import torch
from pydantic import PositiveInt
from torch import Tensor, nn

from enfold.arguments import checked
from enfold.data.tree import describe
from enfold.engines.base import EngineName
from enfold.engines.copying import copy_network
from enfold.engines.initialization import call_factory, reinitialise
from enfold.ensembles.common.efficient import refuse_ties
from enfold.ensembles.common.options import Positive
from enfold.ensembles.common.surgery import narrow_network
from enfold.ensembles.deep_ensemble import DeepEnsemble, Factory
from enfold.errors import EnfoldError


@checked
class PackedEnsemble(DeepEnsemble):
    """M narrow networks that together are about as large as one.

    Args:
        network: The network, or a function that makes one; members have its architecture with narrower layers.
        num_members: The number of members.
        alpha: The width of all members together, as a multiple of the network's.
        gamma: The number of groups of a member's hidden convolutions.
        seed: The seed of the members.
        engine: How members are run: auto, measure, stacked, loop or vmap.
    """

    def __init__(
        self,
        network: nn.Module | Factory,
        num_members: PositiveInt = 4,
        *,
        alpha: Positive = 2.0,
        gamma: PositiveInt = 1,
        seed: int = 0,
        engine: EngineName = "auto",
    ) -> None:
        template = network if isinstance(network, nn.Module) else call_factory(network)
        refuse_ties(template)
        narrow = narrow_network(template, alpha / num_members, gamma)  # (1), (2)

        def make() -> nn.Module:
            return reinitialise(copy_network(narrow), keep_scale=False)  # the values are those of wider layers

        super().__init__(make, num_members, seed=seed, engine=engine)
        self.alpha, self.gamma = alpha, gamma

    def _run(self, inputs: Any, *, each: bool) -> Tensor:
        try:
            return super()._run(inputs, each=each)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            fraction = self.alpha / self.num_members
            shape = f"shape {tuple(inputs.shape)}" if isinstance(inputs, Tensor) else describe(inputs)
            raise EnfoldError(
                f"network must run after its layers were narrowed, but with {fraction:.3g} of its hidden widths this "
                f"{type(self.skeleton.network).__name__} fails on inputs of {shape} "
                f"({str(error).splitlines()[0]}): check that shape, move parameters into layers, or use a method that "
                "does not change widths"
            ) from error

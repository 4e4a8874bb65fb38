"""FiLMEnsemble: common weights, and scales, shifts and statistics of norm layers of its own for every member.

    y_m = γ_m ∘ (x - μ_m) / σ_m + β_m                    in every norm layer                           (1)

    xavier:  γ_m, β_m ~ U(-a, a),      a = gain (6 / (1 + c))^(1/2),      c features                   (2)
    signs:   γ_m, β_m = ± gain, each sign with probability 1/2                                         (3)
    around:  γ_m = γ ∘ (1 + gain ε),   β_m = β + gain ε',      ε, ε' ~ N(0, 1)                         (4)

M. O. Turkoglu, A. Becker, H. A. Gündüz, M. Rezaei, B. Bischl, R. Caye Daudt, S. D'Aronco, J. D. Wegner, K. Schindler:
FiLM-Ensemble: Probabilistic Deep Learning via Feature-wise Linear Modulation, NeurIPS 2022, arXiv:2206.00050.

The gain sets how different members are at the start. (2) and (3) are those of the public code; they replace the affine
parameters of the network and are for training from scratch. (4) starts around those of a trained network; try a gain of
0.1 there.

Differs from the paper: any norm layer with affine parameters is modulated, also layer and group norms; (4) is ours; the
public code has a = gain (6 / (M + c))^(1/2), by which a member would depend on M; members see the data in their own
order, where the public code gives all of them one batch (order="shared" in the training configuration).

Members differ in norm layers only, by design: there is no warning about it, and print(ensemble) shows the fraction.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from pydantic import PositiveInt
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from enfold.arguments import checked
from enfold.engines.base import EngineName
from enfold.ensembles.common.efficient import EfficientEnsemble, refuse_ties
from enfold.ensembles.common.options import NonNegative
from enfold.errors import UnsuitableNetwork
from enfold.seeds import generator

NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


@checked
class FiLMEnsemble(EfficientEnsemble):
    """Common weights; every member has its own scales, shifts and statistics of the norm layers.

    Args:
        network: The network whose weights become the common weights. It is not modified.
        num_members: The number of members.
        init: The initial scales and shifts: "xavier", (2); "signs", (3); "around" those of the network, (4).
        gain: The size of the differences between members at the start.
        seed: The seed of the initial scales and shifts.
        engine: How members are run: auto, measure, stacked, loop or vmap.
    """

    def __init__(
        self,
        network: nn.Module,
        num_members: PositiveInt = 4,
        *,
        init: Literal["xavier", "signs", "around"] = "xavier",
        gain: NonNegative = 1.0,
        seed: int = 0,
        engine: EngineName = "auto",
    ) -> None:
        refuse_ties(network)
        norms = {f"{name}." if name else "": norm for name, norm in network.named_modules() if isinstance(norm, NORMS)}
        affine = [f"{prefix}{key}" for prefix, norm in norms.items() for key, _ in norm.named_parameters(recurse=False)]
        if not affine:
            raise UnsuitableNetwork(
                "network must have norm layers with affine parameters (batch, layer, group, instance or RMS norm), but "
                f"this {type(network).__name__} has none: add norm layers, or use BatchEnsemble"
            )
        statistics = [
            f"{prefix}{key}" for prefix, norm in norms.items() for key, _ in norm.named_buffers(recurse=False)
        ]
        super().__init__(network, num_members, [*affine, *statistics], engine)
        self.init, self.gain, self.seed = init, gain, seed
        own = self.own.state()
        with torch.no_grad():
            for name in affine:  # also those of a frozen network: new values have to be trained
                own[name].requires_grad_().copy_(self._start(name, own[name]))

    def _start(self, name: str, source: Tensor) -> Tensor:
        """Return γ or β of all members, (M, *features), given the values of the network for every member."""
        drawn = []
        for member, values in enumerate(source):
            rng = generator(self.seed, "film_ensemble", name, member)
            if self.init == "around":
                noise = self.gain * torch.randn(values.shape, generator=rng).to(values)
                drawn.append(values + noise * (values if name.endswith("weight") else 1))  # (4)
            elif self.init == "signs":
                drawn.append(self.gain * (torch.rand(values.shape, generator=rng).round() * 2 - 1))  # (3)
            else:
                bound = self.gain * math.sqrt(6 / (1 + values.numel()))
                drawn.append(bound * (torch.rand(values.shape, generator=rng) * 2 - 1))  # (2)
        return torch.stack(drawn)

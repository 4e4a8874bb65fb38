"""FiLM-Ensemble: all weights are shared, and each member has its own scales, shifts and statistics of the norm layers.

    y_m = γ_m ∘ (x - μ_m) / σ_m + β_m                    in every norm layer                           (1)

    xavier:  γ_m, β_m ~ U(-a, a),      a = gain (6 / (1 + c))^(1/2),      c features                   (2)
    signs:   γ_m, β_m = ± gain, each sign with probability 1/2                                         (3)
    around:  γ_m = γ ∘ (1 + gain ε),   β_m = β + gain ε',      ε, ε' ~ N(0, 1)                         (4)

M. O. Turkoglu, A. Becker, H. A. Gündüz, M. Rezaei, B. Bischl, R. Caye Daudt, S. D'Aronco, J. D. Wegner, K. Schindler:
FiLM-Ensemble: Probabilistic Deep Learning via Feature-wise Linear Modulation, NeurIPS 2022, arXiv:2206.00050.

The gain sets how far apart members start. Everything else is one network's, the classifier among it. (2) and (3) are
the public code's and forget the affine parameters of the network given: they are for training from scratch. (4) starts
around those of a trained network; try a gain of 0.1 there.

Differs from the paper: any norm layer with scales is modulated, layer and group norms too; (4) is ours; the public code
has a = gain (6 / (M + c))^(1/2), which would make a member depend on how many there are; members keep their own order
of data, where the code gives all of them one batch (the plan's order="shared").
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from enfold.engines.base import EngineName
from enfold.ensembles.common.sharing import Share, Sharing, refuse_ties, require_size
from enfold.errors import EnfoldError
from enfold.seeds import generator

NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


@dataclass(frozen=True)
class FiLMEnsemble(Share):
    """All weights are shared; each member has its own scales, shifts and statistics of the norm layers."""

    num_members: int = 4
    init: Literal["xavier", "signs", "around"] = "xavier"  # uniform, plus or minus gain, or around the network's own
    gain: float = 1.0  # how far apart members start
    seed: int = 0
    engine: EngineName = "auto"

    def __post_init__(self) -> None:
        require_size(self.num_members)
        if self.gain < 0:
            raise EnfoldError(f"the gain must be 0 or more, got {self.gain}: 1 is the public code's")
        if self.init not in ("xavier", "signs", "around"):
            raise EnfoldError(f"init must be 'xavier', 'signs' or 'around', got {self.init!r}: choose one of them")

    def __call__(self, network: nn.Module) -> FiLMEnsembleMembers:
        """M members that share all weights of the network but those of its norms."""
        return FiLMEnsembleMembers(network, self)


class FiLMEnsembleMembers(Sharing):
    """The members; `own` holds γ, β and the statistics, `shared` all the rest."""

    share: FiLMEnsemble

    def __init__(self, network: nn.Module, share: FiLMEnsemble) -> None:
        refuse_ties(network)
        norms = {f"{name}." if name else "": part for name, part in network.named_modules() if isinstance(part, NORMS)}
        affine = [f"{prefix}{key}" for prefix, part in norms.items() for key, _ in part.named_parameters(recurse=False)]
        if not affine:
            raise EnfoldError(
                "FiLM-Ensemble modulates norm layers with affine parameters (batch, layer, group, instance or RMS "
                f"norm), but this {type(network).__name__} has none: add norm layers, or use BatchEnsemble"
            )
        statistics = [
            f"{prefix}{key}" for prefix, part in norms.items() for key, _ in part.named_buffers(recurse=False)
        ]
        super().__init__(network, share.num_members, [*affine, *statistics], share.engine)
        self.share = share
        own = self.own.state()
        with torch.no_grad():
            for name in affine:
                own[name].requires_grad_().copy_(self._start(name, own[name]))  # what is drawn anew has to be trained

    def _start(self, name: str, source: Tensor) -> Tensor:
        """γ or β of all members, from the network's own, M times the same: (M, *features)."""
        drawn = []
        for member, values in enumerate(source):
            rng = generator(self.share.seed, "film_ensemble", name, member)
            if self.share.init == "around":
                noise = self.share.gain * torch.randn(values.shape, generator=rng).to(values)
                drawn.append(values + noise * (values if name.endswith("weight") else 1))  # (4)
            elif self.share.init == "signs":
                drawn.append(self.share.gain * (torch.rand(values.shape, generator=rng).round() * 2 - 1))  # (3)
            else:
                bound = self.share.gain * math.sqrt(6 / (1 + values.numel()))
                drawn.append(bound * (torch.rand(values.shape, generator=rng) * 2 - 1))  # (2)
        return torch.stack(drawn)

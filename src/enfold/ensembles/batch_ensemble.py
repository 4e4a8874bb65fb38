"""BatchEnsemble: one shared weight a layer, scaled for each member by two vectors.

    W_m = W ∘ Σ_j s_mj r_mj^T,      j = 1..rank                                              (1)
    y_m = s_m ∘ (W (r_m ∘ x)) + b_m                      (the same for rank 1)               (2)

    bias:  member       b_m, one a member
           shared_post  b, added after the scaling
           shared_pre   s_m ∘ b, scaled with the output                                      (3)

Y. Wen, D. Tran, J. Ba: BatchEnsemble: an Alternative Approach to Efficient Ensemble and Lifelong Learning, ICLR 2020,
arXiv:2002.06715. TabM's start: Y. Gorishniy, A. Kotelnikov, A. Babenko, ICLR 2025, arXiv:2410.24210.

r scales the input channels of a linear layer or a convolution and s its output channels; an embedding has s only. In a
convolution all taps of a channel share a factor. The weights W are those of the network given, trained or not.

`fast_grad_scale` multiplies the gradient of r and s in the mean loss over members, and with Adam, which knows no scale
of gradients, their learning rate: 0.5 is published; with SGD, M gives each member's vectors the steps they would take
alone. What attention packs into one matrix for queries, keys and values is no layer and is shared.

Differs from the paper: members keep their own order of data; and each member's own batch is normalised, with its own
statistics, unless `batch_norm` is "joint": one batch norm over all members' examples, which takes more memory because
no member can then be run alone. What a member owns besides r and s, such as its biases, is trained on its own loss, not
on the mean: with SGD its steps are M times as large, and not halved as there. Nothing else known.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from enfold.engines.base import Engine, EngineName
from enfold.engines.factored import Factored
from enfold.engines.groups import Decay
from enfold.engines.program import StackedProgram
from enfold.engines.skeleton import State
from enfold.engines.tree import Tree
from enfold.ensembles.common.layer_shapes import LAYERS, layer_shape
from enfold.ensembles.common.sharing import NormChoice, Share, Sharing, chosen_layers, require_size
from enfold.errors import EnfoldError
from enfold.seeds import generator

NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.modules.instancenorm._InstanceNorm)
CHOICES = {
    "bias": ("member", "shared_post", "shared_pre"),
    "init": ("gaussian", "signs", "ones", "tabm", "tabm_normal"),
    "bias_start": ("network", "zeros"),
    "norms": ("shared", "own"),
}


@dataclass(frozen=True)
class BatchEnsemble(Share):
    """One shared weight a layer, scaled for each member by two vectors."""

    num_members: int = 4
    rank: int = 1  # how many pairs of vectors scale a weight; 1 is the paper's
    bias: Literal["member", "shared_post", "shared_pre"] = "member"  # one a member, or one for all, after or before s_m
    bias_start: Literal["network", "zeros"] = "network"  # what members' biases start as
    init: Literal["gaussian", "signs", "ones", "tabm", "tabm_normal"] = "gaussian"  # how r and s start
    spread: float = 0.5  # gaussian: the standard deviation around 1; signs: the probability of +1
    batch_norm: NormChoice = "shared"  # "own" is EnsembleBN, "joint" the paper's
    norms: Literal["shared", "own"] = "shared"  # affine parameters of norms other than batch norms
    fast_grad_scale: float = 0.5  # on the gradient of r and s in the mean loss; with Adam, on their learning rate
    fast_decay: float = 0.0  # pulls r and s to 1, as a fraction of the plan's weight decay
    include: tuple[str, ...] = ()  # patterns of layer names; all layers if empty
    exclude: tuple[str, ...] = ()
    seed: int = 0
    engine: EngineName = "auto"

    def __post_init__(self) -> None:
        require_size(self.num_members)
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise EnfoldError(
                    f"{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}: choose one"
                )
        for name, holds, rule in (
            ("rank", self.rank >= 1, "1 or more"),
            ("fast_grad_scale", self.fast_grad_scale >= 0, "0 or more"),
            ("fast_decay", self.fast_decay >= 0, "0 or more"),
            (
                "fast_decay",
                not self.fast_decay or self.rank == 1,
                "0 for ranks above 1, whose factors do not start at 1",
            ),
            ("spread", self.init != "signs" or 0 <= self.spread <= 1, "a probability for signs"),
            ("bias", self.rank == 1 or self.bias != "shared_pre", "added after the scaling for ranks above 1"),
        ):
            if not holds:
                raise EnfoldError(f"{name} must be {rule}, got {getattr(self, name)!r}: change {name}")

    def __call__(self, network: nn.Module) -> BatchEnsembleMembers:
        """M members that share the network's weights."""
        members = BatchEnsembleMembers(network, self)
        members.report_coverage()
        return members


class BatchEnsembleMembers(Sharing):
    """The members; `fast` holds r and s as (rank, M, channels)."""

    def __init__(self, network: nn.Module, share: BatchEnsemble) -> None:
        layers = chosen_layers(network, LAYERS, share.include, share.exclude)
        prefixes = {name: f"{name}." if name else "" for name in layers}
        biases = [f"{prefixes[n]}bias" for n, layer in layers.items() if getattr(layer, "bias", None) is not None]
        norms = [f"{name}.{key}" if name else key for name, key in _norm_parameters(network)]
        own = [*(biases if share.bias == "member" else []), *(norms if share.norms == "own" else [])]
        super().__init__(network, share.num_members, own, share.engine, batch_norm=share.batch_norm)
        self.share = share
        self.layers = {prefixes[name]: layer_shape(layer) for name, layer in layers.items()}
        self.scaled_biases = biases if share.bias == "shared_pre" else []
        self.linear = {prefixes[name] for name, layer in layers.items() if type(layer) is nn.Linear}
        if share.bias_start == "zeros":
            for name in set(biases) & self.own.state().keys():
                self.own.state()[name].data.zero_()
        self.fast = Tree({name: nn.Parameter(tensor) for name, tensor in self._start().items()})

    def _start(self) -> State:
        """r and s of every layer; member m's draws depend on the seed, the layer and m alone."""
        found: State = {}
        for position, (prefix, shape) in enumerate(self.layers.items()):
            like = self.shared.state()[f"{prefix}weight"]
            for vector, size in (("r", shape.inputs), ("s", shape.outputs)):
                init = self.share.init
                if init.startswith("tabm") and not (position == 0 and vector == "r"):
                    init = "ones"
                if size and shape.inputs:
                    found[f"{prefix}{vector}"] = self._draw(init, prefix + vector, size).to(like)
                elif size:  # an embedding: without r, ranks add up to one
                    drawn = self._draw(init, prefix + vector, size, rank=1).to(like)
                    found[f"{prefix}{vector}"] = F.pad(drawn, (0, 0, 0, 0, 0, self.share.rank - 1))
        return found

    def _draw(self, init: str, name: str, size: int, rank: int | None = None) -> Tensor:
        """(rank, M, size). The sum over ranks keeps the size of one. Further ranks of "ones" and of TabM's start begin
        with r = 0, so that they add nothing, and with an s that lets r learn."""
        share, rank = self.share, rank or self.share.rank
        drawn = []
        for member in range(share.num_members):
            source = generator(share.seed, "batch_ensemble", name, member)
            if init == "gaussian":
                drawn.append((1 + share.spread * torch.randn(rank, size, generator=source)) * rank**-0.5)
                continue
            chance = share.spread if init == "signs" else 0.5
            signs = (torch.rand(rank, size, generator=source) < chance).float() * 2 - 1
            if init == "signs":
                drawn.append(signs * rank**-0.25)
                continue
            normal = torch.randn(size, generator=source)
            first = {"ones": torch.ones(size), "tabm": signs[0], "tabm_normal": normal}[init]
            rest = signs[1:] if name.endswith("s") else torch.zeros(rank - 1, size)
            drawn.append(torch.cat([first[None], rest]))
        return torch.stack(drawn, dim=1)

    def expand(self) -> State:
        """Equation (1) for every weight, (3) for biases that are scaled."""
        return self._expanded_but(())

    def _expanded_but(self, factored: Collection[str]) -> State:
        """The members' state; of some layers the factors instead of the weights."""
        state, shared, fast = super().expand(), self.shared.state(), self.fast.state()
        for prefix, shape in self.layers.items():
            weight, r, s = shared[f"{prefix}weight"], fast.get(f"{prefix}r"), fast[f"{prefix}s"]
            if prefix in factored and r is not None:
                state[f"{prefix}weight"] = Factored(weight, r.squeeze(0), s.squeeze(0))  # type: ignore[assignment]
            else:
                state[f"{prefix}weight"] = weight * shape.factor(r, s)  # (1)
            if f"{prefix}bias" in self.scaled_biases:
                state[f"{prefix}bias"] = state[f"{prefix}bias"] * s.sum(0)  # (3)
        return state

    def _running_state(self, engine: Engine) -> State:
        """In training by stacked products, linear weights stay factored: (2) for all members at once."""
        if self.share.rank > 1 or not isinstance(engine, StackedProgram) or not torch.is_grad_enabled():
            return super()._running_state(engine)
        return self._expanded_but(self.linear)

    def param_groups(self, weight_decay: float, decay: Decay = "all") -> list[dict[str, Any]]:
        """The fast weights are not decayed, or towards 1, and have their own gradient scale."""
        fast = {
            "params": list(self.fast.parameters()),
            "weight_decay": self.share.fast_decay * weight_decay,
            "decay_to": 1.0,
            "grad_scale": 1 / self.num_members,
            "step_scale": self.share.fast_grad_scale,
        }
        return [*super().param_groups(weight_decay, decay), fast]


def _norm_parameters(network: nn.Module) -> list[tuple[str, str]]:
    parts = [(name, part) for name, part in network.named_modules() if isinstance(part, NORMS)]
    return [(name, key) for name, part in parts for key, _ in part.named_parameters(recurse=False)]

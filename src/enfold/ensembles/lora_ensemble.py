"""LoRA-Ensemble: one frozen, trained network, to whose attention projections each member adds its own low-rank matrix.

    W_m = W + (alpha / r) B_m A_m,      A_m: r x in,  B_m: out x r,  r <= rank                          (1)
    A_m ~ U(-a, a),  a = gain (6 / (r + in))^(1/2)  (xavier),  or N(0, gain^2)  (normal);   B_m = 0     (2)

D. J. Mühlematter, M. Halbheer, A. Becker, D. Narnhofer, H. Aasen, K. Schindler, M. O. Turkoglu: LoRA-Ensemble:
Efficient Uncertainty Modelling for Self-Attention Networks, arXiv:2405.14438. LoRA: E. J. Hu et al., ICLR 2022,
arXiv:2106.09685.

All members start as the network given, which should be a trained one; what sets them apart is A (the gain), their order
of data, and the classification head, the last layer in the network's listing, of which each member has its own in full:
a copy, or drawn anew. The query, key and value blocks of a joint projection have an A and a B each. A network without
attention gets them in all linear layers and convolutions, whose kernels are taken as out x (in taps). A layer is
attention if it is torch's own or lies in a module that has a query projection by name (query, q, q_proj, to_q, wq, qkv,
...); `include` chooses other layers.

The public code has no alpha (None: the factor is 1). For CIFAR-10 and CIFAR-100 it has rank 8, xavier with gain 10, and
AdamW at 1e-4 without weight decay for a ViT-B/32; its normal start has a standard deviation of 0.02.

Differs from the paper: heads start as the network's own unless head="drawn", as they are in the public code, where the
classes are new; networks without attention; statistics of batch norms are each member's own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from enfold.engines.base import EngineName
from enfold.engines.copying import copied
from enfold.engines.groups import Decay, decay_groups
from enfold.engines.initialization import initialised
from enfold.engines.skeleton import State
from enfold.engines.tree import Tree
from enfold.ensembles.common.layer_shapes import CONVOLUTIONS, TRANSPOSED
from enfold.ensembles.common.sharing import NormChoice, Share, Sharing, chosen_layers, require_size
from enfold.errors import EnfoldError
from enfold.seeds import derive, generator

LAYERS = (nn.Linear, *CONVOLUTIONS, *TRANSPOSED, nn.MultiheadAttention)
JOINT = {"qkv", "to_qkv", "qkv_proj", "wqkv", "in_proj"}
QUERIES = JOINT | {"q", "query", "to_q", "q_proj", "q_lin", "wq"}
GAINS = {"xavier": 10.0, "normal": 0.02}
PROJECTIONS = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "weight")


@dataclass(frozen=True)
class LoRAEnsemble(Share):
    """One frozen, trained network, to whose attention projections each member adds its own low-rank matrix."""

    num_members: int = 4
    rank: int = 8  # r, at most: how many columns B has
    alpha: float | None = None  # the factor on B A is alpha / r; None: 1
    init: Literal["xavier", "normal"] = "xavier"  # how A starts: uniform, or normal
    gain: float | None = None  # normal: the standard deviation; None: 10 for xavier, 0.02 for normal
    head: Literal["own", "drawn", "shared"] = "own"  # a copy of its own for each member, one drawn anew, or one for all
    batch_norm: NormChoice = "shared"  # "own" is EnsembleBN
    frozen: bool = True  # False: what members share is trained too
    include: tuple[str, ...] = ()  # patterns of layer names; attention if empty, or all layers where there is none
    exclude: tuple[str, ...] = ()
    seed: int = 0
    engine: EngineName = "auto"

    def __post_init__(self) -> None:
        require_size(self.num_members)
        if self.rank < 1:
            raise EnfoldError(f"the rank must be at least 1, got {self.rank}: 8 is published")
        if self.gain is not None and self.gain <= 0:
            raise EnfoldError(f"the gain must be above 0, or A and B would both stay 0, got {self.gain}: leave it out")
        for field, known in (("init", ("xavier", "normal")), ("head", ("own", "drawn", "shared"))):
            if getattr(self, field) not in known:
                raise EnfoldError(f"{field} must be one of {', '.join(known)}, got {getattr(self, field)!r}: change it")

    @property
    def wants_trained(self) -> bool:
        """Unless all of it is trained."""
        return self.frozen

    def __call__(self, network: nn.Module) -> LoRAEnsembleMembers:
        """M members around the network's weights."""
        return LoRAEnsembleMembers(network, self)


class LoRAEnsembleMembers(Sharing):
    """The members; `low_rank` holds A as (M, blocks, r, in) and B as (M, blocks, out, r), `own` the heads."""

    share: LoRAEnsemble

    def __init__(self, network: nn.Module, share: LoRAEnsemble) -> None:
        layers = chosen_layers(network, LAYERS, share.include, share.exclude)
        head = None if share.head == "shared" else head_name(network)
        adapted = layers if share.include else attention_layers(network, layers) or layers
        others = {name: layer for name, layer in adapted.items() if name != head}
        heads = [] if head is None else [key for key in _names(network, head) if others]
        super().__init__(network, share.num_members, heads, share.engine, batch_norm=share.batch_norm)
        self.share = share
        self.shapes: dict[str, tuple[int, int, int]] = {}  # blocks, rows, columns by the weight's name
        for name, layer in (others or adapted).items():
            self.shapes |= _projections(name, layer)
        self.low_rank = Tree(self._start())
        if share.frozen:
            self.shared.requires_grad_(False)
        for name in heads:
            if name in self.skeleton.parameters:
                self.own.state()[name].requires_grad_()  # of a frozen network too
        if share.head == "drawn":
            self._draw_heads(network, heads)

    def _start(self) -> dict[str, nn.Parameter]:
        """A and B of every projection, by (2)."""
        found = {}
        for name, (blocks, rows, columns) in self.shapes.items():
            rank = min(self.share.rank, rows, columns)
            like = self.shared.state()[name]
            drawn = [self._draw(name, member, (blocks, rank, columns)) for member in range(self.num_members)]
            found[f"{name}.A"] = nn.Parameter(torch.stack(drawn).to(like))
            found[f"{name}.B"] = nn.Parameter(like.new_zeros(self.num_members, blocks, rows, rank))
        return found

    def _draw(self, name: str, member: int, shape: tuple[int, int, int]) -> Tensor:
        source = generator(self.share.seed, "lora_ensemble", name, member)
        gain = GAINS[self.share.init] if self.share.gain is None else self.share.gain
        if self.share.init == "normal":
            return gain * torch.randn(shape, generator=source)
        bound = gain * math.sqrt(6 / (shape[1] + shape[2]))
        return bound * (torch.rand(shape, generator=source) * 2 - 1)

    @torch.no_grad()
    def _draw_heads(self, network: nn.Module, heads: list[str]) -> None:
        own, free = self.own.state(), copied(network).requires_grad_()  # what is frozen would not be drawn
        for member in range(self.num_members):
            fresh, _ = initialised(free, derive(self.share.seed, "lora_ensemble", "head"), member)
            for name in heads:
                own[name][member].copy_(fresh.get_parameter(name))

    def expand(self) -> State:
        """Equation (1) for every projection."""
        state, factors = super().expand(), self.low_rank.state()
        for name in self.shapes:
            down, up = factors[f"{name}.A"], factors[f"{name}.B"]
            scale = 1.0 if self.share.alpha is None else self.share.alpha / down.shape[-2]
            state[name] = state[name] + scale * (up @ down).reshape(state[name].shape)  # (1)
        return state

    def param_groups(self, weight_decay: float, decay: Decay = "all") -> list[dict[str, Any]]:
        """A and B belong to a member, as its head does."""
        factors = [(parameter, 2) for parameter in self.low_rank.parameters()]
        groups = decay_groups(factors, weight_decay, decay, member_axis=True)
        return [*super().param_groups(weight_decay, decay), *groups]


def head_name(network: nn.Module) -> str | None:
    """The last linear layer or convolution."""
    kinds = tuple(kind for kind in LAYERS if kind is not nn.MultiheadAttention)
    return next((name for name, part in reversed(list(network.named_modules())) if isinstance(part, kinds)), None)


def attention_layers(network: nn.Module, layers: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """Those of the layers that are torch's attention or lie in a module with a query projection."""
    blocks = [
        f"{name}."
        for name, part in network.named_modules()
        if isinstance(part, nn.MultiheadAttention) or QUERIES & {key for key, _ in part.named_children()}
    ]
    return {
        name: layer
        for name, layer in layers.items()
        if isinstance(layer, nn.MultiheadAttention) or any(name.startswith(block) for block in blocks if block != ".")
    }


def _names(network: nn.Module, layer: str) -> list[str]:
    prefix = f"{layer}." if layer else ""
    return [f"{prefix}{key}" for key, _ in network.get_submodule(layer).named_parameters(recurse=False)]


def _projections(name: str, layer: nn.Module) -> dict[str, tuple[int, int, int]]:
    """The weights of a layer, each as blocks of rows x columns."""
    prefix = f"{name}." if name else ""
    found = {}
    for key, weight in layer.named_parameters(recurse=False):
        if key in PROJECTIONS:
            joint = key == "in_proj_weight" or (name.rsplit(".", 1)[-1] in JOINT and len(weight) % 3 == 0)
            blocks = 3 if joint else 1
            found[f"{prefix}{key}"] = (blocks, len(weight) // blocks, weight[0].numel())
    return found

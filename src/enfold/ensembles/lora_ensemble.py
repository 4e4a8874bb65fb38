"""LoRAEnsemble: a frozen, trained network, to whose attention projections every member adds a low-rank matrix.

    W_m = W + (alpha / r) B_m A_m,      A_m: r x in,  B_m: out x r,  r <= rank                          (1)
    A_m ~ U(-a, a),  a = gain (6 / (r + in))^(1/2)  (xavier),  or N(0, gain^2)  (normal);   B_m = 0     (2)

D. J. Mühlematter, M. Halbheer, A. Becker, D. Narnhofer, H. Aasen, K. Schindler, M. O. Turkoglu: LoRA-Ensemble:
Efficient Uncertainty Modelling for Self-Attention Networks, arXiv:2405.14438. LoRA: E. J. Hu et al., ICLR 2022,
arXiv:2106.09685.

All members start as the network, which should be trained. They become different by A (the gain), by their order of the
data, and by the classification head, the layer registered last, of which every member has its own: a copy, or drawn
again. The query, key and value blocks of a joint projection have an A and a B each. In a network without attention, all
linear layers and convolutions have them; kernels are taken as out x (in positions). A layer is attention if it is
torch's own or in a module that has a query projection by name (query, q, q_proj, to_q, wq, qkv, ...); `include` selects
other layers.

The public code has no alpha (None: the factor is 1). For CIFAR-10 and CIFAR-100 it has rank 8, xavier with gain 10, and
AdamW at 1e-4 without weight decay for a ViT-B/32; its normal initialisation has a standard deviation of 0.02.

Differs from the paper: heads start as copies of the network's unless head="drawn", as in the public code, where the
classes are new; networks without attention; statistics of batch norms are each member's own.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from pydantic import PositiveInt
from torch import Tensor, nn

from enfold.arguments import checked
from enfold.engines.base import EngineName
from enfold.engines.copying import copy_network
from enfold.engines.initialization import initialize_member
from enfold.engines.parameters import Decay, Tree, decay_groups
from enfold.engines.skeleton import State
from enfold.ensembles.common.efficient import EfficientEnsemble, NormChoice, select_layers
from enfold.ensembles.common.layer_shapes import CONVOLUTIONS, TRANSPOSED
from enfold.ensembles.common.options import Positive
from enfold.seeds import derive, generator

LAYERS = (nn.Linear, *CONVOLUTIONS, *TRANSPOSED, nn.MultiheadAttention)
JOINT = {"qkv", "to_qkv", "qkv_proj", "wqkv", "in_proj"}
QUERIES = JOINT | {"q", "query", "to_q", "q_proj", "q_lin", "wq"}
GAINS = {"xavier": 10.0, "normal": 0.02}
PROJECTIONS = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "weight")


@checked
class LoRAEnsemble(EfficientEnsemble):
    """A frozen, trained network, to whose attention projections every member adds a low-rank matrix.

    Args:
        network: The trained network. It is not modified.
        num_members: The number of members.
        rank: r, at most: the number of columns of B.
        alpha: The factor on B A is alpha / r; None: 1.
        init: The distribution of the initial A: "xavier" (uniform) or "normal".
        gain: The scale of the initial A, above 0, as A and B would both stay 0; None: 10 for "xavier", 0.02 for
            "normal".
        head: The classification head of a member: "own", a copy of the network's; "drawn", a new one; "shared", one for
            all members.
        batch_norm: shared (statistics are each member's own), own (EnsembleBN) or joint (one for all members).
        frozen: Whether the common parameters are frozen.
        include: Regular expressions for the names of the layers to adapt; by default attention, or all layers where
            there is none.
        exclude: Regular expressions for the names of layers not to adapt.
        seed: The seed of A and of new heads.
        engine: How members are run: auto, measure, stacked, loop or vmap.
    """

    def __init__(
        self,
        network: nn.Module,
        num_members: PositiveInt = 4,
        *,
        rank: PositiveInt = 8,
        alpha: float | None = None,
        init: Literal["xavier", "normal"] = "xavier",
        gain: Positive | None = None,
        head: Literal["own", "drawn", "shared"] = "own",
        batch_norm: NormChoice = "shared",
        frozen: bool = True,
        include: tuple[str, ...] = (),
        exclude: tuple[str, ...] = (),
        seed: int = 0,
        engine: EngineName = "auto",
    ) -> None:
        layers = select_layers(network, LAYERS, include, exclude)
        last = None if head == "shared" else head_name(network)
        adapted = layers if include else attention_layers(network, layers) or layers
        others = {name: layer for name, layer in adapted.items() if name != last}
        heads = [] if last is None else [key for key in _names(network, last) if others]
        super().__init__(network, num_members, heads, engine, batch_norm=batch_norm)
        self.rank, self.alpha, self.init, self.gain, self.head = rank, alpha, init, gain, head
        self.batch_norm, self.frozen, self.include, self.exclude, self.seed = batch_norm, frozen, include, exclude, seed
        self.shapes: dict[str, tuple[int, int, int]] = {}  # blocks, rows, columns by the name of the weight
        for name, layer in (others or adapted).items():
            self.shapes |= _projections(name, layer)
        self.low_rank = Tree(self._start())  # A, (M, blocks, r, in), and B, (M, blocks, out, r)
        if frozen:
            self.shared.requires_grad_(False)
        for name in heads:
            if name in self.skeleton.parameters:
                self.own.state()[name].requires_grad_()  # also in a frozen network
        if head == "drawn":
            self._draw_heads(network, heads)

    @property
    def needs_trained_network(self) -> bool:
        """True if the common parameters are frozen."""
        return self.frozen

    def _start(self) -> dict[str, nn.Parameter]:
        """Return A and B of every projection, (2)."""
        factors = {}
        for name, (blocks, rows, columns) in self.shapes.items():
            rank = min(self.rank, rows, columns)
            like = self.shared.state()[name]
            drawn = [self._draw(name, member, (blocks, rank, columns)) for member in range(self.num_members)]
            factors[f"{name}.A"] = nn.Parameter(torch.stack(drawn).to(like))
            factors[f"{name}.B"] = nn.Parameter(like.new_zeros(self.num_members, blocks, rows, rank))
        return factors

    def _draw(self, name: str, member: int, shape: tuple[int, int, int]) -> Tensor:
        source = generator(self.seed, "lora_ensemble", name, member)
        gain = GAINS[self.init] if self.gain is None else self.gain
        if self.init == "normal":
            return gain * torch.randn(shape, generator=source)
        bound = gain * math.sqrt(6 / (shape[1] + shape[2]))
        return bound * (torch.rand(shape, generator=source) * 2 - 1)

    @torch.no_grad()
    def _draw_heads(self, network: nn.Module, heads: list[str]) -> None:
        own, free = self.own.state(), copy_network(network).requires_grad_()  # frozen parameters would not be drawn
        for member in range(self.num_members):
            fresh, _ = initialize_member(free, derive(self.seed, "lora_ensemble", "head"), member)
            for name in heads:
                own[name][member].copy_(fresh.get_parameter(name))

    def expand(self) -> State:
        """Return the members' parameters: (1) for every projection."""
        state, factors = super().expand(), self.low_rank.state()
        for name in self.shapes:
            down, up = factors[f"{name}.A"], factors[f"{name}.B"]
            scale = 1.0 if self.alpha is None else self.alpha / down.shape[-2]
            state[name] = state[name] + scale * (up @ down).reshape(state[name].shape)  # (1)
        return state

    def param_groups(self, weight_decay: float, decay: Decay = "all") -> list[dict[str, Any]]:
        """Return the groups; A and B belong to a member, as its head does."""
        factors = [(parameter, 2) for parameter in self.low_rank.parameters()]
        groups = decay_groups(factors, weight_decay, decay, member_axis=True)
        return [*super().param_groups(weight_decay, decay), *groups]


def head_name(network: nn.Module) -> str | None:
    """Return the name of the last linear layer or convolution."""
    kinds = tuple(kind for kind in LAYERS if kind is not nn.MultiheadAttention)
    return next((name for name, part in reversed(list(network.named_modules())) if isinstance(part, kinds)), None)


def attention_layers(network: nn.Module, layers: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """Return the layers that are torch's attention, or that are in a module with a query projection."""
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
    """Return the weights of a layer, each as blocks of rows x columns."""
    prefix = f"{name}." if name else ""
    found = {}
    for key, weight in layer.named_parameters(recurse=False):
        if key in PROJECTIONS:
            joint = key == "in_proj_weight" or (name.rsplit(".", 1)[-1] in JOINT and len(weight) % 3 == 0)
            blocks = 3 if joint else 1
            found[f"{prefix}{key}"] = (blocks, len(weight) // blocks, weight[0].numel())
    return found

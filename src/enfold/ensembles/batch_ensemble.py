"""BatchEnsemble: one weight per layer for all members, scaled for each member by two vectors.

    W_m = W ∘ Σ_j s_mj r_mj^T,      j = 1..rank                                              (1)
    y_m = s_m ∘ (W (r_m ∘ x)) + b_m                      (the same for rank 1)               (2)

    bias:  member       b_m, one per member
           shared_post  b, added after the scaling
           shared_pre   s_m ∘ b, scaled with the output                                      (3)

Y. Wen, D. Tran, J. Ba: BatchEnsemble: an Alternative Approach to Efficient Ensemble and Lifelong Learning, ICLR 2020,
arXiv:2002.06715. The initialisation of TabM: Y. Gorishniy, A. Kotelnikov, A. Babenko, ICLR 2025, arXiv:2410.24210.

r scales the input channels of a linear layer or a convolution, s its output channels; an embedding has s only. In a
convolution all positions of a kernel have the same factor. The joint projection of queries, keys and values in torch's
attention is not a layer and is common to all members.

`fast_grad_scale` multiplies the gradient of r and s in the mean loss over members and, with Adam, which normalises
gradients, their learning rate. 0.5 is published; with SGD, M gives r and s the steps of a network trained on its own.

Differs from the paper: members see the data in their own order. Every member normalises its own batch, unless
`batch_norm` is "joint", which needs more memory, as all members then run together. What a member owns besides r and s,
such as its biases, is trained on its own loss and not on the mean: with SGD its steps are M times as large.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic import PositiveInt
from torch import Tensor, nn

from enfold.arguments import checked
from enfold.engines.base import Engine, EngineName
from enfold.engines.factored import Factored
from enfold.engines.parameters import Decay, Tree
from enfold.engines.skeleton import State
from enfold.engines.stacked import StackedProgram
from enfold.ensembles.common.efficient import EfficientEnsemble, NormChoice, select_layers
from enfold.ensembles.common.layer_shapes import LAYERS, layer_shape
from enfold.ensembles.common.options import NonNegative
from enfold.errors import EnfoldError
from enfold.seeds import generator

NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.modules.instancenorm._InstanceNorm)


@checked
class BatchEnsemble(EfficientEnsemble):
    """One weight per layer for all members, scaled for each member by two vectors.

    Args:
        network: The network whose weights, trained or not, become the common weights. It is not modified.
        num_members: The number of members.
        rank: The number of pairs of vectors that scale a weight; the paper has 1.
        bias: "member": a bias per member; "shared_post": one bias, added after the scaling by s; "shared_pre": one
            bias, scaled with the output.
        bias_start: The initial biases of members: those of the network, or zeros.
        init: The initial r and s: "gaussian" around 1, random "signs", "ones", or as in TabM.
        spread: For "gaussian" the standard deviation around 1; for "signs" the probability of +1.
        batch_norm: shared (statistics are each member's own), own (EnsembleBN) or joint (one for all members, as in the
            paper).
        norms: Whether the affine parameters of norms other than batch norms are common to all members or each
            member's own.
        fast_grad_scale: A factor on the gradient of r and s in the mean loss; with Adam, on their learning rate.
        fast_decay: Weight decay of r and s towards 1, as a fraction of the weight decay of the training.
        include: Regular expressions for the names of the layers to scale; all layers if empty.
        exclude: Regular expressions for the names of layers to leave unscaled.
        seed: The seed of r and s.
        engine: How members are run: auto, measure, stacked, loop or vmap.
    """

    def __init__(
        self,
        network: nn.Module,
        num_members: PositiveInt = 4,
        *,
        rank: PositiveInt = 1,
        bias: Literal["member", "shared_post", "shared_pre"] = "member",
        bias_start: Literal["network", "zeros"] = "network",
        init: Literal["gaussian", "signs", "ones", "tabm", "tabm_normal"] = "gaussian",
        spread: float = 0.5,
        batch_norm: NormChoice = "shared",
        norms: Literal["shared", "own"] = "shared",
        fast_grad_scale: NonNegative = 0.5,
        fast_decay: NonNegative = 0.0,
        include: tuple[str, ...] = (),
        exclude: tuple[str, ...] = (),
        seed: int = 0,
        engine: EngineName = "auto",
    ) -> None:
        if rank > 1 and fast_decay:
            raise EnfoldError(f"fast_decay must be 0 for rank > 1, where factors do not start at 1, got {fast_decay}")
        if rank > 1 and bias == "shared_pre":
            raise EnfoldError("bias must be 'member' or 'shared_post' for rank > 1, got 'shared_pre': change bias")
        if init == "signs" and not 0 <= spread <= 1:
            raise EnfoldError(f"spread must be a probability in [0, 1] for init='signs', got {spread}: change spread")
        layers = select_layers(network, LAYERS, include, exclude)
        prefixes = {name: f"{name}." if name else "" for name in layers}
        biases = [f"{prefixes[n]}bias" for n, layer in layers.items() if getattr(layer, "bias", None) is not None]
        own_norms = _norm_parameters(network) if norms == "own" else []
        own = [*(biases if bias == "member" else []), *own_norms]
        super().__init__(network, num_members, own, engine, batch_norm=batch_norm)
        self.rank, self.bias, self.bias_start, self.init, self.spread = rank, bias, bias_start, init, spread
        self.batch_norm, self.norms, self.include, self.exclude, self.seed = batch_norm, norms, include, exclude, seed
        self.fast_grad_scale, self.fast_decay = fast_grad_scale, fast_decay
        self.layers = {prefixes[name]: layer_shape(layer) for name, layer in layers.items()}
        self.scaled_biases = biases if bias == "shared_pre" else []
        self.linear = {prefixes[name] for name, layer in layers.items() if type(layer) is nn.Linear}
        if bias_start == "zeros":
            for name in set(biases) & self.own.state().keys():
                self.own.state()[name].data.zero_()
        self.fast = Tree({name: nn.Parameter(tensor) for name, tensor in self._initial_vectors().items()})
        if type(self) is BatchEnsemble:  # a derived class is not complete yet
            self.warn_if_low_coverage()

    def _initial_vectors(self) -> State:
        """Return r and s of every layer, (rank, M, channels); those of member m depend on seed, layer and m only."""
        vectors: State = {}
        for position, (prefix, shape) in enumerate(self.layers.items()):
            like = self.shared.state()[f"{prefix}weight"]
            for vector, size in (("r", shape.inputs), ("s", shape.outputs)):
                init = self.init
                if init.startswith("tabm") and not (position == 0 and vector == "r"):
                    init = "ones"
                if size and shape.inputs:
                    vectors[f"{prefix}{vector}"] = self._draw(init, prefix + vector, size).to(like)
                elif size:  # an embedding: without r, ranks add up to one
                    drawn = self._draw(init, prefix + vector, size, rank=1).to(like)
                    vectors[f"{prefix}{vector}"] = F.pad(drawn, (0, 0, 0, 0, 0, self.rank - 1))
        return vectors

    def _draw(self, init: str, name: str, size: int, rank: int | None = None) -> Tensor:
        """Return (rank, M, size) vectors, whose sum over ranks has the scale of rank 1.

        Further ranks of "ones" and TabM start with r = 0, so that they add nothing, and a random s, so that r learns.
        """
        rank = rank or self.rank
        drawn = []
        for member in range(self.num_members):
            source = generator(self.seed, "batch_ensemble", name, member)
            if init == "gaussian":
                drawn.append((1 + self.spread * torch.randn(rank, size, generator=source)) * rank**-0.5)
                continue
            chance = self.spread if init == "signs" else 0.5
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
        """Return the members' parameters: (1) for weights, (3) for biases that are scaled."""
        return self._expand_except(())

    def _expand_except(self, factored: Collection[str]) -> State:
        """Return the members' parameters, with the factors in place of the weight for some layers."""
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

    def engine_state(self, engine: Engine) -> State:
        """Return the state for an engine; in training by stacked products, linear weights stay factored, as in (2)."""
        if self.rank > 1 or not isinstance(engine, StackedProgram) or not torch.is_grad_enabled():
            return super().engine_state(engine)
        return self._expand_except(self.linear)

    def param_groups(self, weight_decay: float, decay: Decay = "all") -> list[dict[str, Any]]:
        """Return the groups; r and s are decayed towards 1 or not at all, and have a gradient scale of their own."""
        fast = {
            "params": list(self.fast.parameters()),
            "weight_decay": self.fast_decay * weight_decay,
            "decay_to": 1.0,
            "grad_scale": 1 / self.num_members,
            "step_scale": self.fast_grad_scale,
        }
        return [*super().param_groups(weight_decay, decay), fast]


def _norm_parameters(network: nn.Module) -> list[str]:
    norms = [(name, module) for name, module in network.named_modules() if isinstance(module, NORMS)]
    return [f"{name}.{key}" if name else key for name, norm in norms for key, _ in norm.named_parameters(recurse=False)]

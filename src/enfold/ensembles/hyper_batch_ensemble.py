"""Hyper-batch ensembles: a BatchEnsemble whose weights answer to their L2 penalties, which are tuned in training.

    W_m(λ) = W ∘ (s_m r_m^T) + e1(λ) ∘ [Δ ∘ (v_m u_m^T)],    e1 along the outputs            (1)
    b_m(λ) = b_m + e2(λ) ∘ δ_m,    e linear in log λ                                         (2)

    train:  CE_m(λ_m) + E_λ[λ ‖W + e1(λ) ∘ Δ‖² + λ ‖b_m + e2(λ) ∘ δ_m‖²] / N                 (3)
    tune:   -log p̄(λ) - τ H[λ],  λ ~ log-uniform(l, u), by l and u on validation data        (4)

F. Wenzel, J. Snoek, D. Tran, R. Jenatton: Hyperparameter Ensembles for Robustness and Uncertainty Quantification,
NeurIPS 2020, arXiv:2006.13570; weights that answer to λ: M. MacKay et al.: Self-Tuning Networks, ICLR 2019,
arXiv:1903.03088.

Every member has its own l and u of each penalty; in eval mode λ is the mean. There are up to six penalties: of the
first layer, of each third of the hidden ones, of the last layer's weight and of its bias. Layers count in the order in
which the network lists them, and other biases are penalised with their weights. The plan's weight decay holds for the
rest, such as norms. `tied` sets u, v = r, s. The validation part is learned from: scores on it are too good.

Differs from the paper: the loss takes one λ a member and step, not one an example, so that members stay networks of the
given kind (the penalty is the mean over as many λ as the batch has examples); norms have the plan's weight decay, not a
penalty of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from enfold.data import Data
from enfold.data.dataset import Split
from enfold.engines.base import Engine
from enfold.engines.groups import Decay
from enfold.engines.initialization import initialised
from enfold.engines.inputs import in_type_of
from enfold.engines.modes import evaluating
from enfold.engines.skeleton import State, read_state
from enfold.engines.tree import Tree
from enfold.ensembles.batch_ensemble import BatchEnsemble, BatchEnsembleMembers
from enfold.ensembles.common.penalties import Penalised, Penalties, by_output, penalty_groups
from enfold.ensembles.common.sharing import Sharing
from enfold.errors import EnfoldError
from enfold.seeds import derive, generator
from enfold.train import CrossEntropy, Follower, TrainConfig
from enfold.train.optimize import Optimizer


@dataclass(frozen=True)
class HyperBatchEnsemble(BatchEnsemble):
    """A BatchEnsemble whose weights answer to their L2 penalties, which are tuned in training."""

    spread: float = 0.75
    penalties: tuple[float, float] = (0.1, 100.0)  # the range of λ
    width: float = 0.2  # how far l and u are from the middle at first
    entropy: float = 1e-3  # τ, the weight of the entropy that keeps l and u apart
    tune_every: int = 3  # steps of training for each step of tuning
    tune_rate: float = 1e-3  # Adam's learning rate, on log l and log u
    embedding_spread: float = 1e-4  # standard deviation of what embeds λ at first
    tied: bool = True  # u, v = r, s

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (len(self.penalties) == 2 and 0 < self.penalties[0] < self.penalties[1] < math.inf):
            raise EnfoldError(f"penalties must be (low, high) with 0 < low < high, got {self.penalties!r}: change them")
        for name, least in (("tune_every", 1), ("width", 0), ("tune_rate", 0), ("embedding_spread", 0), ("entropy", 0)):
            if not least <= getattr(self, name) < math.inf:
                raise EnfoldError(f"{name} must be {least} or more, got {getattr(self, name)}: change {name}")

    def __call__(self, network: nn.Module) -> HyperBatchMembers:
        """M members that share the network's weights and what answers to λ."""
        members = HyperBatchMembers(network, self)
        members.report_coverage()
        return members

    def objective(self, plan: TrainConfig) -> Penalised:
        """Equation (3)."""
        return Penalised(CrossEntropy(plan.label_smoothing))


class HyperBatchMembers(BatchEnsembleMembers, Follower):
    """The members; `delta` holds Δ and each member's δ, `penalties` l and u and what embeds λ.

    `fit` trains them by (3) on the training part and tunes them by (4) on the validation part.
    """

    def __init__(self, network: nn.Module, share: HyperBatchEnsemble) -> None:
        super().__init__(network, share)
        self.tuning: tuple[Split, Callable[[Tensor], Tensor], int] | None = None  # examples, their preparation, B
        self.num_examples = 1  # N, of the training under way
        names = [(f"{prefix}{key}", shape) for prefix, shape in self.layers.items() for key in ("weight", "bias")]
        outputs = {name: shape.outputs for name, shape in names if name in self.skeleton.parameters}
        groups, seed = penalty_groups(list(self.layers)), derive(share.seed, "hyper_batch_ensembles")
        start = (share.penalties, share.width, share.embedding_spread, seed)
        self.penalties = Penalties(share.num_members, outputs, groups, *start)
        fresh = read_state(initialised(network, seed, 0)[0])
        self.delta = Tree({name: self._stored(name, self._delta(name, fresh[name].detach())) for name in outputs})

    def _delta(self, name: str, fresh: Tensor) -> Tensor:
        return fresh if name.endswith("weight") else fresh.new_zeros(self.num_members, *fresh.shape)

    def _start(self) -> State:
        found, share = super()._start(), self.share
        init = "ones" if share.init == "tabm" else share.init
        for prefix, shape in self.layers.items():
            for vector, size in (("u", shape.inputs), ("v", shape.outputs)):
                if size and not share.tied:
                    like = self.shared.state()[f"{prefix}weight"]
                    found[f"{prefix}{vector}"] = self._draw(init, prefix + vector, size).to(like)
        return found

    def expand(self) -> State:
        """Equations (1) and (2)."""
        state, fast, delta, e = super().expand(), self.fast.state(), self.delta.state(), self.penalties.embedded()
        u, v = ("r", "s") if self.share.tied else ("u", "v")
        for prefix, shape in self.layers.items():
            weight, bias = f"{prefix}weight", f"{prefix}bias"
            factor = shape.factor(fast.get(f"{prefix}{u}"), fast[f"{prefix}{v}"] * e[weight])
            state[weight] = state[weight] + delta[weight] * factor  # (1)
            if bias in delta:
                state[bias] = state[bias] + e[bias] * delta[bias]  # (2)
        return state

    def _running_state(self, engine: Engine) -> State:
        if self.penalties.current is not None:
            return self.expand()
        return Sharing._running_state(self, engine)  # not BatchEnsemble's: these weights are no product of factors

    def penalty(self, values: Tensor) -> Tensor:
        """The second term of (3) without N, from draws of λ: (M, S, H) -> (M,)."""
        stored, e, total = self._penalised(), self.penalties.embedded(values), values.new_zeros(len(values))
        for name, delta in self.delta.state().items():
            sums = [stored[name].square(), stored[name] * delta, delta.square()]
            if name.endswith("weight"):
                shape = self.layers[name.removesuffix("weight")]
                axis = 1 if shape.transposed or not shape.inputs else 0
                sums = [by_output(each, axis, shape.groups) for each in sums]
            total = total + self.penalties.expected(values, name, e[name], sums)
        return total

    def _penalised(self) -> State:
        every = {**self.shared.state(), **self.own.state()}
        return {name: every[name] for name in self.delta.state()}

    def meet(self, data: Data, plan: TrainConfig) -> None:
        """How many examples there are to learn from, and those to tune with."""
        train, validation = (_examples(data, name) for name in ("train", "val"))
        self.num_examples, self.tuning = len(train), (validation, data.prepare, plan.batch_size)

    def finish(self, data: Data) -> None:
        """The examples are let go."""
        self.tuning = None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "tuning": None}  # a copy of the members is none of the data

    def after_step(self, step: int, optimizer: Optimizer) -> None:
        """Equation (4), every few steps."""
        if self.tuning is None or step % self.share.tune_every:
            return
        (part, prepare, size), device = self.tuning, self.penalties.bounds.device
        source = generator(self.share.seed, "hyper_batch_ensembles", "tune", step)
        batch = part[torch.randint(len(part), (size,), generator=source)]

        def loss() -> Tensor:
            with evaluating(self):
                log_probs = self.forward_mean(in_type_of(self, prepare(batch.inputs).to(device)))
            return F.nll_loss(log_probs, batch.labels.to(device))

        self.penalties.tune(loss, source, self.share.entropy, self.share.tune_rate)  # (4)

    def param_groups(self, weight_decay: float, decay: Decay = "all") -> list[dict[str, Any]]:
        """As in BatchEnsemble, but neither what has a penalty is decayed, nor what answers to it."""
        penalised, delta, groups = {id(t) for t in self._penalised().values()}, self.delta.state(), []
        for group in super().param_groups(weight_decay, decay):
            inside = [parameter for parameter in group["params"] if id(parameter) in penalised]
            outside = [parameter for parameter in group["params"] if id(parameter) not in penalised]
            groups += [{**group, "params": outside}, {**group, "params": inside, "weight_decay": 0.0}]
        shared = [*(t for name, t in delta.items() if name.endswith("weight")), *self.penalties.parameters()]
        owned = [tensor for name, tensor in delta.items() if name.endswith("bias")]
        groups.append({"params": shared, "weight_decay": 0.0, "grad_scale": 1 / self.num_members})
        return [*groups, {"params": owned, "weight_decay": 0.0, "member_axis": True}]


def _examples(data: Data, name: str) -> Split:
    part = getattr(data, name)
    if isinstance(part, Split) and len(part):
        return part
    given = "empty" if isinstance(part, Split) else f"a {type(part).__name__}"
    raise EnfoldError(f"penalties are tuned with examples in memory, but the {name} part is {given}: pass a full Split")

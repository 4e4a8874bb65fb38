"""HyperBatchEnsemble: a BatchEnsemble whose weights are functions of their L2 penalties, which are tuned in training.

    W_m(λ) = W ∘ (s_m r_m^T) + e1(λ) ∘ [Δ ∘ (v_m u_m^T)],    e1 along the outputs            (1)
    b_m(λ) = b_m + e2(λ) ∘ δ_m,    e linear in log λ                                         (2)

    train:  CE_m(λ_m) + E_λ[λ ‖W + e1(λ) ∘ Δ‖² + λ ‖b_m + e2(λ) ∘ δ_m‖²] / N                 (3)
    tune:   -log p̄(λ) - τ H[λ],  λ ~ log-uniform(l, u), by l and u on validation data        (4)

F. Wenzel, J. Snoek, D. Tran, R. Jenatton: Hyperparameter Ensembles for Robustness and Uncertainty Quantification,
NeurIPS 2020, arXiv:2006.13570; weights as functions of λ: M. MacKay et al.: Self-Tuning Networks, ICLR 2019,
arXiv:1903.03088.

Every member has its own l and u of each penalty; in eval mode λ is the mean. There are up to six penalties: of the
first layer, of each third of the hidden ones, of the last layer's weight and of its bias. Layers are ordered as in
`named_modules`, and other biases have the penalty of their weights. The weight decay of the training applies to the
rest, such as norms. `tied` sets u, v = r, s. The penalties are fitted to the validation data, so scores on it are
optimistic.

Differs from the paper: the loss uses one λ per member and step, not one per example, so that members are networks of
the given architecture (the penalty is the mean over as many λ as the batch has examples); norms have the weight decay
of the training, not a penalty of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic import PositiveInt
from torch import Tensor, nn

from enfold.arguments import checked
from enfold.data import Data
from enfold.data.dataset import Split
from enfold.engines.base import Engine, EngineName
from enfold.engines.initialization import initialize_member
from enfold.engines.inputs import in_type_of
from enfold.engines.modes import eval_mode
from enfold.engines.parameters import Decay, Tree
from enfold.engines.skeleton import State, read_state
from enfold.ensembles.batch_ensemble import BatchEnsemble
from enfold.ensembles.common.efficient import EfficientEnsemble, NormChoice
from enfold.ensembles.common.options import NonNegative
from enfold.ensembles.common.penalties import Penalised, Penalties, by_output, penalty_groups
from enfold.errors import EnfoldError
from enfold.metrics.predictions import mean_log_probs
from enfold.seeds import derive, generator
from enfold.tasks import as_task
from enfold.train import TrainConfig
from enfold.train.objective import default_loss
from enfold.train.optimize import Optimizer


@checked
class HyperBatchEnsemble(BatchEnsemble):
    """A BatchEnsemble whose weights are functions of their L2 penalties, which are tuned in training.

    `fit` trains by (3) on the training data and tunes by (4) on the validation data.

    Args:
        network: The network whose weights become the common weights. It is not modified.
        num_members: The number of members.
        penalties: The range of λ.
        width: The initial distance of l and u from their centre.
        entropy: τ: the weight of the entropy, which prevents l and u from becoming equal.
        tune_every: The number of training steps per tuning step.
        tune_rate: The learning rate of Adam on log l and log u.
        embedding_spread: The standard deviation of the initial embedding e of λ.
        tied: Whether u, v = r, s.
        rank: See `BatchEnsemble`, also for the following options.
        bias: See `BatchEnsemble`: member, shared_post or shared_pre.
        bias_start: See `BatchEnsemble`: network or zeros.
        init: The initial r and s, see `BatchEnsemble`.
        spread: For "gaussian" the standard deviation of r and s around 1; for "signs" the probability of +1.
        batch_norm: shared (statistics are each member's own), own (EnsembleBN) or joint (one for all members).
        norms: Whether the affine parameters of other norms are shared or each member's own.
        fast_grad_scale: A factor on the gradient of r and s in the mean loss; with Adam, on their learning rate.
        fast_decay: Weight decay of r and s towards 1, as a fraction of the weight decay of the training.
        include: Regular expressions for the names of the layers to scale; all layers if empty.
        exclude: Regular expressions for the names of layers to leave unscaled.
        seed: The seed of all initial values and of tuning.
        engine: How members are run: auto, measure, stacked, loop or vmap.
    """

    def __init__(
        self,
        network: nn.Module,
        num_members: PositiveInt = 4,
        *,
        penalties: tuple[float, float] = (0.1, 100.0),
        width: NonNegative = 0.2,
        entropy: NonNegative = 1e-3,
        tune_every: PositiveInt = 3,
        tune_rate: NonNegative = 1e-3,
        embedding_spread: NonNegative = 1e-4,
        tied: bool = True,
        rank: PositiveInt = 1,
        bias: Literal["member", "shared_post", "shared_pre"] = "member",
        bias_start: Literal["network", "zeros"] = "network",
        init: Literal["gaussian", "signs", "ones", "tabm", "tabm_normal"] = "gaussian",
        spread: float = 0.75,
        batch_norm: NormChoice = "shared",
        norms: Literal["shared", "own"] = "shared",
        fast_grad_scale: NonNegative = 0.5,
        fast_decay: NonNegative = 0.0,
        include: tuple[str, ...] = (),
        exclude: tuple[str, ...] = (),
        seed: int = 0,
        engine: EngineName = "auto",
    ) -> None:
        if not 0 < penalties[0] < penalties[1] < math.inf:
            raise EnfoldError(f"penalties must be (low, high) with 0 < low < high, got {penalties!r}: change penalties")
        super().__init__(
            network,
            num_members,
            rank=rank,
            bias=bias,
            bias_start=bias_start,
            init=init,
            spread=spread,
            batch_norm=batch_norm,
            norms=norms,
            fast_grad_scale=fast_grad_scale,
            fast_decay=fast_decay,
            include=include,
            exclude=exclude,
            seed=seed,
            engine=engine,
        )
        self.penalties, self.width, self.entropy, self.tied = penalties, width, entropy, tied
        self.tune_every, self.tune_rate, self.embedding_spread = tune_every, tune_rate, embedding_spread
        if not tied:
            vectors = {name: nn.Parameter(tensor) for name, tensor in self._delta_vectors().items()}
            self.fast = Tree({**self.fast.state(), **vectors})
        self.tuning: tuple[Split, Callable[[Tensor], Tensor], int] | None = None  # examples, their preparation, B
        self.num_examples = 1  # N, of the training under way
        self.tuned_task = as_task(None)
        names = [(f"{prefix}{key}", shape) for prefix, shape in self.layers.items() for key in ("weight", "bias")]
        outputs = {name: shape.outputs for name, shape in names if name in self.skeleton.parameters}
        groups, own_seed = penalty_groups(list(self.layers)), derive(seed, "hyper_batch_ensembles")
        self.distribution = Penalties(num_members, outputs, groups, penalties, width, embedding_spread, own_seed)
        fresh = read_state(initialize_member(network, own_seed, 0)[0])
        self.delta = Tree({name: self._convert(name, self._delta(name, fresh[name].detach())) for name in outputs})
        self.warn_if_low_coverage()

    def objective(self, config: TrainConfig) -> Penalised:
        """Return (3)."""
        return Penalised(default_loss(config, self.num_members))

    def _delta(self, name: str, fresh: Tensor) -> Tensor:
        return fresh if name.endswith("weight") else fresh.new_zeros(self.num_members, *fresh.shape)

    def _delta_vectors(self) -> State:
        """Return the initial u and v of every layer, unless they are r and s."""
        vectors: State = {}
        init = "ones" if self.init == "tabm" else self.init
        for prefix, shape in self.layers.items():
            for vector, size in (("u", shape.inputs), ("v", shape.outputs)):
                if size:
                    like = self.shared.state()[f"{prefix}weight"]
                    vectors[f"{prefix}{vector}"] = self._draw(init, prefix + vector, size).to(like)
        return vectors

    def expand(self) -> State:
        """Return the members' parameters, (1) and (2)."""
        state, fast, delta, e = super().expand(), self.fast.state(), self.delta.state(), self.distribution.embed()
        u, v = ("r", "s") if self.tied else ("u", "v")
        for prefix, shape in self.layers.items():
            weight, bias = f"{prefix}weight", f"{prefix}bias"
            factor = shape.factor(fast.get(f"{prefix}{u}"), fast[f"{prefix}{v}"] * e[weight])
            state[weight] = state[weight] + delta[weight] * factor  # (1)
            if bias in delta:
                state[bias] = state[bias] + e[bias] * delta[bias]  # (2)
        return state

    def engine_state(self, engine: Engine) -> State:
        """Return `expand()`: these weights are not a product of factors, as those of BatchEnsemble are."""
        return self.expand() if self.distribution.current is not None else EfficientEnsemble.engine_state(self, engine)

    def penalty(self, values: Tensor) -> Tensor:
        """Return the second term of (3) without N, from samples of λ: (M, S, H) -> (M,)."""
        stored, e, total = self._penalized_tensors(), self.distribution.embed(values), values.new_zeros(len(values))
        for name, delta in self.delta.state().items():
            sums = [stored[name].square(), stored[name] * delta, delta.square()]
            if name.endswith("weight"):
                shape = self.layers[name.removesuffix("weight")]
                axis = 1 if shape.transposed or not shape.inputs else 0
                sums = [by_output(each, axis, shape.groups) for each in sums]
            total = total + self.distribution.expected_penalty(values, name, e[name], sums)
        return total

    def _penalized_tensors(self) -> State:
        every = {**self.shared.state(), **self.own.state()}
        return {name: every[name] for name in self.delta.state()}

    def on_fit_start(self, data: Data, config: TrainConfig) -> None:
        """Store the validation examples for tuning, and the number of training examples."""
        train, validation = (_examples(data, name) for name in ("train", "val"))
        self.tuned_task = as_task(config.task)
        self.num_examples, self.tuning = len(train), (validation, data.prepare, config.batch_size)

    def on_fit_end(self, data: Data) -> None:
        """Release the validation examples."""
        self.tuning = None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "tuning": None}  # the data is not copied with the ensemble

    def on_step_end(self, step: int, optimizer: Optimizer) -> None:
        """Tune the penalties, (4), every `tune_every` steps."""
        if self.tuning is None or step % self.tune_every:
            return
        (examples, prepare, size), device = self.tuning, self.distribution.bounds.device
        source = generator(self.seed, "hyper_batch_ensembles", "tune", step)
        batch = examples[torch.randint(len(examples), (size,), generator=source)]

        def loss() -> Tensor:
            with eval_mode(self):
                outputs = self(in_type_of(self, prepare(batch.inputs).to(device)))
            task = self.tuned_task.resolve(outputs, batch.targets)
            rows = task.flatten(outputs, batch.targets.to(device))
            if not task.is_categorical:
                return task.loss(rows).mean()
            return F.nll_loss(mean_log_probs(torch.log_softmax(rows.values, dim=-1)), rows.targets)

        self.distribution.tune(loss, source, self.entropy, self.tune_rate)  # (4)

    def param_groups(self, weight_decay: float, decay: Decay = "all") -> list[dict[str, Any]]:
        """Return the groups of BatchEnsemble, without weight decay of what has a penalty or depends on it."""
        penalised, delta, groups = {id(t) for t in self._penalized_tensors().values()}, self.delta.state(), []
        for group in super().param_groups(weight_decay, decay):
            without = [parameter for parameter in group["params"] if id(parameter) in penalised]
            decayed = [parameter for parameter in group["params"] if id(parameter) not in penalised]
            groups += [{**group, "params": decayed}, {**group, "params": without, "weight_decay": 0.0}]
        shared = [*(t for name, t in delta.items() if name.endswith("weight")), *self.distribution.parameters()]
        owned = [tensor for name, tensor in delta.items() if name.endswith("bias")]
        groups.append({"params": shared, "weight_decay": 0.0, "grad_scale": 1 / self.num_members})
        return [*groups, {"params": owned, "weight_decay": 0.0, "member_axis": True}]


def _examples(data: Data, name: str) -> Split:
    examples = getattr(data, name)
    if isinstance(examples, Split) and len(examples):
        return examples
    given = "empty" if isinstance(examples, Split) else f"a {type(examples).__name__}"
    raise EnfoldError(f"{name} must be examples in memory for HyperBatchEnsemble, got {given}: pass tensors or a Split")

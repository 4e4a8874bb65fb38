"""LatentBE: a BatchEnsemble learns from the members one to one, and the mean of its weights is one network.

    student:  W_m = W ∘ (s_m r_m^T),   r_m = s_m = 1 at the start                                      (1)
    loss:     (1/M) Σ_m [(1 - α) CE(y, p_m) + α τ² KL(t_m(τ) || p_m(τ))]                               (2)
    decay:    (λ/2) (||W||² + ||b||² + ...) + (λ/2) Σ_m (||r_m - 1||² + ||s_m - 1||²)                  (3)

    average:  mean_outer  W ∘ (1/M) Σ_m s_m r_m^T       the mean of the members' weights               (4a)
              outer_mean  W ∘ (s̄ r̄^T)                  the authors' code                              (4b)
              sum         W ∘ Σ_m s_m r_m^T             as printed, M times too large                  (4c)

G. Nam, H. Lee, B. Heo, J. Lee: Improving Ensemble Distillation With Weight Averaging and Diversifying Perturbation,
ICML 2022, arXiv:2206.15047.

The result costs as much as one network; training costs as much as M. (4a) and (4b) differ by the covariance of s and r
over members, which is of second order in their spread, as is the difference between the averaged network's prediction
and the members' mean. r and s take the steps of separate members, all others those of the mean loss (2). A bias is
scaled with the output of its layer, s_m ∘ b, and averaged to s̄ ∘ b. All other values of members become their mean in
all three averages. Like in the paper, the student starts from random weights unless `init` is given.

One batch norm normalises the batches of all members together, and its statistics are those of the averaged network.
With batch_norm="shared" or "own" members have their own statistics and may be trained one after the other, which takes
less memory; statistics are then measured again for the averaged network, because the mean of theirs is right to first
order only. `reestimate_batch_norm` overrides this.

Members start equal and become different by their teachers only: equal teachers raise a `SameTargetsWarning`. Other
initial values of r and s are not offered: random signs would cancel in the mean.

Differs from the paper: (4a) is the default, not (4b), and the bias is averaged at test time as in the authors'
validation. The epoch is chosen by the validation NLL of the averaged network, not by its accuracy. With Adam, whose
steps do not depend on the scale of gradients, r and s have the common learning rate. Nothing else known.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor, nn

from enfold.arguments import checked
from enfold.data import Data
from enfold.data.batches import Order
from enfold.distill.loss import Fraction, Temperature, Weight
from enfold.distill.losses.one_to_one import OneToOne
from enfold.engines.skeleton import State
from enfold.ensemble import Ensemble
from enfold.ensembles.batch_ensemble import BatchEnsemble
from enfold.errors import EnfoldError, level_outside
from enfold.train import TrainConfig
from enfold.train.batch_norm import reestimate
from enfold.train.diversity import LowDiversityWarning

if TYPE_CHECKING:
    from enfold.distill.teacher import Teacher

Average = Literal["mean_outer", "outer_mean", "sum", "none"]

SAME = 1e-6  # nats between the targets of two teachers, times τ²


class SameTargetsWarning(UserWarning):
    """Two members have the same targets, so they remain equal."""


@checked
@dataclass(frozen=True)
class LatentBE(OneToOne):
    """Match a BatchEnsemble to the teachers one to one; the result is one network with the mean of its weights.

    Args:
        alpha: Weight of the teachers' term; the labels have the weight 1 - alpha.
        temperature: τ, by which the logits of teachers and students are divided.
        average: The mean of the members' weights, equation (4a), (4b) or (4c); "none" returns the BatchEnsemble.
        batch_norm: One batch norm for all members ("joint"), statistics per member ("shared"), or one per member
            ("own").
        bias: Whether a bias is scaled with the output, added after the scaling, or owned by each member.
        fast_decay: Decay of r and s towards 1, relative to the weight decay of the training.
        reestimate_batch_norm: Whether batch-norm statistics are measured again for the averaged network; None: only
            if members have their own.
    """

    alpha: Fraction = 1.0
    temperature: Temperature = 4.0
    average: Average = "mean_outer"
    batch_norm: Literal["joint", "shared", "own"] = "joint"
    bias: Literal["shared_pre", "shared_post", "member"] = "shared_pre"
    fast_decay: Weight = 1.0
    reestimate_batch_norm: bool | None = None

    default_init: ClassVar[Literal["random"]] = "random"
    ignored_warnings: ClassVar[tuple[type[Warning], ...]] = (LowDiversityWarning,)  # similar members can be averaged

    def build_student(self, network: nn.Module, num_teachers: int, config: TrainConfig) -> nn.Module:
        """Return equation (1), with the decay (3).

        Args:
            network: The network from which the student starts, or the ensemble passed as `student`.
            num_teachers: Number of teachers, T.
            config: The training settings.
        """
        if isinstance(network, Ensemble):
            raise EnfoldError(
                f"loss=LatentBE() builds its own BatchEnsemble, whose members start equal, got a "
                f"{type(network).__name__}: leave student out, or use OneToOne()"
            )
        return BatchEnsemble(
            network,
            num_teachers,
            init="ones",
            bias=self.bias,
            batch_norm=self.batch_norm,
            fast_grad_scale=num_teachers if config.optimizer == "sgd" else 1.0,
            fast_decay=self.fast_decay,
        )

    def check(self, teacher: Teacher, student: nn.Module, config: TrainConfig) -> None:
        """Also warn of equal teachers, because members that start equal differ by nothing else.

        Args:
            teacher: The teachers.
            student: The student, as it is before the training.
            config: The training settings.
        """
        super().check(teacher, student, config)
        if teacher.num_members == 1:
            return
        if not self.alpha:
            _warn(f"alpha={self.alpha} leaves the labels only, which are the same for all members: raise alpha")
        if config.epochs:
            self._compare_teachers(teacher, config)

    def _compare_teachers(self, teacher: Teacher, config: TrainConfig) -> None:
        with torch.random.fork_rng(devices=[]):  # a user's loader may draw random numbers
            batch = next(iter(Order(config.batch_size, seed=config.seed).batches(teacher.data, epoch=0)))
        distances = self.temperature**2 * _pairwise_kl(teacher(batch))
        first, second = divmod(int(distances.argmin()), teacher.num_members)
        if distances.min() < SAME:
            _warn(
                f"teachers {first} and {second} are {float(distances.min()):.1e} nats from each other on a batch: use "
                "teachers trained from different seeds"
            )

    def evaluated_model(self, student: nn.Module) -> nn.Module:
        """Return the averaged network, with the batch-norm statistics of the training."""
        return _average_network(student, self.average)

    def finish(self, student: nn.Module, data: Data) -> nn.Module:
        """Return the averaged network."""
        if self.average == "none":
            return student.eval()
        network = _average_network(student, self.average)
        if self.batch_norm != "joint" if self.reestimate_batch_norm is None else self.reestimate_batch_norm:
            reestimate(network, data)
        return network.eval()


def _average_network(student: nn.Module, average: Average) -> nn.Module:
    if not isinstance(student, BatchEnsemble):
        raise TypeError("the student of LatentBE is a BatchEnsemble")
    return student.network(average_state(student, average))


@torch.no_grad()
def average_state(ensemble: BatchEnsemble, average: Average = "mean_outer") -> State:
    """Return the values of one network by equation (4); all values but the layers' weights are the members' mean."""
    state = ensemble.mean_state()  # (4a)
    fast, shared = ensemble.fast.state(), ensemble.shared.state()
    for prefix, shape in ensemble.layers.items() if average in ("outer_mean", "sum") else ():
        r, s = fast.get(f"{prefix}r"), fast[f"{prefix}s"]  # (rank, M, channels)
        if average == "outer_mean":
            factor = shape.factor(None if r is None else r.mean(1, keepdim=True), s.mean(1, keepdim=True))[0]  # (4b)
        else:
            factor = shape.factor(r, s).sum(0)  # (4c)
        state[f"{prefix}weight"] = shared[f"{prefix}weight"] * factor
    return state


def _pairwise_kl(targets: Tensor) -> Tensor:
    """Return the mean KL between teachers: targets (T, B, C + 1) -> (T, T), infinite on the diagonal."""
    probs = targets[..., :-1].double()
    log_probs = probs.clamp(min=1e-45).log()  # the smallest number of float32
    cross = torch.einsum("tbc,sbc->ts", probs, log_probs) / probs.shape[1]
    return (cross.diagonal()[:, None] - cross).fill_diagonal_(torch.inf)


def _warn(reason: str) -> None:
    message = f"members that start equal become different by their teachers only, but {reason}"
    warnings.warn(message, SameTargetsWarning, stacklevel=level_outside())

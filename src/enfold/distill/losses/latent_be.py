"""LatentBE: a BatchEnsemble learns from the members one to one, and its mean weights are one network.

    student:  W_m = W ∘ (s_m r_m^T),   r_m = s_m = 1 at the start                            (1)
    loss:     (1/M) Σ_m [(1 - α) CE(y, p_m) + α τ² KL(t_m(τ) || p_m(τ))]                     (2)
    decay:    (λ/2) (||W||² + ||b||² + ...) + (λ/2) Σ_m (||r_m - 1||² + ||s_m - 1||²)        (3)

    fold:     mean_outer  W ∘ (1/M) Σ_m s_m r_m^T       the mean of the members' weights     (4a)
              outer_mean  W ∘ (s̄ r̄^T)                  what the authors' code computes      (4b)
              sum         W ∘ Σ_m s_m r_m^T             as printed, M times too large        (4c)

G. Nam, H. Lee, B. Heo, J. Lee: Improving Ensemble Distillation With Weight Averaging and Diversifying Perturbation,
ICML 2022, arXiv:2206.15047.

What is returned costs what one network costs; training costs as much as M. (4a) and (4b) differ by the covariance of
s and r over members, which is of second order in their spread, as is what the folded network's prediction differs by
from the members' mean. r and s take the steps they would take alone, others those of the mean loss (2). A bias is
scaled with its layer's output, s_m ∘ b, and folded to s̄ ∘ b. Whatever else members own becomes its mean in all three
folds. `latent` gives the BatchEnsemble itself, and `folded` its mean weights.

One batch norm normalises all members' batches together, and its statistics are those of the fold. With
batch_norm="shared" or "own", members have statistics of their own, and may be trained one after the other, which takes
less memory; statistics are then measured again for the folded network, which the mean of theirs fits to first order
only. `reestimate_batch_norm` says so for any choice.

Members that start as one can be told apart by their teachers alone: teachers that say the same bring a
`SameTargetsWarning`. Other starts of r and s are not offered: random signs would cancel in the mean.

Differs from the paper: (4a) is the default, not (4b), and the bias is folded at test time as it is in the authors'
validation. The epoch is chosen by the folded network's validation NLL, not by its accuracy. With Adam, whose steps know
no size of gradients, r and s have the learning rate of all others. Nothing else known.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from enfold.data import Data
from enfold.data.batches import Order
from enfold.distill.cached import CachedTeacher
from enfold.distill.losses.one_to_one import OneToOne
from enfold.distill.start import Start
from enfold.distill.teacher import Teacher
from enfold.engines.skeleton import State
from enfold.ensembles.batch_ensemble import BatchEnsemble, BatchEnsembleMembers
from enfold.ensembles.common.sharing import NormChoice
from enfold.errors import EnfoldError
from enfold.train.batch_norm import reestimate
from enfold.train.diversity import LowDiversityWarning

How = Literal["mean_outer", "outer_mean", "sum"]
Bias = Literal["shared_pre", "shared_post", "member"]

SAME = 1e-6  # nats between two teachers' targets, times τ²


class SameTargetsWarning(UserWarning):
    """Two members are taught the same, so they remain one."""


@dataclass(frozen=True)
class LatentBE(OneToOne):
    """One network: the mean of a BatchEnsemble whose members are each taught by a teacher of its own."""

    temperature: float = 4.0  # teachers' and students' logits are divided by it
    start: Start | None = "fresh"  # what the student starts from: fresh, member, average, matched or als
    fold: How = "mean_outer"  # which mean of the latent members' weights
    batch_norm: NormChoice = "joint"  # one for all members, or statistics, or all of it, a member
    bias: Bias = "shared_pre"  # scaled with the output, added after the scaling, or one a member
    fast_decay: float = 1.0  # pulls r and s to 1, as a fraction of the plan's weight decay
    reestimate_batch_norm: bool | None = None  # None: only where members have statistics of their own

    expected: ClassVar[tuple[type[Warning], ...]] = (
        LowDiversityWarning,
    )  # members near each other are what can be folded
    one_network: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.share is not None:
            raise EnfoldError(
                f"the latent members are a BatchEnsemble with one member a teacher, got share={self.share!r}: leave it "
                "out, or use one_to_one, which trains any share and does not fold it"
            )
        if self.start == "als":
            raise EnfoldError(
                "the latent members must start as one network, got start: als, where they start near the teachers: "
                "use fresh, member, average or matched"
            )
        self.student_share(1)  # refuses what it does not know

    def student_share(self, num_teachers: int) -> BatchEnsemble:
        """Equation (1), with the decay (3)."""
        return BatchEnsemble(
            num_teachers,
            init="ones",
            bias=self.bias,
            batch_norm=self.batch_norm,
            fast_grad_scale=num_teachers if self.plan.optimizer == "sgd" else 1.0,
            fast_decay=self.fast_decay,
        )

    def latent(
        self,
        members: nn.Module | CachedTeacher,
        data: Data,
        *,
        checkpoint: Path | None = None,
        answers: Path | None = None,
    ) -> BatchEnsembleMembers:
        """The trained BatchEnsemble, whose fold is what a call returns."""
        student = self.learned(members, data, checkpoint=checkpoint, answers=answers)
        if not isinstance(student, BatchEnsembleMembers):
            raise TypeError("the student is a BatchEnsemble")
        return student

    def check(self, teacher: Teacher, student: nn.Module) -> None:
        """Also, teachers should differ: members that start as one are told apart by nothing else."""
        super().check(teacher, student)
        if self.plan.epochs and teacher.num_members > 1:
            self._compare(teacher)
        if not self.alpha and teacher.num_members > 1:
            warnings.warn(
                f"members that start as one are told apart by their teachers alone, but alpha={self.alpha} leaves the "
                "labels alone, which are the same for all: raise alpha",
                SameTargetsWarning,
                stacklevel=2,
            )

    def _compare(self, teacher: Teacher) -> None:
        with torch.random.fork_rng(devices=[]):  # a loader of the user's own may draw
            batch = next(iter(Order(self.plan.batch_size, seed=self.plan.seed).batches(teacher.data, epoch=0)))
        apart = self.temperature**2 * _apart(teacher(batch))
        first, second = divmod(int(apart.argmin()), teacher.num_members)
        if apart.min() < SAME:
            warnings.warn(
                f"members that start as one are told apart by their teachers alone, but teachers {first} and {second} "
                f"are {float(apart.min()):.1e} nats apart on a training batch: use teachers trained from other seeds",
                SameTargetsWarning,
                stacklevel=2,
            )

    def judged(self, student: nn.Module) -> nn.Module:
        """The folded network, with the statistics of training."""
        return _network(student, self.fold)

    def finish(self, student: nn.Module, data: Data) -> nn.Module:
        """The folded network."""
        network = _network(student, self.fold)
        wanted = self.batch_norm != "joint" if self.reestimate_batch_norm is None else self.reestimate_batch_norm
        if wanted:
            reestimate(network, data)
        return network.eval()


def _network(student: nn.Module, how: How) -> nn.Module:
    if not isinstance(student, BatchEnsembleMembers):
        raise TypeError("the student is a BatchEnsemble")
    return student.network(folded(student, how))


@torch.no_grad()
def folded(members: BatchEnsembleMembers, how: How = "mean_outer") -> State:
    """One network's values by equation (4); everything but the layers' weights is the members' mean."""
    if how not in get_args(How):
        raise EnfoldError(f"the fold must be one of {', '.join(get_args(How))}, got {how!r}: choose one")
    state = members.mean_state()  # (4a)
    fast, shared = members.fast.state(), members.shared.state()
    for prefix, shape in members.layers.items() if how != "mean_outer" else ():
        r, s = fast.get(f"{prefix}r"), fast[f"{prefix}s"]  # (rank, M, channels)
        if how == "outer_mean":
            factor = shape.factor(None if r is None else r.mean(1, keepdim=True), s.mean(1, keepdim=True))[0]  # (4b)
        else:
            factor = shape.factor(r, s).sum(0)  # (4c)
        state[f"{prefix}weight"] = shared[f"{prefix}weight"] * factor
    return state


def _apart(targets: Tensor) -> Tensor:
    """The mean KL from each of T teachers to each other: targets (T, B, C + 1) -> (T, T), infinite on the diagonal."""
    probs = targets[..., :-1].double()
    log_probs = probs.clamp(min=1e-45).log()  # float32 has no smaller ones
    cross = torch.einsum("tbc,sbc->ts", probs, log_probs) / probs.shape[1]
    return (cross.diagonal()[:, None] - cross).fill_diagonal_(torch.inf)

"""TreeNet: one trunk for all members, and a branch of their own for each from a split on.

    z_m = branch_m(trunk(x))                                                                 (1)
    L = Σ_m (1/B) Σ_b ℓ(z_mb, y_b)                    branches whole, trunk with 1/M of it   (2)
    parameters = trunk + M · branch                   in operations of a prediction too      (3)

Multiple choice learning, choice="best": an example trains the branch that is best on it,

    L = Σ_m (M/B) Σ_b w_mb ℓ(z_mb, y_b),   w_mb = s + (1 - M s) [m = argmin_k ℓ(z_kb, y_b)]   (4)

with s = `minimum_share`: 0 is the winner alone, 1/M is (2). The best branch of M then gets better (oracle accuracy),
and each branch alone worse.

S. Lee, S. Purushwalkam, M. Cogswell, D. Crandall, D. Batra: Why M Heads are Better than One: Training a Diverse
Ensemble of Deep Networks, 2015, arXiv:1511.06314. Multiple choice: S. Lee, S. Purushwalkam, M. Cogswell, V. Ranjan,
D. Crandall, D. Batra: Stochastic Multiple Choice Learning for Training Diverse Deep Ensembles, NeurIPS 2016,
arXiv:1606.07839. The share s: C. Rupprecht and others: Learning in an Uncertain World, ICCV 2017, arXiv:1612.00197.

The split goes by the order in which modules are registered, which in most networks is that of their use; where it is
not, `branch` names what members own. A tensor of the trunk that is used after the split is shared all the same.

Differs from the paper: the trunk's gradient is divided by M, so that it has the size of one network's; with
choice="best" the first `warmup_epochs` train all branches on all examples, because a branch that starts badly would
never win, and the last epoch is kept, because the mean member is meant to get worse; nothing else known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from enfold.data import Data
from enfold.data.batches import Batch
from enfold.engines.base import EngineName
from enfold.ensembles.common.branching import (
    Branches,
    Branching,
    Start,
    middle,
    pattern_names,
    require_start,
    split_names,
)
from enfold.ensembles.common.sharing import require_size
from enfold.errors import EnfoldError
from enfold.train import Follower, Objective, TrainConfig
from enfold.train.objective import batch_classes, batch_logits


@dataclass(frozen=True)
class TreeNet(Branching):
    """One trunk for all members, and a branch of their own for each from a split on."""

    num_members: int = 4
    split: str | None = None  # path of the first module of the branch; None: about half of the layers lie behind it
    branch: tuple[str, ...] = ()  # instead of a split: patterns of the names of what members own
    branches: Start = "fresh"  # drawn anew for each member, or copies of the network's, which keep trained weights
    noise: float = 0.1  # on copies, relative to each tensor's size; equal branches would never part
    choice: Literal["all", "best"] = "all"  # an example trains all branches, or the one that is best on it
    warmup_epochs: int = 1  # choice="best": how many epochs first train all branches
    minimum_share: float = 0.0  # choice="best": what every branch gets of each example, at most 1/M
    seed: int = 0
    engine: EngineName = "auto"

    def __post_init__(self) -> None:
        require_size(self.num_members)
        require_start(self.branches, self.noise)
        if self.split is not None and self.branch:
            raise EnfoldError(
                f"a branch is given by a split or by patterns, got both '{self.split}' and {self.branch}: leave one out"
            )
        if self.choice not in ("all", "best"):
            raise EnfoldError(f"an example trains 'all' branches or the 'best', got {self.choice!r}: choose one")
        if not 0 <= self.minimum_share <= 1 / self.num_members:
            raise EnfoldError(
                f"the minimum_share of {self.num_members} branches must be between 0 and {1 / self.num_members:.3g}, "
                f"got {self.minimum_share}: lower it"
            )
        if self.warmup_epochs < 0:
            raise EnfoldError(f"warmup_epochs must be 0 or more, got {self.warmup_epochs}: 1 is the default")

    def __call__(self, network: nn.Module) -> TreeNetMembers:
        """M members that share the network's trunk."""
        return TreeNetMembers(network, self)

    def branch_of(self, network: nn.Module) -> list[str]:
        """The tensors behind the split, or those that the patterns name."""
        if self.branch:
            return pattern_names(network, self.branch)
        return split_names(network, middle(network) if self.split is None else self.split)

    def adapted(self, plan: TrainConfig) -> TrainConfig:
        """All members see the same examples; a choice among them is not undone by choosing the best mean member."""
        plan = super().adapted(plan)
        return plan if self.choice == "all" else plan.replace(select="last", patience=None)

    def objective(self, plan: TrainConfig) -> Objective | None:
        """Equation (4), or the cross-entropy of each member."""
        if self.choice == "all":
            return None
        smoothing = plan.per_member("label_smoothing", self.num_members)
        return BestBranch(self.minimum_share, self.warmup_epochs, smoothing)


class TreeNetMembers(Branches, Follower):
    """The members; `epochs` counts those of the training that is going on."""

    epochs: Tensor

    def __init__(self, network: nn.Module, share: TreeNet) -> None:
        super().__init__(network, share, share.branches, share.noise)
        self.register_buffer("epochs", torch.tensor(0))

    def begin(self) -> None:
        """Another training counts from 0."""
        self.epochs.zero_()

    def after_epoch(self, epoch: int, plan: TrainConfig) -> None:
        """Count."""
        self.epochs.fill_(epoch)

    def finish(self, data: Data) -> None:
        """Another training counts from 0."""
        self.epochs.zero_()


@dataclass(frozen=True)
class BestBranch:
    """Cross-entropy in which an example counts for the branch that is best on it, as in equation (4)."""

    minimum_share: float = 0.0
    warmup_epochs: int = 0
    label_smoothing: Sequence[float] = (0.0,)  # one for all, or one a member

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        """The loss of each member, (M,)."""
        if batch.own:
            raise EnfoldError(
                "a choice among branches needs all of them to see the same examples, got a batch for each: "
                "train with order: shared"
            )
        log_probs = torch.log_softmax(batch_logits(model, batch), dim=-1)  # (M, B, C)
        labels = batch_classes(batch, log_probs)[..., None]
        smoothing = torch.tensor(self.label_smoothing, dtype=log_probs.dtype, device=log_probs.device)[:, None]
        nll = -log_probs.gather(-1, labels).squeeze(-1)
        losses = (1 - smoothing) * nll - smoothing * log_probs.mean(-1)  # (M, B)
        if int(getattr(model, "epochs", self.warmup_epochs)) < self.warmup_epochs:
            return losses.mean(1)  # (2)
        num_members, share = len(losses), self.minimum_share
        best = torch.nn.functional.one_hot(losses.detach().argmin(0), num_members).T  # (M, B)
        return num_members * ((share + (1 - num_members * share) * best) * losses).mean(1)  # (4)

"""TreeNet: a common trunk for all members, and a branch of its own for every member.

    z_m = branch_m(trunk(x))                                                                 (1)
    L = Σ_m (1/B) Σ_b ℓ(z_mb, y_b)                    trunk: gradient divided by M           (2)
    parameters = trunk + M · branch                   also in operations per prediction      (3)

Multiple choice learning, choice="best": an example trains the branch that is best on it,

    L = Σ_m (M/B) Σ_b w_mb ℓ(z_mb, y_b),   w_mb = s + (1 - M s) [m = argmin_k ℓ(z_kb, y_b)]   (4)

with s = `minimum_weight`: with 0 only the best branch is trained, 1/M is (2). The best branch of M (oracle accuracy)
gets better, and every single branch worse.

S. Lee, S. Purushwalkam, M. Cogswell, D. Crandall, D. Batra: Why M Heads are Better than One: Training a Diverse
Ensemble of Deep Networks, 2015, arXiv:1511.06314. Multiple choice: S. Lee, S. Purushwalkam, M. Cogswell, V. Ranjan,
D. Crandall, D. Batra: Stochastic Multiple Choice Learning for Training Diverse Deep Ensembles, NeurIPS 2016,
arXiv:1606.07839. The weight s: C. Rupprecht and others: Learning in an Uncertain World, ICCV 2017, arXiv:1612.00197.

The split follows the order in which modules are registered, in most networks that of their use; otherwise `branch`
names what members own. A tensor of the trunk that is used after the split is common to all members, too.

Differs from the paper: the gradient of the trunk is divided by M, so that it is as large as that of a single network.
With choice="best" the first `warmup_epochs` train all branches on all examples, because a branch that starts badly
would never be the best, and the last epoch is selected, because the mean member is meant to get worse.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import NonNegativeInt, PositiveInt
from torch import Tensor, nn

from enfold.arguments import checked
from enfold.data import Data
from enfold.data.batches import Batch
from enfold.engines.base import EngineName
from enfold.ensembles.common.branching import BranchedEnsemble, middle_module, pattern_names, split_names
from enfold.ensembles.common.options import NonNegative
from enfold.errors import EnfoldError
from enfold.tasks import TaskLike, as_task
from enfold.train import Objective, TrainConfig
from enfold.train.objective import batch_outputs


@checked
class TreeNet(BranchedEnsemble):
    """A common trunk, and a branch of its own for every member from a split on.

    Args:
        network: The network; its trunk, trained or not, is common to all members.
        num_members: The number of members.
        split: The path of the first module of the branch; by default about half of the layers are behind it.
        branch: Instead of `split`: regular expressions for the names of the tensors or modules that members own.
        branches: "fresh": branches are drawn again for every member; "copies": they are copies of the network's.
        noise: The standard deviation of the noise on copies, relative to the root mean square of a tensor.
        choice: "all": an example trains all branches; "best": the branch with the lowest loss on it.
        warmup_epochs: With choice="best", the number of first epochs in which an example trains all branches.
        minimum_weight: With choice="best", the weight of every example for every branch, at most 1/M.
        seed: The seed of the branches.
        engine: How members are run: auto, measure, stacked, loop or vmap.
    """

    epochs: Tensor  # of the training that is under way

    def __init__(
        self,
        network: nn.Module,
        num_members: PositiveInt = 4,
        *,
        split: str | None = None,
        branch: tuple[str, ...] = (),
        branches: Literal["fresh", "copies"] = "fresh",
        noise: NonNegative = 0.1,
        choice: Literal["all", "best"] = "all",
        warmup_epochs: NonNegativeInt = 1,
        minimum_weight: NonNegative = 0.0,
        seed: int = 0,
        engine: EngineName = "auto",
    ) -> None:
        if split is not None and branch:
            raise EnfoldError(f"split and branch exclude each other, got '{split}' and {branch}: leave one out")
        if minimum_weight > 1 / num_members:
            raise EnfoldError(
                f"minimum_weight must be at most 1 / num_members, got {minimum_weight} for {num_members} members: "
                "lower minimum_weight"
            )
        if branch:
            own = pattern_names(network, branch)
        else:
            own = split_names(network, middle_module(network) if split is None else split)
        super().__init__(network, num_members, own, engine)
        self.split, self.branch, self.branches, self.noise, self.choice = split, branch, branches, noise, choice
        self.warmup_epochs, self.minimum_weight, self.seed = warmup_epochs, minimum_weight, seed
        if branches == "fresh":
            self.draw_branches(network)
        elif noise:
            self.perturb_branches(noise)
        self.register_buffer("epochs", torch.tensor(0))

    def configure(self, config: TrainConfig) -> TrainConfig:
        """Use one order of the data; with choice="best" the last epoch, as the mean member is meant to get worse."""
        config = super().configure(config)
        return config if self.choice == "all" else config.replace(select="last", patience=None)

    def objective(self, config: TrainConfig) -> Objective | None:
        """Return (4), or None for the cross-entropy of every member."""
        if self.choice == "all":
            return None
        smoothing = config.per_member("label_smoothing", self.num_members)
        return BestBranch(self.minimum_weight, self.warmup_epochs, smoothing, config.task)

    def on_fit_start(self, data: Data, config: TrainConfig) -> None:
        """Count epochs from 0."""
        self.epochs.zero_()

    def on_epoch_end(self, epoch: int, config: TrainConfig) -> None:
        """Count the epochs."""
        self.epochs.fill_(epoch)

    def on_fit_end(self, data: Data) -> None:
        """Reset the count, so that equal ensembles have equal state dicts."""
        self.epochs.zero_()


@dataclass(frozen=True)
class BestBranch:
    """The loss in which an example counts for the branch that is best on it, (4).

    Args:
        minimum_weight: The weight of every example for every branch.
        warmup_epochs: The number of first epochs in which every example counts for all branches.
        label_smoothing: The label smoothing, one value for all or one per member.
        task: The task; None to infer it.
    """

    minimum_weight: float = 0.0
    warmup_epochs: int = 0
    label_smoothing: Sequence[float] = (0.0,)
    task: TaskLike = None

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the loss of each member, (M,)."""
        if batch.own:
            raise EnfoldError(
                "order must be 'shared' for choice='best', which compares branches on the same examples, got a batch "
                "for each: train with order='shared'"
            )
        outputs = batch_outputs(model, batch)
        task = as_task(self.task).resolve(outputs, batch.targets)
        rows = task.flatten(outputs, batch.targets, batch.weights)
        losses = task.row_losses(rows, self.label_smoothing)  # (M, N)
        if int(getattr(model, "epochs", self.warmup_epochs)) < self.warmup_epochs:
            return rows.mean(losses)  # (2)
        num_members, low = len(losses), self.minimum_weight
        best = torch.nn.functional.one_hot(losses.detach().argmin(0), num_members).T  # (M, B)
        return num_members * rows.mean((low + (1 - num_members * low) * best) * losses)  # (4)

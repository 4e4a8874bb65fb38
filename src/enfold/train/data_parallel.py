"""Data-parallel training under torchrun: each process computes the gradients of its part of every batch.

    g = Σ_r (B_r / B) g_r,      L = Σ_r (B_r / B) L_r        for the parts B_r of a batch of B = Σ_r B_r examples

That is the mean over the batch, so that the result is the one of a single process to rounding. All processes draw the
same order, hold the same weights and evaluate the same validation examples; the first one writes files.

The parameters of a network may be sharded by FSDP2 (`torch.distributed.fsdp.fully_shard`), which computes the mean over
R processes itself, (1 / R) Σ_r; the loss of a part is multiplied by R B_r / B then.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from enfold.data.batches import Batch
from enfold.data.tree import select_examples
from enfold.engines.modes import is_shard, is_sharded
from enfold.ensemble import Ensemble
from enfold.errors import EnfoldError
from enfold.io.files import digest


def complete(tensor: Tensor) -> Tensor:
    """Return the complete tensor of a sharded one, in a call that all processes make."""
    return tensor.full_tensor() if is_shard(tensor) else tensor  # type: ignore[attr-defined]


def shard_as(like: Any, tensor: Tensor) -> Tensor:
    """Return a complete tensor, divided among processes if `like` of the same shape is."""
    if not is_shard(like) or like.shape != tensor.shape:
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements)


@dataclass(frozen=True)
class DataParallel:
    """This process among those that train one model; a single one if torch.distributed is not initialized.

    Args:
        rank: Its number.
        size: The number of processes.
    """

    rank: int = 0
    size: int = 1

    @classmethod
    def current(cls) -> DataParallel:
        """Return the default process group of torch.distributed."""
        if not (dist.is_available() and dist.is_initialized()):
            return cls()
        return cls(dist.get_rank(), dist.get_world_size())

    @property
    def is_first(self) -> bool:
        """Whether this process writes files and shows progress."""
        return self.rank == 0

    @torch.no_grad()
    def share(self, model: nn.Module) -> None:
        """Give all processes the weights of the first; shards stay as they are.

        Raises:
            EnfoldError: If the parameters of an ensemble are sharded, or those of a network in another group.
        """
        if is_sharded(model):
            self._check_shards(model)
        if self.size > 1:
            for tensor in (*model.parameters(), *model.buffers()):
                if not is_shard(tensor):
                    dist.broadcast(tensor, 0)

    def _check_shards(self, model: nn.Module) -> None:
        shards: list[Any] = [parameter for parameter in model.parameters() if is_shard(parameter)]
        if isinstance(model, Ensemble):
            raise EnfoldError(
                f"the parameters of a {type(model).__name__} must be complete in each process, got shards: train its "
                "members one by one, each under fully_shard"
            )
        if any(shard.device_mesh.ndim != 1 or shard.device_mesh.size() != self.size for shard in shards):
            raise EnfoldError(
                f"sharded parameters must be divided among all {self.size} processes in one dimension, got "
                f"{shards[0].device_mesh}: call fully_shard without a mesh"
            )

    def part(self, batch: Batch) -> tuple[Batch, float]:
        """Return the examples of this process and their share of the batch.

        Raises:
            EnfoldError: If examples have weights, by whose sum over the whole batch losses are divided.
        """
        if self.size == 1:
            return batch, 1.0
        if batch.weights is not None:
            raise EnfoldError(
                f"weights of examples are normalized over a batch, which {self.size} processes divide, got weights: "
                "train in one process, or leave them out"
            )
        count = len(batch)
        if count < self.size:
            return batch, 1 / self.size
        rows = torch.arange(self.rank, count, self.size)
        if batch.own:
            indices = None if batch.indices is None else batch.indices[:, rows]
            chosen = replace(batch, inputs=batch.inputs[:, rows], targets=batch.targets[:, rows], indices=indices)
        else:
            indices = None if batch.indices is None else batch.indices[rows]
            inputs, targets = (select_examples(each, rows) for each in (batch.inputs, batch.targets))
            chosen = replace(batch, inputs=inputs, targets=targets, indices=indices)
        return chosen, len(rows) / count

    def weight(self, model: nn.Module, share: float) -> float:
        """Return the factor on the loss of a part whose gradients are summed by `reduce`, or averaged by FSDP2."""
        return share * self.size if self.size > 1 and is_sharded(model) else share

    def reduce(self, model: nn.Module, losses: Tensor, share: float, *, stop: bool) -> tuple[Tensor, bool]:
        """Replace the gradients by those of the batch; return its losses, and whether a process was asked to stop.

        Args:
            model: The model, after the backward pass.
            losses: The losses of this part.
            share: Its share of the batch, by which the gradients have been multiplied.
            stop: Whether this process was asked to stop.
        """
        if self.size == 1:
            return losses, stop
        trained = [each for each in model.parameters() if each.requires_grad and not is_shard(each)]
        flags = [float(parameter.grad is not None) for parameter in trained]
        about = torch.cat([(losses * share).float(), losses.new_tensor([float(stop), *flags]).float()])
        dist.all_reduce(about)
        for parameter, used in zip(trained, about[len(losses) + 1 :].tolist(), strict=True):
            if not used:
                continue
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            dist.all_reduce(grad)
            parameter.grad = grad
        return about[: len(losses)].to(losses), bool(about[len(losses)])

    def synchronize(self, model: nn.Module) -> None:
        """Use the buffers of the first process, such as running statistics, and compare the weights of all.

        Raises:
            EnfoldError: If the weights differ.
        """
        if self.size == 1:
            return
        for buffer in model.buffers():
            dist.broadcast(buffer, 0)
        whole = (parameter for parameter in model.parameters() if not is_shard(parameter))
        own, found = digest(whole), [None] * self.size
        dist.all_gather_object(found, own)
        if any(each != own for each in found):
            raise EnfoldError(
                "all processes must have the same weights after an epoch, but they differ: start from the same weights "
                "and data in all processes, and use deterministic algorithms"
            )

    def wait(self) -> None:
        """Wait until all processes are here, so that they see the files of the first."""
        if self.size > 1:
            dist.barrier()

"""Train and distil in all processes of torchrun, or in this one, and save the results of the first."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn

import enfold


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))


def main(out: str) -> None:
    rank = int(os.environ.get("RANK", "0"))
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        torch.manual_seed(rank)  # processes that were seeded differently start from the weights of the first
    inputs = torch.randn(203, 8, generator=torch.Generator().manual_seed(0))  # the last batch is uneven
    train = inputs, (inputs[:, 0] > 0).long() + (inputs[:, 1] > 0).long()
    ensemble = enfold.DeepEnsemble(network, 2, seed=rank)
    settings = {"epochs": 3, "batch_size": 33, "lr": 1e-2, "quiet": True}
    history = enfold.fit(ensemble, train, train, checkpoint=f"{out}.checkpoint.safetensors", **settings)
    student = enfold.distill(ensemble, train, train, perturb=None, **settings)
    if rank == 0:
        enfold.save(ensemble, f"{out}-ensemble.safetensors")
        enfold.save(student, f"{out}-student.safetensors")
        print(history.epochs[-1].train_loss, history.chosen)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])

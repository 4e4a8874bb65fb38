"""Train and distil in all processes of torchrun, or in this one, and save the results of the first."""

import contextlib
import os
import sys

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

import enfold
from enfold.train.data_parallel import complete

SETTINGS = {"epochs": 3, "batch_size": 33, "lr": 1e-2, "quiet": True}


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 17), nn.ReLU(), nn.Linear(17, 3))  # an odd number of rows is sharded unevenly


def shard(model: nn.Module) -> nn.Module:
    if dist.is_initialized():
        from torch.distributed.fsdp import fully_shard

        fully_shard(model)
    return model


def sharded() -> nn.Module:
    torch.manual_seed(5)
    return shard(network())


def stop(epoch: object) -> None:
    raise KeyboardInterrupt


def fit_sharded(train: object, out: str) -> None:
    """Train a network with FSDP2, interrupted and not, and distill into one that is sharded, too."""
    settings = SETTINGS | {"clip_norm": 1.0, "ema": 0.9}
    net, again = sharded(), sharded()
    history = enfold.fit(net, train, train, **settings)
    file = f"{out}.checkpoint.safetensors"
    with contextlib.suppress(KeyboardInterrupt):
        enfold.fit(sharded(), train, train, checkpoint=file, on_epoch=stop, **settings)
    enfold.fit(again, train, train, checkpoint=file, **settings)
    student = enfold.distill(net, train, train, student=sharded, **SETTINGS)
    whole = [{name: complete(each) for name, each in each.state_dict().items()} for each in (net, student, again)]
    assert all(torch.equal(whole[0][name], whole[2][name]) for name in whole[0])
    if dist.is_initialized():
        for model, options in ((shard(enfold.BatchEnsemble(network(), 2)), {}), (sharded(), {"trajectory": out})):
            with pytest.raises(enfold.EnfoldError, match=r"must be complete|sharded parameters"):
                enfold.fit(model, train, **options, **SETTINGS)
    if not dist.is_initialized() or dist.get_rank() == 0:
        for name, state in (("network", whole[0]), ("student", whole[1])):
            save_file(state, f"{out}-{name}.safetensors")
        print(history.epochs[-1].train_loss, history.chosen)


def fit_ensemble(train: object, out: str, rank: int) -> None:
    """Train an ensemble and distill it."""
    ensemble = enfold.DeepEnsemble(network, 2, seed=rank)
    history = enfold.fit(ensemble, train, train, checkpoint=f"{out}.checkpoint.safetensors", **SETTINGS)
    student = enfold.distill(ensemble, train, train, perturb=None, **SETTINGS)
    if rank == 0:
        enfold.save(ensemble, f"{out}-ensemble.safetensors")
        enfold.save(student, f"{out}-student.safetensors")
        print(history.epochs[-1].train_loss, history.chosen)


def main(out: str, kind: str) -> None:
    rank = int(os.environ.get("RANK", "0"))
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        torch.manual_seed(rank)  # processes that were seeded differently start from the weights of the first
    inputs = torch.randn(203, 8, generator=torch.Generator().manual_seed(0))  # the last batch is uneven
    train = inputs, (inputs[:, 0] > 0).long() + (inputs[:, 1] > 0).long()
    if kind == "sharded":
        fit_sharded(train, out)
    else:
        fit_ensemble(train, out, rank)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])

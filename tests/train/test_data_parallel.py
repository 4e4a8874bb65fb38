"""Data-parallel training: two processes give the result of one to rounding."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from enfold.data.batches import Batch
from enfold.errors import EnfoldError
from enfold.train.data_parallel import DataParallel

SCRIPT = str(Path(__file__).parent / "torchrun_script.py")


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("kind", "models"), [("whole", ("ensemble", "student")), ("sharded", ("network", "student"))])
def test_two_processes_give_the_result_of_one(tmp_path, kind, models):
    """Also if each has one half of the parameters, by FSDP2."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    printed = []
    for name, words in (("one", []), ("two", torchrun)):
        command = [sys.executable, *words, SCRIPT, str(tmp_path / name), kind]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout.split("]")[-2])
    assert printed[0] == printed[1]  # the chosen epochs
    for model in models:
        one, two = (load_file(tmp_path / f"{name}-{model}.safetensors") for name in ("one", "two"))
        for name, value in one.items():
            torch.testing.assert_close(two[name], value, rtol=1e-3, atol=1e-4)
    assert (tmp_path / "two.checkpoint.safetensors").is_file()


@pytest.mark.parametrize("own", [True, False])
def test_the_parts_are_the_batch(own):
    shape = (2, 7) if own else (7,)
    inputs, targets = torch.arange(7.0).expand(shape)[..., None], torch.arange(7).expand(shape)
    batch = Batch(inputs, targets, own, targets)
    parts = [DataParallel(rank, 3).part(batch) for rank in range(3)]
    assert sum(share for _, share in parts) == pytest.approx(1)
    assert [len(part) for part, _ in parts] == [3, 2, 2]
    for field in ("inputs", "targets", "indices"):
        joined = torch.cat([getattr(part, field) for part, _ in parts], dim=int(own))
        assert joined.flatten().sort().values.tolist() == getattr(batch, field).flatten().sort().values.tolist()


def test_a_batch_smaller_than_the_processes_is_computed_by_all():
    batch = Batch(torch.zeros(2, 1), torch.zeros(2))
    assert DataParallel(0, 3).part(batch) == (batch, 1 / 3)


def test_one_process_takes_the_batch_itself():
    batch, losses = Batch(torch.zeros(2, 1), torch.zeros(2), weights=torch.ones(2)), torch.ones(1)
    assert DataParallel().part(batch)[0] is batch
    assert DataParallel().reduce(nn.Linear(1, 1), losses, 1.0, stop=True) == (losses, True)


def test_weights_of_examples_are_refused():
    with pytest.raises(EnfoldError, match="weights of examples"):
        DataParallel(0, 2).part(Batch(torch.zeros(4, 1), torch.zeros(4), weights=torch.ones(4)))

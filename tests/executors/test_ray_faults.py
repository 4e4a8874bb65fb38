"""Workers and nodes of a real Ray cluster that are killed in the middle of a training."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import enfold
from enfold.executors import Parallel, RayExecutor

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500), pytest.mark.filterwarnings("default")]
MEMBERS = 4


@pytest.fixture
def cluster(monkeypatch):
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_worker_niceness", "0")  # 15 by default: minutes to import torch on a busy machine
    ray.cloudpickle.register_pickle_by_value(__import__(__name__, fromlist=["_"]))  # a module of pytest alone
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    yield made
    made.shutdown()


class Slow:
    """The mean square error, slowly; of the processes that compute it, the first kills itself if it is told to."""

    def __init__(self, seconds: float, mark: Path | None = None) -> None:
        self.seconds, self.mark, self.calls = seconds, mark, 0

    def __repr__(self) -> str:
        return "Slow()"  # the same loss, however slow

    def __call__(self, model, batch):
        self.calls += 1
        if self.mark is not None and self.calls == 12 and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(self.seconds)
        return (model(batch.inputs.flatten(0, 1))[..., 0] - batch.targets.flatten()).square().mean(1)


def train(executor, objective, store=None):
    """Train an ensemble in blocks of one member; return its weights."""
    inputs = torch.randn(120, 8, generator=torch.Generator().manual_seed(0))
    ensemble = enfold.DeepEnsemble(lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)), MEMBERS)
    parallel = Parallel(executor, store=store)
    settings = {"epochs": 6, "batch_size": 20, "task": "regression"}
    enfold.fit(ensemble, (inputs, inputs[:, 0]), objective=objective, executor=parallel, **settings)
    return ensemble.state_dict()


def same(first, second) -> bool:
    return all(torch.equal(value, second[name]) for name, value in first.items())


def test_a_worker_is_killed_in_a_training(cluster, tmp_path):
    expected = train("serial", Slow(0.0))
    mark = tmp_path / "killed"
    with RayExecutor(cluster.address, threads=1, workers=1) as executor:
        found = train(executor, Slow(0.0, mark), tmp_path / "store")
    assert mark.exists()
    assert same(expected, found)


def test_a_node_is_killed_in_a_training(cluster, tmp_path, capsys):
    """The members that it was training are trained elsewhere, and the finished ones are not trained again."""
    expected, node = train("serial", Slow(0.0)), cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    finished: dict[Path, int] = {}

    def kill() -> None:
        def results() -> list[Path]:
            files = (tmp_path / "store").rglob("*.safetensors")
            return [path for path in files if "checkpoint" not in path.name]

        while len(found := results()) < 3:  # the examples are stored, too
            time.sleep(0.05)
        finished.update({path: path.stat().st_ino for path in found})
        cluster.remove_node(node, allow_graceful=False)

    killer = threading.Thread(target=kill, daemon=True)
    with RayExecutor(cluster.address, threads=1, workers=2) as executor:
        killer.start()
        found = train(executor, Slow(0.1), tmp_path / "store")
        killer.join()
    assert "ended abruptly" in capsys.readouterr().err
    assert finished
    assert all(path.stat().st_ino == inode for path, inode in finished.items())
    assert same(expected, found)

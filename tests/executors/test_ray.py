"""A real Ray cluster on this machine: the same bits, and a killed worker costs one repetition."""

import os
import signal

import pytest
import torch
from torch import nn

import enfold
from enfold.errors import EnfoldError, MissingExtra
from enfold.executors import Parallel, RayExecutor, Store, Task, run_tasks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400), pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="module")
def executor():
    pytest.importorskip("ray")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_worker_niceness", "0")  # 15 by default: minutes to import torch on a busy machine
        with RayExecutor(threads=1, workers=2) as found:
            yield found


def _kill_once(store, mark):
    if not store.exists(mark):
        with store.write(mark) as path:
            path.write_text("killed")
        os.kill(os.getpid(), signal.SIGKILL)
    with store.write("output") as path:
        path.write_text("complete")


def test_functions_errors_and_threads(executor):
    assert executor.slots == 2
    assert executor.submit(torch.get_num_threads).result() == 1
    assert executor.submit(os.getenv, "OMP_NUM_THREADS").result() == "1"
    with pytest.raises(ZeroDivisionError):
        executor.submit(divmod, 1, 0).result()


def test_a_training_has_the_bits_of_this_process(executor, tmp_path):
    def network():
        return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))

    inputs = torch.randn(200, 8, generator=torch.Generator().manual_seed(0))
    train = inputs, (inputs[:, 0] > 0).long()
    states = []
    for parallel in (Parallel("serial"), Parallel("ray", store=tmp_path), Parallel(executor)):
        ensemble = enfold.DeepEnsemble(network, 3)
        enfold.fit(ensemble, train, epochs=2, quiet=True, executor=parallel)
        states.append(ensemble.state_dict())
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name])
        assert torch.equal(value, states[2][name])


def test_a_killed_worker_is_repeated_once(executor, tmp_path, capsys):
    import ray

    ray.cloudpickle.register_pickle_by_value(__import__(__name__, fromlist=["_"]))  # a module of pytest alone
    store = Store(tmp_path)
    task = Task("task", "output", _kill_once, ("mark",))
    assert run_tasks([task], store, Parallel(executor), title="tasks", quiet=True) == []
    assert store.exists("output")
    assert "task ended abruptly" in capsys.readouterr().err


def test_an_unknown_cluster_is_refused(executor, monkeypatch):
    import ray

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **_: (_ for _ in ()).throw(ConnectionError("no cluster there")))
    with pytest.raises(EnfoldError, match=r"got 'head:1' \(no cluster there\)"):
        RayExecutor("head:1")
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(MissingExtra, match=r"enfold\[ray\]"):
        RayExecutor()

"""An ensemble called from several threads returns the outputs of a single thread."""

import sys
import threading

import pytest
import torch
from torch import nn

from enfold import DeepEnsemble, MixedEnsemble
from enfold.errors import UnsuitableNetwork
from enfold.registry import methods
from zoo import vectors

THREADS = 4


@pytest.fixture(autouse=True)
def _frequent_switches():
    """Threads take turns a thousand times as often as usual."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-6)
    yield
    sys.setswitchinterval(before)


def dense():
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))


def convolutional():
    return nn.Sequential(
        nn.Conv2d(1, 4, (3, 1)), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(),
        nn.Dropout(0.2), nn.Linear(16, 3),
    )  # fmt: skip


def wrong_answers(model, calls, make, first=None):
    """How many calls of `calls` in each of 4 threads gave something else than a call in one thread."""
    inputs = [vectors(rows) for rows in (4, 5, 70)]
    if make is convolutional:
        inputs = [x[:, None, :, None] for x in inputs]
    expected = [(first or model)(x).detach() for x in inputs]
    wrong, start = [], threading.Barrier(THREADS)

    def work(offset):
        start.wait()
        for number in range(calls):
            which = (number + offset) % len(inputs)
            try:
                with torch.no_grad():
                    outputs = model(inputs[which])
                if not torch.allclose(outputs, expected[which], atol=1e-5):
                    wrong.append(float((outputs - expected[which]).abs().max()))
            except Exception as error:
                wrong.append(error)

    threads = [threading.Thread(target=work, args=(offset,)) for offset in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return wrong


CALLS = [10, pytest.param(400, marks=[pytest.mark.slow, pytest.mark.timeout(600)])]


@pytest.mark.parametrize("calls", CALLS)
@pytest.mark.parametrize(
    ("make", "engine"),
    [(dense, "loop"), (dense, "stacked"), (dense, "vmap"), (convolutional, "loop"), (convolutional, "vmap")],
)
def test_every_engine(make, engine, calls):
    members = DeepEnsemble(make, 3, engine=engine).eval()
    alone = MixedEnsemble([member.eval() for member in members]).eval()
    assert wrong_answers(members, calls, make, first=alone) == []


@pytest.mark.parametrize("calls", CALLS)
@pytest.mark.parametrize("name", sorted(methods("ensemble")))
@pytest.mark.parametrize("make", [pytest.param(dense, marks=pytest.mark.slow), convolutional])
def test_every_method(make, name, calls):
    try:
        model = methods("ensemble")[name].target(make()).eval()
    except UnsuitableNetwork as reason:
        pytest.skip(str(reason))
    assert wrong_answers(model, calls, make) == []


@pytest.mark.parametrize("calls", CALLS)
def test_the_mean_of_members(calls):
    members = DeepEnsemble(convolutional, 3).eval()
    assert wrong_answers(members.forward_mean, calls, convolutional) == []


def test_other_modules_run_while_one_thread_traces():
    """A trace by torch.fx replaces the call of all modules of the process."""
    stop, failed, network = threading.Event(), [], dense().eval()

    def call():
        while not stop.is_set():
            try:
                network(vectors(4))
            except Exception as error:
                failed.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    try:
        for seed in range(5):
            DeepEnsemble(dense, 2, seed=seed)(vectors(4))
    finally:
        stop.set()
        thread.join()
    assert failed == []


def test_members_do_not_depend_on_other_threads():
    alone = DeepEnsemble(dense, 6, seed=0).state_dict()
    stop = threading.Event()

    def draw():
        while not stop.is_set():
            torch.randn(10)

    def make():
        for _ in range(5):
            made.append(DeepEnsemble(dense, 6, seed=0).state_dict())

    made = []
    drawing, making = threading.Thread(target=draw), [threading.Thread(target=make) for _ in range(2)]
    for thread in (drawing, *making):
        thread.start()
    for thread in making:
        thread.join()
    stop.set()
    drawing.join()
    assert all(torch.equal(alone[name], state[name]) for state in made for name in alone)
    assert len(made) == 10

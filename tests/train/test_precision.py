"""Half precision and compiled training: faster, and the same training."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.train import TrainConfig, fit

SGD = TrainConfig(epochs=3, batch_size=16, optimizer="sgd", lr=0.1, schedule="constant", select="last")


def seeded(factory, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return factory()


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
@pytest.mark.parametrize("members", [None, 2], ids=["network", "members"])
def test_half_precision_learns_with_full_precision_weights(data, make, precision, members):
    model, full = (seeded(make["mlp"]) if members is None else DeepEnsemble(make["mlp"], members) for _ in range(2))
    plan = SGD.replace(clip_norm=1.0)
    half = fit(model, data, config=plan.replace(precision=precision), quiet=True).epochs[-1]
    whole = fit(full, data, config=plan, quiet=True).epochs[-1]
    assert half.train_loss == pytest.approx(whole.train_loss, rel=0.05)
    assert half.train_loss != whole.train_loss
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())


@pytest.mark.parametrize("members", [None, 2], ids=["network", "members"])
@pytest.mark.parametrize("fast", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["eager", "inductor"])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch hides it from users
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler's own modules
def test_compiled_training(data, make, monkeypatch, members, fast):
    """The graphs are counted; the real compiler takes seconds and runs with the slow tests."""
    graphs = []

    def backend(graph, examples):
        from torch._dynamo.backends.registry import lookup_backend

        graphs.append(graph)
        return lookup_backend("eager" if fast else "inductor")(graph, examples)

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    model, reference = (
        seeded(make["mlp"]) if members is None else DeepEnsemble(make["mlp"], members, engine="stacked")
        for _ in range(2)
    )
    fit(model, data, config=SGD.replace(compile=True), quiet=True)
    assert 2 <= len(graphs) <= 8, "graphs for training and validation, not one for each step"
    fit(reference, data, config=SGD, quiet=True)
    for own, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-5)
    network = model if members is None else model.skeleton.network
    assert network._compiled_call_impl is None
    assert members is None or model.engine == "stacked"


def test_compiled_models_remain_compiled(data, make, monkeypatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    network = seeded(make["mlp"])
    network.compile()
    before = network._compiled_call_impl
    fit(network, data, config=SGD.replace(compile=True, epochs=1), quiet=True)
    assert network._compiled_call_impl is before

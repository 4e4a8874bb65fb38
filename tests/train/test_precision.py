"""Half precision in training, evaluation and inference; compiled training: faster, and the same results."""

from __future__ import annotations

import functools
import statistics

import pytest
import torch
from torch import nn

from enfold.distill import distill
from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.errors import EnfoldError
from enfold.evaluate import evaluate
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


def image_network() -> nn.Module:
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 16, 3))


def patches(seed: int, n: int = 96) -> tuple[torch.Tensor, torch.Tensor]:
    """Return noisy images, and which channel is brightest: the classes overlap."""
    drawn, labels = torch.Generator().manual_seed(seed), torch.arange(n) % 3
    images = torch.randn(n, 3, 8, 8, generator=drawn)
    images[torch.arange(n), labels] += 0.2
    return images, labels


def test_bf16_changes_nll_by_less_than_the_seed():
    found: dict[str, list[float]] = {}
    for precision in ("float32", "bf16"):
        for seed in range(3):
            members = DeepEnsemble(image_network, 2, seed=seed)
            fit(members, patches(0), epochs=6, lr=3e-3, batch_size=32, seed=seed, precision=precision, quiet=True)
            row = evaluate(members, patches(1), precision=precision)
            found.setdefault(precision, []).append(row.scores["nll"])
    differences = [half - full for half, full in zip(found["bf16"], found["float32"], strict=True)]
    assert any(differences)
    assert abs(statistics.mean(differences)) < statistics.stdev(found["float32"])


def test_precision_of_evaluation_and_inference():
    members = DeepEnsemble(image_network, 2).eval()
    inputs, labels = patches(0)
    full = members(inputs).detach()
    row = evaluate(members, (inputs, labels), precision="bf16")
    assert row.scores["nll"] != evaluate(members, (inputs, labels)).scores["nll"]
    half = members.set_precision("bf16")(inputs)
    assert half.dtype == torch.float32
    assert not torch.equal(half, full)
    torch.testing.assert_close(half, full, rtol=0.05, atol=0.05)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(half, members.set_precision("fp32")(inputs).float())
    assert torch.equal(members(inputs), full)
    assert members.set_precision("bf16").train()(inputs).requires_grad
    assert all(parameter.dtype == torch.float32 for parameter in members.parameters())


def test_distillation_in_bf16():
    teachers = DeepEnsemble(image_network, 2)
    networks = {}
    for precision in ("float32", "bf16"):
        student = distill(teachers, patches(0), epochs=1, precision=precision, select="last", quiet=True)
        networks[precision] = torch.nn.utils.parameters_to_vector(student.parameters()).detach()
    assert networks["bf16"].dtype == torch.float32
    assert not torch.equal(networks["bf16"], networks["float32"])
    torch.testing.assert_close(networks["bf16"], networks["float32"], rtol=0.05, atol=0.02)


def test_unknown_precision_is_refused():
    members = DeepEnsemble(image_network, 2)
    with pytest.raises(EnfoldError, match="precision"):
        members.set_precision("int8")
    with pytest.raises(EnfoldError, match="precision"):
        evaluate(members, patches(0), precision="half")
    assert members.precision == "float32"

"""Weights of an ensemble are used wherever its members are averaged, and are saved with it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import enfold
from enfold import BatchEnsemble, DeepEnsemble, MixedEnsemble
from enfold.distill.cached import CachedTeacher
from enfold.errors import EnfoldError
from enfold.networks import MLP

W = (0.6, 0.3, 0.1)
SOURCE = torch.Generator().manual_seed(0)
X, Y = torch.randn(60, 4, generator=SOURCE), torch.arange(60) % 3


def networks() -> list[nn.Module]:
    torch.manual_seed(0)
    return [MLP(4, [5], 3).eval() for _ in range(3)]


def weighted_probs(members: list[nn.Module]) -> torch.Tensor:
    with torch.no_grad():
        return sum(w * member(X).softmax(-1) for w, member in zip(W, members, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [DeepEnsemble, MixedEnsemble])
def test_predictions_use_the_weights(kind, tmp_path):
    members = networks()
    ensemble = kind(members, weights=(6, 3, 1))
    expected = weighted_probs(members)
    assert ensemble.weights == pytest.approx(W)
    prediction = ensemble.predict(X)
    torch.testing.assert_close(prediction.mean, expected)
    each = torch.stack([F.softmax(member(X), -1) for member in members]).detach()
    entropies = -(each * each.log()).sum(-1)
    torch.testing.assert_close(prediction.aleatoric, (torch.tensor(W)[:, None] * entropies).sum(0))
    torch.testing.assert_close(ensemble.forward_mean(X).detach().exp(), expected)
    row = enfold.evaluate(ensemble, (X, Y))
    assert row.scores["nll"] == pytest.approx(float(F.nll_loss(expected.log(), Y)))
    torch.testing.assert_close(enfold.calibrate(ensemble, (X, Y)).model.predict(X).mean, expected)
    calibrated = enfold.calibrate(ensemble, (X, Y))
    logits = calibrated(X).detach() * calibrated.factor
    torch.testing.assert_close(logits.softmax(-1), expected)
    enfold.save(ensemble, tmp_path / "e.safetensors")
    loaded = enfold.load(tmp_path / "e.safetensors", members)
    assert loaded.weights == ensemble.weights
    assert torch.equal(loaded.predict(X).mean, prediction.mean)


@pytest.mark.parametrize("task", ["binary", "multilabel", "regression"])
def test_weights_of_other_tasks(task):
    torch.manual_seed(0)
    members = [MLP(4, [5], 1 if task == "binary" else 2).eval() for _ in range(3)]
    targets = (
        torch.randn(60, 2) if task == "regression" else (torch.rand(60, 1 if task == "binary" else 2) > 0.5).long()
    )
    ensemble, repeated = DeepEnsemble(members, weights=(2, 1, 1)), DeepEnsemble([members[0], *members])
    one, other = (enfold.evaluate(each, (X, targets), task=task).scores for each in (ensemble, repeated))
    for name, value in one.items():
        if "gibbs" not in name and "disagreement" not in name:
            assert value == pytest.approx(other[name], rel=1e-5, abs=1e-7), name
    ensemble.task = repeated.task = enfold.tasks.as_task(task)
    for one, other in zip(vars(ensemble.predict(X)).values(), vars(repeated.predict(X)).values(), strict=True):
        if isinstance(one, torch.Tensor) and one.shape[0] == 60:
            torch.testing.assert_close(one, other)


def test_equal_weights_give_the_same_bits_as_none():
    members = networks()
    plain, equal = DeepEnsemble(members), DeepEnsemble(members, weights=(2.0, 2.0, 2.0))
    assert equal.weights is None
    assert equal.state_dict().keys() == plain.state_dict().keys()
    assert torch.equal(plain.predict(X).mean, equal.predict(X).mean)
    assert enfold.evaluate(plain, (X, Y)).scores == enfold.evaluate(equal, (X, Y)).scores


def test_a_slice_has_the_weights_of_its_members():
    ensemble = DeepEnsemble(networks(), weights=W)
    assert ensemble[1:].weights == pytest.approx((0.75, 0.25))
    assert ensemble[[2, 0]].weights == pytest.approx((1 / 7, 6 / 7))


def test_a_state_dict_has_the_weights():
    ensemble, other = DeepEnsemble(networks(), weights=W), DeepEnsemble(networks())
    plain = other.state_dict()
    other.load_state_dict(ensemble.state_dict())
    assert other.weights == ensemble.weights
    other.load_state_dict(plain)
    assert other.weights is None


def test_efficient_ensembles_have_weights_too(tmp_path):
    torch.manual_seed(0)
    ensemble = BatchEnsemble(MLP(4, [5], 3), num_members=3).eval().set_weights(W)
    expected = weighted_probs([member.eval() for member in ensemble.networks()])
    torch.testing.assert_close(ensemble.predict(X).mean, expected)
    enfold.save(ensemble, tmp_path / "e.safetensors")
    loaded = enfold.load(tmp_path / "e.safetensors", MLP(4, [5], 3))
    assert loaded.member_weights == ensemble.member_weights
    assert loaded.set_weights(None).member_weights is None


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bma", "pseudo-bma", "stacking"])
def test_fitted_weights_prefer_the_better_member(kind):
    members = networks()
    enfold.fit(members[1], (X, Y), epochs=30, lr=0.05, batch_size=30, select="last", quiet=True)
    ensemble = DeepEnsemble(members)
    weights = enfold.fit_weights(ensemble, (X, Y), kind)
    assert sum(weights) == pytest.approx(1)
    assert max(weights) == weights[1]
    assert ensemble.weights is None
    before = enfold.evaluate(ensemble, (X, Y)).scores["nll"]
    assert enfold.evaluate(ensemble.set_weights(weights), (X, Y)).scores["nll"] < before


def test_fit_weights_needs_an_ensemble_and_examples():
    with pytest.raises(EnfoldError, match="ensemble"):
        enfold.fit_weights(networks()[0], (X, Y))
    with pytest.raises(EnfoldError, match="val"):
        enfold.fit_weights(DeepEnsemble(networks()), None)


@pytest.mark.parametrize("reduction", ["mean_softened_probs", "mean_probs_then_soften", "mean_logits"])
def test_a_teacher_with_weights_is_the_repeated_teacher(reduction):
    members, loss = networks(), enfold.KD(temperature=2.0, reduction=reduction)
    weighted, repeated = DeepEnsemble(members, weights=(2, 1, 1)), DeepEnsemble([members[0], *members])
    settings = {"init": members[2], "loss": loss, "epochs": 1, "batch_size": 20, "select": "last", "quiet": True}
    found = [enfold.distill(teacher, (X, Y), **settings).state_dict() for teacher in (weighted, repeated, members)]
    torch.testing.assert_close(found[0], found[1])
    assert any(not torch.allclose(found[0][name], found[2][name]) for name in found[0])


def test_losses_without_a_mean_refuse_weights():
    with pytest.raises(EnfoldError, match="OneToOne"):
        enfold.distill(DeepEnsemble(networks(), weights=W), (X, Y), loss=enfold.OneToOne(), epochs=1, quiet=True)


def test_cached_teachers_have_weights(tmp_path):
    members = networks()
    logits = torch.stack([member(X) for member in members]).detach()
    teacher = CachedTeacher.load(CachedTeacher(logits, weights=W).save(tmp_path / "logits.safetensors"))
    assert teacher.weights == pytest.approx(W)
    settings = {"init": members[2], "epochs": 1, "batch_size": 20, "select": "last", "quiet": True}
    found = enfold.distill(teacher, (X, Y), **settings).state_dict()
    torch.testing.assert_close(found, enfold.distill(DeepEnsemble(members, weights=W), (X, Y), **settings).state_dict())


@pytest.mark.slow
def test_an_exported_ensemble_has_its_weights(tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    ensemble = DeepEnsemble(networks(), weights=W)
    enfold.export(ensemble, tmp_path / "e.onnx", example=X[:5])
    session = runtime.InferenceSession(tmp_path / "e.onnx")
    found = session.run(["probabilities"], {session.get_inputs()[0].name: X[:5].numpy()})[0]
    torch.testing.assert_close(torch.from_numpy(found), ensemble.predict(X[:5]).mean, rtol=1e-4, atol=1e-5)

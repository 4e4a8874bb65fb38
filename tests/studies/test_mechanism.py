"""The mechanism in numbers: teachers differ more at moved inputs."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor, nn

from classroom import make_cnn, make_mlp, make_pictures, population
from enfold.data import Data
from enfold.distill.perturb.gaussian import Gaussian
from enfold.distill.perturb.ods import ODS
from enfold.distill.perturb.tdiv_sdiv import TDivSDiv
from enfold.ensembles.batch_ensemble import BatchEnsemble
from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.errors import EnfoldError
from enfold.evaluate import predict
from enfold.metrics import disagreement, pairwise_kl
from studies.latentbe.disagreement import measure_mechanism

PLACES = ("clean", "perturbed")
MEASURES = {"cross_entropy", "kl", "disagreement"}


def test_perturbations_increase_teacher_diversity_and_reduce_student_diversity():
    data = make_pictures(count=60)
    teachers, student = DeepEnsemble(population(make_cnn)), DeepEnsemble(population(make_cnn, seed=7))
    found = measure_mechanism(TDivSDiv(step=8.0, pairs="all"), teachers, student, data)
    for measure in ("cross_entropy", "kl"):
        assert found["teachers"]["perturbed"][measure] > found["teachers"]["clean"][measure]
        assert found["student"]["perturbed"][measure] < found["student"]["clean"][measure]
    assert found["teachers"]["perturbed"]["disagreement"] >= found["teachers"]["clean"]["disagreement"]


@pytest.fixture
def pictures() -> Data:
    return make_pictures()


def copy_values(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_clean_inputs_give_the_metrics(pictures):
    teachers, student = DeepEnsemble(population(make_cnn)).train(), BatchEnsemble(make_cnn(), 3).train()
    before = [copy_values(model) for model in (teachers, student)]
    found = measure_mechanism(ODS(), teachers, student, pictures, "val", batch_size=5, seed=2)
    for model, values in zip((teachers, student), before, strict=True):
        assert model.training
        assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())
        torch.testing.assert_close(copy_values(model), values, rtol=0, atol=0)
    for who, model in (("teachers", teachers), ("student", student)):
        expected = predict(model, pictures.val)
        told = found[who]["clean"]
        assert told["kl"] == pytest.approx(pairwise_kl(expected), abs=1e-6)
        assert told["disagreement"] == pytest.approx(disagreement(expected))
        probs = expected.log_probs.double().exp()
        pairs = [(i, j) for i in range(3) for j in range(3) if i != j]
        cross = torch.stack([-(probs[i] * probs[j].log()).sum(-1).mean() for i, j in pairs]).mean()
        assert told["cross_entropy"] == pytest.approx(float(cross), abs=1e-6)


def test_it_can_be_stored_and_is_the_same_again(pictures):
    teachers, student = DeepEnsemble(population(make_cnn)), DeepEnsemble(population(make_cnn, seed=7))
    first = measure_mechanism(ODS(step=4.0), teachers, student, pictures, seed=1, batch_size=4)
    assert (
        json.loads(json.dumps(first))
        == first
        == measure_mechanism(ODS(step=4.0), teachers, student, pictures, "test", 4, 1)
    )
    assert first != measure_mechanism(ODS(step=4.0), teachers, student, pictures, seed=2, batch_size=4)
    assert {name: first[name] for name in ("method", "part", "examples", "settings")} == {
        "method": "ods",
        "part": "test",
        "examples": 12,
        "settings": {"step": 4.0, "temperature": 1.0},
    }
    assert all(
        first[who][where].keys() == MEASURES for who in ("teachers", "student") for where in ("clean", "perturbed")
    )


def test_loaders_and_single_students(pictures):
    loader = pictures.replace(test=[(pictures.prepare(pictures.test.inputs), pictures.test.labels)])
    teachers, student = DeepEnsemble(population(make_mlp)), make_mlp()
    assert measure_mechanism(Gaussian(), teachers, student, loader) == measure_mechanism(
        Gaussian(), teachers, student, pictures
    )
    assert "student" not in measure_mechanism(Gaussian(), teachers, student, loader)


def test_invalid_measurements_are_refused(pictures):
    teachers = DeepEnsemble(population(make_mlp))
    with pytest.raises(EnfoldError, match=r"part .* 'val'"):
        measure_mechanism(ODS(), teachers, teachers, pictures.replace(val=pictures.test[:0]), "val")
    with pytest.raises(EnfoldError, match="at least 2"):
        measure_mechanism(ODS(), make_mlp(), teachers, pictures)

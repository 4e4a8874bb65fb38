"""The mechanism in numbers: teachers differ more at moved inputs; its figure is drawn from what was stored."""

from __future__ import annotations

import json

import pytest
import torch

from classroom import make_cnn, make_mlp, make_pictures, population
from enfold.analysis.mechanism import measure_mechanism
from enfold.distill.perturb.gaussian import Gaussian
from enfold.distill.perturb.ods import ODS
from enfold.distill.perturb.tdiv_sdiv import TDivSDiv
from enfold.ensembles.batch_ensemble import BatchEnsemble
from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.errors import EnfoldError
from enfold.evaluate import predict
from enfold.metrics import disagreement, pairwise_kl
from enfold.report.mechanism import draw, mechanism_figure

PLACES = ("clean", "perturbed")
MEASURES = {"cross_entropy", "kl", "disagreement"}


def test_teachers_differ_more_and_students_less_where_inputs_move_to():
    data = make_pictures(count=60)
    teachers, student = DeepEnsemble(population(make_cnn)), DeepEnsemble(population(make_cnn, seed=7))
    found = measure_mechanism(TDivSDiv(step=8.0, pairs="all"), teachers, student, data)
    for measure in ("cross_entropy", "kl"):
        assert found["teachers"]["perturbed"][measure] > found["teachers"]["clean"][measure]
        assert found["student"]["perturbed"][measure] < found["student"]["clean"][measure]
    assert found["teachers"]["perturbed"]["disagreement"] >= found["teachers"]["clean"]["disagreement"]


def test_what_is_measured_on_clean_inputs_are_the_metrics(pictures, snapshot):
    teachers, student = DeepEnsemble(population(make_cnn)).train(), BatchEnsemble(make_cnn(), 3).train()
    unchanged = [snapshot(model) for model in (teachers, student)]
    found = measure_mechanism(ODS(), teachers, student, pictures, "val", batch_size=5, seed=2)
    assert all(one() for one in unchanged)
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


def test_a_loader_is_taken_as_it_is_and_one_student_has_no_members(pictures):
    loader = pictures.replace(test=[(pictures.prepare(pictures.test.inputs), pictures.test.labels)])
    teachers, student = DeepEnsemble(population(make_mlp)), make_mlp()
    assert measure_mechanism(Gaussian(), teachers, student, loader) == measure_mechanism(
        Gaussian(), teachers, student, pictures
    )
    assert "student" not in measure_mechanism(Gaussian(), teachers, student, loader)


def test_what_cannot_be_measured(pictures):
    teachers = DeepEnsemble(population(make_mlp))
    with pytest.raises(EnfoldError, match=r"part .* 'val'"):
        measure_mechanism(ODS(), teachers, teachers, pictures.replace(val=pictures.test[:0]), "val")
    with pytest.raises(EnfoldError, match="at least 2"):
        measure_mechanism(ODS(), make_mlp(), teachers, pictures)


def stored(teachers: tuple[float, float], student: tuple[float, float] | None = None) -> dict[str, object]:
    def both(values: tuple[float, float]) -> dict[str, dict[str, float]]:
        return {
            where: dict.fromkeys(MEASURES, value) for where, value in zip(("clean", "perturbed"), values, strict=True)
        }

    return {"teachers": both(teachers)} | ({} if student is None else {"student": both(student)})


RUNS = {
    "Gaussian": (stored((0.2, 0.21), (0.01, 0.01)), stored((0.2, 0.21), (0.1, 0.11))),
    "ODS": (stored((0.2, 0.3)), stored((0.2, 0.3))),
    "TDiv-SDiv": (stored((0.2, 0.5), (0.01, 0.02)), stored((0.2, 0.5), (0.3, 0.4))),
}


@pytest.mark.parametrize(("measure", "scale"), [("kl", 1), ("disagreement", 100)])
def test_what_the_figure_shows(measure, scale):
    left, right = draw(RUNS, measure).axes
    ends = {
        axes: [
            (line.get_gid(), float(line.get_xdata()[0]), float(line.get_ydata()[0]))
            for line in axes.lines
            if str(line.get_gid()).startswith("end:")
        ]
        for axes in (left, right)
    }
    assert [label.get_text() for label in left.get_yticklabels()] == list(RUNS)
    assert [(x, y) for _, x, y in ends[left]] == [(scale * value, row) for row, value in enumerate((0.21, 0.3, 0.5))]
    assert [(gid, x) for gid, x, _ in ends[right]] == [
        ("end:students, clean inputs", scale * 0.1),
        ("end:students, perturbed inputs", scale * 0.11),
        ("end:students, clean inputs", scale * 0.3),
        ("end:students, perturbed inputs", scale * 0.4),
    ]
    assert [text.get_text() for text in right.texts] == ["one network"]


def test_the_figure_is_written(tmp_path):
    written = mechanism_figure({"ODS": RUNS["ODS"]}, tmp_path, name="teachers")
    assert [path.name for path in written] == ["teachers.svg", "teachers.png"]
    assert written[1].read_bytes().startswith(b"\x89PNG")
    assert b"Teachers: where inputs move to" in written[0].read_bytes()
    assert b"Students" not in written[0].read_bytes()


def test_what_cannot_be_drawn(tmp_path):
    with pytest.raises(EnfoldError, match="a measure must be one of kl, cross_entropy, disagreement, got 'js': choose"):
        mechanism_figure(RUNS, tmp_path, "js")
    with pytest.raises(EnfoldError, match="needs at least one measured perturbation, got none: pass"):
        mechanism_figure({}, tmp_path)
    assert not list(tmp_path.iterdir())

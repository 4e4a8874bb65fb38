"""The explanation of compress names what to ship and why, in each case."""

from dataclasses import replace

import pytest
from torch import nn

from enfold.compress import Compression, Diagnosis, Trial
from enfold.compress.explain import shown_gain
from enfold.ensembles import MixedEnsemble
from enfold.errors import EnfoldError
from enfold.merge.basin_check import BasinReport

from .helpers import make


def basin(largest: float) -> BasinReport:
    return BasinReport({(0, 1): largest}, (0.5, 0.5), 0.6, 1.0, 0.05, "nats", 100, 0.1)


DIAGNOSIS = Diagnosis("nll", 0.50, 0, 0.49, 0.40, (0.08, 0.12), basin=basin(2.1))
MEMBER = Trial("best member", "", {"nll": 0.49}, 0.1, 1.0, 0, 0.0, kind="reference", network=make())
CONTROL = Trial("control", "", {"nll": 0.47}, 0.3, 1.0, 8, 1.0, kind="control", network=make())
STUDENT = Trial("distill + mixup", "", {"nll": 0.41}, 0.9, 1.0, 8, 1.0, network=make())
AVERAGE = Trial("average", "", {"nll": 0.405}, 0.95, 1.0, 0, 0.1, kind="merge", network=make())
ENSEMBLE = Trial("ensemble of 4", "", {"nll": 0.40}, 1.0, 4.0, 0, 0.0, kind="reference", network=make(), size=4.0)


def result(*trials: Trial, diagnosis: Diagnosis = DIAGNOSIS, **more) -> Compression:
    chosen = min((each for each in trials if each.is_candidate), key=lambda each: each.scores["nll"])
    return Compression(chosen, list(trials), diagnosis, ("nll",), frozenset(), 1.0, **more)


def test_gains_far_beyond_that_of_the_ensemble_have_no_number():
    assert [shown_gain(each) for each in (260.3, 10.0, -1.5, float("nan"))] == ["> 1000 %", "1000 %", "< -100 %", "-"]
    sentences = replace(DIAGNOSIS, calibrated_fraction=47.0).sentences()
    assert "A temperature alone gives one member > 1000 % of the gain." in sentences


def test_a_plot_marks_the_chosen_network():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    axes = result(MEMBER, CONTROL, STUDENT, ENSEMBLE).plot()
    points = [(line.get_xdata()[0], line.get_ydata()[0]) for line in axes.lines]
    assert points == [(1.0, 0.49), (1.0, 0.47), (1.0, 0.41), (4.0, 0.40), (4.0, 0.40)]
    assert [line.get_markersize() for line in axes.lines] == [7, 7, 7, 15, 7]
    assert [text.get_text() for text in axes.texts] == [MEMBER.name, CONTROL.name, STUDENT.name, ENSEMBLE.name]
    pyplot.close("all")
    with pytest.raises(EnfoldError, match="metric must be one of nll, got 'f1'"):
        result(MEMBER).plot("f1")


CASES = {
    "distillation": (
        result(MEMBER, CONTROL, STUDENT),
        [
            "Ship `distill + mixup` (NLL 0.4100, 90 % of the ensemble's gain, 1.00x cost).",
            "Training one member longer gives 30 %.",
            "Averaging weights does not apply: members lie in different basins (barrier 2.10).",
        ],
    ),
    "calibrated": (
        result(MEMBER, replace(CONTROL, calibrated_gain=-0.1), replace(STUDENT, calibrated_gain=0.7)),
        [
            "90 % of the ensemble's gain and 70 % of that at a fitted temperature, 1.00x cost)",
            "Training one member longer gives 30 % and -10 % of that at a fitted temperature.",
        ],
    ),
    "control": (
        result(MEMBER, CONTROL, replace(STUDENT, scores={"nll": 0.48})),
        ["Ship `control`", "No route from the ensemble is better than training one member longer."],
    ),
    "refit": (
        result(MEMBER, CONTROL, replace(CONTROL, name="refit", scores={"nll": 0.3})),
        ["Ship `refit`", "better than refitting one network on all data."],
    ),
    "average": (
        result(MEMBER, CONTROL, STUDENT, AVERAGE, diagnosis=replace(DIAGNOSIS, basin=basin(0.01))),
        ["Ship `average`", "Members lie in one basin (barrier 0.01), so that their weights can be averaged."],
    ),
    "no gain": (
        result(MEMBER, diagnosis=replace(DIAGNOSIS, ensemble=0.499, gain=(-0.003, 0.004))),
        ["gains nothing over its mean member beyond noise (-0.0030 to 0.0040)", "No route is better than the best"],
    ),
    "architectures": (
        result(STUDENT, diagnosis=replace(DIAGNOSIS, basin=None), members=MixedEnsemble([make(), make(3)])),
        ["Members have different architectures, so that only distillation applies."],
    ),
    "ensemble": (
        result(MEMBER, replace(STUDENT, gain=0.95), ENSEMBLE),
        ["Ship `ensemble of 4`", "`distill + mixup` recovers 95 % at 1.00x cost."],
    ),
    "undertrained": (
        result(MEMBER, replace(CONTROL, scores={"nll": 0.3})),
        ["Train the members longer first (train_longer=True): it helps a member more than the ensemble does."],
    ),
    "trained longer": (
        result(MEMBER, STUDENT, trained_longer=8),
        ["The members were trained 8 epochs longer first."],
    ),
    "out of time": (
        result(MEMBER, replace(STUDENT, network=None, scores={}, note="stopped: out of time"), left_out=("latent BE",)),
        ["Not tried for lack of time: latent BE.", "Stopped by the time limit: distill + mixup."],
    ),
    "resumed": (result(MEMBER, STUDENT, resumed=3), ["3 trainings were taken from an earlier search."]),
}


@pytest.mark.parametrize("case", CASES)
def test_the_explanation_names_the_reasons(case):
    found, sentences = CASES[case]
    text = found.recommendation
    assert [each for each in sentences if each not in text] == [], text
    assert isinstance(found.network, nn.Module)


def test_reasons_that_do_not_apply_are_not_given():
    text = CASES["distillation"][0].recommendation
    assert not any(word in text for word in ("longer first", "architectures", "time", "earlier search", "noise"))
    assert "Averaging" not in CASES["average"][0].recommendation
    assert "control" not in CASES["no gain"][0].recommendation

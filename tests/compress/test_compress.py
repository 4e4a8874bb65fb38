"""compress: the choice is never worse than the best member or the control, and its reasons are stated."""

import copy
import itertools
import json

import pytest
import torch
from torch import nn

import enfold
from enfold import EnfoldError
from enfold.compress.limits import parse_budget, parse_time
from enfold.compress.runner import Work
from enfold.compress.scores import rank
from enfold.data.convert import as_data
from enfold.metrics import Predictions, calibrated_nll, nll

from .helpers import SETTINGS, TRAIN, VAL, make

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def result(members):
    return enfold.compress(members, TRAIN, VAL, **SETTINGS)


def test_the_choice_is_never_worse_than_the_best_member_or_the_control(result, members):
    losses = {trial.name: trial.scores["nll"] for trial in result.trials if trial.is_candidate}
    assert result.chosen.scores["nll"] == min(losses.values())
    assert {"best member", "control"} <= losses.keys()
    found = enfold.evaluate(result.network, VAL).scores["nll"]
    assert found == pytest.approx(result.chosen.scores["nll"], rel=1e-5)
    assert type(result.network) is nn.Sequential


def test_references_and_gain_are_those_of_the_members(result, members):
    each = [enfold.evaluate(member, VAL).scores["nll"] for member in members]
    ensemble = enfold.evaluate(members, VAL).scores["nll"]
    assert result.diagnosis.mean_member == pytest.approx(sum(each) / 3, rel=1e-5)
    assert result.diagnosis.ensemble == pytest.approx(ensemble, rel=1e-5)
    own = result.chosen.scores["nll"]
    expected = (own - sum(each) / 3) / (ensemble - sum(each) / 3)
    assert result.chosen.gain == pytest.approx(expected, rel=1e-4)
    cnll = {trial.name: trial.scores["cnll"] for trial in result.trials}
    mean, best = cnll["mean member"], cnll["ensemble of 3"]
    expected = (mean - result.chosen.scores["cnll"]) / (mean - best)
    assert result.chosen.calibrated_gain == pytest.approx(expected, rel=1e-6)
    assert f"{round(100 * expected)} % of that at a fitted temperature" in result.recommendation


def test_members_of_different_basins_are_not_averaged(result):
    assert not result.diagnosis.is_one_basin
    assert "average" not in [trial.name for trial in result.trials]
    assert "different basins" in result.recommendation


def test_members_of_one_basin_are_averaged(members):
    base = members.member(0)
    near = []
    for seed in range(3):
        network = copy.deepcopy(base)
        with torch.no_grad():
            for parameter in network.parameters():
                noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
                parameter += 0.02 * noise * parameter.std()
        near.append(network)
    found = enfold.compress(near, TRAIN, VAL, **{**SETTINGS, "epochs": 1})
    assert found.diagnosis.is_one_basin
    assert "average" in [trial.name for trial in found.trials]


def test_members_are_not_changed(members):
    before = {name: tensor.clone() for name, tensor in members.state_dict().items()}
    enfold.compress(members, TRAIN, VAL, **{**SETTINGS, "epochs": 1})
    assert all(torch.equal(before[name], tensor) for name, tensor in members.state_dict().items())


def test_the_result_is_printed_saved_and_drawn(result, tmp_path):
    text = str(result)
    assert text.startswith("Ship `")
    assert all(trial.name in text for trial in result.trials)
    path = result.save(tmp_path / "model")
    stored = json.loads((tmp_path / "model" / "compress.json").read_text())
    assert [trial["name"] for trial in stored["trials"] if trial["chosen"]] == [result.chosen.name]
    page = (tmp_path / "model" / "report.html").read_text()
    assert result.chosen.name in page
    assert "<script" not in page
    loaded = enfold.load(path, make())
    torch.testing.assert_close(loaded(VAL[0]), result.network(VAL[0]))


class Unread:
    """Batches that must not be read."""

    def __iter__(self):
        raise AssertionError("test examples were read")

    def __len__(self):
        return 3


def test_test_examples_are_never_read(members):
    data = as_data(TRAIN, VAL).replace(test=Unread())
    found = enfold.compress(members, data, base=members.member(0), **{**SETTINGS, "epochs": 2})
    assert found.chosen.is_candidate
    with pytest.raises(AssertionError, match="were read"):
        enfold.evaluate(found.network, data)


def test_an_interrupted_search_continues(members, tmp_path, monkeypatch):
    calls = []
    distil = enfold.compress.routes.distill

    def counted(*args, **kwargs):
        calls.append((kwargs["title"], kwargs["config"].epochs))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return distil(*args, **kwargs)

    monkeypatch.setattr("enfold.compress.routes.distill", counted)
    with pytest.raises(KeyboardInterrupt):
        enfold.compress(members, TRAIN, VAL, folder=tmp_path, **SETTINGS)
    first = list(calls)
    again = enfold.compress(members, TRAIN, VAL, folder=tmp_path, **SETTINGS)
    assert calls[len(first)] == first[-1]
    assert not set(calls[len(first) :]) & set(first[:2]), "finished trials are not repeated"
    fresh = enfold.compress(members, TRAIN, VAL, **SETTINGS)
    assert again.chosen.scores["nll"] == pytest.approx(fresh.chosen.scores["nll"], rel=1e-6)
    assert (again.resumed > 0, fresh.resumed) == (True, 0)
    assert "taken from an earlier search" in again.recommendation


@pytest.mark.slow
def test_a_search_with_a_time_limit_continues_with_its_plan(members, tmp_path):
    given = {**SETTINGS, "epochs": 2, "time": "1 h", "folder": tmp_path}
    first = enfold.compress(members, TRAIN, VAL, **given)
    again = enfold.compress(members, TRAIN, VAL, **given)
    assert [(trial.name, trial.epochs) for trial in again.trials] == [(each.name, each.epochs) for each in first.trials]
    assert again.resumed == len([trial for trial in first.trials if trial.kind != "reference"])
    assert again.chosen.scores == first.chosen.scores


@pytest.mark.slow
def test_time_that_is_left_is_used_for_longer_trainings_and_control(members):
    found = enfold.compress(members, TRAIN, VAL, time="1 h", **{**SETTINGS, "epochs": 2})
    lengths = sorted({trial.epochs for trial in found.trials if trial.epochs > 2})
    assert lengths in ([4], [4, 8], [4, 8, 16])
    for length in lengths:
        assert sorted(trial.kind for trial in found.trials if trial.epochs == length) == ["control", "distillation"]
    best = [
        min(rank(t.scores, "nll", found.diagnosis.ensemble) for t in found.trials if t.is_candidate and t.epochs <= e)
        for e in (2, *lengths)
    ]
    assert all(after < before for before, after in itertools.pairwise(best[:-1])), "only while it improves"


def test_a_time_limit_holds(members):
    import time

    started = time.monotonic()
    found = enfold.compress(members, TRAIN, VAL, time="2 s", **{**SETTINGS, "epochs": 5000})
    assert time.monotonic() - started < 20
    assert found.chosen.is_candidate
    assert all(trial.epochs < 5000 for trial in found.trials)


def test_a_smaller_student_meets_a_smaller_budget(members):
    found = enfold.compress(members, TRAIN, VAL, budget="0.5x", student=lambda: make(6), **SETTINGS)
    assert found.network[0].out_features == 6
    assert found.chosen.cost <= 0.5
    with pytest.raises(EnfoldError, match="cheapest"):
        enfold.compress(members, TRAIN, VAL, budget=0.1, student=lambda: make(12), **{**SETTINGS, "epochs": 1})


def test_another_student_or_base_is_not_taken_from_the_folder(members, tmp_path):
    def swapped():
        return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))

    short = {**SETTINGS, "epochs": 1}
    first = enfold.compress(members, TRAIN, VAL, budget="0.5x", student=lambda: make(6), folder=tmp_path, **short)
    second = enfold.compress(members, TRAIN, VAL, budget="0.5x", student=swapped, folder=tmp_path, **short)
    assert isinstance(first.network[1], nn.ReLU)
    assert isinstance(second.network[1], nn.Tanh)
    torch.manual_seed(0)
    fresh = enfold.compress(members, TRAIN, VAL, budget="0.5x", student=swapped, **short)
    assert second.chosen.scores["nll"] == pytest.approx(fresh.chosen.scores["nll"], rel=1e-6)
    assert not list(tmp_path.glob("*.checkpoint"))


def test_a_student_with_another_head():
    targets = [inputs[:, :1] * 2 for inputs in (TRAIN[0], VAL[0])]
    task = enfold.tasks.Regression(head="gaussian", variance="softplus")
    ensemble = enfold.DeepEnsemble(lambda: nn.Linear(6, 2), 2)
    enfold.fit(ensemble, (TRAIN[0], targets[0]), epochs=2, task=task, quiet=True)
    found = enfold.compress(
        ensemble, (TRAIN[0], targets[0]), (VAL[0], targets[1]), budget=2, student=lambda: nn.Linear(6, 3), **SETTINGS
    )
    assert any(trial.kind == "distillation" and trial.scores for trial in found.trials)


def test_a_regression():
    targets = [inputs[:, :1] * 2 + inputs[:, 1:2] ** 2 for inputs in (TRAIN[0], VAL[0])]
    ensemble = enfold.DeepEnsemble(lambda: nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1)), 3)
    enfold.fit(ensemble, (TRAIN[0], targets[0]), epochs=20, lr=1e-2, quiet=True)
    found = enfold.compress(ensemble, (TRAIN[0], targets[0]), (VAL[0], targets[1]), **SETTINGS)
    assert found.diagnosis.criterion == "mse"
    assert found.chosen.scores["mse"] <= found.diagnosis.best_member_loss


WRONG = {
    "one network": lambda: enfold.compress([make()], TRAIN, VAL),
    "identical members": lambda: enfold.compress([copy.deepcopy(net) for net in [make()] * 3], TRAIN, VAL),
    "no validation examples": lambda: enfold.compress([make(), make()], TRAIN),
    "budget": lambda: enfold.compress([make(), make()], TRAIN, VAL, budget="cheap"),
    "budget must be at least 1x": lambda: enfold.compress([make(), make()], TRAIN, VAL, budget=0.5),
    "time": lambda: enfold.compress([make(), make()], TRAIN, VAL, time="soon"),
    "models must be": lambda: enfold.compress(3, TRAIN, VAL),
    "network must be given": lambda: enfold.compress(["a.pt", "b.pt"], TRAIN, VAL),
    "compress needs train": lambda: enfold.compress([make(), make()], None, VAL),
}


@pytest.mark.parametrize("words", WRONG)
def test_wrong_arguments_are_refused(words):
    with pytest.raises(EnfoldError, match=words.split()[0]):
        WRONG[words]()


def test_networks_of_different_architectures_are_distilled_only():
    networks = [make(24), nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 2))]
    found = enfold.compress(networks, TRAIN, VAL, student=make, **SETTINGS)
    assert {trial.kind for trial in found.trials} == {"reference", "distillation", "control"}
    assert "different architectures" in found.recommendation


@pytest.mark.parametrize(("text", "value"), [("1x", 1.0), (0.5, 0.5), (" 2 x", 2.0), ("1.5", 1.5)])
def test_budgets(text, value):
    assert parse_budget(text) == value


@pytest.mark.parametrize(("text", "value"), [("30 min", 1800), ("2h", 7200), (45, 45), ("30m", 1800), (None, None)])
def test_durations(text, value):
    assert parse_time(text) == value


# Progress


def test_the_remaining_time_is_shown_after_the_first_training(members, capfd):
    enfold.compress(members, TRAIN, VAL, **{**SETTINGS, "quiet": False})
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("compress: ")]
    trained = [line for line in lines if line.startswith(("compress: distill", "compress: control"))]
    assert len(trained) > 4
    assert all(line.endswith("s left") for line in trained[:-1])
    assert not trained[-1].endswith("left"), "nothing is left after the last training"


def test_the_remaining_time_is_that_of_the_trainings_that_are_not_done():
    work = Work(planned=10)
    assert work.left() is None
    work.finish(2, seconds=6.0)
    work.skip(3)
    assert work.left() == pytest.approx(15.0)
    work.finish(5, seconds=9.0)
    assert work.left() is None


# Choice


def test_the_nll_counts_as_far_as_it_is_above_that_of_the_ensemble():
    assert rank({"nll": 1.0, "cnll": 0.8}, "nll", 0.9) == pytest.approx(0.9)
    assert rank({"nll": 0.85, "cnll": 0.8}, "nll", 0.9) == 0.8
    assert rank({"nll": 1.0}, "nll", 0.9) == 1.0
    assert rank({"mse": 2.0, "nll": 1.0, "cnll": 0.8}, "mse", 1.5) == 2.0


def test_the_calibrated_nll_does_not_depend_on_the_temperature():
    logits, labels = torch.randn(400, 3, generator=torch.Generator().manual_seed(0)), torch.arange(400) % 3
    logits[torch.arange(400), labels] += 1.0
    one, hot = (Predictions(torch.log_softmax(scale * logits, -1)[None], labels) for scale in (1.0, 4.0))
    assert nll(hot) > nll(one) + 0.2
    assert calibrated_nll(hot) == pytest.approx(calibrated_nll(one), rel=1e-3)
    assert calibrated_nll(one) == pytest.approx(nll(one), rel=0.02)
    assert calibrated_nll(one.select(torch.arange(20))) is None


def test_the_choice_is_the_best_of_those_that_are_not_worse_than_the_control(result):
    alone = [trial for trial in result.trials if trial.kind == "control" or trial.name == "best member"]
    most = min(trial.scores["nll"] for trial in alone)
    allowed = [trial for trial in result.trials if trial.is_candidate and trial.scores["nll"] <= most]
    known = result.diagnosis.ensemble
    assert rank(result.chosen.scores, "nll", known) == min(rank(trial.scores, "nll", known) for trial in allowed)
    assert "cnll" in result.header

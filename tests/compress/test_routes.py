"""Routes of compress: which apply to which members, data and budgets, and the order in which they are tried."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

import enfold
from enfold import EnfoldError
from enfold.compress.diagnosis import Diagnosis
from enfold.compress.distillations import find_distillations, noise_step
from enfold.compress.efficient import best_subset, find_ensembles
from enfold.compress.merges import find_merges
from enfold.compress.routes import Route, Setting, average_decay, keep
from enfold.compress.schedule import count_epochs, make_rounds, plan_epochs
from enfold.data.convert import as_data
from enfold.distill.losses.kd import KD
from enfold.evaluate import predict
from enfold.merge.basin_check import BasinReport

from .helpers import SETTINGS, TRAIN, VAL, make

pytestmark = pytest.mark.filterwarnings("ignore")


def setting(members=None, train=TRAIN, val=VAL, basin=1.0, **more) -> Setting:
    members = enfold.DeepEnsemble(make, 3) if members is None else members
    report = BasinReport({(0, 1): basin}, (0.5, 0.5), 0.6, 1.0, 0.05, "nats", 100, 0.1)
    diagnosis = Diagnosis("nll", 0.5, 0, 0.49, 0.4, (0.08, 0.12), basin=report)
    task = enfold.tasks.Classification()
    return Setting(members, as_data(train, val), task, enfold.TrainConfig(batch_size=32), diagnosis, **more)


def names(routes) -> list[str]:
    return [route.name for route in routes]


def test_distillations_match_functions():
    routes = {route.name: route for route in find_distillations(setting())}
    assert routes["distill"].loss == KD(alpha=1.0, temperature=1.0)
    assert routes["distill + labels"].loss.alpha == 0.5
    assert {"distill + mixup", "distill + noise", "distill + ema"} <= routes.keys()
    assert not {"distill + cutmix", "distill + ConfODS", "latent BE"} & routes.keys()


def test_images_add_cutmix_and_expensive_routes_are_added_on_request():
    images = (torch.rand(40, 1, 8, 8), torch.randint(2, (40,)))
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 2))
    given = setting(enfold.DeepEnsemble([network, copy.deepcopy(network)]), images, images)
    mixed = {"distill + cutmix", "distill + cutmix + labels", "distill + cutmix or mixup"}
    assert mixed <= set(names(find_distillations(given)))
    expensive = names(find_distillations(given, expensive=True))
    assert {"distill + ConfODS", "latent BE", "latent BE + TDiv-SDiv"} <= set(expensive)


def test_tokens_have_no_perturbations():
    tokens = (torch.randint(9, (40, 5)), torch.randint(2, (40,)))
    found = names(find_distillations(setting(None, tokens, tokens)))
    assert found == ["distill", "distill + labels", "distill + ema"]


def test_noise_is_a_tenth_of_the_range():
    inputs = torch.rand(1000, 4)
    assert noise_step(as_data((inputs, inputs[:, 0]))) == pytest.approx(25.5, rel=0.05)
    assert noise_step(enfold.data.load("fashion-mini")) == 25.5
    assert noise_step(as_data((inputs * torch.tensor([1.0, 1.0, 1.0, 1e4]), inputs[:, 0]))) is None


def test_the_average_of_weights_is_over_a_part_of_the_steps():
    assert average_decay(setting(), 40) == pytest.approx(1 - 1 / (0.05 * 40 * 5))


def test_merges_of_one_basin_and_of_several():
    near, far = names(find_merges(setting(basin=0.0))), names(find_merges(setting()))
    assert {"average", "greedy soup", "learned soup", "fisher", "regmean", "spherical mean"} == set(near)
    assert far == ["weight matching", "weight matching + repair", "merge many + repair"]
    assert names(find_merges(setting(), expensive=True))[-1] == "permAVG"
    base = names(find_merges(setting(basin=0.0, base=make())))
    assert {"wise-ft", "model stock", "task arithmetic", "ties", "dare"} <= set(base)


def test_permutations_are_learned(members):
    route = next(route for route in find_merges(setting(members), expensive=True) if route.name == "permAVG")
    found = route.run(setting(members), 0)
    assert type(found) is nn.Sequential


def test_adapters_are_merged_as_products():
    class Adapter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.eye(2, 6))
            self.lora_A = nn.Parameter(torch.randn(2, 6))
            self.lora_B = nn.Parameter(torch.randn(2, 2))
            self.scaling = 1.0

        def forward(self, x):
            return x @ (self.weight + self.lora_B @ self.lora_A).T

    members = enfold.DeepEnsemble([Adapter(), Adapter()])
    routes = list(find_merges(setting(members, basin=0.0)))
    assert names(routes) == ["lora"]
    merged = routes[0].run(setting(members), 0)
    mean = sum(own.weight + own.lora_B @ own.lora_A for own in members.networks()) / 2
    torch.testing.assert_close(merged.weight + merged.lora_B @ merged.lora_A, mean)


def test_several_students_are_tried_and_those_above_the_budget_are_not_trained(members):
    students = [lambda: make(8), lambda: make(12), lambda: make(100)]
    found = enfold.compress(members, TRAIN, VAL, budget="0.6x", student=students, **{**SETTINGS, "epochs": 2})
    tried = {trial.name: trial for trial in found.trials if trial.kind == "distillation"}
    assert {"distill into student 0", "distill into student 1 + labels"} <= tried.keys()
    dropped = tried["distill into student 2"]
    assert (dropped.epochs, dropped.seconds, dropped.scores) == (0, 0.0, {})
    assert "above the budget" in dropped.note
    assert found.network[0].out_features in (8, 12)
    assert found.chosen.cost <= 0.6


def test_nothing_is_trained_if_nothing_meets_the_budget(members, monkeypatch):
    monkeypatch.setattr("enfold.compress.routes.distill", None)
    with pytest.raises(EnfoldError, match=r"cheapest, `distill into student 0`, has 0\.33x"):
        enfold.compress(members, TRAIN, VAL, budget=0.1, student=[lambda: make(8), lambda: make(12)], **SETTINGS)


# Cross-validation


def test_members_of_a_cross_validation_teach_out_of_fold():
    ensemble = enfold.DeepEnsemble(make, 3, seed=0)
    config = {**SETTINGS, "folds": 3, "seed": 5}
    enfold.fit(ensemble, TRAIN, select="last", **{**config, "epochs": 30})
    found = enfold.compress(ensemble, TRAIN, VAL, **config)
    tried = {trial.name: trial for trial in found.trials}
    assert {"distill out of fold", "distill out of fold + labels", "refit", "control"} <= tried.keys()
    assert tried["refit"].kind == "control"
    assert tried["distill out of fold"].scores["nll"] != tried["distill"].scores["nll"]
    explicit = enfold.data.fold_numbers(160, 3, 5)
    again = enfold.compress(ensemble, TRAIN, VAL, folds=explicit, **{**SETTINGS, "seed": 5})
    assert [trial.scores for trial in again.trials] == [trial.scores for trial in found.trials]


@pytest.mark.parametrize("folds", [2, torch.zeros(7, dtype=torch.long), torch.ones(3, 160, dtype=torch.bool)])
def test_wrong_folds_are_refused(members, folds):
    with pytest.raises(EnfoldError, match="folds"):
        enfold.compress(members, TRAIN, VAL, folds=folds, **SETTINGS)


# Ensembles


def test_with_the_budget_of_all_members_the_ensemble_is_a_candidate(members, tmp_path):
    found = enfold.compress(members, TRAIN, VAL, budget="3x", **{**SETTINGS, "epochs": 1})
    rows = {trial.name: trial for trial in found.trials}
    assert rows["ensemble of 3"].is_candidate
    assert rows["ensemble of 3"].cost == pytest.approx(3, rel=0.01)
    assert found.chosen.scores["nll"] <= rows["ensemble of 3"].scores["nll"]
    result = replace(found, chosen=rows["ensemble of 3"])
    path = result.save(tmp_path)
    loaded = enfold.load(path, make())
    torch.testing.assert_close(loaded(VAL[0]), result.network(VAL[0]))
    assert "ensemble of 3" in (tmp_path / "report.html").read_text()


@pytest.mark.slow
def test_less_memory_than_members_gives_an_efficient_ensemble(members, tmp_path):
    given = {**SETTINGS, "epochs": 2, "budget": "3x", "memory": "2.5x", "folder": tmp_path}
    found = enfold.compress(members, TRAIN, VAL, **given)
    rows = {trial.name: trial for trial in found.trials}
    assert {"batch ensemble", "hydra", "2 best members", "2 distilled members"} <= rows.keys()
    assert not rows["ensemble of 3"].is_candidate
    assert isinstance(rows["batch ensemble"].network, enfold.BatchEnsemble)
    assert rows["batch ensemble"].size == pytest.approx(2, rel=0.02)
    assert all(trial.cost <= 3.01 and trial.size <= 2.51 for trial in found.trials if trial.is_candidate)
    again = enfold.compress(members, TRAIN, VAL, **given)
    assert [trial.scores for trial in again.trials] == [trial.scores for trial in found.trials]
    assert "size" in str(found)


def test_the_best_subset_is_chosen_one_after_the_other(members):
    found = predict(members, as_data(val=VAL).val)
    losses = [enfold.metrics.nll(found.member(index)) for index in range(3)]
    chosen = best_subset(found, 2)
    assert min(range(3), key=losses.__getitem__) in chosen
    assert names(find_ensembles(setting(members), found)) == []


# Longer training


@pytest.mark.slow
def test_members_are_trained_longer_on_request():
    ensemble = enfold.DeepEnsemble(make, 3, seed=0)
    enfold.fit(ensemble, TRAIN, **{**SETTINGS, "lr": 1e-3})
    fast = {**SETTINGS, "lr": 5e-2}
    before = {name: tensor.clone() for name, tensor in ensemble.state_dict().items()}
    found = enfold.compress(ensemble, TRAIN, VAL, train_longer=True, **fast)
    assert found.trained_longer == SETTINGS["epochs"]
    assert "trained 4 epochs longer first" in found.recommendation
    rows = {trial.name: trial.scores["nll"] for trial in found.trials if trial.scores}
    assert rows["ensemble of 3"] < rows["ensemble of 3, as given"]
    assert all(torch.equal(before[name], tensor) for name, tensor in ensemble.state_dict().items())
    advised = enfold.compress(ensemble, TRAIN, VAL, **{**fast, "epochs": 2})
    assert "train_longer=True" in advised.recommendation


# Rounds


def test_many_routes_have_two_rounds():
    assert make_rounds(1, 20) == []
    assert [(each.epochs, each.kept) for each in make_rounds(4, 20)] == [(5, 1)]
    assert [(each.epochs, each.kept) for each in make_rounds(9, 40)] == [(5, 4), (10, 1)]
    assert count_epochs([1.0] * 9, 40, 1) == 9 * 5 + 4 * 10 + 40 + 40


def test_the_best_of_each_perturbation_goes_on_first():
    routes = [
        Route("ema", ""),
        Route("labels", ""),
        Route("mixup", "", perturb=enfold.Mixup()),
        Route("plain", ""),
        Route("mixup + labels", "", perturb=enfold.Mixup()),
        Route("noise", "", perturb=enfold.Gaussian()),
    ]
    assert names(keep(routes, 1)) == ["ema"]
    assert names(keep(routes, 3)) == ["ema", "mixup", "noise"]
    assert names(keep(routes, 5)) == ["ema", "mixup", "noise", "labels", "plain"]


def test_routes_are_left_out_before_trainings_are_shortened():
    efforts = [1.0] * 9
    assert plan_epochs(efforts, 40, 1, 1000) == (9, 40)
    number, epochs = plan_epochs(efforts, 40, 1, 120)
    assert (3 <= number < 9, epochs) == (True, 40)
    number, epochs = plan_epochs(efforts, 40, 1, 50)
    assert (number, epochs < 40) == (3, True)
    assert count_epochs(efforts[:number], epochs, 1) <= 50

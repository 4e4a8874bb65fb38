"""Evidence for claims: rows and numbers of runs, over seeds and several runs."""

import json
import math
from pathlib import Path

import pytest
import torch

from enfold.errors import EnfoldError
from enfold.metrics import accuracy, mean_member, nll
from enfold.metrics.predictions import Predictions
from enfold.run import RunDirectory, parse_recipe
from enfold.run.execute import seed_runs
from studies.claims import evaluate_claims, parse_claims
from studies.definition import (
    make_recipes,
)
from studies.evidence import CORRUPTED, Evidence
from studies.reproduce import Options, open_or_extend


def predict_at(seed: int, signal: float) -> Predictions:
    rng = torch.Generator().manual_seed(seed)
    labels = torch.arange(300) % 3
    logits = signal * torch.nn.functional.one_hot(labels, 3) + torch.randn(4, 300, 3, generator=rng)
    return Predictions.from_logits(logits, labels)


def planted(path: Path, signal: float) -> RunDirectory:
    run = RunDirectory.create(path, parse_recipe("members: 4\nseeds: [0, 1]\n"))
    for seed in (0, 1):
        run.of_seed(seed).write_predictions("ensemble", {"test": predict_at(seed, signal)})
        rows = {"mean member": {"corrupted": {"nll": 2.0 + seed}}, "ensemble": {"corrupted": {"nll": 1.0 + 3 * seed}}}
        run.of_seed(seed).write_json("results.json", {"seed": seed, "rows": rows})
    return run


@pytest.fixture
def evidence(tmp_path: Path) -> Evidence:
    runs = {name: planted(tmp_path / name, signal) for name, signal in (("good", 2.0), ("bad", 0.5))}
    trees = [
        {"look": {"lines": {"curve": [0.5, 0.1, 0.9]}, "points": [{"at": 1.0, "v": each}, {"at": 5.0, "v": 0.0}]}}
        for each in (1.0, 2.0)
    ]
    return Evidence({name: seed_runs(run, run.recipe()) for name, run in runs.items()}, {"good": trees})


def test_rows_of_runs_of_some_members_and_of_analyses(evidence: Evidence) -> None:
    few = evidence.row("good/ensemble of 2", "accuracy")
    assert few is not None
    assert few.values == pytest.approx([accuracy(predict_at(seed, 2.0).subset(range(2))) for seed in (0, 1)])
    one = evidence.row("bad/mean member of ensemble of 3", "accuracy")
    assert one is not None
    assert one.values == pytest.approx(
        [mean_member(accuracy, predict_at(seed, 0.5).subset(range(3))) for seed in (0, 1)]
    )
    best = evidence.row("bad/best member of ensemble", "accuracy").values
    assert best == [max(accuracy(predict_at(seed, 0.5).member(index)) for index in range(4)) for seed in (0, 1)]
    assert evidence.row("good/ensemble of 5", "accuracy") is None, "there are 4 members"
    assert evidence.row("nowhere/ensemble", "accuracy") is None
    for place, value in (("lines/curve/middle", 0.1), ("lines/curve/ends", 0.7), ("lines/curve/max", 0.9)):
        row = evidence.row(f"good/look/{place}", "loss")
        assert row is not None
        assert row.values == pytest.approx([value, value])
    assert evidence.row("good/look/points/at=1.0/v", "loss").values == [1.0, 2.0]
    assert evidence.row("good/look/points/at=2.0/v", "loss") is None
    assert evidence.row("good/look/lines/nowhere/first", "loss") is None
    assert set(CORRUPTED) == {"corrupted accuracy", "corrupted nll", "corrupted ece"}
    assert evidence.row("good/mean member", "corrupted nll").values == [2.0, 3.0]
    assert evidence.row("good/mean member", "corrupted ece") is None


def test_claims_of_several_runs_and_of_numbers_over_seeds(evidence: Evidence) -> None:
    text = """
source: {paper: A. Author}
published: {good/ensemble: {accuracy: 0.9}, bad/ensemble: {accuracy: 0.8}}
rows: {moved: good/look/points/at=1.0/v, still: good/look/points/at=5.0/v}
claims:
  - {statement: good is better, metric: accuracy, first: good/ensemble, relation: above, second: bad/ensemble}
  - {statement: all better, metric: accuracy, first: ensemble, relation: above, second: mean member, runs: [good, bad]}
  - {statement: it moved, metric: way, first: moved, relation: above, second: still}
  - {statement: it pays, metric: corrupted nll, first: good/ensemble, relation: below, second: good/mean member}
"""
    found = evaluate_claims(evidence, parse_claims(text), {"name": "n"}, replicates=200)
    better, every, other, moved, pays = found["claims"]
    assert (better["verdict"], better["first"]["published"]) == ("held", 0.9)
    assert [every["statement"], other["statement"]] == ["good: all better", "bad: all better"]
    assert every["verdict"] == "held"
    half = 12.706204736 * math.sqrt(0.5) / math.sqrt(2)  # Student's t of one degree of freedom, values 1 and 2
    assert moved["difference"]["mean"] == 1.5
    assert moved["difference"]["upper"] == pytest.approx(1.5 + half)
    assert moved["verdict"] == "within noise"
    assert pays["difference"]["values"] == [-1.0, 1.0]


def test_one_seed_has_no_noise_between_seeds(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", parse_recipe("members: 2\n"))
    text = "source: {paper: p}\nclaims:\n  - {statement: s, metric: m, first: r/a/x, relation: above, second: r/a/y}\n"
    evidence = Evidence({"r": seed_runs(run, run.recipe())}, {"r": [{"a": {"x": 2.0, "y": 1.0}}]})
    claim = evaluate_claims(evidence, parse_claims(text), {})["claims"][0]
    none = {"lower": None, "upper": None, "p": None, "p_holm": None}
    assert claim["difference"] == {"mean": 1.0, **none, "values": [1.0]}
    assert claim["verdict"] == "within noise"


def test_definitions_with_a_common_run_add_their_rows(tmp_path: Path) -> None:
    first, second = (make_recipes(name, "smoke")["cifar10"] for name in ("latentbe-cifar10", "distill-cifar10"))
    options = Options("distill-cifar10", "smoke", resume=True)
    place = open_or_extend(RunDirectory(tmp_path / "cifar10-distillation"), first, options)
    both = open_or_extend(place, second, options).recipe()
    assert both.extends(first)
    assert both.extends(second)
    assert open_or_extend(place, first, options).recipe() == both
    other = second.model_copy(update={"members": 3})
    with pytest.raises(EnfoldError, match="only be resumed with its own recipe"):
        open_or_extend(place, other, options)
    assert place.recipe() == both


def test_an_existing_run_is_evaluated_by_name(studies, tmp_path: Path) -> None:
    """Claims about CIFAR-100 are evaluated on the run of CIFAR-10, as at the laptop scale."""
    run = RunDirectory.create(tmp_path / "run", parse_recipe("name: cifar10-ensembles\nmembers: 4\n"))
    for label, signal in (("ensemble", 2.0), ("mixture-1.0", 1.5), ("mixture-0.4", 1.0)):
        run.write_predictions(label, {"test": predict_at(0, signal)})
    done = studies("mixture-cifar", "--run", run.path, "--json")
    verdicts = {claim["statement"]: claim["verdict"] for claim in json.loads(done.out)["claims"]}
    assert verdicts["A deep ensemble of four is more accurate than one network"] == "held"
    assert verdicts["A budget of one network gives more accuracy than 0.4"] == "held"
    assert verdicts["MIMO is more accurate than one network"] == "not run"
    done = studies("permavg-table", "--run", run.path)
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "has several runs, and the recipe's name must be that of one of them, got 'cifar10-ensembles'" in done.err


def test_members_may_have_weights_fitted_on_validation_data(tmp_path: Path) -> None:
    """One member is right and three are not: its weight is nearly 1."""
    splits = {}
    for name, seed in (("test", 0), ("validation", 1)):
        good, bad = predict_at(seed, 3.0).member(0), predict_at(seed + 2, 0.0).subset(range(3))
        splits[name] = Predictions(torch.cat([good.log_probs, bad.log_probs]), good.labels)
    run = RunDirectory.create(tmp_path / "run", parse_recipe("members: 4\n"))
    run.write_predictions("ensemble", splits)
    evidence = Evidence({"": seed_runs(run, run.recipe())})
    (equal,), (best,) = evidence.row("ensemble", "nll").values, evidence.row("ensemble weighted by bma", "nll").values
    assert best == pytest.approx(nll(splits["test"].member(0)), abs=1e-6)
    assert best < evidence.row("ensemble weighted by stacking", "nll").values[0] + 0.05 < equal
    with pytest.raises(EnfoldError, match="weighted by one of bma, pseudo-bma, stacking, got 'luck'"):
        evidence.row("ensemble weighted by luck", "nll")

"""Published tables: their files are whole, their smoke scale runs, and rows of several runs and analyses are judged."""

import csv
import json
import math
import re
from pathlib import Path

import pytest
import torch

from enfold.errors import EnfoldError
from enfold.metrics import accuracy, mean_member
from enfold.metrics.predictions import Predictions
from enfold.report.reproduced import notes, page, row_cells
from enfold.run import RunDirectory, parse_recipe, read_recipe
from enfold.run.claims import judge_by, parse_claims
from enfold.run.evidence import CORRUPTED, Evidence, Place
from enfold.run.execute import cells
from enfold.run.published import SCALES, claimed, listing, merged, names, recipes, reproduction
from enfold.run.reproduce import Asked, _chosen, _one, _other_data, reproduce

RECIPES = Path(__file__).parents[2] / "recipes"
NAMES = [
    "distill-cifar10",
    "distill-cifar100",
    "landscape",
    "latentbe-cifar10",
    "latentbe-cifar100",
    "mixture-cifar",
    "mixture-diversity",
    "permavg-analyses",
    "permavg-table",
]


def test_every_published_table_and_figure_is_there() -> None:
    assert names() == NAMES
    rows = {row["name"]: row["scales"] for row in listing()}
    for scales in rows.values():
        assert list(scales) == list(SCALES)
        assert scales["smoke"]["data"] == {"fashion-mini": True}, "smoke needs no data but what ships"
    assert set(rows["permavg-table"]["laptop"]["data"]) == {"cifar10", "fashion-mnist"}
    assert set(rows["latentbe-cifar100"]["paper"]["data"]) == {"cifar100"}


@pytest.mark.parametrize("name", NAMES)
def test_a_file_names_rows_that_its_recipes_make(name: str) -> None:
    found = reproduction(name)
    assert len({claim.says for claim in found.claims}) == len(found.claims), "every sentence once"
    made = recipes(name, "laptop")
    lacking = {run for run in found.runs if run not in made}
    assert lacking == set(found.scales["laptop"].instead)
    for row in claimed(found):
        place = Place.of(found.label(row))
        recipe = made[found.scales["laptop"].instead.get(place.run, place.run) or next(iter(made))]
        if place.path:
            assert found.analysis is not None
            assert place.file == found.analysis.name
            continue
        labels = {each.label for each in (*recipe.shares, *recipe.folds)}
        assert place.file in {"ensemble", "control", *labels}, row
        assert (place.first or 1) <= recipe.members
        assert place.file != "control" or recipe.control
    assert set(made) == set(recipes(name, "paper")) or found.scales["paper"].only or lacking


def test_published_values_and_settings() -> None:
    table = reproduction("permavg-table")
    assert table.value("cifar10-4/perm-avg-6", "accuracy") == 0.5326
    assert table.value("fashion-mnist-4-brief/perm-avg-6", "accuracy") == 0.8165, "a run like another has its values"
    assert table.value("cifar10-2/mean member of ensemble of 3", "accuracy") == 0.5284
    made = recipes("permavg-table", "laptop")
    assert len(made) == 12
    assert (made["cifar10-4"].network, made["cifar10-4"].data.source) == (
        {"name": "mlp", "widths": [128, 128, 128]},
        "cifar10",
    )
    assert made["cifar10-4-brief"].plan["epochs"] < made["cifar10-4"].plan["epochs"]
    assert recipes("permavg-table", "paper")["fashion-mnist-3-brief"].network == {"name": "mlp", "widths": [512, 512]}
    best = {
        each.label: each.settings for each in made["fashion-mnist-2"].folds if each.label.startswith("perm-avg-best")
    }
    assert len(best) == 5
    assert len({json.dumps(each) for each in best.values()}) == 1, "settings in one place"
    assert reproduction("latentbe-cifar100").value("+ TDiv-SDiv", "nll") == 0.792
    assert reproduction("mixture-cifar").value("Thin MixtureEnsembles 36.5M, CIFAR-100", "corrupted accuracy") == 0.542
    assert reproduction("distill-cifar10").value("BE student, head", "corrupted nll") == 0.911
    assert recipes("latentbe-cifar100", "paper")["cifar100"].network == "wrn-28-4"


@pytest.mark.parametrize(
    ("file", "sharing"),
    [
        ("cifar10-shares", ("mixture-cifar", "mixture-diversity")),
        ("cifar10-distillation", ("latentbe-cifar10", "distill-cifar10")),
    ],
)
def test_a_recipe_file_says_what_the_packaged_recipe_says(file: str, sharing: tuple[str, ...]) -> None:
    written = read_recipe(RECIPES / f"{file}.yaml")
    packaged = [recipes(name, "laptop")["cifar10"] for name in sharing]
    for each in packaged:
        assert written.extends(each)
        assert (written.name, written.corruptions, written.ood) == (each.name, each.corruptions, each.ood)
    for key in ("shares", "folds"):
        assert {each.label for each in getattr(written, key)} == {
            each.label for recipe in packaged for each in getattr(recipe, key)
        }


@pytest.mark.parametrize(
    ("file", "judging"),
    [
        ("cifar10-shares", ("mixture-cifar", "mixture-diversity")),
        ("cifar10-distillation", ("latentbe-cifar10", "latentbe-cifar100", "distill-cifar10", "distill-cifar100")),
    ],
)
def test_every_model_of_a_recipe_file_is_judged(file: str, judging: tuple[str, ...]) -> None:
    recipe = read_recipe(RECIPES / f"{file}.yaml")
    labels = {each.label for each in (*recipe.shares, *recipe.folds)}
    judged = {Place.of(found.label(row)).file for found in map(reproduction, judging) for row in claimed(found)}
    assert labels - judged == {label for label in labels if label.startswith("single-")}, "controls are no paper's"


def test_a_change_merges_and_names_methods_by_label() -> None:
    content = {
        "plan": {"epochs": 9, "batch_size": 8},
        "network": {"name": "mlp", "widths": [4]},
        "folds": [{"label": "kd-2", "plan": {"epochs": 9}}, {"label": "average"}],
    }
    change = {"plan": {"epochs": 1}, "network": {"name": "resnet"}, "folds": {"kd-*": {"plan": {"epochs": 2}}}}
    assert merged(content, change) == {
        "plan": {"epochs": 1, "batch_size": 8},
        "network": {"name": "resnet"},
        "folds": [{"label": "kd-2", "plan": {"epochs": 2}}, {"label": "average"}],
    }
    assert content["plan"] == {"epochs": 9, "batch_size": 8}, "what is changed stays as it was"


def said(seed: int, signal: float) -> Predictions:
    rng = torch.Generator().manual_seed(seed)
    labels = torch.arange(300) % 3
    logits = signal * torch.nn.functional.one_hot(labels, 3) + torch.randn(4, 300, 3, generator=rng)
    return Predictions.from_logits(logits, labels)


def planted(path: Path, signal: float) -> RunDirectory:
    run = RunDirectory.create(path, parse_recipe("members: 4\nseeds: [0, 1]\n"))
    for seed in (0, 1):
        run.cell(seed).write_predictions("ensemble", {"test": said(seed, signal)})
        rows = {"mean member": {"corrupted": {"nll": 2.0 + seed}}, "ensemble": {"corrupted": {"nll": 1.0 + 3 * seed}}}
        run.cell(seed).write_json("results.json", {"seed": seed, "rows": rows})
    return run


@pytest.fixture
def evidence(tmp_path: Path) -> Evidence:
    runs = {name: planted(tmp_path / name, signal) for name, signal in (("good", 2.0), ("bad", 0.5))}
    trees = [
        {"look": {"lines": {"curve": [0.5, 0.1, 0.9]}, "points": [{"at": 1.0, "v": each}, {"at": 5.0, "v": 0.0}]}}
        for each in (1.0, 2.0)
    ]
    return Evidence({name: cells(run, run.recipe()) for name, run in runs.items()}, {"good": trees})


def test_rows_of_runs_of_some_members_and_of_analyses(evidence: Evidence) -> None:
    few = evidence.row("good/ensemble of 2", "accuracy")
    assert few is not None
    assert few.values == pytest.approx([accuracy(said(seed, 2.0).subset(range(2))) for seed in (0, 1)])
    one = evidence.row("bad/mean member of ensemble of 3", "accuracy")
    assert one is not None
    assert one.values == pytest.approx([mean_member(accuracy, said(seed, 0.5).subset(range(3))) for seed in (0, 1)])
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
  - {says: good is better, metric: accuracy, first: good/ensemble, relation: above, second: bad/ensemble}
  - {says: all are better, metric: accuracy, first: ensemble, relation: above, second: mean member, runs: [good, bad]}
  - {says: it moved, metric: way, first: moved, relation: above, second: still}
  - {says: it pays, metric: corrupted nll, first: good/ensemble, relation: below, second: good/mean member}
"""
    found = judge_by(evidence, parse_claims(text), {"name": "n"}, replicates=200)
    better, every, other, moved, pays = found["claims"]
    assert (better["verdict"], better["first"]["published"]) == ("held", 0.9)
    assert [every["says"], other["says"]] == ["good: all are better", "bad: all are better"]
    assert every["verdict"] == "held"
    half = 12.706204736 * math.sqrt(0.5) / math.sqrt(2)  # Student's t of one degree of freedom, values 1 and 2
    assert moved["difference"]["mean"] == 1.5
    assert moved["difference"]["upper"] == pytest.approx(1.5 + half)
    assert moved["verdict"] == "within noise"
    assert pays["difference"]["values"] == [-1.0, 1.0]


def test_one_seed_says_nothing_of_noise_between_seeds(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", parse_recipe("members: 2\n"))
    text = "source: {paper: p}\nclaims:\n  - {says: s, metric: m, first: r/a/x, relation: above, second: r/a/y}\n"
    evidence = Evidence({"r": cells(run, run.recipe())}, {"r": [{"a": {"x": 2.0, "y": 1.0}}]})
    claim = judge_by(evidence, parse_claims(text), {})["claims"][0]
    assert claim["difference"] == {"mean": 1.0, "lower": None, "upper": None, "values": [1.0]}
    assert claim["verdict"] == "within noise"


def test_names_that_share_a_run_add_their_rows_to_it(tmp_path: Path) -> None:
    first, second = (recipes(name, "smoke")["cifar10"] for name in ("latentbe-cifar10", "distill-cifar10"))
    asked = Asked("distill-cifar10", "smoke", resume=True)
    place = _one(RunDirectory(tmp_path / "cifar10-distillation"), first, asked)
    both = _one(place, second, asked).recipe()
    assert both.extends(first)
    assert both.extends(second)
    assert _one(place, first, asked).recipe() == both
    other = second.model_copy(update={"members": 3})
    with pytest.raises(EnfoldError, match="only be resumed with its own recipe"):
        _one(place, other, asked)
    assert place.recipe() == both


def test_a_run_that_is_there_is_judged_by_name(enfold, tmp_path: Path) -> None:
    """Of what is said of CIFAR-100 the run of CIFAR-10 is the judge, as at the laptop scale."""
    run = RunDirectory.create(tmp_path / "run", parse_recipe("name: cifar10-shares\nmembers: 4\n"))
    for label, signal in (("ensemble", 2.0), ("mixture-1.0", 1.5), ("mixture-0.4", 1.0)):
        run.write_predictions(label, {"test": said(0, signal)})
    done = enfold("claims", run.path, "mixture-cifar", "--json")
    verdicts = {claim["says"]: claim["verdict"] for claim in json.loads(done.out)["claims"]}
    assert verdicts["Four independent networks together are more accurate than one"] == "held"
    assert verdicts["A budget of one network gives more accuracy than 0.4"] == "held"
    assert verdicts["MIMO is more accurate than one network"] == "not run"
    done = enfold("claims", run.path, "permavg-table")
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "is of several runs, of which this must be one by its name, got 'cifar10-shares'" in done.err


def test_a_table_is_held_against_another_data_set_in_the_run_of_another_table(tmp_path: Path) -> None:
    """Where CIFAR-100 is not there, the teachers and students of CIFAR-10 are judged."""
    changes = ("data.source=cifar10", "name=cifar10-distillation")
    asked = Asked("latentbe-cifar100", "laptop", changes, resume=True)
    made = recipes(asked.name, asked.scale, changes)
    place = _one(RunDirectory(tmp_path / "run"), recipes("latentbe-cifar10", "laptop")["cifar10"], asked)
    before = place.recipe()
    assert _one(place, made["cifar100"], asked).recipe() == before, "nothing is to do again"
    told = {"scale": "laptop", "changes": changes, "instead": {}, "runs": made, "other_data": _other_data(asked, made)}
    assert "The data set was changed: ours is cifar10, what is published is of cifar100." in notes(told)
    as_it_is = Asked("latentbe-cifar100")
    assert _other_data(as_it_is, recipes(as_it_is.name, as_it_is.scale)) == {}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("permavg-tables",), "one of .*permavg-table.*did you mean 'permavg-table'"),
        (("landscape", "OUT", "--scale", "smoky"), "one of smoke, laptop, paper, got 'smoky', did you mean 'smoke'"),
        (("latentbe-cifar100", "OUT"), "needs the data set cifar100, .* enfold data cifar100 --fetch .* --scale smoke"),
        (("landscape", "OUT", "--scale", "smoke", "--set", "plan.epoch=1"), "no key 'epoch'"),
        (
            ("mixture-cifar", "OUT", "--scale", "paper", "--set", "name=one", "--set", "data.source=fashion-mini"),
            "folder of its own, got 'one' for both cifar10 and cifar100: leave --set name out",
        ),
    ],
)
def test_what_cannot_be_is_one_sentence_and_writes_nothing(enfold, tmp_path, monkeypatch, words, says) -> None:
    monkeypatch.setenv("ENFOLD_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    done = enfold("reproduce", *(tmp_path / "out" if word == "OUT" else word for word in words))
    assert (done.code, done.err.count("\n")) == (2, 1), done.err
    assert re.search(says, done.err), done.err
    assert not (tmp_path / "out").exists()


def test_the_list_says_what_each_needs(enfold) -> None:
    done = enfold("reproduce")
    assert done.code == 0
    for word in (*NAMES, "cifar100", "fashion-mini: here", "laptop"):
        assert word in done.out
    assert [row["name"] for row in json.loads(enfold("reproduce", "--json").out)] == NAMES


def check_written(out: Path, name: str) -> dict[str, object]:
    content = json.loads((out / f"{name}.json").read_text())
    with (out / f"{name}.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert any(row["ours"] for row in rows)
    with (out / f"{name}.claims.csv").open() as file:
        assert [row["verdict"] for row in csv.DictReader(file)] == [claim["verdict"] for claim in content["claims"]]
    html = (out / f"{name}.html").read_text()
    assert html.startswith("<!doctype html>")
    assert "http://" not in html.replace("http://www.w3.org", "")
    assert sum(content["verdicts"].values()) == len(content["claims"])
    return content


def test_a_figure_at_the_smoke_scale_and_again_without_work(enfold, tmp_path: Path, monkeypatch) -> None:
    words = ("reproduce", "permavg-analyses", tmp_path, "--scale", "smoke")
    done = enfold(*words)
    assert done.code == 0, done.err
    for word in ("correlation", "published", "say nothing about the claims", "within noise"):
        assert word in done.out
    content = check_written(tmp_path, "permavg-analyses")
    assert content["verdicts"]["not run"] == 0
    assert "already holds a run: add --resume" in enfold(*words).err
    monkeypatch.setattr("enfold.run.alignment.learned_alignment", None)  # nothing is computed again
    again = enfold(*words, "--resume", "--json")
    assert again.code == 0, again.err
    assert json.loads(again.out)["claims"] == content["claims"]


def test_pages_and_tables_show_ours_beside_the_published() -> None:
    found = {"published": 0.9, "ours": {"mean": 0.8, "std": 0.01, "values": [0.79, 0.81]}}
    content = {
        "name": "n",
        "title": "<T>",
        "scale": "laptop",
        "changes": ["seeds=[0]"],
        "seeds": [0, 1],
        "runs": {"r": {"path": "r", "network": "mlp", "data": {}}},
        "instead": {"cifar100": "r"},
        "source": {"paper": "P & Q", "table": "t"},
        "bootstrap": {"level": 0.95},
        "verdicts": {"held": 1, "not held": 0, "within noise": 0, "not run": 0},
        "rows": [{"run": "r", "row": "r/kd", "label": "r/kd", "metrics": {"accuracy": found}}],
        "claims": [
            {
                "says": "a < b",
                "metric": "accuracy",
                "first": found,
                "second": found,
                "difference": {"mean": 0.1, "lower": None, "upper": None},
                "verdict": "held",
            }
        ],
    }
    assert row_cells(content) == (["row", "accuracy (%)"], [["kd", "80.00 ± 1.00 (90)"]])
    html = page(content, {"line.svg": b"<svg/>"})
    for word in ("&lt;T&gt;", "P &amp; Q", "a &lt; b", "✓ held", "cifar100 is held against r", "PHN2Zy8+", "+10.00"):
        assert word in html
    assert "<T>" not in html


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", NAMES)
def test_every_name_runs_at_the_smoke_scale(enfold, tmp_path: Path, name: str) -> None:
    done = enfold("reproduce", name, tmp_path, "--scale", "smoke")
    assert done.code == 0, done.err
    content = check_written(tmp_path, name)
    assert content["seconds"] < 600
    if name != "permavg-table":  # of its twelve runs smoke makes one
        assert content["verdicts"]["not run"] == 0


def test_the_scale_and_the_name_are_asked_before_anything(tmp_path: Path) -> None:
    with pytest.raises(EnfoldError, match="a scale must be one of"):
        reproduce(Asked("landscape", "huge"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_some_runs_of_a_table_alone() -> None:
    made = recipes("permavg-table", "laptop")
    chosen = _chosen(Asked("permavg-table", only=("cifar10-?", "fashion-mnist-2")), made)
    assert set(chosen) == {"cifar10-2", "cifar10-3", "cifar10-4", "fashion-mnist-2"}
    assert _chosen(Asked("permavg-table"), made) == made
    with pytest.raises(
        EnfoldError, match=r"only must name runs of 'permavg-table', got mnist: they are fashion-mnist-2"
    ):
        _chosen(Asked("permavg-table", only=("mnist",)), made)

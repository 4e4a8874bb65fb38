"""Published tables: definitions are consistent, the smoke scale runs, and claims use several runs and analyses."""

import csv
import json
import re
from pathlib import Path

import pytest

from enfold.errors import EnfoldError
from enfold.run import RunDirectory, parse_recipe
from enfold.run.recipe import Recipe
from studies.definition import (
    SCALES,
    claimed_rows,
    list_names,
    list_studies,
    load_definition,
    make_recipes,
    merge_change,
    resolve_names,
)
from studies.evidence import RowName
from studies.page import make_page
from studies.reproduce import Options, open_or_extend, other_data, reproduce, select_recipes
from studies.tables import list_notes, table_rows

NAMES = [
    "accuracy-cifar10",
    "all-methods",
    "distill-cifar10",
    "distill-cifar100",
    "distill-interpolating",
    "landscape",
    "latentbe-cifar10",
    "latentbe-cifar100",
    "latentbe-interpolating",
    "mixture-cifar",
    "mixture-diversity",
    "mixture-members",
    "permavg-analyses",
    "permavg-sizes",
    "permavg-table",
]


def labels_of(recipe: Recipe | None) -> list[str]:
    """The labels of a recipe's steps."""
    return [] if recipe is None else [step.label for step in recipe.steps]


@pytest.mark.slow
def test_every_published_table_and_figure_exists() -> None:
    assert list_names() == NAMES
    rows = {row["name"]: row["scales"] for row in list_studies()}
    for scales in rows.values():
        assert list(scales) == list(SCALES)
        assert scales["smoke"]["data"] == {"fashion-mini": True}, "smoke needs no data but what ships"
    assert set(rows["permavg-table"]["laptop"]["data"]) == {"cifar10", "fashion-mnist"}
    assert set(rows["latentbe-cifar100"]["paper"]["data"]) == {"cifar100"}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_definitions_name_rows_of_their_recipes(name: str) -> None:
    found = load_definition(name)
    assert len({claim.statement for claim in found.claims}) == len(found.claims), "statements are unique"
    made = make_recipes(name, "laptop")
    lacking = {run for run in found.runs if run not in made}
    assert lacking == set(found.scales["laptop"].substitutes)
    for row in claimed_rows(found):
        place = RowName.parse(found.label(row))
        recipe = made[found.scales["laptop"].substitutes.get(place.run, place.run) or next(iter(made))]
        if place.path:
            assert found.analysis is not None
            assert place.file == found.analysis.name
            continue
        assert place.file in {"ensemble", "control", *labels_of(recipe)}, row
        assert (place.first or 1) <= recipe.members
        assert place.file != "control" or recipe.control
    assert set(made) == set(make_recipes(name, "paper")) or found.scales["paper"].only or lacking


def test_published_values_and_settings() -> None:
    table = load_definition("permavg-table")
    assert table.value("cifar10-4/perm-avg-6", "accuracy") == 0.5326
    assert table.value("fashion-mnist-4-brief/perm-avg-6", "accuracy") == 0.8165, "a run like another has its values"
    assert table.value("cifar10-2/mean member of ensemble of 3", "accuracy") == 0.5284
    made = make_recipes("permavg-table", "laptop")
    assert len(made) == 12
    assert (made["cifar10-4"].network, made["cifar10-4"].data.source) == (
        {"name": "mlp", "widths": [128, 128, 128]},
        "cifar10",
    )
    assert made["cifar10-4-brief"].train["epochs"] < made["cifar10-4"].train["epochs"]
    assert make_recipes("permavg-table", "paper")["fashion-mnist-3-brief"].network == {
        "name": "mlp",
        "widths": [512, 512],
    }
    best = {
        step.label: step.options for step in made["fashion-mnist-2"].steps if step.label.startswith("perm-avg-soft")
    }
    assert len(best) == 5
    assert len({json.dumps(each) for each in best.values()}) == 1, "settings in one place"
    assert load_definition("latentbe-cifar100").value("+ TDiv-SDiv", "nll") == 0.792
    assert (
        load_definition("mixture-cifar").value("Thin MixtureEnsembles 36.5M, CIFAR-100", "corrupted accuracy") == 0.542
    )
    assert load_definition("distill-cifar10").value("BE student, head", "corrupted nll") == 0.911
    assert make_recipes("latentbe-cifar100", "paper")["cifar100"].network == "wrn-28-4"


def test_a_paper_consists_of_its_tables() -> None:
    assert resolve_names("permavg") == ["permavg-analyses", "permavg-sizes", "permavg-table"]
    assert resolve_names("landscape") == ["landscape"]
    assert resolve_names("mixture-cifar") == ["mixture-cifar"]
    with pytest.raises(EnfoldError, match="did you mean 'mixture'"):
        resolve_names("mixtur")


@pytest.mark.parametrize(
    ("run", "tables"),
    [
        ("cifar10", ("mixture-cifar", "mixture-diversity")),
        ("cifar10", ("latentbe-cifar10", "latentbe-cifar100", "distill-cifar10", "distill-cifar100")),
    ],
)
def test_every_model_of_a_base_recipe_has_a_claim(run: str, tables: tuple[str, ...]) -> None:
    labels = {label for name in tables for label in labels_of(make_recipes(name, "laptop").get(run))}
    claimed = {
        RowName.parse(found.label(row)).file for found in map(load_definition, tables) for row in claimed_rows(found)
    }
    assert labels - claimed == {label for label in labels if label.startswith("single-")}, "controls have no claims"


def test_a_change_merges_and_names_methods_by_label() -> None:
    content = {
        "train": {"epochs": 9, "batch_size": 8},
        "network": {"name": "mlp", "widths": [4]},
        "steps": [{"label": "kd-2", "train": {"epochs": 9}}, {"label": "average"}],
    }
    change = {"train": {"epochs": 1}, "network": {"name": "resnet"}, "steps": {"kd-*": {"train": {"epochs": 2}}}}
    assert merge_change(content, change) == {
        "train": {"epochs": 1, "batch_size": 8},
        "network": {"name": "resnet"},
        "steps": [{"label": "kd-2", "train": {"epochs": 2}}, {"label": "average"}],
    }
    assert content["train"] == {"epochs": 9, "batch_size": 8}, "what is changed stays as it was"


def test_a_selection_includes_the_steps_that_it_starts_from() -> None:
    smoke = [step.label for step in make_recipes("permavg-table", "smoke")["fashion-mnist-3"].steps]
    assert {label[-1] for label in smoke} == {"2", "6"}
    assert smoke.index("perm-avg-soft-6") < smoke.index("perm-avg-best-6")
    assert labels_of(make_recipes("permavg-analyses", "laptop")["cifar10-3"]) == []


def test_a_table_is_evaluated_in_the_run_of_another_table(tmp_path: Path) -> None:
    """Where CIFAR-100 is not there, the teachers and students of CIFAR-10 are judged."""
    changes = ("data.source=cifar10", "name=cifar10-distillation")
    options = Options("latentbe-cifar100", "laptop", changes, resume=True)
    made = make_recipes(options.name, options.scale, changes)
    place = open_or_extend(
        RunDirectory(tmp_path / "run"), make_recipes("latentbe-cifar10", "laptop")["cifar10"], options
    )
    before = place.recipe()
    assert open_or_extend(place, made["cifar100"], options).recipe() == before, "nothing is to do again"
    content = {
        "scale": "laptop",
        "changes": changes,
        "substitutes": {},
        "runs": made,
        "other_data": other_data(options, made),
    }
    assert "The data set was changed: ours is cifar10, the published values are for cifar100." in list_notes(content)
    unchanged = Options("latentbe-cifar100")
    assert other_data(unchanged, make_recipes(unchanged.name, unchanged.scale)) == {}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("permavg-tables",), "one of .*permavg-table.*did you mean 'permavg-table'"),
        (
            ("landscape", "--out", "OUT", "--scale", "smoky"),
            "one of smoke, laptop, paper, got 'smoky', did you mean 'smoke'",
        ),
        (
            ("latentbe-cifar100", "--out", "OUT"),
            "needs the data set cifar100, .* enfold data cifar100 --fetch .* --scale smoke",
        ),
        (("landscape", "--out", "OUT", "--scale", "smoke", "--set", "train.epoch=1"), "'epoch'"),
        (
            (
                "mixture-cifar",
                "--out",
                "OUT",
                "--scale",
                "paper",
                "--set",
                "name=one",
                "--set",
                "data.source=fashion-mini",
            ),
            "own folder, got 'one' for both cifar10 and cifar100: remove --set name",
        ),
    ],
)
def test_invalid_options_are_one_sentence_and_write_nothing(studies, tmp_path, monkeypatch, words, says) -> None:
    monkeypatch.setenv("ENFOLD_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    done = studies(*(tmp_path / "out" if word == "OUT" else word for word in words))
    assert (done.code, done.err.count("\n")) == (2, 1), done.err
    assert re.search(says, done.err), done.err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_list_shows_requirements(studies) -> None:
    done = studies()
    assert done.code == 0
    for word in (*NAMES, "cifar100", "fashion-mini: present", "laptop"):
        assert word in done.out
    assert [row["name"] for row in json.loads(studies("--json").out)] == NAMES


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


@pytest.mark.slow
def test_a_figure_at_the_smoke_scale_and_again_without_work(studies, tmp_path: Path, monkeypatch) -> None:
    words = ("permavg-analyses", "--out", tmp_path, "--scale", "smoke")
    done = studies(*words)
    assert done.code == 0, done.err
    for word in ("correlation", "published", "not evidence for the claims", "within noise"):
        assert word in done.out
    content = check_written(tmp_path, "permavg-analyses")
    assert content["verdicts"]["not run"] == 0
    assert "already contains a run: add --resume" in studies(*words).err
    monkeypatch.setattr("enfold.run.alignment.train_alignment", None)  # nothing is computed again
    again = studies(*words, "--resume", "--json")
    assert again.code == 0, again.err
    assert json.loads(again.out)["claims"] == content["claims"]


def test_pages_and_tables_show_measured_and_published_values() -> None:
    found = {"published": 0.9, "ours": {"mean": 0.8, "std": 0.01, "values": [0.79, 0.81]}}
    content = {
        "name": "n",
        "title": "<T>",
        "scale": "laptop",
        "changes": ["seeds=[0]"],
        "seeds": [0, 1],
        "runs": {"r": {"path": "r", "network": "mlp", "data": {}}},
        "substitutes": {"cifar100": "r"},
        "source": {"paper": "P & Q", "table": "t"},
        "bootstrap": {"level": 0.95},
        "verdicts": {"held": 1, "not held": 0, "within noise": 0, "not run": 0},
        "rows": [{"run": "r", "row": "r/kd", "label": "r/kd", "metrics": {"accuracy": found}}],
        "claims": [
            {
                "statement": "a < b",
                "metric": "accuracy",
                "first": found,
                "second": found,
                "difference": {"mean": 0.1, "lower": None, "upper": None},
                "verdict": "held",
            }
        ],
    }
    assert table_rows(content) == (["row", "accuracy (%)"], [["kd", "80.00 ± 1.00 (90)"]])
    html = make_page(content, {"line.svg": b"<svg/>"})
    for word in (
        "&lt;T&gt;",
        "P &amp; Q",
        "a &lt; b",
        "✓ held",
        "Claims about cifar100 are evaluated on r",
        "PHN2Zy8+",
        "+10.00",
    ):
        assert word in html
    assert "<T>" not in html


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", NAMES)
def test_every_name_runs_at_the_smoke_scale(studies, tmp_path: Path, name: str) -> None:
    done = studies(name, "--out", tmp_path, "--scale", "smoke")
    assert done.code == 0, done.err
    content = check_written(tmp_path, name)
    assert content["seconds"] < 600
    verdicts = content["verdicts"]
    if name in ("permavg-table", "permavg-sizes"):  # the smoke scale makes some of their runs
        assert sum(verdicts.values()) > verdicts["not run"]
    else:
        assert verdicts["not run"] == 0


def test_scale_and_name_are_checked_first(tmp_path: Path) -> None:
    with pytest.raises(EnfoldError, match="a scale must be one of"):
        reproduce(Options("landscape", "huge"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_only_selects_runs_of_a_table(monkeypatch) -> None:
    monkeypatch.setattr("studies.reproduce.catalogue", list)
    chosen = select_recipes(Options("permavg-table", only=("cifar10-?", "fashion-mnist-2")))
    assert set(chosen) == {"cifar10-2", "cifar10-3", "cifar10-4", "fashion-mnist-2"}
    assert select_recipes(Options("permavg-table")) == make_recipes("permavg-table", "laptop")
    with pytest.raises(EnfoldError, match=r"only must match .*'permavg-table', got mnist: they are fashion-mnist-2"):
        select_recipes(Options("permavg-table", only=("mnist",)))


@pytest.mark.slow
def test_a_dry_run_estimates_and_writes_nothing(studies, tmp_path: Path) -> None:
    done = studies("permavg-table", "--scale", "smoke", "--out", tmp_path / "out", "--dry-run")
    assert done.code == 0, done.err
    assert "permavg-table, fashion-mnist-3: about" in done.out
    assert not (tmp_path / "out").exists()


def test_user_code_needs_trust(studies, tmp_path: Path) -> None:
    (tmp_path / "hostile.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    change = f"network={tmp_path / 'hostile.py'}:make"
    done = studies("distill-cifar10", "--out", tmp_path / "out", "--scale", "smoke", "--set", change)
    assert (done.code, "--trust-code" in done.err) == (2, True), done.err
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("text", ["[red]x[/red].yaml", "a\x1b[2Jb.yaml"])
def test_names_are_printed_as_text(studies, tmp_path: Path, text: str) -> None:
    run = RunDirectory.create(tmp_path / "run", parse_recipe("members: 2\n"))
    done = studies(text, "--run", run.path)
    assert done.code == 2
    assert not set("\x1b\r") & set(done.out + done.err)

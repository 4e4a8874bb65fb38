"""A table in another regime: its definition extends the first, rows have gains, and runs of other tables are reused."""

from __future__ import annotations

import json

import pytest

from enfold.errors import EnfoldError
from studies.definition import load_definition, make_recipes
from studies.evidence import Evidence, Row, RowName
from studies.gains import gain_cells, gain_columns, gains
from studies.north_star import count_judged, gain_table
from studies.pages import judged_table
from studies.tables import list_notes

TABLES = {"latentbe-interpolating": "latentbe-cifar10", "distill-interpolating": "distill-cifar10"}


@pytest.mark.parametrize(("name", "base"), TABLES.items())
def test_a_definition_has_the_claims_and_values_of_the_one_that_it_extends(name, base):
    found, first = load_definition(name), load_definition(base)
    assert found.claims[: len(first.claims)] == first.claims
    assert first.published.items() <= found.published.items()
    assert first.rows.keys() <= found.rows.keys()
    assert found.source == first.source
    assert found.regime


@pytest.mark.parametrize("name", TABLES)
def test_the_regime_ends_with_the_last_epoch(name):
    (recipe,) = make_recipes(name, "laptop").values()
    assert recipe.train["select"] == "last"
    others = {step.label for step in recipe.steps if step.train.get("select") == "best"}
    assert all(label.endswith("-best") for label in others)


class Known(Evidence):
    """Rows with given values."""

    def __init__(self, values: dict[str, dict[str, list[float]]]) -> None:
        self.values = values

    def row(self, label: str, metric: str) -> Row | None:
        found = self.values.get(label, {}).get(metric)
        return None if found is None else Row(found, tuple(range(len(found))))


def test_the_gain_is_relative_to_that_of_the_ensemble_over_common_seeds():
    evidence = Known(
        {
            "r/mean member": {"nll": [2.0, 2.0, 9.0], "cnll": [1.5, 1.5, 1.5]},
            "r/ensemble": {"nll": [1.0, 1.0, 1.0], "cnll": [1.5, 1.5, 1.6]},
            "r/kd": {"nll": [1.5, 1.0], "cnll": [1.0, 1.0]},
        }
    )
    found = gains(evidence, "r/kd")
    assert found == {"nll": pytest.approx(0.75)}, "the calibrated ensemble gains nothing"
    assert gains(evidence, "r/absent") is None
    rows = [{"gain": found}, {"gain": None}]
    columns = gain_columns(rows)
    assert [gain_cells(row, columns) for row in rows] == [["75", "-"], ["-", "-"]]
    assert gain_columns([{}]) == gain_cells({}, []) == []


def test_a_row_may_be_scaled_by_its_temperature():
    name = RowName.parse("r/mean member of kd + temperature")
    assert (name.file, name.of_mean_member, name.scaled) == ("kd", True, True)
    assert not RowName.parse("r/kd").scaled


def test_the_notes_state_regime_command_and_time():
    content = {
        "substitutes": {}, "scale": "laptop", "changes": [], "runs": {"r": {}}, "regime": "Members fit.",
        "training_accuracy": {"r": [0.999, 1.0]}, "command": "python -m studies x",
        "training_seconds": {"r": 240.0, "q": 60.0}, "seeds": [0, 1],
        "rows": [{"row": "KD", "metrics": {"nll": {"ours": {"values": [1.0]}}}}],
    }  # fmt: skip
    notes = " ".join(list_notes(content))
    assert "Members fit. Accuracy of the members on training images: 99.9, 100.0 %." in notes
    assert "`python -m studies x`; all trainings of the run took 5 minutes." in notes
    assert "Fewer than 2 seeds: KD (1). Intervals of one seed are those of the test set." in notes


@pytest.mark.slow
def test_the_second_table_uses_the_networks_of_the_first_without_a_flag(studies, tmp_path):
    for name in TABLES:
        done = studies(name, "--out", tmp_path, "--scale", "smoke", "--set", "train.epochs=1")
        assert done.code == 0, done.err
    content = json.loads((tmp_path / "distill-interpolating.json").read_text())
    rows = {row["label"]: row for row in content["rows"]}
    assert rows["mean member + temperature"]["metrics"]["nll"]["ours"]["mean"] <= 2.4
    assert len(content["training_accuracy"]["cifar10"]) == 1
    assert content["training_seconds"]["cifar10"] > 0
    assert content["command"] == "python -m studies distill-interpolating --scale smoke --set train.epochs=1"
    again = studies("distill-interpolating", "--out", tmp_path, "--scale", "smoke", "--set", "train.epochs=1")
    assert "add --resume" in again.err


def test_an_unknown_base_is_refused(tmp_path, monkeypatch):
    file = tmp_path / "paper" / "odd.yaml"
    file.parent.mkdir()
    file.write_text("title: t\nextends: nothing\n")
    monkeypatch.setattr("studies.definition._files", lambda: {"odd": file})
    with pytest.raises(EnfoldError, match="extends must be another table"):
        load_definition.__wrapped__("odd")


@pytest.mark.slow
def test_what_is_stored_is_evaluated_with_the_seeds_that_have_it(studies, tmp_path):
    words = ("latentbe-interpolating", "--out", tmp_path, "--scale", "smoke", "--set", "train.epochs=1")
    seeds = ("--set", "seeds=[0,1]")
    none = studies(*words, *seeds, "--stored")
    assert none.code == 0, none.err
    content = json.loads((tmp_path / "latentbe-interpolating.json").read_text())
    assert content["verdicts"]["not run"] == len(content["claims"])
    assert content["training_accuracy"] == {"cifar10": []}


def test_the_single_network_with_the_largest_gain_is_beside_its_controls():
    def spread(nll: float, cnll: float) -> dict[str, dict[str, float]]:
        return {"gain nll": {"mean": nll}, "gain cnll": {"mean": cnll}}

    rows = {
        "mean member": (0.0, 0.0), "member + temperature": (0.8, 0.0), "ensemble": (1.0, 1.0),
        "control": (-0.5, 0.2), "cutmix": (1.1, 0.9), "mixup": (1.2, 0.7), "one seed": (2.0, 2.0),
    }  # fmt: skip
    record = {
        "title": "A setting",
        "rows": {
            label: {"seeds": [0] if label == "one seed" else [0, 1], "last": spread(*each), "best": spread(*each)}
            for label, each in rows.items()
        },
    }
    line = gain_table({"compress-x": record}, {}).splitlines()[2]
    assert line.endswith("| 2 | cutmix | 110 (90) | -50 (20) | -50 (20) | 80 (0) |")


def test_only_claims_of_the_paper_count():
    sources = ("table 1", "a control, not in the paper", "an identity, not an experiment")
    record = {"claims": [{"source": source, "verdict": "held"} for source in sources]}
    assert count_judged(record) == {"held": 1, "not held": 0, "within noise": 0, "not run": 0}


def test_tables_are_separated_by_their_regime():
    def stored(name: str, *verdicts: str) -> dict[str, object]:
        return {"name": name, "claims": [{"source": "t", "verdict": each} for each in verdicts]}

    page = judged_table([stored("latentbe-cifar10", "not held"), stored("latentbe-interpolating", "held", "held")])
    assert "| **members as published** | 2 | 0 | 0 | 0 | 100 |" in page
    assert "| **small networks, not interpolating** | 0 | 1 | 0 | 0 | 0 |" in page

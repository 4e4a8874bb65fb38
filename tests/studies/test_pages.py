"""Tables of the pages are made from stored results; results of separate runs are joined."""

import json
from pathlib import Path

import pytest

from enfold.errors import EnfoldError
from studies.check import CHECKS
from studies.join_records import join_records
from studies.measured import merging_table
from studies.pages import fill_page, format_value, overview, study_rows
from studies.permavg.grid import scaling_table
from studies.rows import QUALITY, Column


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.records
def test_pages_and_definitions_agree_with_the_stored_results(check):
    assert not list(check())


def test_a_cell_has_its_spread_and_what_is_missing_is_a_dash():
    row = {"scores": {"nll": {"mean": 0.5, "std": 0.25, "values": [0.25, 0.75]}}, "cost": None}
    shown = [format_value(row, each) for each in (*QUALITY, Column("parameters", "cost", "parameters", 1, 0))]
    assert shown == ["-", "0.500 ± 0.250", "-", "-"]


def both(published: float | None, mean: float, std: float | None = 0.01) -> dict[str, object]:
    return {"published": published, "ours": {"mean": mean, "std": std, "values": [mean]}}


def row(label: str, called: str = "", **metrics: object) -> dict[str, object]:
    return {"run": label.partition("/")[0], "row": called or label, "label": label, "metrics": metrics}


def claim(statement: str, verdict: str, difference: tuple[float | None, ...] | None = None) -> dict[str, object]:
    found = difference and dict(zip(("mean", "lower", "upper"), difference, strict=True))
    side = {"published": 0.9, "ours": difference and {"mean": 0.75, "std": None, "values": [0.75]}}
    about = {"statement": statement, "source": "table 1", "metric": "accuracy", "first": side, "second": side}
    return {**about, "difference": found, "verdict": verdict}


def content(name: str, runs: tuple[str, ...], **more: object) -> dict[str, object]:
    data = {"source": "cifar10", "train_size": 10000}
    return {
        "name": name,
        "title": "A title",
        "scale": "laptop",
        "changes": ["data.source=cifar10"],
        "seeds": [0, 1, 2],
        "runs": {run: {"data": data, "network": {"name": "mlp", "widths": [128, 64]}} for run in runs},
        "other_data": {runs[0]: ["cifar100", "cifar10"]},
        "substitutes": {},
        "date": "2026-01-02",
        "source": {"paper": "P. Aper", "table": "table 1"},
        "verdicts": {"held": 2, "not held": 1, "within noise": 0, "not run": 4},
        **more,
    }


def shown(tmp_path: Path, content: dict[str, object]) -> str:
    """A page with the results of one study."""
    folder = tmp_path / "studies" / "paper" / "results"
    folder.mkdir(parents=True)
    (folder / f"{content['name']}.json").write_text(json.dumps(content))
    return fill_page(f"<!-- results {content['name']} -->\nold\n<!-- end -->\n", tmp_path)


def test_reproduced_values_are_beside_published_values(tmp_path):
    rows = [
        row("kd", "KD", accuracy=both(0.937, 0.7), nll=both(None, 0.5)),
        row("r/mean member", accuracy=both(None, 0.6, None)),
        row("r/landscape/paths/loss/max", "the worst loss", nll=both(0.25, 2.0)),
    ]
    judged = [
        claim("KD is better", "held", (0.1, 0.05, 0.15)),
        claim("one seed", "within noise", (0.1, None, None)),
        claim("it is worse", "not run"),
    ]
    page = shown(tmp_path, content("some-table", ("r",), rows=rows, claims=judged))
    for line in (
        "The data set was changed: ours is cifar10, the published values are for cifar100.",
        "| ours (published) | accuracy (%) | NLL |",
        "| KD | 70.00 ± 1.00 (93.7) | 0.500 ± 0.010 |",
        "| one network (mean member) | 60.00 | - |",
        "| the worst loss | NLL | 2.000 ± 0.010 (0.25) |",
        "<details><summary>3 claims: 2 held, 1 not held, 4 not run</summary>",
        "| KD is better | accuracy (%) | 90.0 / 90.0 | 75.00 / 75.00 | +10.00 [+5.00, +15.00] | held |",
        "| one seed | accuracy (%) | 90.0 / 90.0 | 75.00 / 75.00 | +10.00 | within noise |",
        "| it is worse | accuracy (%) | 90.0 / 90.0 | - / - | - | not run |",
    ):
        assert line in page, line
    assert "old" not in page
    assert fill_page(page, tmp_path) == page


def test_costs_are_columns_of_a_table_that_has_them():
    cost = {"parameters": 1.5, "flops": 4.0, "latency": {"1": 2.0, "128": 3.25}}
    rows = [
        {**row("kd", "KD", nll=both(None, 0.5)), "cost": cost},
        {**row("be", "BE", nll=both(None, 0.4)), "cost": None},
    ]
    heads, _, kd, be = study_rows({"rows": rows}).splitlines()
    assert heads == "| ours (published) | NLL | parameters (x) | operations (x) | time, batch 128 (x) |"
    assert kd == "| KD | 0.500 ± 0.010 | 1.50 | 4.00 | 3.25 |"
    assert be.endswith("| - | - | - |")


def test_the_overview_counts_claims_by_verdict():
    line = overview([content("permavg-table", ("r",))]).splitlines()[2]
    assert line == (
        "| [permavg-table](permavg/README.md#permavg-table) | A title | cifar10, 10,000 images | mlp: widths 128-64 | "
        "3 | 2 | 1 | 0 | 4 | [2026-01-02](permavg/results/permavg-table.json) |"
    )


def test_invalid_markers_are_refused(tmp_path):
    with pytest.raises(EnfoldError, match="nowhere"):
        fill_page("<!-- rows nowhere -->\n<!-- end -->\n", tmp_path)
    with pytest.raises(EnfoldError, match="tables"):
        fill_page("<!-- tables nowhere -->\n<!-- end -->\n", tmp_path)


def test_a_table_of_every_number_of_members_is_one_for_each_data_set_and_kind_of_members(tmp_path):
    rows = [
        row("cifar10-2/perm-avg-2", accuracy=both(0.5755, 0.5)),
        row("cifar10-2/perm-avg-3", accuracy=both(0.5737, 0.4)),
        row("cifar10-3/ensemble of 6", accuracy=both(0.6172, 0.6)),
        row("cifar10-2/control", accuracy=both(None, 0.55), nll=both(None, 1.5)),
        row("cifar10-2/kd-2", nll=both(None, 1.25)),
        row("cifar10-2-brief/kd-4", accuracy=both(0.5697, 0.3)),
    ]
    judged = [claim("cifar10-2: it is so", "held"), claim("cifar10-2-brief: it is so", "not held")]
    runs = ("cifar10-2", "cifar10-3", "cifar10-2-brief")
    page = shown(tmp_path, content("permavg-table", runs, rows=rows, claims=judged))
    for line in (
        "**cifar10, converged members**; seeds: 2 layers 3, 3 layers 3; "
        "accuracy (%) of one member trained further: 2 layers 55.00 ± 1.00, 3 layers -",
        "| 2 | permAVG | 50.00 ± 1.00 (57.55) | 40.00 ± 1.00 (57.37) | - | - | - |",
        "| 3 | ensemble | - | - | - | - | 60.00 ± 1.00 (61.72) |",
        "**cifar10, converged members**; seeds: 2 layers 3, 3 layers 3; "
        "NLL of one member trained further: 2 layers 1.500 ± 0.010, 3 layers -",
        "| 2 | student | 1.250 ± 0.010 | - | - | - | - |",
        "**cifar10, briefly trained members**",
        "| 2 | student | - | - | 30.00 ± 1.00 (56.97) | - | - |",
        "|  | cifar10-2 | cifar10-3 | cifar10-2-brief |",
        "| it is so | ✓ |  | ✗ |",
    ):
        assert line in page, line
    assert "briefly trained members**; NLL" not in page, "no table without rows"


def test_two_and_six_members_are_side_by_side():
    rows = [
        row("cifar10-2/perm-avg-2", accuracy=both(0.57, 0.5), nll=both(None, 1.5)),
        row("cifar10-2/perm-avg-best-6", accuracy=both(None, 0.625), nll=both(None, 1.25)),
        row("cifar10-2/kd-6", accuracy=both(0.5, 0.6)),
    ]
    judged = content("permavg-table", ("cifar10-2", "cifar10-2-brief"), rows=rows, claims=[])
    first, _, only = scaling_table(judged).splitlines()
    assert first.startswith("| accuracy (%) / NLL, converged members | one member |")
    assert only == "| cifar10, 2 layers | - | - | - | 50.00 / 1.500 | - | - | 62.50 / 1.250 | - | - | - |"


def test_merges_have_a_line_per_network_and_a_dash_for_missing_runs():
    def spread(mean: float) -> dict[str, object]:
        return {"mean": mean, "std": 0.01, "values": [mean]}

    rows = {
        label: {"accuracy": spread(0.1 * k)}
        for k, label in enumerate(("mean member", "ensemble", "ensemble of 2", "matched-2", "matched-4"), 1)
    }
    barriers = {"average-2": spread(0.3), "matched-2": spread(0.2)}
    lines = merging_table({"networks": {"narrow": {"rows": rows, "barriers": barriers}}}).splitlines()
    found = [line for line in lines if line.startswith("| narrow")]
    assert found == [
        "| narrow | 10.0 ± 1.0 | - | 30.0 ± 1.0 | - | 40.0 ± 1.0 | - | - | - |",
        "| narrow | 10.0 ± 1.0 | - | 20.0 ± 1.0 | - | 50.0 ± 1.0 | - | - | - |",
        "| narrow | 30.0 ± 1.0 | 20.0 ± 1.0 | - | - | - |",
    ]


def test_separate_runs_of_a_table_are_joined():
    def part(run: str, mean: float, verdict: str, changes: list[str]) -> dict[str, object]:
        rows = [row(f"{name}/kd-2", accuracy={"published": 0.9, "ours": None}) for name in ("a", "b")]
        rows[run == "b"] = row(f"{run}/kd-2", accuracy=both(0.9, mean))
        claims = [claim(name, verdict if name == run else "not run") for name in ("a", "b")]
        counts = {"held": 1, "not held": 0, "within noise": 0, "not run": 1}
        made = {run: {"seeds": [0]}}
        about = {"changes": changes, "only": [run], "runs": made, "figures": [], "verdicts": counts, "seconds": 1.0}
        return {"name": "x", "scale": "laptop", "versions": {}, "seeds": [0], "rows": rows, "claims": claims, **about}

    parts = [part("a", 0.5, "held", []), part("b", 0.6, "within noise", ["seeds=[0]"])]
    found = join_records(parts)
    assert [each["metrics"]["accuracy"]["ours"]["mean"] for each in found["rows"]] == [0.5, 0.6]
    assert [each["verdict"] for each in found["claims"]] == ["held", "within noise"]
    assert found["verdicts"] == {"held": 1, "not held": 0, "within noise": 1, "not run": 0}
    assert (found["changes"], list(found["runs"]), found["seconds"]) == (["seeds=[0] of b"], ["a", "b"], 2.0)
    again = join_records([found, part("b", 0.7, "held", [])])
    assert [each["metrics"]["accuracy"]["ours"]["mean"] for each in again["rows"]] == [0.5, 0.7]
    assert (again["changes"], [each["verdict"] for each in again["claims"]]) == ([], ["held", "held"])
    assert again["command"] == "; ".join([*found["command"].split("; "), "python -m studies x --out OUT --only b"])
    with pytest.raises(SystemExit, match="the same table, scale and versions"):
        join_records([parts[0], parts[1] | {"scale": "paper"}])

"""Claims are evaluated on predictions written into a run directory; wrong files are refused."""

import json
from pathlib import Path

import pytest
import torch

from enfold.errors import EnfoldError
from enfold.metrics import accuracy, evaluate_calibrated, mean_member, nll, normalised_disagreement
from enfold.metrics.predictions import Predictions
from enfold.run import RunDirectory, parse_recipe
from studies.claims import evaluate_run, parse_claims, read_claims
from studies.tables import claim_rows

CLAIMS = """\
source: {paper: A. Author, table: table 1}
published:
  One: {accuracy: 0.90, nll: 0.5}
  Many: {accuracy: 0.95, nll: 0.3, diversity: 0.9}
  Worse: {accuracy: 0.96, diversity: 0.5}
rows: {One: mean member, Many: ensemble, Worse: low, Twin: twin, Absent: absent, Part: mean member of low}
claims:
  - {statement: many are better, metric: accuracy, first: Many, relation: above, second: One}
  - {statement: many pay less, metric: nll, first: Many, relation: below, second: One, source: the text}
  - {statement: "[b]worse is better[/b]", metric: accuracy, first: Worse, relation: above, second: Many}
  - {statement: a twin is worse, metric: ece, first: Twin, relation: above, second: Many}
  - {statement: an absent one is better, metric: accuracy, first: Absent, relation: above, second: Many}
  - {statement: worse differ less, metric: diversity, first: Worse, relation: below, second: Many}
  - {statement: a part pays more than the whole, metric: nll, first: Part, relation: above, second: Worse}
"""


def predictions(seed: int, signal: float, common: float = 0.0) -> Predictions:
    rng = torch.Generator().manual_seed(seed)
    labels = torch.arange(400) % 4
    shared, own = torch.randn(400, 4, generator=rng), torch.randn(3, 400, 4, generator=rng)
    logits = signal * torch.nn.functional.one_hot(labels, 4) + common * shared + own
    return Predictions.from_logits(logits, labels)


def make_run(path: Path, seeds: list[int]) -> RunDirectory:
    run = RunDirectory.create(path, parse_recipe(f"name: planted\nmembers: 3\nseeds: {seeds}\n"))
    for seed in seeds:
        cell = run if len(seeds) == 1 else run.of_seed(seed)
        planted = {
            "ensemble": predictions(seed, 2.0),
            "low": predictions(100 + seed, 1.0, common=1.5),
            "twin": predictions(200 + seed, 2.0),
        }
        for label, said in planted.items():
            cell.write_predictions(label, {"test": said})
    return run


@pytest.fixture
def claims_file(tmp_path: Path) -> Path:
    path = tmp_path / "some.claims.yaml"
    path.write_text(CLAIMS)
    return path


def test_every_claim_gets_its_verdict_and_its_numbers(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [0, 1, 2])
    found = evaluate_run(run, run.recipe(), parse_claims(CLAIMS), replicates=300)
    assert json.loads(json.dumps(found)) == found
    verdicts = [claim["verdict"] for claim in found["claims"]]
    assert verdicts == ["held", "held", "not held", "within noise", "not run", "held", "held"]
    assert found["verdicts"] == {"held": 4, "not held": 1, "within noise": 1, "not run": 1}
    assert found["seeds"] == [0, 1, 2]
    better, cheaper, _, _, absent, diverse, part = found["claims"]
    stored = [predictions(seed, 2.0) for seed in range(3)]
    assert better["first"]["published"] == 0.95
    assert better["first"]["ours"]["values"] == pytest.approx([accuracy(p) for p in stored])
    assert better["second"]["ours"]["values"] == pytest.approx([mean_member(accuracy, p) for p in stored])
    gaps = torch.tensor([nll(p) - mean_member(nll, p) for p in stored], dtype=torch.float64)
    assert cheaper["difference"]["values"] == pytest.approx(gaps.tolist())
    assert cheaper["difference"]["mean"] == pytest.approx(gaps.mean().item())
    assert cheaper["difference"]["lower"] < gaps.mean() < cheaper["difference"]["upper"] < 0
    assert (better["source"], cheaper["source"]) == ("table 1", "the text")
    assert absent["first"] == {"row": "Absent", "label": "absent", "published": None, "ours": None}
    assert absent["second"]["ours"]["std"] > 0
    assert absent["difference"] is None
    assert diverse["second"]["ours"]["values"] == pytest.approx([normalised_disagreement(p) for p in stored])
    low = [predictions(100 + seed, 1.0, common=1.5) for seed in range(3)]
    assert part["first"]["ours"]["values"] == pytest.approx([mean_member(nll, p) for p in low])


def test_calibrated_metrics_are_those_at_the_temperature_of_the_validation_data(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [0])
    text = CLAIMS[: CLAIMS.index("claims:")] + (
        "claims:\n"
        "  - {statement: many, metric: cnll, first: Many, relation: below, second: One}\n"
        "  - {statement: sure, metric: cece, first: Many, relation: below, second: Worse}\n"
    )
    unfit = evaluate_run(run, run.recipe(), parse_claims(text), replicates=20)
    assert [claim["verdict"] for claim in unfit["claims"]] == ["not run"] * 2  # no validation predictions
    test, validation = predictions(0, 2.0), predictions(300, 2.0)
    for label in ("ensemble", "low"):
        run.write_predictions(label, {"test": test, "validation": validation})
    claim = evaluate_run(run, run.recipe(), parse_claims(text), replicates=20)["claims"][0]
    each = [evaluate_calibrated(nll, test.member(k), validation.member(k)) for k in range(3)]
    assert claim["first"]["ours"]["mean"] == pytest.approx(evaluate_calibrated(nll, test, validation))
    assert claim["second"]["ours"]["mean"] == pytest.approx(sum(each) / 3)
    assert claim["verdict"] == "held"


def test_a_row_that_one_seed_lacks_is_not_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [0, 1])
    (run.of_seed(1).path / "predictions/low.safetensors").write_bytes(b"damaged")
    found = evaluate_run(run, run.recipe(), parse_claims(CLAIMS), replicates=50)
    lacking = [
        claim["verdict"] for claim in found["claims"] if "Worse" in (claim["first"]["row"], claim["second"]["row"])
    ]
    assert lacking == ["not run"] * 3
    assert found["claims"][0]["verdict"] == "held"


def test_a_step_of_some_seeds_is_compared_in_these_seeds(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [0, 1, 2])
    recipe = parse_recipe(
        "name: planted\nmembers: 3\nseeds: [0, 1, 2]\nsteps: [{method: average, label: low, seeds: [0, 2]}]"
    )
    (run.of_seed(1).path / "predictions/low.safetensors").unlink()
    claim = evaluate_run(run, recipe, parse_claims(CLAIMS), replicates=50)["claims"][2]
    assert claim["verdict"] == "not held"
    sides = [[predictions(100 + seed, 1.0, common=1.5) for seed in (0, 2)], [predictions(seed, 2.0) for seed in (0, 2)]]
    low, many = ([accuracy(each) for each in side] for side in sides)
    assert claim["first"]["ours"]["values"] == pytest.approx(low)
    assert len(claim["second"]["ours"]["values"]) == 3
    assert claim["difference"]["values"] == pytest.approx([a - b for a, b in zip(low, many, strict=True)])


def test_one_seed_uses_the_bootstrap_over_examples(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [5])
    found = evaluate_run(run, run.recipe(), parse_claims(CLAIMS), replicates=300)
    claim = found["claims"][0]
    assert claim["first"]["ours"]["std"] is None
    assert claim["difference"]["lower"] < claim["difference"]["mean"] < claim["difference"]["upper"]
    assert claim["verdict"] == "held"


def test_the_verb_prints_a_table_and_writes_json(studies, tmp_path: Path, claims_file: Path) -> None:
    run = make_run(tmp_path / "run", [0, 1])
    out = tmp_path / "results" / "verdicts.json"
    done = studies(claims_file, "--run", run.path, "--out", out)
    assert done.code == 0, done.err
    for word in (
        "many are better",
        "[b]worse",
        "95 / 90",
        "not held",
        "within noise",
        "not run",
        "2 seeds",
        "A. Author",
    ):
        assert word in done.out
    written = json.loads(out.read_text())
    assert written["command"] == f"python -m studies {claims_file} --run {run.path} --out {out}"
    assert {"date", "seeds", "versions", "claims"} < set(written)
    shown = json.loads(studies(claims_file, "--run", run.path, "--json").out)
    assert shown["claims"] == written["claims"]
    assert list(out.parent.iterdir()) == [out], "nothing temporary is left"


def test_cells_show_units_deviations_and_intervals() -> None:
    def side(published: float | None, ours: dict[str, object] | None) -> dict[str, object]:
        return {"published": published, "ours": ours}

    ours = {"mean": 0.9123, "std": 0.002}
    claim = {
        "statement": "it is",
        "metric": "accuracy",
        "first": side(0.966, ours),
        "second": side(None, {"mean": 0.9, "std": None}),
        "difference": {"mean": 0.0123, "lower": -0.001, "upper": 0.025},
        "verdict": "within noise",
    }
    absent = {**claim, "metric": "nll", "first": side(None, None), "difference": None, "verdict": "not run"}
    assert claim_rows({"claims": [claim, absent]}) == [
        ["it is", "accuracy (%)", "96.6 / -", "91.23 ± 0.20 / 90.00", "+1.23 [-0.10, +2.50]", "within noise"],
        ["it is", "NLL (nats)", "-", "- / 0.9000", "-", "not run"],
    ]


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (
            "first: Twin",
            "first: Twim",
            "claims.3: a row must be one of those under rows, got 'Twim', did you mean 'Twin'",
        ),
        ("  Worse: {acc", "  Elsewhere: {acc", "got 'Elsewhere': add it there"),
        ("metric: ece", "metric: eec", "claims.3: a metric must be one of .* got 'eec', did you mean 'ece'"),
        ("One: {accuracy", "One: {precision", "published.One: a metric must be one of"),
        ("0.90, nll", "90, nll", r"accuracy must be a fraction from 0 to 1, got 90: write 0\.9 for 90 %"),
        (
            "relation: above, second: One",
            "relation: below, second: One",
            "must agree with the published values.*0.95 and 0.9",
        ),
        ("One: {accuracy: 0.90", "One: {accuracy: 0.95", "must agree with the published values"),
        ("relation: above, second: One", "relation: over, second: One", r"'claims\.0\.relation' is wrong.*got 'over'"),
        ("Twin: twin", "Twin: ensemble", "two rows of the run, got 'ensemble' twice"),
        (
            "second: Many}\n  - {statement: a part",
            "second: One}\n  - {statement: a part",
            "diversity compares members.*'One'",
        ),
        ("statement: a twin is worse, ", "", r"'claims\.3\.statement' is missing: add it"),
        (
            "statement: a twin is worse, ",
            "statements: x, statement: y, ",
            "no key 'statements', did you mean 'statement'.*the keys are statement",
        ),
        ("source: {paper", "sources: {paper", "missing|no key"),
        (
            "source: {paper: A. Author, table",
            "source: {paper: A. Author, tables",
            "no key 'tables', did you mean 'table'",
        ),
        ("rows: {", "rows: [", "must be YAML"),
    ],
)
def test_wrong_claims_are_one_sentence(old: str, new: str, says: str) -> None:
    assert CLAIMS.count(old) >= 1
    with pytest.raises(EnfoldError, match=says) as caught:
        parse_claims(CLAIMS.replace(old, new, 1), "file.yaml")
    assert str(caught.value).startswith(("file.yaml", "'file.yaml'"))
    assert "\n" not in str(caught.value)


def test_invalid_files_of_claims(tmp_path: Path) -> None:
    with pytest.raises(EnfoldError, match="must be a mapping of keys to values, got list"):
        parse_claims("[1, 2]")
    with pytest.raises(EnfoldError, match=r"readable YAML file.*nowhere\.yaml.*check the path"):
        read_claims(tmp_path / "nowhere.yaml")


def test_a_claim_without_data_is_reported(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [0])
    run.write_predictions("twin", {"test": predictions(0, 2.0).mean()})
    text = CLAIMS.replace("metric: ece", "metric: disagreement")
    with pytest.raises(EnfoldError, match=r"the claim 'a twin is worse' cannot be evaluated: .* at least 2, got 1"):
        evaluate_run(run, run.recipe(), parse_claims(text), replicates=10)
    with pytest.raises(EnfoldError, match="replicates >= 1 and a level"):
        evaluate_run(run, run.recipe(), parse_claims(CLAIMS), replicates=0)


def test_an_invalid_command_writes_nothing(studies, tmp_path: Path, claims_file: Path) -> None:
    run = make_run(tmp_path / "run", [0])
    before = sorted(tmp_path.rglob("*"))
    for arguments, says in (
        ((claims_file, "--run", run.path, "--out", tmp_path / "out.txt"), ".json file"),
        ((claims_file, "--run", tmp_path, "--out", tmp_path / "out.json"), "run.json"),
        ((tmp_path / "none.yaml", "--run", run.path, "--out", tmp_path / "out.json"), "none.yaml"),
    ):
        done = studies(*arguments)
        assert (done.code, done.err.count("\n")) == (2, 1)
        assert says in done.err
    assert sorted(tmp_path.rglob("*")) == before

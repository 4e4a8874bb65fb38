"""`enfold evaluate --theory`: votes, Masegosa and Theorem 1 of every ensemble, on the terminal and the page."""

from __future__ import annotations

import json

import pytest

import enfold as library


@pytest.mark.slow
def test_the_theory_of_a_run_is_shown_stored_and_reported(enfold, recipe_file, tmp_path):
    text = recipe_file.read_text()
    steps = "steps: [average, {method: batch_ensemble, label: be, bias: shared_post}, {method: mimo, label: mimo}]\n"
    recipe_file.write_text(text[: text.index("steps:")] + steps)
    out = tmp_path / "out"
    assert enfold("run", recipe_file, out).code == 0
    plain = json.loads(enfold("evaluate", out, "--json").out)
    assert "theory" not in plain
    assert not (out / "theory.json").exists()
    done = enfold("evaluate", out, "--theory", "--json")
    assert done.code == 0, done.err
    rows = json.loads(done.out)["theory"]
    assert list(rows) == ["ensemble", "be", "mimo"]  # the average is one network
    members = library.load(out / "members" / "members.safetensors")
    data = library.data.load(str(tmp_path / "small.npz"), val_size=60)
    expected = library.metrics.theory_scores(library.predict(members, data.test))
    for name, value in expected.items():
        assert rows["ensemble"][name]["mean"] == pytest.approx(value, abs=1e-6), name
    assert rows["ensemble"]["rank_one_defect"]["mean"] > 0.01  # separate networks
    assert rows["be"]["rank_one_defect"]["mean"] < 1e-5  # Theorem 1
    assert "rank_one_defect" not in rows["mimo"]  # whose members are no networks
    assert json.loads((out / "theory.json").read_text())["rows"] == rows
    shown = enfold("evaluate", out, "--theory")
    assert "vote accuracy" in " ".join(shown.out.split())
    pytest.importorskip("jinja2")
    assert enfold("report", out).code == 0
    page = next(out.glob("*.html")).read_text()
    assert "Theory of averaging" in page
    assert "masegosa variance" in page


@pytest.mark.slow
def test_a_damaged_file_is_named(enfold, finished):
    pytest.importorskip("jinja2")
    (finished / "theory.json").write_text("{")
    refused = enfold("report", finished)
    assert refused.code == 2
    assert "theory.json" in refused.err

"""The model card, from the same results as the page."""

import dataclasses
from pathlib import Path

import pytest

from enfold.errors import EnfoldError
from enfold.report.card import render_card
from enfold.report.content import Difference
from enfold.run.collect import collect


def test_a_card_contains_description_scores_and_usage(stored_run: Path) -> None:
    content = collect(stored_run)
    card = render_card(content)
    nll = content.rows["kd"]["scores"]["nll"]
    for heading in ("Model", "Quality", "Cost", "Limits", "Usage", "Reproducibility"):
        assert f"\n## {heading}\n" in card
    assert "made by `kd` in a run with 3 members" in card
    assert "| test data | kd | control | mean member | ensemble |" in card
    assert f"| NLL (nats) | {nll['mean']:.4f} ± {nll['std']:.4f} |" in card
    assert 'enfold.load("seed-0/steps/kd.safetensors")' in card
    assert "MFLOPs per prediction | 2.00 | 2.00 | 2.00 | 6.00" in card
    assert "Corrupted inputs were not evaluated" in card
    assert f"torch {content.versions['torch']}".replace("+", "+") in card
    assert content.recipe.rstrip() in card


def test_another_model_can_be_selected_by_label(stored_run: Path) -> None:
    assert render_card(collect(stored_run, label="average")).startswith("# average, from the run small")
    with pytest.raises(EnfoldError, match="got 'averag', did you mean 'average'"):
        collect(stored_run, label="averag")


def test_a_network_no_better_than_its_control_is_a_limitation(stored_run: Path) -> None:
    content = collect(stored_run)
    assert "difference to its control is within noise" not in render_card(content)
    for lower in (-0.1, 0.05):
        worse = dataclasses.replace(content.headline, to_control=Difference(0.1, lower, 0.2))
        assert "difference to its control is within noise" in render_card(dataclasses.replace(content, headline=worse))


def test_user_text_is_escaped(stored_run: Path) -> None:
    content = collect(stored_run)
    rows = {**content.rows, "kd": {**content.rows["kd"], "warning": "<b>|`x`"}}
    evil = dataclasses.replace(
        content, name="<script>", recipe="a: b\n```\n<script>", summary={**content.summary, "rows": rows}
    )
    card = render_card(evil)
    assert "from the run \\<script\\>" in card
    assert "- \\<b\\>\\|\\`x\\`" in card
    assert "````yaml\na: b\n```\n<script>\n````" in card


def test_a_run_without_steps_has_no_card(stored_run: Path) -> None:
    with pytest.raises(EnfoldError, match="enfold distill"):
        render_card(dataclasses.replace(collect(stored_run), headline=None))


def test_a_better_control_is_recommended_in_one_sentence(stored_run: Path) -> None:
    content = collect(stored_run)
    assert "Use control" not in render_card(content)
    for lower, noise in ((-0.1, True), (0.05, False)):
        worse = dataclasses.replace(content.headline, to_control=Difference(0.1, lower, 0.2))
        card = render_card(dataclasses.replace(content, headline=worse))
        recommended = next(line for line in card.splitlines() if "Use control" in line)
        assert "seed-0/controls/control.safetensors" in recommended
        assert ("within noise" in recommended) == noise
        assert card.index(recommended) < card.index("## Model")

"""The tables in the docs are what results/*.json hold."""

import importlib.util
from pathlib import Path

import pytest

SPEC = importlib.util.spec_from_file_location(
    "make_result_tables", Path(__file__).parent.parent / "tools" / "make_result_tables.py"
)
maker = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(maker)


@pytest.mark.parametrize("page", maker.pages(), ids=lambda page: page.stem)
def test_a_page_shows_what_was_measured(page):
    text = page.read_text(encoding="utf-8")
    assert maker.filled(text) == text, "run python tools/make_result_tables.py"


def test_a_cell_has_its_spread_and_what_is_missing_is_a_dash():
    row = {"scores": {"nll": {"mean": 0.5, "std": 0.25, "values": [0.25, 0.75]}}, "cost": None}
    shown = [maker._cell(row, column) for column in (*maker.QUALITY, ("parameters", "cost", "parameters", 1, 0))]
    assert shown == ["-", "0.500 ± 0.250", "-", "-"]

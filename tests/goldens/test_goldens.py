"""What every method computes is what it computed when the goldens were recorded."""

from __future__ import annotations

from pathlib import Path

import pytest

from . import adapter
from .cases import Case, cases
from .golden import compare, read, summarize

CASES = cases()
# Training amplifies rounding; with 2 threads instead of 1, the members' NLL moved by 1.2 %.
DEMO_TOLERANCE = 0.05
DEMO_WIDER = {"ece": 0.5, "gain_recovered": 0.5, "temperature": 0.15}
AREAS = sorted({case.name.partition("/")[0] for case in CASES})


@pytest.mark.parametrize("area", AREAS)
def test_recorded_names_equal_computed_names(area: str):
    assert sorted(read(area)) == sorted(
        case.name.partition("/")[2] for case in CASES if case.name.startswith(f"{area}/")
    )


def is_slow(case: Case) -> bool:
    """Return whether a case runs with `make slow` only: long ones, and the third network, a transformer."""
    return case.slow or case.name.endswith("/vit")


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.name, marks=[pytest.mark.slow] * is_slow(case)) for case in CASES]
)
def test_golden(case: Case):
    area, _, name = case.name.partition("/")
    wrong = [each for each in compare(read(area)[name], case.run()) if not each.relative <= case.tolerance]
    assert not wrong, "\n".join(map(str, wrong[:12]))


def demo_tolerance(where: str) -> float:
    return next((wider for name, wider in DEMO_WIDER.items() if f"/{name}[" in where), DEMO_TOLERANCE)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_demo_reproduces_its_table(tmp_path: Path):
    found = summarize(adapter.demo(tmp_path / "demo"))
    wrong = [each for each in compare(read("demo")["table"], found) if not each.relative <= demo_tolerance(each.where)]
    assert not wrong, "\n".join(map(str, wrong))

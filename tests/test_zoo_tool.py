"""The compatibility tool: every kind of failure is an outcome."""

import json
import os
import time

import pytest
import torch
from torch import nn

from enfold import EnfoldError
from tools.zoo import runner
from tools.zoo.case import Case, Wrong, difference
from tools.zoo.checks import CHECKS
from tools.zoo.entry import Entry, vectors
from tools.zoo.page import PAGE, page


def network(_: int) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 5))


ENTRY = Entry("a network", "by hand", network, vectors(4))


def refuse(_: Case) -> None:
    raise EnfoldError("members must be alike, got others: leave them out")


def be_wrong(case: Case) -> None:
    case.compare(case.references + 1, case.references, "outputs")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of a process that is forked while threads are there
def test_every_failure_is_an_outcome_and_the_other_checks_run(monkeypatch):
    checks = {
        "fine": lambda case: case.compare(case.references, case.references, "outputs"),
        "refused": refuse,
        "wrong": be_wrong,
        "crash": lambda case: [][0],
        "abort": lambda case: os._exit(7),
        "slow": lambda case: time.sleep(60),
        "after": lambda case: None,
    }
    monkeypatch.setattr(runner, "CHECKS", checks)
    found = {name: result["outcome"] for name, result in runner.tried(ENTRY, list(checks), limit=4.0).items()}
    assert found == {
        "fine": "ok",
        "refused": "refused",
        "wrong": "wrong",
        "crash": "crash",
        "abort": "abort",
        "slow": "slow",
        "after": "ok",
    }


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_missing_package_is_one_outcome(monkeypatch):
    def missing(_: int) -> nn.Module:
        raise ModuleNotFoundError("No module named 'elsewhere'")

    found = runner.tried(Entry("missing", "elsewhere", missing, vectors(4)), list(CHECKS))
    assert {name: result["outcome"] for name, result in found.items()} == {"network": "missing"}


def test_members_are_reproducible_and_dropout_is_detected():
    case = Case(ENTRY)
    first, again, other = (case.build(index).state_dict() for index in (0, 0, 1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["0.weight"], other["0.weight"])
    assert case.drawing(calm=False)
    assert not case.drawing()


def test_a_difference_of_shapes_is_wrong():
    with pytest.raises(Wrong, match="shape"):
        difference(torch.zeros(2, 3), torch.zeros(3, 3))


def test_the_page_shows_what_was_found():
    record = json.loads((PAGE.parents[1] / "results" / "zoo.json").read_text(encoding="utf-8"))
    assert PAGE.read_text(encoding="utf-8") == page(record), "run python -m tools.zoo"

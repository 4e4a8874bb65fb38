"""The table of accuracies by severity of corruption."""

import json

import pytest

from enfold.data.corruptions import KINDS
from studies.ood.severity import RESULT, find_increases, severity_table, spread_over_seeds


@pytest.mark.records
def test_the_record_is_consistent():
    record = json.loads(RESULT.read_text(encoding="utf-8"))
    assert [*record["accuracy"]] == [*KINDS]
    assert record["rises"] == find_increases(record["accuracy"])


def test_an_arrow_marks_an_increase_in_every_seed():
    values = [[0.5, 0.75], [0.5, 0.5], [0.75, 0.75], [0.5, 0.5], [0.25, 0.75], [0.0, 0.0]]
    accuracies = {"fog": {str(severity): spread_over_seeds(each) for severity, each in enumerate(values)}}
    increases = find_increases(accuracies)
    steps = {step: found["values"] for step, found in increases["fog"].items()}
    assert steps == {"1 to 2": [0.25, 0.25], "3 to 4": [-0.25, 0.25]}
    row = severity_table({"accuracy": accuracies, "rises": increases}).splitlines()[2]
    assert row == "| fog | 62.5 ± 17.7 | 50.0 ± 0.0 | 75.0 ± 0.0 ↑ | 50.0 ± 0.0 | 50.0 ± 35.4 | 0.0 ± 0.0 |"

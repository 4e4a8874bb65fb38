"""The report begins with what to ship: the network, its control, or a member."""

import dataclasses
from pathlib import Path

import pytest

from enfold.report.content import Difference
from enfold.report.headline import summarize_run
from enfold.run.collect import collect


@pytest.mark.parametrize(
    ("lower", "upper", "begin"),
    [
        (-0.3, -0.1, "Ship {label}. "),
        (-0.1, 0.2, "Ship {label} or {control}: their difference is within noise. "),
        (0.1, 0.3, "Train one member longer: {control} is better than {label}. "),
        (0.0, 0.0, "Train one member longer: {label} chose the same network as {control}. "),
    ],
)
def test_a_network_is_compared_with_its_control(stored_run: Path, lower: float, upper: float, begin: str) -> None:
    content = collect(stored_run)
    headline = dataclasses.replace(content.headline, to_control=Difference((lower + upper) / 2, lower, upper))
    sentence = summarize_run(dataclasses.replace(content, headline=headline)).sentence
    assert sentence.startswith(begin.format(label=headline.label, control=headline.control))


@pytest.mark.parametrize(
    ("change", "of_control", "begin"),
    [
        ((-0.3, -0.1), (0.1, 0.2), "Ship {label}. "),
        ((0.1, 0.3), (0.1, 0.2), "Ship a member; {label} is worse than one. "),
        ((0.1, 0.3), (-0.2, -0.1), "Train one member longer: control is better than a member; "),
    ],
)
def test_a_network_without_control_is_compared_with_a_member(
    stored_run: Path, change: tuple[float, float], of_control: tuple[float, float], begin: str
) -> None:
    content = collect(stored_run)
    headline = dataclasses.replace(content.headline, to_control=None, control=None)
    differences = {
        label: {content.criterion: Difference(sum(bounds) / 2, *bounds)}
        for label, bounds in ((headline.label, change), ("control", of_control))
    }
    assert "control" in content.rows
    found = dataclasses.replace(content, headline=headline, differences={**content.differences, **differences})
    assert summarize_run(found).sentence.startswith(begin.format(label=headline.label))

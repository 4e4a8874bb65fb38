"""The mechanism figure is drawn from stored measurements."""

from __future__ import annotations

import pytest

from enfold.errors import EnfoldError
from studies.latentbe.figure import draw, mechanism_figure

MEASURES = {"cross_entropy", "kl", "disagreement"}


def stored(teachers: tuple[float, float], student: tuple[float, float] | None = None) -> dict[str, object]:
    def both(values: tuple[float, float]) -> dict[str, dict[str, float]]:
        return {
            where: dict.fromkeys(MEASURES, value) for where, value in zip(("clean", "perturbed"), values, strict=True)
        }

    return {"teachers": both(teachers)} | ({} if student is None else {"student": both(student)})


RUNS = {
    "Gaussian": (stored((0.2, 0.21), (0.01, 0.01)), stored((0.2, 0.21), (0.1, 0.11))),
    "ODS": (stored((0.2, 0.3)), stored((0.2, 0.3))),
    "TDiv-SDiv": (stored((0.2, 0.5), (0.01, 0.02)), stored((0.2, 0.5), (0.3, 0.4))),
}


@pytest.mark.parametrize(("measure", "scale"), [("kl", 1), ("disagreement", 100)])
def test_content_of_the_figure(measure, scale):
    left, right = draw(RUNS, measure).axes
    ends = {
        axes: [
            (line.get_gid(), float(line.get_xdata()[0]), float(line.get_ydata()[0]))
            for line in axes.lines
            if str(line.get_gid()).startswith("end:")
        ]
        for axes in (left, right)
    }
    assert [label.get_text() for label in left.get_yticklabels()] == list(RUNS)
    assert [(x, y) for _, x, y in ends[left]] == [(scale * value, row) for row, value in enumerate((0.21, 0.3, 0.5))]
    assert [(gid, x) for gid, x, _ in ends[right]] == [
        ("end:students, clean inputs", scale * 0.1),
        ("end:students, perturbed inputs", scale * 0.11),
        ("end:students, clean inputs", scale * 0.3),
        ("end:students, perturbed inputs", scale * 0.4),
    ]
    assert [text.get_text() for text in right.texts] == ["one network"]


def test_the_figure_is_written(tmp_path):
    written = mechanism_figure({"ODS": RUNS["ODS"]}, tmp_path, name="teachers")
    assert [path.name for path in written] == ["teachers.svg", "teachers.png"]
    assert written[1].read_bytes().startswith(b"\x89PNG")
    assert b"Teachers: effect of the perturbation" in written[0].read_bytes()
    assert b"Students" not in written[0].read_bytes()


def test_invalid_figures_are_refused(tmp_path):
    with pytest.raises(EnfoldError, match="a measure must be one of kl, cross_entropy, disagreement, got 'js': choose"):
        mechanism_figure(RUNS, tmp_path, "js")
    with pytest.raises(EnfoldError, match="needs at least one measured perturbation, got none: pass"):
        mechanism_figure({}, tmp_path)
    assert not list(tmp_path.iterdir())

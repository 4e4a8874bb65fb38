"""The figure of a perturbation's effect: disagreement of teachers and of students on clean and on perturbed inputs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from enfold.errors import EnfoldError
from enfold.report.figure import FAINT, INK, draw_arrow, legend_above, write_figure

Measure = Literal["kl", "cross_entropy", "disagreement"]
UNITS = {
    "kl": "KL of two members (nats)",
    "cross_entropy": "cross-entropy of two members (nats)",
    "disagreement": "examples with different classes (%)",
}
# Colours that remain distinguishable with colour vision deficiency (M. Okabe and K. Ito, 2008).
TEACHERS, STUDENTS = "#0072B2", "#009E73"
PLACES = {"clean": 0.14, "perturbed": -0.14}  # heights in a row

Stored = Mapping[str, Any]  # a result of `studies.latentbe.mechanism`


def mechanism_figure(
    runs: Mapping[str, tuple[Stored, Stored]], folder: Path, measure: Measure = "kl", name: str = "mechanism"
) -> list[Path]:
    """Draw the measurements before and after training with each perturbation, as SVG and PNG.

    Args:
        runs: Name of a row: measurements (before, after) training.
        folder: Where the files are written.
        measure: kl, cross_entropy or disagreement.
        name: Stem of the files.

    Returns:
        The files. The left panel shows the effect of the perturbation on the teachers; the right panel shows the
        students before and after training, on clean and on perturbed inputs.
    """
    if measure not in UNITS:
        raise EnfoldError(f"a measure must be one of {', '.join(UNITS)}, got {measure!r}: choose one")
    if not runs:
        raise EnfoldError("a figure needs at least one measured perturbation, got none: pass {name: (before, after)}")
    return write_figure(lambda: draw(runs, measure), folder, name, "the mechanism figure")


def draw(runs: Mapping[str, tuple[Stored, Stored]], measure: Measure) -> Any:
    """Return the figure without writing it."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    several = any("student" in found for pair in runs.values() for found in pair)
    figure = Figure(figsize=(8 if several else 4.5, 1.9 + 0.55 * len(runs)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2 if several else 1, sharey=True, squeeze=False)[0]
    for row, (before, after) in enumerate(runs.values()):
        teachers = {place: _value(before, "teachers", place, measure) for place in PLACES}
        draw_arrow(panels[0], row, teachers["clean"], teachers["perturbed"], TEACHERS, "teachers, perturbed inputs")
        for axes in panels[1:]:
            _students(axes, row, before, after, measure)
    _label(panels, list(runs), measure)
    return figure


def _value(found: Stored, who: str, place: str, measure: str) -> float:
    value = float(found[who][place][measure])
    return 100 * value if measure == "disagreement" else value


def _students(axes: Any, row: int, before: Stored, after: Stored, measure: str) -> None:
    if "student" not in before or "student" not in after:
        axes.text(0.02, row, "one network", transform=axes.get_yaxis_transform(), va="center", size=9, color=FAINT)
        return
    for place, height in PLACES.items():
        start, end = (_value(found, "student", place, measure) for found in (before, after))
        draw_arrow(axes, row - height, start, end, STUDENTS, f"students, {place} inputs", hollow=place == "clean")


def _label(panels: Any, names: list[str], measure: Measure) -> None:
    from matplotlib.ticker import MaxNLocator

    panels[0].set_yticks(range(len(names)), names, color=INK)
    panels[0].set_ylim(len(names) - 0.5, -0.5)
    titles = ("Teachers: effect of the perturbation", "Students: effect of training")
    for axes, title, handles in zip(panels, titles, _legends(), strict=False):
        axes.set_title(title, loc="left", size=11, pad=24)
        axes.margins(x=0.1)
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.tick_params(axis="y", length=0)
        axes.grid(visible=False, axis="y")
        axes.set_xlabel(UNITS[measure])
        legend_above(axes, handles, ncols=len(handles), columnspacing=1.2, fontsize=9)


def _legends() -> tuple[list[Any], list[Any]]:
    from matplotlib.lines import Line2D

    def bar(colour: str, label: str) -> Line2D:
        return Line2D([], [], ls="", marker="|", color=colour, ms=11, mew=2, label=label)

    def circle(colour: str, label: str, face: str) -> Line2D:
        return Line2D([], [], ls="", marker="o", color=colour, ms=7.5, mew=1.6, mfc=face, label=label)

    teachers = [bar(TEACHERS, "clean inputs"), circle(TEACHERS, "perturbed", TEACHERS)]
    students = [
        bar(STUDENTS, "before"),
        circle(STUDENTS, "after, clean inputs", "white"),
        circle(STUDENTS, "after, perturbed", STUDENTS),
    ]
    return teachers, students

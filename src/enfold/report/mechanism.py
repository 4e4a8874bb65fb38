"""The figure of a mechanism: perturbed inputs make teachers differ, and training carries that over to students."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from enfold.errors import EnfoldError
from enfold.report.figure import FAINT, INK, legend_above, write_figure

Measure = Literal["kl", "cross_entropy", "disagreement"]
UNITS = {
    "kl": "KL of two members (nats)",
    "cross_entropy": "cross-entropy of two members (nats)",
    "disagreement": "examples with different classes (%)",
}
# Two colours that people with any colour vision tell apart (M. Okabe and K. Ito, 2008); filled or not does without.
TEACHERS, STUDENTS = "#0072B2", "#009E73"
PLACES = {"clean": 0.14, "perturbed": -0.14}  # heights in a row

Stored = Mapping[str, Any]  # the result of `enfold.analysis.mechanism.measure_mechanism`


def mechanism_figure(
    runs: Mapping[str, tuple[Stored, Stored]], folder: Path, measure: Measure = "kl", name: str = "mechanism"
) -> list[Path]:
    """Draw what was measured before and after a training with each perturbation, as SVG and PNG.

    `runs` holds (before, after) by the name that a row shall have. On the left, what a move does to the teachers; on
    the right, how far the students were and came to be apart, on clean and on perturbed inputs.
    """
    if measure not in UNITS:
        raise EnfoldError(f"a measure must be one of {', '.join(UNITS)}, got {measure!r}: choose one")
    if not runs:
        raise EnfoldError("a figure needs at least one measured perturbation, got none: pass {name: (before, after)}")
    return write_figure(lambda: draw(runs, measure), folder, name, "the figure of a mechanism")


def draw(runs: Mapping[str, tuple[Stored, Stored]], measure: Measure) -> Any:
    """The figure, not yet written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    several = any("student" in found for pair in runs.values() for found in pair)
    figure = Figure(figsize=(8 if several else 4.5, 1.9 + 0.55 * len(runs)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2 if several else 1, sharey=True, squeeze=False)[0]
    for row, (before, after) in enumerate(runs.values()):
        teachers = {place: _value(before, "teachers", place, measure) for place in PLACES}
        arrow(panels[0], row, teachers["clean"], teachers["perturbed"], TEACHERS, "teachers, perturbed inputs")
        for axes in panels[1:]:
            _students(axes, row, before, after, measure)
    _words(panels, list(runs), measure)
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
        arrow(axes, row - height, start, end, STUDENTS, f"students, {place} inputs", hollow=place == "clean")


def arrow(axes: Any, height: float, start: float, end: float, colour: str, what: str, hollow: bool = False) -> None:
    """From a short bar, where it was, to a circle, where it came to be."""
    axes.plot([start, end], [height, height], color=colour, lw=1.6, zorder=2)
    axes.plot([start], [height], "|", color=colour, ms=11, mew=2, zorder=3)
    axes.plot(
        [end],
        [height],
        "o",
        ms=7.5,
        mew=1.6,
        mec=colour,
        mfc="white" if hollow else colour,
        zorder=4,
        gid=f"end:{what}",
    )


def _words(panels: Any, names: list[str], measure: Measure) -> None:
    from matplotlib.ticker import MaxNLocator

    panels[0].set_yticks(range(len(names)), names, color=INK)
    panels[0].set_ylim(len(names) - 0.5, -0.5)
    titles = ("Teachers: where inputs move to", "Students: what training does")
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

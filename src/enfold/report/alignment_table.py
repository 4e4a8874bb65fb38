"""A study of alignment as tables that a person reads in a terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from enfold.report.alignment_groups import describe_omitted, kinds_of, layer_name, select_kinds

if TYPE_CHECKING:
    from rich.table import Table

SOFTNESSES = 4  # columns of a sweep
Part = Any  # a part of a study as JSON holds it
Cells = tuple[str, Sequence[str], list[list[str]]]  # title, header, rows


def alignment_tables(found: Mapping[str, Part]) -> list[Table]:
    """Return one table for each section, in the order in which they were computed."""
    from rich.table import Table

    tables = []
    for title, header, rows in study_cells(found):
        table = Table(title=title, title_justify="left")
        for index, name in enumerate(header):
            table.add_column(name, justify="right" if index else "left", no_wrap=index == 0)
        for row in rows:
            table.add_row(*row)
        tables.append(table)
    return tables


def study_cells(found: Mapping[str, Part]) -> list[Cells]:
    """Return title, header with units, and cells of each section that exists."""
    return [cells(found[name]) for name, cells in CELLS.items() if name in found]


def _change(value: Mapping[str, float], digits: int) -> str:
    return f"{value['before']:.{digits}f} → {value['after']:.{digits}f}"


def _percent(value: float | None) -> str:
    return "singular" if value is None else f"{100 * value:.2f}"


def _rows(rows: Sequence[Mapping[str, Any]]) -> Cells:
    header = ("layer", "rows", "correlation", "distance", "length", "deviation of a weight")
    cells = [
        [
            layer_name(row["layer"]) + ("" if row["hidden"] else " (output)"),
            str(row["units"]),
            *(_change(row[what], 3) for what in ("correlation", "distance", "length")),
            _change(row["deviation"], 4),
        ]
        for row in rows
    ]
    return "rows of weights before → after alignment", header, cells


def _line(modes: Mapping[str, Mapping[str, Any]]) -> Cells:
    header = (
        "line between members 1 and 2",
        "statistics",
        "accuracy, worst (%)",
        "middle (%)",
        "best (%)",
        "barrier, error (points)",
        "barrier, loss (nats)",
        "area, loss (nats)",
    )
    cells = []
    for mode, lines in modes.items():
        for name, line in lines.items():
            accuracy, barrier = line["accuracy"], line["barrier"]
            cells.append(
                [
                    name,
                    mode,
                    *(_percent(value) for value in (min(accuracy), accuracy[len(accuracy) // 2], max(accuracy))),
                    _percent(barrier["error"]["height"]),
                    f"{barrier['loss']['height']:.4f}",
                    f"{barrier['loss']['area']:+.4f}",
                ]
            )
    return "interpolation, on test data", header, cells


def _matrices(groups: Sequence[Mapping[str, Any]]) -> Cells:
    def spread(values: Sequence[float], digits: int) -> str:
        return ", ".join(f"{value:.{digits}f}" for value in values)

    header = ("units", "number", "softness, 0 to 1", "condition", "one to one (%)")
    cells = [
        [
            layer_name(group["group"]),
            str(group["units"]),
            spread(group["softness"], 3),
            ", ".join(f"{value:.1e}" for value in group["condition"]),
            spread([100 * value for value in group["one_to_one"]], 1),
        ]
        for group in groups
    ]
    return "soft permutations, one value for each aligned member", header, cells


def _averages(averages: Mapping[str, Mapping[str, Any]]) -> Cells:
    counts = sorted({int(count) for rows in averages.values() for count in rows})
    header = ("average of weights", *(f"{count} members" if count > 1 else "mean member" for count in counts))
    cells = [
        [name, *(_percent(rows[str(count)]["accuracy"]) if str(count) in rows else "-" for count in counts)]
        for name, rows in averages.items()
    ]
    return "accuracy on test data (%)", header, cells


def _sweep(points: Sequence[Mapping[str, Any]]) -> Cells:
    known: Mapping[str, float] = next((point["softness"] for point in points if point["softness"]), {})
    kinds = kinds_of(dict.fromkeys(known, 0))
    shown = select_kinds(kinds, SOFTNESSES)
    header = ("temperature", "accuracy (%)", "NLL (nats)", *(f"softness, {kind.name}" for kind in shown))
    cells = []
    for point in points:
        if point["failed"] is not None:
            cells.append([f"{point['temperature']:g}", "singular", *["-"] * (len(header) - 2)])
            continue
        soft = [f"{kind.mean(point['softness']):.3f}" for kind in shown]
        cells.append([f"{point['temperature']:g}", _percent(point["accuracy"]), f"{point['nll']:.4f}", *soft])
    less = describe_omitted(kinds, shown, "sweep.json")
    return "permAVG by temperature, on test data" + (f"; softness {less}" if less else ""), header, cells


def _planted_cells(points: Sequence[Mapping[str, Any]]) -> Cells:
    names = list(points[0]["recovered"])
    cells = [[f"{point['noise']:g}", *(_percent(point["recovered"][name]) for name in names)] for point in points]
    title = f"units of a planted permutation that are found (%); chance {_percent(points[0]['chance'])}"
    return title, ("noise (deviations of the weights)", *names), cells


def _different(pairs: Sequence[Mapping[str, Any]]) -> Cells:
    header = ("task", "member 1", "member 2", "naive", "weight matching", "permAVG", "correlation, first layer")
    cells = [
        [
            f"different {pair['difference']}",
            *(_percent(value) for value in pair["members"]),
            *(_percent(pair[key]["accuracy"]) for key in ("naive", "matched", "learned")),
            _change(pair["rows"][0]["correlation"], 3),
        ]
        for pair in pairs
    ]
    return "members trained on different tasks: accuracy on test data (%)", header, cells


CELLS: dict[str, Callable[[Any], Cells]] = {
    "rows": _rows,
    "line": _line,
    "matrices": _matrices,
    "averages": _averages,
    "sweep": _sweep,
    "planted": _planted_cells,
    "different": _different,
}

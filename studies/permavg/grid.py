"""Tables of permAVG: every number of members and layers, on two data sets, with two kinds of members."""

from __future__ import annotations

from collections.abc import Iterator

from studies.markdown import METRICS, Content, format_metric, make_table
from studies.tables import MARKS

NAME = "permavg-table"  # rows for every number of members, in runs named DATA-LAYERS or DATA-LAYERS-brief
SIZES = range(2, 7)
METHODS = {  # label for M members: heading
    "ensemble of {}": "ensemble",
    "mean member of ensemble of {}": "one member",
    "perm-avg-{}": "permAVG",
    "perm-avg-best-{}": "permAVG, tuned",
    "kd-{}": "student",
    "average-tuned-{}": "plain average, fine-tuned",
    "matched-distilled-{}": "matched average, distilled",
}
ONE_SEED = "¹"
KINDS = {"": "converged members", "-brief": "briefly trained members"}
COMPARED = {  # permAVG of two and of six members, and its controls
    "mean member of ensemble of 6": "one member",
    "control": "one member, trained further",
    "ensemble of 6": "ensemble of 6",
    "perm-avg-2": "permAVG as published, 2",
    "perm-avg-6": "permAVG as published, 6",
    "perm-avg-best-2": "permAVG tuned, 2",
    "perm-avg-best-6": "permAVG tuned, 6",
    "kd-6": "student of 6",
    "matched-distilled-6": "matched average of 6, distilled",
    "average-tuned-6": "plain average of 6, fine-tuned",
}


def grid_rows(content: Content) -> str:
    """Return a table for each data set, kind of members and metric: layers and methods by number of members."""
    tables = []
    for data, kind, runs in _grids(content):
        for metric in ("accuracy", "nll"):
            heading = METRICS[metric][0]
            values = {row["label"]: row["metrics"].get(metric) for row in content["rows"]}
            lines = [["layers", f"{heading}: ours (published)", *(f"M = {size}" for size in SIZES)]]
            for run, layers in runs.items():
                for pattern, method in METHODS.items():
                    texts = [format_metric(values.get(f"{run}/{pattern.format(size)}"), metric) for size in SIZES]
                    if any(text != "-" for text in texts):
                        lines.append([layers, method, *texts])
            if len(lines) == 1:
                continue
            controls = [f"{n} layers {format_metric(values.get(f'{run}/control'), metric)}" for run, n in runs.items()]
            seeds = [
                f"{n} layers {len(content['runs'][run].get('seeds', content['seeds']))}" for run, n in runs.items()
            ]
            tables.append(
                f"**{data}, {KINDS[kind]}**; seeds: {', '.join(seeds)}; {heading} of one member trained further: "
                f"{', '.join(controls)}\n\n"
                f"{make_table(lines, left=2)}"
            )
    return "\n".join(tables)


def grid_claims(content: Content) -> str:
    """Return one line for each statement, with a mark for each run it is about."""
    marks_of: dict[str, dict[str, str]] = {}
    for claim in content["claims"]:
        run, _, statement = claim["statement"].partition(": ")
        one_seed = len((claim.get("difference") or {}).get("values", [])) == 1
        marks_of.setdefault(statement, {})[run] = MARKS[claim["verdict"]] + ONE_SEED * one_seed
    runs = list(content["runs"])
    lines = [["", *runs], *([text, *(marks.get(run, "") for run in runs)] for text, marks in marks_of.items())]
    legend = ", ".join(f"{mark} {verdict}" for verdict, mark in MARKS.items())
    once = f"{ONE_SEED} one seed: the interval covers test examples only"
    return f"{legend}; {once}; the JSON file has differences and intervals.\n\n{make_table(lines)}"


def _grids(content: Content) -> Iterator[tuple[str, str, dict[str, str]]]:
    """Return data set, kind of members, and their runs with the number of layers of each."""
    grids: dict[tuple[str, str], dict[str, str]] = {}
    for run in content["runs"]:
        kind = "-brief" if run.endswith("-brief") else ""
        data, _, layers = run.removesuffix(kind).rpartition("-")
        grids.setdefault((data, kind), {})[run] = layers
    for (data, kind), runs in grids.items():
        yield data, kind, runs


def scaling_table(content: Content) -> str:
    """Return accuracy and NLL of permAVG of two and of six members, a line for each data set and number of layers."""
    metrics = {row["label"]: row["metrics"] for row in content["rows"]}
    tables = []
    for kind, members in KINDS.items():
        lines = [[f"accuracy (%) / NLL, {members}", *COMPARED.values()]]
        for data, own, runs in _grids(content):
            if own == kind:
                lines += [
                    [f"{data}, {layers} layers", *(_pair(metrics.get(f"{run}/{label}")) for label in COMPARED)]
                    for run, layers in runs.items()
                ]
        if any("/" in text for line in lines[1:] for text in line):
            tables.append(make_table(lines))
    return "\n".join(tables)


def _pair(metrics: Content | None) -> str:
    values = [(metrics or {}).get(metric) for metric in ("accuracy", "nll")]
    means = [each["ours"]["mean"] for each in values if each and each["ours"]]
    return f"{100 * means[0]:.2f} / {means[1]:.3f}" if len(means) == len(values) else "-"

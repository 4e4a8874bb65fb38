"""Fill the tables of the pages from stored results: python -m studies.pages

A page in docs/ or studies/ marks where a table belongs:

<!-- overview studies -->             all tables and figures with the number of claims by verdict
<!-- gains settings -->               the gain that one network recovers, in all settings
<!-- claims regimes -->               the papers' claims by verdict, each in its paper's regime
<!-- items items -->                  all items of the five works with their results
<!-- results permavg-table -->        a study: notes, rows beside the published values, claims
<!-- rows cifar10-ensembles -->       the models of a run
<!-- choices cifar10-ensembles -->    the rows of a run between which a guide helps to choose
<!-- ood cifar10-ood -->              the models of a run on corrupted and on out-of-distribution data
<!-- recovered compress -->          the gain that one network recovers in each setting of the study of compress
<!-- clipping | merging | scaling | third-party | speed | severities | coverage NAME -->   single measurements

A mark ends with <!-- end -->. NAME.json is a file in results/ or in studies/PAPER/results/.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from enfold.errors import EnfoldError
from studies.choices import choices_table
from studies.compress.tables import compress_table, recovered_table
from studies.coverage import coverage_table
from studies.definition import load_definition, results_file, stored_names
from studies.finetuned.merges import finetuned_table
from studies.gains import gain_cells, gain_columns
from studies.items import items_table
from studies.markdown import METRICS, Content, format_metric, format_spread, make_table, metric_format
from studies.measured import clipping_table, merging_table, speed_table, third_party_table
from studies.north_star import count_judged, gain_table
from studies.ood.severity import severity_table
from studies.permavg import grid
from studies.rows import COLUMNS, OOD_COLUMNS, OOD_SCORES, OOD_TITLES, RUN_TITLES, TITLES, Column
from studies.tables import MARKS, count_published, count_seeds, count_verdicts, list_notes

ROOT = Path(__file__).parent.parent
COSTS: dict[str, Callable[[Content], float]] = {  # relative to one network
    "parameters (x)": lambda ratios: float(ratios["parameters"]),
    "operations (x)": lambda ratios: float(ratios["flops"]),
    "time, batch 128 (x)": lambda ratios: float(ratios["latency"]["128"]),
}
NOT_INTERPOLATING = {"distillation", "ensembles"}  # recipes
MARK = re.compile(r"(<!-- (\w+) ([\w.-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def rows_table(name: str, content: Content) -> str:
    """Return one line for each model, without ensembles of the first members."""
    columns = COLUMNS[name]
    titles = TITLES | RUN_TITLES.get(name, {})
    lines = [["", *(column.heading for column in columns)]]
    for label, row in content["rows"].items():
        if not label.startswith("ensemble of "):
            lines.append([titles[label], *(format_value(row, column) for column in columns)])
    return make_table(lines)


def ood_tables(content: Content) -> str:
    """Return clean and corrupted scores, then the AUROC of each out-of-distribution set, one line for each model."""
    titles = TITLES | OOD_TITLES
    rows = {titles.get(label, label): row for label, row in content["rows"].items() if "ood" in row}
    quality = [["", *(column.heading for column in OOD_COLUMNS)]]
    quality += [[name, *(format_value(row, column) for column in OOD_COLUMNS)] for name, row in rows.items()]
    sets = list(next(iter(rows.values()))["ood"])
    detection = [[f"AUROC (%) by {' / '.join(OOD_SCORES.values())}", *sets]]
    detection += [[name, *(_auroc(row["ood"][each]) for each in sets)] for name, row in rows.items()]
    return f"{make_table(quality)}\n{make_table(detection)}"


def _auroc(content: Content) -> str:
    scores = (content["scores"].get(score) for score in OOD_SCORES)
    return " / ".join(format_spread(each and each["auroc"], 100, 1) for each in scores)


def format_value(row: Content, column: Column) -> str:
    """Return the value of a model in one column."""
    values = row if not column.group else row.get(column.group) or {}
    value = values.get(column.key)
    if value is None or isinstance(value, Mapping):
        return format_spread(value, column.scale, column.digits)
    return f"{column.scale * value:,.{column.digits}f}"


def study_section(content: Content) -> str:
    """Return the notes, the rows and the claims of a study."""
    source = content["source"]
    is_grid = content["name"] == grid.NAME
    claims = grid.grid_claims(content) if is_grid else claim_lines(content)
    counts = f"{len(content['claims'])} claims: {count_verdicts(content)}. {count_published(content)}".rstrip(". ")
    summary = f"<details><summary>{counts}</summary>\n\n"
    parts = [
        f"{content['title']} ({source['paper']}; {source['table']}). {' '.join(list_notes(content))}\n",
        grid.grid_rows(content) if is_grid else study_rows(content),
        f"{summary}{claims}\n</details>\n",
    ]
    return "\n" + "\n".join(parts)


def claim_lines(content: Content) -> str:
    """Return one line for each claim, with the interval of the difference."""
    lines = [["claim", "metric", "published", "ours", "difference", "verdict"]]
    for claim in content["claims"]:
        metric, scale, coarse, fine = METRICS.get(claim["metric"], (claim["metric"], 1, 3, 3))
        sides = (claim["first"], claim["second"])
        published = [_number(side["published"], scale, coarse) for side in sides]
        ours = [_number(side["ours"] and side["ours"]["mean"], scale, fine) for side in sides]
        other = claim["source"] != content["source"]["table"]
        statement = f"{claim['statement']}; {claim['source']}" if other else claim["statement"]
        difference = _difference(claim["difference"], scale, fine)
        lines.append([statement, metric, " / ".join(published), " / ".join(ours), difference, claim["verdict"]])
    return make_table(lines)


def _difference(value: Content | None, scale: float, digits: int) -> str:
    if value is None:
        return "-"
    bounds = [value["lower"], value["upper"]]  # one seed may have no interval
    interval = "" if None in bounds else f" [{', '.join(f'{scale * bound:+.{digits}f}' for bound in bounds)}]"
    return f"{scale * value['mean']:+.{digits}f}{interval}"


def _number(value: float | None, scale: float, digits: int) -> str:
    return "-" if value is None else f"{scale * value:.{digits}f}"


def study_rows(content: Content) -> str:
    """Return a column for each metric of the models, then one line for each number of an analysis."""
    models = [row for row in content["rows"] if row["label"].count("/") < 2]
    metrics = list(dict.fromkeys(metric for row in models for metric in row["metrics"]))
    more, costs = gain_columns(models), list(COSTS) if any(row.get("cost") for row in models) else []
    lines = [["ours (published)", *(metric_format(metric)[0] for metric in metrics), *more, *costs]]
    for row in models:
        texts = (format_metric(row["metrics"].get(metric), metric) for metric in metrics)
        lines.append([_title(row), *texts, *gain_cells(row, more), *_cost_cells(row, costs)])
    numbers = [["analysis", "metric", "ours (published)"]]
    for row in content["rows"]:
        if row not in models:
            values = row["metrics"].items()
            numbers += [[row["row"], metric_format(key)[0], format_metric(value, key)] for key, value in values]
    return "\n".join(make_table(each) for each in (lines, numbers) if len(each) > 1)


def _cost_cells(row: Content, columns: list[str]) -> list[str]:
    """Return the cost of a row's model relative to one network."""
    found = row.get("cost") or {}
    return ["-" if not found else f"{COSTS[column](found):.2f}" for column in columns]


def _title(row: Content) -> str:
    """Return the published name of a published row, and the title of any other row."""
    label = row["label"].rpartition("/")[2]
    name: str = TITLES.get(label, label) if "/" in row["row"] else row["row"]
    return name


def overview(contents: Sequence[Content]) -> str:
    """Return one line for each study: data, network, seeds, and the number of claims by verdict."""
    lines = [["name", "table", "data", "network", "seeds", *MARKS, "results"]]
    for content in contents:
        name, runs = content["name"], content["runs"].values()
        paper = results_file(name).parent.parent.name
        data = dict.fromkeys(_data(run["data"]) for run in runs)
        networks = dict.fromkeys(_network(run["network"]) for run in runs)
        counts = (str(content["verdicts"][verdict]) for verdict in MARKS)
        link = f"[{content['date']}]({paper}/results/{name}.json)"
        texts = [f"[{name}]({paper}/README.md#{name})", content["title"], "; ".join(data), "; ".join(networks)]
        seeds = sorted({len(run.get("seeds", content["seeds"])) for run in runs})
        if content.get("regime"):  # may be evaluated before all seeds are made
            seeds = sorted({count_seeds(row) for row in content["rows"]} - {0})
        lines.append([*texts, " to ".join(map(str, dict.fromkeys((seeds[0], seeds[-1])))), *counts, link])
    return make_table(lines, left=4)


def north_star(root: Path = ROOT) -> str:
    """Return the gain that one network recovers in all settings."""
    names = sorted(path.stem for path in root.glob("studies/compress/results/compress-*.json"))
    records = {name: load_record(name, root) for name in stored_names()}
    return gain_table(
        {name: load_record(name, root) for name in names}, {n: r for n, r in records.items() if r.get("regime")}
    )


def judged_table(contents: Sequence[Content]) -> str:
    """Return the papers' claims by verdict, first of the tables with members as published, then of the others."""
    lines = [["table", *MARKS, "held, of those judged (%)"]]
    for title, small in (("members as published", False), ("small networks, not interpolating", True)):
        chosen = [each for each in contents if _is_small(each["name"]) is small]
        counts = [count_judged(each) for each in chosen]
        lines += [_judged(each["name"], count) for each, count in zip(chosen, counts, strict=True)]
        lines.append(_judged(f"**{title}**", {verdict: sum(each[verdict] for each in counts) for verdict in MARKS}))
    return make_table(lines)


def _is_small(name: str) -> bool:
    """Return whether a table is of networks that do not fit their training images."""
    return {spec.recipe for spec in load_definition(name).runs.values()} <= NOT_INTERPOLATING


def _judged(name: str, count: Mapping[str, int]) -> list[str]:
    judged = count["held"] + count["not held"]
    return [name, *(str(count[verdict]) for verdict in MARKS), f"{100 * count['held'] / judged:.0f}" if judged else "-"]


def _data(data: Content) -> str:
    return f"{data['source']}, {data['train_size']:,} images" if data["train_size"] else data["source"]


def _network(network: str | Content) -> str:
    if isinstance(network, str):
        return network
    settings = {key: value for key, value in network.items() if key != "name"}
    texts = (f"{key} {'-'.join(map(str, each)) if isinstance(each, list) else each}" for key, each in settings.items())
    return f"{network['name']}: {', '.join(texts)}"


MEASUREMENTS: dict[str, Callable[[Content], str]] = {
    "results": study_section,
    "clipping": clipping_table,
    "third-party": third_party_table,
    "choices": choices_table,
    "ood": ood_tables,
    "merging": merging_table,
    "scaling": grid.scaling_table,
    "speed": speed_table,
    "severities": severity_table,
    "finetuned": finetuned_table,
    "coverage": coverage_table,
    "compressed": compress_table,
}


def load_record(name: str, root: Path = ROOT) -> Content:
    """Return the stored results of that name."""
    files = [*root.glob(f"results/{name}.json"), *root.glob(f"studies/*/results/{name}.json")]
    if len(files) != 1:
        raise EnfoldError(f"a mark must name one results file, got '{name}', which matches {len(files)}: correct it")
    content: Content = json.loads(files[0].read_text(encoding="utf-8"))
    return content


def fill_page(page: str, root: Path = ROOT) -> str:
    """Return a page with its tables filled from the stored results."""

    def fill(match: re.Match[str]) -> str:
        opening, kind, name, closing = match.groups()
        if kind == "overview":
            table = overview([load_record(each, root) for each in stored_names()])
        elif kind == "gains":
            table = north_star(root)
        elif kind == "claims":
            table = judged_table([load_record(each, root) for each in stored_names()])
        elif kind == "items":
            table = items_table()
        elif kind == "rows":
            table = rows_table(name, load_record(name, root))
        elif kind == "recovered":
            table = recovered_table(lambda setting: load_record(f"{name}-{setting}", root))
        elif kind in MEASUREMENTS:
            table = MEASUREMENTS[kind](load_record(name, root))
        else:
            raise EnfoldError(
                f"a mark must be overview, items, rows, recovered, {', '.join(MEASUREMENTS)}, got '{kind}': correct it"
            )
        return f"{opening}{table}{closing}"

    return MARK.sub(fill, page)


def list_pages(root: Path = ROOT) -> list[Path]:
    """Return all pages with marks."""
    files = [
        *root.glob("docs/*.md"),
        *root.glob("docs/guides/*.md"),
        *root.glob("studies/*.md"),
        *root.glob("studies/*/*.md"),
    ]
    return [path for path in sorted(files) if MARK.search(path.read_text(encoding="utf-8"))]


if __name__ == "__main__":
    for path in list_pages():
        path.write_text(fill_page(path.read_text(encoding="utf-8")), encoding="utf-8")

"""The gain of an ensemble that one network recovers, over all settings: the best single network beside three controls.

Settings are those of the study of compress, and the tables with a regime, whose rows have gains. The single network is
the one with the largest gain in cNLL among the rows with all seeds; that it is chosen on test data flatters it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from enfold.run.recipe import Recipe
from enfold.run.specs import StepSpec
from enfold.run.step_methods import family_of
from studies.claims import is_published
from studies.definition import make_recipes
from studies.evidence import MEAN_MEMBER, SCALED, RowName
from studies.gains import METRICS
from studies.markdown import Content, make_table
from studies.tables import MARKS, count_seeds

HEADS = ["setting", "seeds", "best single network", "its gain", "control, last epoch", "control, best epoch"]
SEVERAL = ("hydra",)  # distillations to more than one network
Gain = Mapping[str, float]


def gain_table(compressed: Mapping[str, Content], tables: Mapping[str, Content]) -> str:
    """Return one line for each setting: gains recovered in NLL and, in brackets, cNLL, in percent.

    Args:
        compressed: Results of the study of compress, by name.
        tables: Results of tables whose rows have gains, by name.
    """
    lines = [[*HEADS, "member + temperature"]]
    lines += [_of_compress(name, record) for name, record in compressed.items()]
    for name, record in tables.items():
        lines += _of_table(name, record)
    return make_table(lines, left=1)


def _of_compress(name: str, record: Content) -> list[str]:
    rows = record["rows"]
    seeds = len(rows["control"]["seeds"])
    single = {
        f"{label}{suffix}": _means(row[which])
        for label, row in rows.items()
        if label not in (MEAN_MEMBER, f"member{SCALED}", "ensemble") and not label.startswith("control")
        for which, suffix in (("last", ""), ("best", ", best epoch"))
        if len(row["seeds"]) >= seeds and (label == "compress") == (which == "best")
    }
    best = max(single, key=lambda label: single[label]["cnll"])
    control = [_means(rows["control"][which]) for which in ("last", "best")]
    texts = [single[best], *control, _means(rows[f"member{SCALED}"]["last"])]
    title = f"[{name}](compress/README.md): {record['title']}"
    return [title, str(seeds), best.removesuffix(", best epoch"), *map(_text, texts)]


def _means(values: Content) -> dict[str, float]:
    """Return the mean of each gain; a model without a part of it has none."""
    return {metric: values[f"gain {metric}"]["mean"] for metric in METRICS}


def _of_table(name: str, record: Content) -> Iterator[list[str]]:
    """Yield a line for each run that has a row with the gain of one network."""
    for run, recipe in make_recipes(name, record["scale"], tuple(record["changes"])).items():
        rows = [row for row in record["rows"] if row.get("gain") and _is_of(row, run, recipe, record)]
        gains = {_label(row): row["gain"] for row in rows}
        titles = {_label(row): row["row"] for row in rows}
        single = [label for label in gains if _is_single(recipe, label) and "cnll" in gains[label]]
        if not single:
            continue
        best = max(single, key=lambda label: float(gains[label]["cnll"]))
        others = (gains.get(label) for label in ("control", "control-best", f"{MEAN_MEMBER}{SCALED}"))
        seeds = {label: count_seeds(row) for label, row in zip(gains, rows, strict=True)}
        yield [f"{name}: {record['title']}", str(seeds[best]), titles[best], *map(_text, (gains[best], *others))]


def _label(row: Content) -> str:
    return str(row["label"]).rpartition("/")[2]


def _is_of(row: Content, run: str, recipe: Recipe, record: Content) -> bool:
    return RowName.parse(row["label"]).run in (("", run) if len(record["runs"]) == 1 else (run,))


def _is_single(recipe: Recipe, label: str) -> bool:
    """Return whether a row is one network that a step makes from the members."""
    found = [step for step in recipe.steps if step.label == label]
    return any(_gives_one_network(step) and step.train.get("select") != "best" for step in found)


def _gives_one_network(step: StepSpec) -> bool:
    family = step.family or family_of(step.method)
    return family != "ensemble" and step.student is None and step.method not in SEVERAL


def _text(gain: Gain | None) -> str:
    if not gain:
        return "-"
    nll, cnll = (f"{100 * gain[metric]:.0f}" if metric in gain else "-" for metric in METRICS)
    return f"{nll} ({cnll})"


def count_judged(record: Content) -> dict[str, int]:
    """Return how many of the papers' claims of a table have each verdict."""
    verdicts = [claim["verdict"] for claim in record["claims"] if is_published(claim)]
    return {verdict: verdicts.count(verdict) for verdict in MARKS}

"""Write the tables of results/*.json into the docs, between their marks: rows of a run, verdicts on claims, and all of
what `enfold reproduce` found.

<!-- rows cifar10-shares --> ... <!-- end -->        <!-- claims cifar10-shares --> ... <!-- end -->
<!-- outside cifar10-outside --> ... <!-- end -->    rows on corrupted images, and on images from elsewhere
<!-- foreign foreign-networks --> ... <!-- end -->   what may be permuted in networks of other packages
<!-- speed bench-shares --> ... <!-- end -->         what shares cost, and each of them in one line
<!-- merged cifar10-merging --> ... <!-- end -->     merges and barriers by the width of networks
<!-- scaling reproduce-permavg-table --> ... <!-- end -->   permAVG of two and of six beside what it is held against
<!-- reproduced reproduce-* --> ... <!-- end -->     of every file of such a name; rows and claims know them too
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from cells import METRICS, Content, both_of, shown, spread, table
from enfold.report.reproduced import MARKS, notes, verdicts
from grid_tables import GRID, grid_claims, grid_rows, scaling_of
from measured_tables import clipping_of, foreign_of, merged_of, speed_of

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results"
KINDS_OF_MARKS = "rows|claims|clipping|outside|foreign|merged|scaling|speed|reproduced"
MARK = re.compile(rf"(<!-- ({KINDS_OF_MARKS}) ([\w.*-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
Cell = tuple[str, str, str, float, int]  # heading, group of a row, its key, scale, digits

QUALITY: tuple[Cell, ...] = (
    ("accuracy (%)", "scores", "accuracy", 100, 2),
    ("NLL (nats)", "scores", "nll", 1, 3),
    ("ECE (%)", "scores", "ece", 100, 2),
)
COLUMNS: dict[str, tuple[Cell, ...]] = {
    "cifar10-shares": (
        *QUALITY,
        ("diversity", "diversity", "normalised_disagreement", 1, 2),
        ("a member (%)", "diversity", "member_accuracy", 100, 2),
        ("parameters", "cost", "parameters", 1, 0),
        ("MFLOPs", "cost", "flops", 1e-6, 1),
    ),
    "cifar10-distillation": (
        *QUALITY,
        ("cNLL", "scores", "cnll", 1, 3),
        ("cECE (%)", "scores", "cece", 100, 2),
        ("gain recovered (%)", "", "gain_recovered", 100, 0),
        ("corrupted: accuracy (%)", "corrupted", "accuracy", 100, 2),
        ("NLL", "corrupted", "nll", 1, 3),
        ("ECE (%)", "corrupted", "ece", 100, 2),
    ),
    "permavg-options": (*QUALITY, ("gain recovered (%)", "", "gain_recovered", 100, 0)),
    "permavg-attention": (*QUALITY, ("gain recovered (%)", "", "gain_recovered", 100, 0)),
}
SHIFTED: tuple[Cell, ...] = (
    *QUALITY,
    ("corrupted: accuracy (%)", "corrupted", "accuracy", 100, 2),
    ("NLL", "corrupted", "nll", 1, 3),
    ("ECE (%)", "corrupted", "ece", 100, 2),
)
OTHERWISE = {  # called so in one table
    "permavg-options": {
        "ensemble": "deep ensemble of 6",
        "control": "control: the best member, trained on for 20 epochs",
        "control-2": "the same, for 5 epochs",
        "control-3": "the same, for an epoch",
    },
    "permavg-attention": {
        "ensemble": "deep ensemble of 2",
        "control": "control: the best member, trained on for 20 epochs",
        "control-2": "the same, for 5 epochs",
        "control-3": "the same, for 25 epochs",
        "matched": "matched, averaged",
        "published": "permAVG as published, 20 epochs",
        "matched-start": "matched start, 5 epochs",
        "taught": "the same, taught by the ensemble",
        "taught-distilled": "the same, distilled for 20 epochs",
    },
}
OUTSIDE = {  # called otherwise there than in TITLES
    "ensemble": "deep ensemble",
    "batch-ensemble": "BatchEnsemble",
    "kd": "KD",
    "latent-be": "LatentBE",
    "control-2": "the same, as long as the merge",
    "merge": "members merged, then distilled",
}
TOLD_BY = {"entropy": "entropy", "energy": "energy", "mutual_information": "mutual information"}
TITLES = {
    "mean member": "one network (mean member)",
    "ensemble": "deep ensemble of 4",
    "control": "control: the best member, trained on",
    "control-2": "the same, gradients clipped",
    "single-48-epochs": "control: one network, 48 epochs",
    "batch-ensemble": "BatchEnsemble, joint batch norm",
    "batch-ensemble-bn": "BatchEnsemble + EnsembleBN",
    "mimo": "MIMO, M = 3",
    "mc-dropout": "MC dropout 0.1, 4 samples",
    "swag": "SWAG, rank 20, 30 samples",
    "tree-net": "TreeNet",
    "mixture-0.4": "MixtureEnsemble, 0.4 networks",
    "mixture-1.0": "MixtureEnsemble, 1 network",
    "mixture-3.3": "MixtureEnsemble, 3.3 networks",
    "mixture-thin": "thin MixtureEnsemble, 1 network",
    "kd": "KD, temperature 4",
    "ae-kd": "AE-KD",
    "proxy-end2": "Proxy-EnD²",
    "latent-be": "KD + LatentBE",
    "latent-be-confods": "KD + LatentBE + ConfODS",
    "latent-be-tdiv-sdiv": "KD + LatentBE + TDiv-SDiv",
    "average": "plain average",
    "matched-average": "matched, averaged",
    "matched-average-repaired": "the same, REPAIR",
    "published": "permAVG as published, 20 epochs of batches of 256",
    "published-5-epochs": "the same, 5 epochs of batches of 256, as all below",
    "ridge": "the same, a ridge of 0.1",
    "matched-12": "matched start, 12",
    "matched-4": "matched start, 4, as all below",
    "sequential": "one member after the other, an epoch each",
    "taught": "taught by the ensemble",
    "gain": "a gain for each unit",
    "universe": "a universe instead of member 1",
    "annealed": "temperature to 0.3",
    "dirichlet": "random weights of the average",
    "projected": "permutations at the end",
    "projected-repaired": "the same, REPAIR",
    "annealed-projected": "temperature to 0.3, permutations at the end",
    "few-iterations": "20 iterations, potentials kept",
    "lone-student": "lone student: KD, temperature 1",
    "be-head": "BatchEnsemble student, head by head",
    "be-mean": "BatchEnsemble student, of the mean",
    "be-mean-3": "the same, 3 members",
    "be-mean-8": "the same, 8 members",
    "be-als": "BatchEnsemble student of the mean, ALS start",
    "be-tie-mean": "BatchEnsemble student, head by head, tie 0.1 of the mean",
    "be-tie": "BatchEnsemble student, head by head, tie 0.1 of the sum",
}


def rows_of(name: str, content: Content) -> str:
    """One line a model, but none for ensembles of some of the members."""
    if isinstance(content["rows"], list):
        return reproduced_rows(content)
    columns = COLUMNS[name]
    lines = [["", *(heading for heading, *_ in columns)]]
    titles = TITLES | OTHERWISE.get(name, {})
    for label, row in content["rows"].items():
        if label.startswith("ensemble of "):
            continue
        lines.append([titles[label], *(_cell(row, column) for column in columns)])
    return table(lines)


def outside_of(content: Content) -> str:
    """One line a model: clean and corrupted images; then how often what is from outside is told from test images."""
    names = TITLES | OUTSIDE
    rows = {names.get(label, label): row for label, row in content["rows"].items() if "ood" in row}
    quality = [["", *(heading for heading, *_ in SHIFTED)]]
    quality += [[name, *(_cell(row, column) for column in SHIFTED)] for name, row in rows.items()]
    sets = list(next(iter(rows.values()))["ood"])
    told = [[f"AUROC (%) by {' / '.join(TOLD_BY.values())}", *sets]]
    told += [[name, *(_told(row["ood"][each]) for each in sets)] for name, row in rows.items()]
    return f"{table(quality)}\n{table(told)}"


def _told(found: Content) -> str:
    scores = (found["scores"].get(score) for score in TOLD_BY)
    return " / ".join(spread(each and each["auroc"], 100, 1) for each in scores)


def _cell(row: Content, column: Cell) -> str:
    _, group, key, scale, digits = column
    values = row if not group else row.get(group) or {}
    value = values.get(key)
    if value is None or isinstance(value, Mapping):
        return spread(value, scale, digits)
    return f"{scale * value:,.{digits}f}"


def claims_of(name: str, content: Content) -> str:
    """How many held, and one line a claim."""
    judged = content["claims"] if isinstance(content["claims"], Mapping) else content
    counts = verdicts(judged)
    return f"\n{counts[0].upper()}{counts[1:]}.\n\n{claim_lines(judged)}"


def claim_lines(judged: Content, *, intervals: bool = False) -> str:
    """One line a claim, with the interval of the difference if it is wanted."""
    lines = [
        ["published ordering", "metric", "published", "ours", *(["difference"] if intervals else []), "verdict"],
    ]
    for claim in judged["claims"]:
        metric, scale, rough, fine = METRICS.get(claim["metric"], (claim["metric"], 1, 3, 3))
        sides = (claim["first"], claim["second"])
        published = [_value(side["published"], scale, rough) for side in sides]
        ours = [_value(side["ours"] and side["ours"]["mean"], scale, fine) for side in sides]
        other = claim["source"] != judged["source"]["table"]
        says = f"{claim['says']}; {claim['source']}" if other else claim["says"]
        cells = [says, metric, " / ".join(published), " / ".join(ours)]
        lines.append(
            [*cells, *([_difference(claim["difference"], scale, fine)] if intervals else []), claim["verdict"]]
        )
    return table(lines)


def _difference(found: Content | None, scale: float, digits: int) -> str:
    if found is None:
        return "-"
    ends = [found["lower"], found["upper"]]  # none of one seed where no predictions are compared
    told = "" if None in ends else f" [{', '.join(f'{scale * end:+.{digits}f}' for end in ends)}]"
    return f"{scale * found['mean']:+.{digits}f}{told}"


def _value(value: float | None, scale: float, digits: int) -> str:
    return "-" if value is None else f"{scale * value:.{digits}f}"


def reproduced(contents: Sequence[Content]) -> str:
    """An overview of everything that was reproduced, then each with its rows and claims."""
    if not contents:
        return "None are kept in `results/` yet.\n"
    parts = [overview(contents)]
    for content in contents:
        source = content["source"]
        told = " ".join(notes(content))
        folded = f"<details><summary>{len(content['claims'])} claims: {verdicts(content)}</summary>\n\n"
        claims = grid_claims(content) if content["name"] == GRID else claim_lines(content, intervals=True)
        parts += [
            f"### {content['name']}\n",
            f"{content['title']} ({source['paper']}; {source['table']}). {told}\n",
            reproduced_rows(content),
            f"{folded}{claims}\n</details>\n",
        ]
    return "\n" + "\n".join(parts)


def overview(contents: Sequence[Content]) -> str:
    """One line a name: what it was run with, and how many claims had which verdict."""
    lines = [["name", "what", "data", "network", "seeds", *MARKS, "date"]]
    for content in contents:
        name, runs = content["name"], content["runs"].values()
        data = dict.fromkeys(_data(run["data"]) for run in runs)
        networks = dict.fromkeys(_network(run["network"]) for run in runs)
        counts = (str(content["verdicts"][verdict]) for verdict in MARKS)
        link = f"[{content['date']}](../results/reproduce-{name}.json)"
        told = [f"[{name}](#{name})", content["title"], "; ".join(data), "; ".join(networks)]
        seeds = sorted({len(run.get("seeds", content["seeds"])) for run in runs})
        lines.append([*told, " to ".join(map(str, dict.fromkeys((seeds[0], seeds[-1])))), *counts, link])
    return table(lines, left=4)


def _data(data: Content) -> str:
    return f"{data['source']}, {data['train_size']:,} images" if data["train_size"] else data["source"]


def _network(network: str | Content) -> str:
    if isinstance(network, str):
        return network
    settings = {key: value for key, value in network.items() if key != "name"}
    told = (f"{key} {'-'.join(map(str, each)) if isinstance(each, list) else each}" for key, each in settings.items())
    return f"{network['name']}: {', '.join(told)}"


def reproduced_rows(content: Content) -> str:
    """Ours, with the published value in brackets: a column a metric, then what analyses found, a line a number."""
    if content["name"] == GRID:
        return grid_rows(content)
    models = [row for row in content["rows"] if row["label"].count("/") < 2]
    metrics = list(dict.fromkeys(metric for row in models for metric in row["metrics"]))
    lines = [["ours (published)", *(shown(metric)[0] for metric in metrics)]]
    lines += [[_called(row), *(both_of(row["metrics"].get(metric), metric) for metric in metrics)] for row in models]
    found = [["found", "metric", "ours (published)"]]
    for row in content["rows"]:
        if row not in models:
            found += [[row["row"], shown(metric)[0], both_of(both, metric)] for metric, both in row["metrics"].items()]
    return "\n".join(table(each) for each in (lines, found) if len(each) > 1)


def _called(row: Content) -> str:
    """A published row by its name there, one of ours by what it is."""
    label = row["label"].rpartition("/")[2]
    name: str = TITLES.get(label, label) if "/" in row["row"] else row["row"]
    return name


MADE = {
    "clipping": clipping_of,
    "foreign": foreign_of,
    "outside": outside_of,
    "merged": merged_of,
    "scaling": scaling_of,
    "speed": speed_of,
}


def filled(page: str, results: Path = RESULTS) -> str:
    """A page with its tables as the results have them."""

    def made(found: re.Match[str]) -> str:
        opening, kind, name, closing = found.groups()
        contents = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(results.glob(f"{name}.json"))]
        if kind == "reproduced":
            return f"{opening}{reproduced(contents)}{closing}"
        if kind in MADE:
            return f"{opening}{MADE[kind](contents[0])}{closing}"
        return f"{opening}{(rows_of if kind == 'rows' else claims_of)(name, contents[0])}{closing}"

    return MARK.sub(made, page)


def pages() -> list[Path]:
    """All pages with marks."""
    return [path for path in sorted((ROOT / "docs").glob("*.md")) if MARK.search(path.read_text(encoding="utf-8"))]


if __name__ == "__main__":
    for path in pages():
        path.write_text(filled(path.read_text(encoding="utf-8")), encoding="utf-8")

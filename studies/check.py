"""Check that the pages agree with the stored results, and the stored results with the definitions: make results"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from typing import Any

from studies.definition import load_definition, results_file, stored_names
from studies.items import check_items
from studies.pages import ROOT, fill_page, list_pages, load_record

LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)")


def check_pages() -> Iterator[str]:
    """Yield the pages whose tables differ from the stored results."""
    for page in list_pages():
        text = page.read_text(encoding="utf-8")
        if fill_page(text) != text:
            yield f"{page.relative_to(ROOT)}: tables differ from the stored results: run python -m studies.pages"


def check_links() -> Iterator[str]:
    """Yield links of the pages to files that do not exist."""
    for page in sorted((*ROOT.glob("docs/*.md"), *ROOT.glob("studies/**/*.md"))):
        for target in LINK.findall(page.read_text(encoding="utf-8")):
            if not (page.parent / target).exists():
                yield f"{page.relative_to(ROOT)}: the link '{target}' leads to no file"


def check_records() -> Iterator[str]:
    """Yield results whose claims or published values differ from the definition."""
    for name in stored_names():
        definition, record = load_definition(name), json.loads(results_file(name).read_text(encoding="utf-8"))
        claims = [(claim.statement, claim.metric, claim.relation) for claim in definition.claims]
        stored = [(claim["statement"], claim["metric"], claim["relation"]) for claim in record["claims"]]
        if claims != stored:
            yield f"{name}: the stored claims differ from those of the definition"
        for row in record["rows"]:
            for metric, value in row["metrics"].items():
                if value["published"] != definition.value(row["row"], metric):
                    yield f"{name}: the published {metric} of '{row['row']}' differs from the definition"


def check_statements() -> Iterator[str]:
    """Yield statements in the permAVG page that the results do not support."""
    record = load_record("permavg-table")
    rows = {row["label"]: row["metrics"] for row in record["rows"]}
    for run in (run for run in record["runs"] if not run.endswith("-brief")):
        yield from _check_tuned(run, rows)


def _check_tuned(run: str, rows: dict[str, Any]) -> Iterator[str]:
    """Check that tuned permAVG does not decrease with more members, and exceeds a member and its controls."""

    def ours(label: str, metric: str) -> float:
        mean: float = rows[f"{run}/{label}"][metric]["ours"]["mean"]
        return mean

    orderings = [("perm-avg-best-6", "perm-avg-best-2", metric) for metric in ("accuracy", "nll")]
    for size in range(2, 7):
        best = f"perm-avg-best-{size}"
        orderings += [(best, f"mean member of ensemble of {size}", metric) for metric in ("accuracy", "nll")]
        orderings += [(best, f"{other}-{size}", "nll") for other in ("kd", "average-tuned")]
    for better, worse, metric in orderings:
        difference = ours(better, metric) - ours(worse, metric)
        if (difference if metric == "accuracy" else -difference) < 0:
            yield f"permavg-table, {run}: {better} is worse than {worse} in {metric}"


CHECKS = (check_pages, check_links, check_records, check_items, check_statements)


def main() -> int:
    """Print every problem and return 1 if there is one."""
    problems = [problem for check in CHECKS for problem in check()]
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

"""Join results of one table whose runs were made separately: python -m studies.join_records TARGET PART PART ...

Parts are NAME.json of `python -m studies NAME --only ...`, or files that were joined before. A run that is in several
parts is taken from the last. Each run has its own list of seeds.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from enfold.io.files import write_json

Record = dict[str, Any]
OF = " of "  # a change of single runs is "CHANGE of RUN, RUN"


def join_records(parts: Sequence[Record]) -> Record:
    """Return one record of all runs; parts must have the same table, scale and versions."""
    same = {(part["name"], part["scale"], json.dumps(part["versions"])) for part in parts}
    if len(same) > 1:
        raise SystemExit(f"parts must have the same table, scale and versions, got {same}")
    source = {run: index for index, part in enumerate(parts) for run in part["runs"]}  # the last part that contains it
    claims = [_last(each, _is_evaluated) for each in zip(*(part["claims"] for part in parts), strict=True)]
    rows: dict[str, list[Record]] = {}
    for row in (row for part in parts for row in part["rows"]):
        rows.setdefault(row["label"], []).append(row)
    counted = Counter(claim["verdict"] for claim in claims)
    used = [part for index, part in enumerate(parts) if index in source.values()]
    return {
        "command": "; ".join(dict.fromkeys(part.get("command") or _command(part) for part in used)),
        "date": time.strftime("%Y-%m-%d"),
        **{key: value for key, value in parts[-1].items() if key not in ("command", "date")},
        "changes": [change for index in range(len(parts)) for change in _changes(parts[index], index, source)],
        "only": [],
        "seeds": max((part["seeds"] for part in parts), key=len),
        "runs": {run: parts[index]["runs"][run] for run, index in source.items()},
        "figures": [],
        "rows": [_last(each, _is_ours) for each in rows.values()],
        "verdicts": {verdict: counted[verdict] for verdict in parts[-1]["verdicts"]},
        "claims": [
            {**claim, "statement": last["statement"]} for claim, last in zip(claims, parts[-1]["claims"], strict=True)
        ],
        "seconds": sum(part["seconds"] for part in parts),
    }


def _changes(part: Record, index: int, source: dict[str, int]) -> Iterator[str]:
    """Return the changes of the runs that are read from a part."""
    for change in part["changes"]:
        what, _, names = change.partition(OF)
        runs = [run for run in (names.split(", ") if names else part["runs"]) if source[run] == index]
        if runs:
            yield f"{what}{OF}{', '.join(runs)}"


def _is_evaluated(claim: Record) -> bool:
    evaluated: bool = claim["verdict"] != "not run"
    return evaluated


def _is_ours(row: Record) -> bool:
    return any(metric["ours"] is not None for metric in row["metrics"].values())


def _last(same: Sequence[Record], is_run: Callable[[Record], bool]) -> Record:
    return next((each for each in reversed(same) if is_run(each)), same[-1])


def _command(part: Record) -> str:
    only = [f"--only {','.join(part['only'])}"] if part["only"] else []
    return " ".join(
        [f"python -m studies {part['name']} --out OUT", *only, *(f"--set {each}" for each in part["changes"])]
    )


if __name__ == "__main__":
    target, *files = sys.argv[1:]
    write_json(Path(target), join_records([json.loads(Path(file).read_text(encoding="utf-8")) for file in files]))

"""Join records of one published table whose runs were made apart: python tools/join_records.py TARGET PART PART ...

Parts are NAME.json of `enfold reproduce NAME OUT --only ...`; what was not run in one is taken from another. Each run
says its own seeds.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from enfold.files import write_json

Record = dict[str, Any]


def joined(parts: Sequence[Record]) -> Record:
    """One record of all runs; parts must be of one table and scale, and of different runs."""
    first = parts[0]
    same = {(part["name"], part["scale"], json.dumps(part["versions"])) for part in parts}
    runs = [run for part in parts for run in part["runs"]]
    if len(same) > 1 or len(set(runs)) < len(runs):
        raise SystemExit(
            f"parts must be of one table, scale and versions, and of different runs, got {same} and {runs}"
        )
    claims = [_first(each, _is_judged) for each in zip(*(part["claims"] for part in parts), strict=True)]
    rows: dict[str, list[Record]] = {}
    for row in (row for part in parts for row in part["rows"]):
        rows.setdefault(row["label"], []).append(row)
    counted = Counter(claim["verdict"] for claim in claims)
    return {
        **first,
        "changes": [f"{change} of {', '.join(part['runs'])}" for part in parts for change in part["changes"]],
        "only": [],
        "seeds": max((part["seeds"] for part in parts), key=len),
        "runs": {name: run for part in parts for name, run in part["runs"].items()},
        "figures": [],
        "rows": [_first(each, _is_ours) for each in rows.values()],
        "verdicts": {verdict: counted[verdict] for verdict in first["verdicts"]},
        "claims": claims,
        "seconds": sum(part["seconds"] for part in parts),
    }


def _is_judged(claim: Record) -> bool:
    judged: bool = claim["verdict"] != "not run"
    return judged


def _is_ours(row: Record) -> bool:
    return any(metric["ours"] is not None for metric in row["metrics"].values())


def _first(same: Sequence[Record], is_run: Callable[[Record], bool]) -> Record:
    return next((each for each in same if is_run(each)), same[0])


def _command(part: Record) -> str:
    only = [f"--only {','.join(part['only'])}"] if part["only"] else []
    return " ".join([f"enfold reproduce {part['name']} OUT", *only, *(f"--set {each}" for each in part["changes"])])


if __name__ == "__main__":
    target, *files = sys.argv[1:]
    given = [json.loads(Path(file).read_text(encoding="utf-8")) for file in files]
    about = {"command": "; ".join(map(_command, given)), "date": time.strftime("%Y-%m-%d")}
    write_json(Path(target), {**about, **joined(given)})

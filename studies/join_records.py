"""Join records of one published table whose runs were made apart: python tools/join_records.py TARGET PART PART ...

Parts are NAME.json of `enfold reproduce NAME OUT --only ...`, or what was joined before. What was not run in one is
taken from another; what was run in several is taken from the last. Each run says its own seeds.
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
OF = " of "  # a change of some runs is "CHANGE of RUN, RUN"


def joined(parts: Sequence[Record]) -> Record:
    """One record of all runs; parts must be of one table and scale."""
    same = {(part["name"], part["scale"], json.dumps(part["versions"])) for part in parts}
    if len(same) > 1:
        raise SystemExit(f"parts must be of one table, scale and versions, got {same}")
    source = {run: index for index, part in enumerate(parts) for run in part["runs"]}  # the last part that has it
    claims = [_last(each, _is_judged) for each in zip(*(part["claims"] for part in parts), strict=True)]
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
        "claims": [{**claim, "says": now["says"]} for claim, now in zip(claims, parts[-1]["claims"], strict=True)],
        "seconds": sum(part["seconds"] for part in parts),
    }


def _changes(part: Record, index: int, source: dict[str, int]) -> Iterator[str]:
    """What was changed of the runs that are taken from a part."""
    for change in part["changes"]:
        what, _, names = change.partition(OF)
        runs = [run for run in (names.split(", ") if names else part["runs"]) if source[run] == index]
        if runs:
            yield f"{what}{OF}{', '.join(runs)}"


def _is_judged(claim: Record) -> bool:
    judged: bool = claim["verdict"] != "not run"
    return judged


def _is_ours(row: Record) -> bool:
    return any(metric["ours"] is not None for metric in row["metrics"].values())


def _last(same: Sequence[Record], is_run: Callable[[Record], bool]) -> Record:
    return next((each for each in reversed(same) if is_run(each)), same[-1])


def _command(part: Record) -> str:
    only = [f"--only {','.join(part['only'])}"] if part["only"] else []
    return " ".join([f"enfold reproduce {part['name']} OUT", *only, *(f"--set {each}" for each in part["changes"])])


if __name__ == "__main__":
    target, *files = sys.argv[1:]
    write_json(Path(target), joined([json.loads(Path(file).read_text(encoding="utf-8")) for file in files]))

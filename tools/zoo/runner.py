"""Run the checks of one network after the other, each network in a separate process.

If the process ends, the current check has the outcome `abort`; if it exceeds the time limit, `slow`. The remaining
checks are run in a new process.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import time
import traceback
import warnings
from collections.abc import Iterable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch

from enfold import EnfoldError
from tools.zoo.case import Case, Skipped, Wrong, settled
from tools.zoo.checks import CHECKS
from tools.zoo.entry import Entry, declare_operators, seeded

SECONDS = 60.0  # default time limit of a check
PROCESSES = multiprocessing.get_context("fork")
Result = dict[str, Any]


def tried(entry: Entry, names: Sequence[str], limit: float = SECONDS) -> dict[str, Result]:
    """Return the results of every check, each with a time limit in seconds."""
    results: dict[str, Result] = {}
    left = list(names)
    while left:
        done, ended = _some(entry, left, limit)
        results.update(done)
        left = [name for name in left if name not in done]
        if left and ended is not None:
            if "network" in done:  # it cannot be built
                break
            results[left.pop(0)] = ended
    return results


def _some(entry: Entry, names: Sequence[str], limit: float) -> tuple[dict[str, Result], Result | None]:
    """Return the results of a process, and how it ended if it failed."""
    ours, theirs = PROCESSES.Pipe(duplex=False)
    process = PROCESSES.Process(target=_work, args=(entry, names, theirs), daemon=True)
    process.start()
    theirs.close()
    done: dict[str, Result] = {}
    ended: Result | None = None
    while len(done) < len(names) and "network" not in done:
        if not ours.poll(limit):
            ended = {"outcome": "slow", "message": f"more than {limit:.0f} s"}
            break
        try:
            name, result = ours.recv()
        except EOFError:
            process.join()
            ended = {"outcome": "abort", "message": f"the process ended with code {process.exitcode}"}
            break
        done[name] = result
    process.kill()
    process.join()
    if "network" in done:
        ended = done["network"]
    return done, ended


def _work(entry: Entry, names: Sequence[str], pipe: Connection) -> None:
    torch.set_num_threads(1)
    quiet = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(quiet, stream)
    declare_operators()
    try:
        Case(entry).build()
    except ModuleNotFoundError as error:
        pipe.send(("network", {"outcome": "missing", "message": str(error)}))
        return
    except Exception as error:
        pipe.send(("network", {"outcome": "broken", "message": _said(error)}))
        return
    for name in names:
        pipe.send((name, one(entry, name)))


def one(entry: Entry, name: str) -> Result:
    """Return the outcome of one check."""
    started = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        seeded(0)
        try:
            note = settled(CHECKS[name], entry)
            result = {"outcome": "ok", "message": note or ""}
        except EnfoldError as error:
            result = {"outcome": "refused", "message": _said(error)}
        except Wrong as error:
            result = {"outcome": "wrong", "message": str(error)}
        except Skipped as error:
            result = {"outcome": "skipped", "message": str(error)}
        except Exception as error:
            result = {"outcome": "crash", "message": _said(error), "where": _where(error)}
    told = sorted({str(w.message)[:300] for w in caught if _ours(w.category)})
    return {**result, "seconds": round(time.perf_counter() - started, 2), **({"warnings": told} if told else {})}


def _ours(category: type[Warning]) -> bool:
    return category.__module__.startswith("enfold")


def _said(error: BaseException) -> str:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return re.sub(r"0x[0-9a-f]+", "0x...", text)[:400]


def _where(error: BaseException) -> str:
    """Return the last line of enfold in the traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "/enfold/" in frame.filename]
    frame = (ours or frames)[-1]
    return f"{frame.filename.rsplit('/src/', 1)[-1]}:{frame.lineno}"


def run(entries: Iterable[Entry], names: Sequence[str]) -> Iterable[tuple[Entry, dict[str, Result]]]:
    """Run the checks of one network after the other."""
    for entry in entries:
        yield entry, tried(entry, names)

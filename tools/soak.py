"""Kill a run again and again: python -m tools.soak [--kills 200] [--signals 40] [--out results/soak.json].

A recipe of a few seconds is run once without interruption. Then it is run in processes that get SIGKILL, SIGINT or
SIGTERM at random moments, and resumed until it ends. After each end of a process every file of the run must be whole;
at the end weights, predictions and results must be those of the uninterrupted run, bit by bit. Processes are forks of
one that has imported everything, so that a kill takes no longer than the run.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors import safe_open

from enfold.cli import main as enfold

RECIPE = """\
name: soak
data: {source: digits, train_size: 300, val_size: 100}
network: {name: mlp, widths: [16]}
members: 3
cost: false
train: {epochs: 4, batch_size: 32, lr: 0.01}
steps:
  - average
  - {method: kd, label: fresh, init: random}
  - {method: batch_ensemble, num_members: 2, train: {epochs: 3}}
  - {method: swa, train: {epochs: 4}}
"""
ENDS = {signal.SIGKILL: -signal.SIGKILL, signal.SIGINT: 130, signal.SIGTERM: 143}


class Broken(Exception):
    """What may never happen."""


def start(recipe: Path, out: Path, printed: Path) -> int:
    """Start a run, or resume it, in a fork; return its id."""
    child = os.fork()
    if child:
        return child
    try:
        target = os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(target, 1)
        os.dup2(target, 2)
        sys.argv = ["enfold", "run", str(recipe), str(out), *(["--resume"] if (out / "run.json").exists() else [])]
        enfold()
    except SystemExit as stopped:
        sys.stderr.flush()
        printed.with_suffix(".modules").write_text("\n".join(sys.modules))
        os._exit(int(stopped.code or 0))
    finally:
        os._exit(99)


def import_all(names: Path) -> None:
    """Import what a run imports on demand, so that the next forks need not."""
    for name in names.read_text().splitlines():
        if name not in sys.modules:
            with suppress(Exception):  # modules that others make
                import_module(name)


def wait(child: int) -> int:
    """Return the exit code of a process; negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def require_whole(out: Path) -> int:
    """Read every file that has its final name; return how many temporary ones there are."""
    for path in sorted(out.rglob("*")):
        if path.suffix == ".json":
            json.loads(path.read_text())
        elif path.suffix == ".yaml":
            yaml.safe_load(path.read_text())
        elif path.suffix == ".safetensors":
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a dictionary
                    file.get_tensor(name)
    return len(list(out.rglob(".*.part")))


def content(out: Path) -> dict[str, str]:
    """Return digests of weights and predictions, and the results."""
    found = {
        str(path.relative_to(out)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(out.rglob("*.safetensors"))
    }
    return found | {str(path.relative_to(out)): _rows(path) for path in sorted(out.rglob("results.json"))}


def _rows(path: Path) -> str:
    return json.dumps(json.loads(path.read_text())["rows"], sort_keys=True)


def place_of(out: Path) -> str:
    """Return what the run is about to make, from its log."""
    log = out / "log.jsonl"
    lines = [line for line in log.read_text().splitlines() if line.startswith("{")] if log.is_file() else []
    try:
        last = json.loads(lines[-1]) if lines else {}
    except ValueError:
        last = {}
    return f"{last.get('event', 'before the first')} {last.get('stage', 'stage')}"


class Soak:
    """Runs that are interrupted, against one that is not."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.random, self.recipe = folder, random.Random(seed), folder / "soak.yaml"
        self.recipe.write_text(RECIPE)
        self.printed = folder / "printed.txt"
        self.counts: Counter[str] = Counter()
        self.places: Counter[str] = Counter()
        for name in ("first", "whole"):
            started = time.monotonic()
            if wait(start(self.recipe, folder / name, self.printed)):
                raise Broken(self.printed.read_text()[-600:])
            import_all(self.printed.with_suffix(".modules"))
        self.seconds, self.expected = time.monotonic() - started, content(folder / "whole")
        if content(folder / "first") != self.expected:
            raise Broken("two uninterrupted runs differ")

    def interrupt(self, out: Path, by: signal.Signals) -> bool:
        """Start or resume, and send a signal at a random moment; return whether the run has ended before."""
        self.printed.write_text("")
        child = start(self.recipe, out, self.printed)
        time.sleep(self.random.uniform(0, 0.9 * self.seconds))
        os.kill(child, by)
        code = wait(child)
        place = place_of(out)
        if code == 0:
            return True
        if code != ENDS[by] and not self.printed.read_text() and by != signal.SIGKILL:
            self.counts["signals before the command began"] += 1
            return False
        if code != ENDS[by]:
            raise Broken(f"{by.name} in '{place}' gave the exit code {code}: {self.printed.read_text()[-600:]}")
        self.counts[by.name] += 1
        self.places[place] += 1
        left = require_whole(out) if out.exists() else 0
        self.counts["temporary files left"] += left
        if by != signal.SIGKILL:
            self._require_words(out, left)
        return False

    def _require_words(self, out: Path, left: int) -> None:
        words, again = self.printed.read_text(), f"enfold run {self.recipe} {out}"
        resume = f"continue with  {again} --resume" if (out / "run.json").exists() else f"start again with  {again}"
        if resume not in words or "Traceback" in words or left:
            raise Broken(f"after a signal {left} files are left, and it was printed: {words[-600:]}")

    def run(self, name: str, signals: list[signal.Signals]) -> int:
        """Interrupt one run at most as often as there are signals, finish it and compare; return how often."""
        out, sent = self.folder / name, 0
        for by in signals:
            if self.interrupt(out, by):
                break
            sent += 1
        if wait(start(self.recipe, out, self.printed)):
            raise Broken(f"the run does not resume: {self.printed.read_text()[-600:]}")
        found = content(out)
        if found != self.expected:
            differ = [each for each in self.expected if found.get(each) != self.expected[each]]
            raise Broken(f"after {sent} interruptions other bits in {', '.join(differ[:5]) or 'more files'}")
        self.counts["runs with the same bits"] += 1
        shutil.rmtree(out)
        return sent


def soak(kills: int, signals: int, seed: int) -> dict[str, Any]:
    """Interrupt runs until there were that many kills, then that many signals; return the counts."""
    with tempfile.TemporaryDirectory() as place:
        state, started = Soak(Path(place), seed), time.monotonic()
        print(f"an uninterrupted run takes {state.seconds:.1f} s", flush=True)
        for wanted, by in ((kills, [signal.SIGKILL]), (signals, [signal.SIGINT, signal.SIGTERM])):
            done = 0
            while done < wanted:
                chosen = [state.random.choice(by) for _ in range(min(5, wanted - done))]
                done += state.run(f"run-{time.monotonic_ns()}", chosen)
                print(f"{dict(state.counts)}  {time.monotonic() - started:.0f} s", flush=True)
        return {
            "date": time.strftime("%Y-%m-%d"),
            "torch": torch.__version__,
            "seed": seed,
            "seconds": round(time.monotonic() - started),
            "seconds of an uninterrupted run": round(state.seconds, 2),
            **dict(state.counts),
            "places": dict(sorted(state.places.items())),
        }


def main() -> int:
    """Run, print and store the counts; the exit code is 1 if anything is broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--signals", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="a JSON file for the counts")
    given = parser.parse_args()
    torch.set_num_threads(1)
    try:
        found = soak(given.kills, given.signals, given.seed)
    except Broken as broken:
        print(f"broken: {broken}")
        return 1
    if given.out is not None:
        given.out.write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps(found, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())

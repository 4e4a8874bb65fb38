"""Fuzz all readers: python -m tools.fuzz [--inputs 110000] [--only NAME] [--out results/fuzz.json].

Inputs are valid files that were mutated by their structure. Each is read in a process with limits of memory and time,
in which an audit hook watches for code that runs. An input is well handled if it is accepted or refused by an
EnfoldError; everything else is a finding, whose files are kept in .fuzz.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from tools.fuzz import guided
from tools.fuzz.readers import READERS, Reader
from tools.fuzz.worker import Outcome, run

BATCH = 1000  # inputs of one process
PATIENCE = 180  # seconds without a finished input, after which a process is killed
KEPT = Path(".fuzz").resolve()


def fuzz(reader: Reader, number: int, seed: int, place: Path) -> Outcome:
    """Read mutated inputs in processes of their own.

    Args:
        reader: The reader.
        number: The number of inputs.
        seed: The seed of the first process; the others have the next ones.
        place: A folder for the inputs.
    """
    template, total, left = place / "template", Outcome(), number
    template.mkdir()
    reader.write(template)
    reader.read(template)  # valid files are accepted
    shutil.rmtree(template)
    template.mkdir()
    reader.write(template)
    while left > 0:
        found = _in_child(reader, template, place / "inputs", min(BATCH, left), seed)
        shutil.rmtree(place / "inputs", ignore_errors=True)
        total.add(found)
        left -= max(int(found["inputs"]), 1)
        seed += 1
    return total


def _in_child(reader: Reader, template: Path, folder: Path, number: int, seed: int) -> dict[str, Any]:
    """Run a batch in a fork; a process that is killed or hangs is a finding."""
    answer, progress = folder.with_name("answer.json"), folder.with_name("progress")
    answer.unlink(missing_ok=True)
    progress.write_text("")
    child = os.fork()
    if not child:
        try:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1), os.dup2(null, 2)
            answer.write_text(json.dumps(run(reader, template, folder, number, seed, KEPT)))
        except BaseException as error:
            answer.with_suffix(".error").write_text(repr(error))
        finally:
            os._exit(0)
    status = _wait(child, progress)
    if answer.is_file():
        found: dict[str, Any] = json.loads(answer.read_text())
        return found
    words = progress.read_text().split()
    error = answer.with_suffix(".error")
    example = f"status {status}, {error.read_text()[:300] if error.is_file() else ''} at {' '.join(words)}"
    error.unlink(missing_ok=True)
    if folder.is_dir():
        shutil.copytree(folder, KEPT / f"{reader.name}-ended-{seed}", symlinks=True, dirs_exist_ok=True)
    done = int(words[-1]) + 1 if words else 0
    return {"inputs": done, "accepted": 0, "refused": 0, "findings": {"process ended or hangs": [1, example]}}


def _wait(child: int, progress: Path) -> int:
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status
        if time.time() - progress.stat().st_mtime > PATIENCE:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return -1
        time.sleep(0.05)


def main() -> int:
    """Fuzz, print the counts and store them; the exit code is 1 if there is a finding."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=125_000, help="mutated inputs in total")
    parser.add_argument("--guided", type=int, default=25_000, help="inputs that atheris finds by coverage")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="names of readers, separated by commas")
    parser.add_argument("--out", type=Path, help="a JSON file for the counts")
    given = parser.parse_args()
    torch.set_num_threads(1)
    KEPT.mkdir(exist_ok=True)
    os.environ["ENFOLD_DATA"] = str(KEPT / "no-data")
    chosen = [each for each in READERS if given.only is None or each.name in given.only.split(",")]
    share, rows, started = given.inputs / sum(each.number for each in READERS), {}, time.time()
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None  # noqa: S108 - a folder in memory
    for reader in chosen:
        began = time.time()
        with tempfile.TemporaryDirectory(dir=memory) as place:
            found = fuzz(reader, max(1, round(reader.number * share)), given.seed * 1_000_000, Path(place))
        rows[reader.name] = {**vars(found), "seconds": round(time.time() - began, 1)}
        _show(reader.name, rows[reader.name])
    if given.guided and given.only is None:
        rows |= guided.run_all(given.guided, given.seed, _show)
    number, findings = sum(row["inputs"] for row in rows.values()), sum(len(row["findings"]) for row in rows.values())
    print(f"{number:,} inputs in {time.time() - started:.0f} s, {findings} kinds of findings")
    if given.out is not None:
        about = {"date": time.strftime("%Y-%m-%d"), "seed": given.seed, "torch": torch.__version__}
        about |= {"python": sys.version.split()[0], "inputs": number, "findings": findings}
        about |= {"seconds": round(time.time() - started)}
        given.out.write_text(json.dumps({**about, "readers": rows}, indent=2) + "\n")
    return 1 if findings else 0


def _show(name: str, row: dict[str, Any]) -> None:
    counts = "  ".join(f"{row[key]:>7,} {key}" for key in ("inputs", "accepted", "refused"))
    print(f"{name:<34}{counts}  {len(row['findings'])} findings  {row['seconds']:.0f} s", flush=True)
    for key, (number, example) in row["findings"].items():
        print(f"    {number} x {key}: {' '.join(str(example).split())[-300:]}", flush=True)


if __name__ == "__main__":
    sys.exit(main())

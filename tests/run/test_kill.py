"""A run that is killed at any file it writes, and resumed, equals an uninterrupted run."""

import hashlib
import json
import random
from pathlib import Path

import pytest

from fresh import run_python

# Every file of a run becomes whole by one rename: the run kills itself before the one of that number. It is a fork of a
# process that has imported everything, which takes longer than the run.
KILLED = """
import os, pathlib, signal, sys
import enfold.cli, enfold.run.execute
numbers, recipe, out = [int(number) for number in sys.argv[1].split(",")], *sys.argv[2:]
renamed = pathlib.Path.replace
for number in numbers:
    run = os.fork()
    if not run:
        def replace(path, target):
            global number
            number -= 1
            if number == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return renamed(path, target)
        pathlib.Path.replace = replace
        resume = ["--resume"] if os.path.exists(os.path.join(out, "run.json")) else []
        sys.argv = ["enfold", "run", recipe, out, *resume]
        enfold.cli.main()
    if os.waitpid(run, 0)[1] != signal.SIGKILL:
        sys.exit(f"the run was over before its file {number}")
    print(*sorted(path.name for path in pathlib.Path(out).rglob("*") if path.is_file() and path.name[0] != "."))
"""


def killed_at(numbers: list[int], recipe: Path, out: Path) -> list[list[str]]:
    """Run and kill once per number; return the names of the complete files after each."""
    done = run_python(KILLED, ",".join(map(str, numbers)), recipe, out)
    assert done.returncode == 0, done.stderr
    return [line.split() for line in done.stdout.splitlines()]


def digests(out: Path) -> dict[str, str]:
    """Of weights and predictions; JSON manifests hold versions and times of no interest here."""
    return {
        str(path.relative_to(out)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(out.rglob("*.safetensors"))
    }


def test_killed_twice_and_resumed_equals_uninterrupted(
    enfold, recipe_file: Path, finished: Path, tmp_path: Path
) -> None:
    """Before the second checkpoint of the members is complete, and during the next training."""
    out = tmp_path / "killed"
    first, second = killed_at([4, 6], recipe_file, out)
    assert first == ["log.jsonl", "members.checkpoint.safetensors", "recipe.yaml", "run.json"]
    assert {"members.json", "members.safetensors"} < set(second)
    assert enfold("run", recipe_file, out, "--resume").code == 0
    assert digests(out) == digests(finished)
    results = [json.loads((run / "results.json").read_text())["rows"] for run in (finished, out)]
    assert results[0] == results[1]


@pytest.mark.slow
def test_killed_anywhere_and_resumed_equals_uninterrupted(enfold, recipe_file: Path, finished: Path, tmp_path: Path):
    out, moments = tmp_path / "killed", random.Random(0)
    killed_at([moments.randint(1, 5) for _ in range(6)], recipe_file, out)
    assert enfold("run", recipe_file, out, "--resume").code == 0
    assert digests(out) == digests(finished)

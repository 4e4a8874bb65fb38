"""A run that is killed at any file it writes, and resumed, ends in the same bits as one that was left alone."""

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

# Every file of a run becomes whole by one rename: the process kills itself before or after the one of that number.
KILLED = """
import os, pathlib, signal, sys
from enfold.cli import main
left, renamed = int(sys.argv.pop(1)), pathlib.Path.replace
def replace(path, target):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return renamed(path, target)
pathlib.Path.replace = replace
main()
"""


def killed_at(number: int, recipe: Path, out: Path) -> None:
    resume = ["--resume"] if (out / "run.json").exists() else []
    words = [sys.executable, "-c", KILLED, str(number), "run", str(recipe), str(out), *resume]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr


def digests(out: Path) -> dict[str, str]:
    """Of weights and predictions; JSON manifests hold versions and times of no interest here."""
    return {
        str(path.relative_to(out)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(out.rglob("*.safetensors"))
    }


def test_killed_twice_and_resumed_equals_left_alone(enfold, recipe_file: Path, finished: Path, tmp_path: Path) -> None:
    """Before the members' second checkpoint is whole, and amid the training of what follows them."""
    out = tmp_path / "killed"
    killed_at(4, recipe_file, out)
    assert (out / "members/members.checkpoint.safetensors").exists()
    killed_at(6, recipe_file, out)
    assert (out / "members/members.json").exists()
    assert enfold("run", recipe_file, out, "--resume").code == 0
    assert digests(out) == digests(finished)
    results = [json.loads((run / "results.json").read_text())["rows"] for run in (finished, out)]
    assert results[0] == results[1]


@pytest.mark.slow
def test_killed_anywhere_and_resumed_equals_left_alone(enfold, recipe_file: Path, finished: Path, tmp_path: Path):
    out, moments = tmp_path / "killed", random.Random(0)
    for _ in range(6):
        killed_at(moments.randint(1, 5), recipe_file, out)
    assert enfold("run", recipe_file, out, "--resume").code == 0
    assert digests(out) == digests(finished)

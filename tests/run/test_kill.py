"""A run that is killed at random moments and resumed ends in the same bits as one that was left alone."""

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

COMMAND = [sys.executable, "-c", "from enfold.cli import main; main()", "run"]


def start(recipe: Path, out: Path) -> "subprocess.Popen[bytes]":
    resume = ["--resume"] if (out / "run.json").exists() else []
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*COMMAND, str(recipe), str(out), *resume, "--set", "plan.epochs=12"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=environment,
    )


def digests(out: Path) -> dict[str, str]:
    """Of weights and predictions; JSON manifests hold versions and times of no interest here."""
    return {
        str(path.relative_to(out)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(out.rglob("*.safetensors"))
    }


def test_killed_and_resumed_equals_left_alone(recipe_file: Path, tmp_path: Path) -> None:
    alone, killed = tmp_path / "alone", tmp_path / "killed"
    whole = start(recipe_file, alone)
    _, said = whole.communicate(timeout=100)
    assert whole.returncode == 0, said.decode()
    moments = random.Random(0)
    kills = 0
    for _ in range(4):
        process = start(recipe_file, killed)
        deadline = time.monotonic() + 60
        while not (killed / "run.json").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(moments.uniform(0.0, 0.6) if kills == 0 else moments.uniform(1.0, 3.0))
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            kills += 1
        process.communicate()
    assert kills >= 1, "the run was over before it could be killed"
    last = start(recipe_file, killed)
    _, said = last.communicate(timeout=100)
    assert last.returncode == 0, said.decode()
    assert digests(killed) == digests(alone)
    results = [json.loads((out / "results.json").read_text())["rows"] for out in (alone, killed)]
    assert results[0] == results[1]

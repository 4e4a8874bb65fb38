"""The fuzzer finds what it should: each fault here is named."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.fuzz.draws import Draws
from tools.fuzz.mutations import MUTATIONS
from tools.fuzz.readers import READERS, Reader
from tools.fuzz.worker import Outcome, judge

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals and forks are needed")


def judged(folder: Path, read) -> tuple[Outcome, str | None]:
    outcome = Outcome()
    return outcome, judge(Reader("x", 1, lambda folder: None, read, {}), folder, outcome)


def endless(folder: Path) -> None:
    while True:
        pass


def runs_code(folder: Path) -> None:
    os.posix_spawn("/bin/true", ["true"], {})


def allocates(folder: Path) -> None:
    raise MemoryError("x")


FAULTS = {"KeyError": lambda folder: {}["x"], "hang": endless, "code": runs_code, "memory": allocates}


@pytest.mark.parametrize("kind", FAULTS)
def test_faults_are_findings(tmp_path, monkeypatch, kind):
    monkeypatch.setattr("tools.fuzz.worker.SECONDS", 0.2)
    outcome, found = judged(tmp_path, FAULTS[kind])
    assert found is not None
    assert found.startswith(kind)
    assert (outcome.inputs, outcome.accepted, outcome.refused) == (1, 0, 0)


def test_writing_elsewhere_is_a_finding(tmp_path):
    (tmp_path / "inside").mkdir()
    assert judged(tmp_path / "inside", lambda folder: (tmp_path / "elsewhere").write_text("x"))[1] == "code"
    assert judged(tmp_path / "inside", lambda folder: (folder / "here").write_text("x"))[1] is None


@pytest.mark.filterwarnings("ignore")
def test_valid_files_are_accepted_and_mutations_differ(tmp_path):
    for reader in READERS:
        if "run" in reader.name:
            continue  # takes longer
        folder = tmp_path / reader.name
        folder.mkdir()
        reader.write(folder)
        reader.read(folder)
        for name, kinds in reader.kinds.items():
            for kind in kinds:
                content = (folder / name).read_bytes()
                changed = {MUTATIONS[kind](Draws(seed, [1]), content) for seed in range(10)}
                assert len(changed - {content}) > 4, (reader.name, name, kind)


@pytest.mark.slow
def test_a_short_run_has_no_findings(tmp_path):
    words = [sys.executable, "-m", "tools.fuzz", "--inputs", "2000", "--guided", "0", "--out", tmp_path / "fuzz.json"]
    words += ["--only", ",".join(reader.name for reader in READERS if "run" not in reader.name)]
    root = Path(__file__).parents[2]
    done = subprocess.run(words, capture_output=True, text=True, cwd=root, check=False)
    assert done.returncode == 0, done.stdout
    assert json.loads((tmp_path / "fuzz.json").read_text())["inputs"] > 1500

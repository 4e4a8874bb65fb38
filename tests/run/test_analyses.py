"""`landscape` and `alignment` of a run of several seeds: each seed's lives with its seed, and none is lost."""

import json
from pathlib import Path
from typing import Any

import pytest

from enfold.report import alignment as alignment_report
from enfold.report import landscape as landscape_report

pytest.importorskip("matplotlib")

ASKED: dict[str, tuple[Any, ...]] = {
    "landscape": ("--only", "similarity", "--examples", 50),
    "alignment": ("--only", "averages", "--set", "matched=12", "--epochs", 0),
}
PART = {"landscape": "similarity.json", "alignment": "averages.json"}


@pytest.fixture(autouse=True)
def _undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are listed, but none is written: that takes long."""
    for module in (alignment_report, landscape_report):
        monkeypatch.setattr(module, "write_figure", lambda *_, **__: [])


@pytest.fixture
def run(enfold, small_data: Path, tmp_path: Path) -> Path:
    """Seeds 4 and 2 with different members, which need not be trained for these tests."""
    out, changes = tmp_path / "out", ("train.epochs=0", "network={name: mlp, widths: [5]}", "data.val_size=60")
    settings = [part for change in changes for part in ("--set", change)]
    done = enfold("train", out, "--data", small_data, "--members", 2, "--seed", 4, "--seed", 2, *settings)
    assert done.code == 0, done.err
    return out


def files_in(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.slow
@pytest.mark.parametrize("verb", ASKED)
def test_each_seed_has_its_own_results(enfold, run: Path, verb: str) -> None:
    first = enfold("analyse", verb, run, *ASKED[verb], "--json")
    assert first.code == 0, first.err
    assert json.loads(first.out)["seed"] == 4, "the first of the recipe"
    kept = files_in(run / "seed-4" / verb)
    second = enfold("analyse", verb, run, *ASKED[verb], "--seed", 2, "--json")
    assert json.loads(second.out)["seed"] == 2
    assert json.loads(second.out)["parts"] != json.loads(first.out)["parts"]
    assert json.loads((run / "seed-2" / verb / PART[verb]).read_text())["settings"]["seed"] == 2
    assert files_in(run / "seed-4" / verb) == kept
    assert not (run / verb).exists()


@pytest.mark.parametrize("verb", ASKED)
def test_a_folder_of_another_seed_is_refused(enfold, run: Path, verb: str, tmp_path: Path) -> None:
    out = tmp_path / "elsewhere"
    assert enfold("analyse", verb, run, *ASKED[verb], "--out", out).code == 0
    kept = files_in(out)
    done = enfold("analyse", verb, run, *ASKED[verb], "--out", out, "--seed", 2)
    assert done.code == 2
    assert f"must contain the {verb} of one seed, but '{out}' has that of seed 4, got seed 2" in " ".join(
        done.err.split()
    )
    assert files_in(out) == kept
    assert not (run / "seed-2" / verb).exists()


@pytest.mark.parametrize("verb", ASKED)
def test_unknown_seeds_and_files_for_folders_are_refused(enfold, run: Path, verb: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for flags, says in (
        (("--seed", 7), "--seed must be one of the run's seeds, 4, 2, got 7"),
        (("--out", tmp_path / "file"), "--out must be a folder, got the file"),
    ):
        done = enfold("analyse", verb, run, *flags)
        assert done.code == 2
        assert says in " ".join(done.err.split())

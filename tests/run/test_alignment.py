"""`enfold analyse alignment`: every section is computed once and stored; invalid options are refused."""

import json
from pathlib import Path

import pytest

from enfold.errors import MissingExtra
from enfold.report import alignment as figures
from enfold.run import alignment

QUICK = ("--epochs", 1, "--examples", 96, "--temperatures", "0.5,1", "--noises", "0", "--points", 3)


@pytest.fixture
def run(enfold, small_data: Path, tmp_path: Path) -> Path:
    """Different members, which need not be trained for these tests."""
    out = tmp_path / "out"
    changes = ("train.epochs=0", "network={name: mlp, widths: [6, 5]}", "data.val_size=60")
    settings = [part for change in changes for part in ("--set", change)]
    assert enfold("train", out, "--data", small_data, "--members", 3, *settings).code == 0
    return out


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of all figures that are drawn, of which none is written: that takes long."""
    names: list[str] = []
    monkeypatch.setattr(
        figures, "write_figure", lambda make, folder, name, purpose, alt: (make() and names.append(name)) or []
    )
    return names


def test_all_sections_are_computed_once_stored_and_drawn(enfold, run: Path, drawn, monkeypatch) -> None:
    done = enfold("analyse", "alignment", run, *QUICK)
    assert done.code == 0, done.err
    for word in ("rows of weights", "hidden.1", "weight matching", "softness", "planted", "different labels"):
        assert word in done.out, word
    parts = {"rows", "line", "line-repair", "softness", "matrices", "averages", "sweep", "planted", "different"}
    assert set(drawn) == parts
    titles = [line.split(" 100 %")[0] for line in done.err.splitlines() if not line.startswith("alignment")]
    assert titles == [
        "permAVG at temperature 1, members 1 to 2",
        "permAVG at temperature 0.5, members 1 to 2",
        "planted with noise 0, permAVG, members 1 to 2",
        "planted with noise 0, permAVG, matched, members 1 to 2",
        "different classes, permAVG, members 1 to 2",
        "different labels, permAVG, members 1 to 2",
    ]
    folder = run / "alignment"
    for part in alignment.PARTS:
        assert json.loads((folder / f"{part}.json").read_text())["part"] == part
    assert not list(folder.glob("*checkpoint*"))
    kept = {name: len(each) for name, each in alignment.stored_matrices(folder).items()}
    assert kept == {"hidden.0": 1, "hidden.1": 1}

    for name in ("train_alignment", "recover_planted", "train_different_pair", "interpolate", "score_naive_averages"):
        monkeypatch.setattr(alignment, name, None)  # nothing is computed again
    before = {file.name: file.read_bytes() for file in folder.glob("*.json")}
    again = enfold("analyse", "alignment", run, *QUICK, "--json")
    assert again.code == 0, again.err
    content = json.loads(again.out)
    averages = content["parts"]["averages"]
    assert averages["naive"].keys() == {"1", "2", "3"}
    assert averages["mean member"].keys() == averages["ensemble"].keys() == {"2"}, "of those that are merged"
    assert averages["mean member"]["2"] != averages["naive"]["1"]
    assert [point["temperature"] for point in content["parts"]["sweep"]] == [0.5, 1.0]
    assert before == {file.name: file.read_bytes() for file in folder.glob("*.json")}


@pytest.mark.slow
def test_changed_settings_added_points_and_damaged_files(enfold, run: Path, drawn, monkeypatch) -> None:
    flags = ("--members", 3, "--set", "matched=12", "--temperature", 0.5, "--epochs", 0)
    done = enfold("analyse", "alignment", run, *flags, "--only", "matrices, rows", "--json")
    assert done.code == 0, done.err
    assert [len(group["softness"]) for group in json.loads(done.out)["parts"]["matrices"]] == [2, 2]
    folder = run / "alignment"
    settings = json.loads((folder / "rows.json").read_text())["settings"]
    assert (settings["fold"]["matched"], settings["fold"]["temperature"], settings["members"]) == (12, 0.5, 3)
    assert settings["fold"]["config"]["lr"] == 0.1
    expected = (folder / "matrices.json").read_text()
    (folder / "matrices.json").write_text("{")
    (folder / "matrices.safetensors").write_bytes(b"no tensors")
    assert enfold("analyse", "alignment", run, *flags, "--only", "matrices").code == 0
    assert (folder / "matrices.json").read_text() == expected

    asked: list[float] = []
    true = alignment.train_at_temperature
    monkeypatch.setattr(alignment, "train_at_temperature", lambda *given: asked.append(given[-1]) or true(*given))
    for temperatures, members, more in (("2", 3, [2.0]), ("2,3", 3, [3.0]), ("3", 2, [3.0])):
        asked.clear()
        sweep = ("--members", members, "--only", "sweep", "--out", run / "elsewhere", "--temperatures", temperatures)
        assert enfold("analyse", "alignment", run, *flags[2:], *sweep).code == 0
        assert asked == more
    assert len(json.loads((run / "elsewhere" / "sweep.json").read_text())["found"]) == 1


def test_a_section_of_an_older_version_is_computed_again(enfold, run: Path, drawn) -> None:
    rows = run / "alignment/rows.json"
    assert enfold("analyse", "alignment", run, *QUICK, "--only", "rows").code == 0
    expected = json.loads(rows.read_text())
    del expected["settings"]["meaning"]
    rows.write_text(json.dumps({**expected, "found": "as it was"}))
    done = enfold("analyse", "alignment", run, *QUICK, "--only", "rows", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["parts"]["rows"] == expected["found"]


@pytest.mark.slow
def test_only_written_files_are_listed(enfold, run: Path, drawn, monkeypatch) -> None:
    def said(part: str) -> str:
        done = enfold("analyse", "alignment", run, *QUICK, "--only", part)
        assert done.code == 0, done.err
        return " ".join(done.out.split()).rpartition(f"written to {run / 'alignment'}: ")[2]  # lines may be broken

    assert said("planted") == "a .json file a part, figures as .svg and .png"
    assert not (run / "alignment/matrices.safetensors").exists()
    assert said("matrices") == "a .json file a part, matrices.safetensors, figures as .svg and .png"

    def missing(*ignored: object, **settings: object) -> None:
        raise MissingExtra("matplotlib", "report", "drawing")

    monkeypatch.setattr(figures, "write_figure", missing)
    assert said("matrices") == "a .json file a part, matrices.safetensors"


def test_only_singular_temperatures_are_marked(enfold, run: Path, drawn) -> None:
    done = enfold("analyse", "alignment", run, *QUICK[:4], "--only", "sweep", "--temperatures", "1e9,1", "--json")
    assert done.code == 0, done.err
    hot, usual = json.loads(done.out)["parts"]["sweep"]
    assert "is singular to the precision of" in hot["failed"]
    assert usual["failed"] is None


WRONG = [
    (("--members", 4), "--members must be from 2 to 3"),
    (("--only", "row"), "no section 'row'"),
    (("--temperatures", "1;2"), "commas"),
    (("--temperatures", "1,-2"), "above 0, got -2"),
    (("--temperature", 0), "temperature"),
    (("--noises", "-1"), "0 or more, got -1"),
    (("--examples", 1), "--examples must be at least 2"),
    (("--points", 1), "--points must be at least 2"),
    (("--set", "colour=red"), "colour"),
    (("--set", "train.colour=red"), "no training setting 'colour'"),
    (("--set", "train.epochs=2.5"), "the command line: 'epochs' of train must be an integer, got '2.5'"),
    (("--set", "iterations=2.5"), "iterations must be"),
    (("--set", "train=3"), "the command line: 'train' must be a mapping, got '3'"),
    (("--set", "train=3", "--epochs", 1), "the command line: 'train' must be a mapping, got '3'"),
    (("--set", "universe=true", "--only", "planted"), "got permAVG with universe"),
    (("--set", "gain=true", "--only", "sweep", "--temperatures", "5,2"), "got permAVG with gain"),
    (("--set", "project=true"), "got permAVG with project"),
]


def test_invalid_options_are_refused_before_anything_is_written(enfold, run: Path) -> None:
    for flags, message in WRONG:
        done = enfold("analyse", "alignment", run, *flags)
        assert done.code == 2, flags
        assert message in done.err
        assert len(done.err.strip().splitlines()) == 1
    assert not (run / "alignment").exists()

"""The verbs that show a run: what they write, what they refuse, and that a run keeps what they need."""

import shutil
import sys
from pathlib import Path

import pytest

from enfold.cli import main

pytestmark = pytest.mark.usefixtures("drawn_once")


@pytest.fixture
def enfold(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def call(*arguments: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["enfold", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            main()
        printed = capsys.readouterr()
        return int(stopped.value.code or 0), printed.out + printed.err

    return call


def test_default_locations_of_reports(enfold, own_run: Path, tmp_path: Path) -> None:
    assert enfold("report", own_run) == (0, f"written to {own_run / 'report.html'}\n")
    out, other = tmp_path / "both.html", shutil.copytree(own_run, tmp_path / "other")
    code, told = enfold("report", own_run, own_run, "--out", out)
    assert code == 2
    assert "shows each run once" in told
    assert not out.exists()
    assert enfold("report", own_run, other, "--out", out)[0] == 0
    assert out.read_text().count('<section class="headline">') == 2
    assert not list(tmp_path.rglob("*.part"))


def test_a_report_of_a_broken_run_is_refused(enfold, own_run: Path) -> None:
    before = (own_run / "report.html").exists()
    (own_run / "summary.json").write_text("{")
    code, told = enfold("report", own_run)
    assert code == 2
    assert told.startswith("enfold: ")
    assert "summary.json" in told
    assert before is (own_run / "report.html").exists() is False


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("report", "RUN", "--out", "page.txt"), ".html file, got 'page.txt'"),
        (("report", "nothing"), "a run directory must contain run.json"),
        (("report", "RUN", "--card", "--out", "card.html"), ".md file, got 'card.html'"),
        (("report", "RUN", "--card", "--label", "dk"), "got 'dk'"),
        (("report", "RUN", "--label", "kd"), "--card"),
        (("watch", "nothing"), "a run directory must contain run.json"),
    ],
)
def test_invalid_calls_are_one_line(enfold, own_run: Path, words: tuple[str, ...], told: str) -> None:
    code, said = enfold(*(own_run if word == "RUN" else word for word in words))
    assert code == 2
    assert told in said
    assert said.count("\n") == 1


def test_a_card_is_written_to_its_run(enfold, own_run: Path) -> None:
    assert enfold("report", own_run, "--card", "--label", "average")[0] == 0
    assert (own_run / "MODEL_CARD.md").read_text().startswith("# average")

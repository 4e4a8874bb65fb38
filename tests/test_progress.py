"""Progress on stderr: lines in a log, a bar on a terminal, nothing with `quiet`."""

from __future__ import annotations

import io
import sys
from contextlib import nullcontext

import pytest

from enfold import progress as module
from enfold.progress import Lines, Silent, part, progress, replace_titles


@pytest.fixture
def clock(monkeypatch):
    """A clock that is moved by hand."""
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def test_a_line_shows_progress_figures_and_remaining_time(clock, capsys):
    lines = Lines("training", 100)
    clock[0] += 10
    lines.advance(25)
    lines.say("loss 0.5")
    assert capsys.readouterr().err == "training  25 %  loss 0.5  30 s left\n"


def test_remaining_time_ignores_earlier_work(clock, capsys):
    """Resumed at 50 of 100 and 25 more in 10 s: 10 s for the last 25."""
    lines = Lines("training", 100, done=50)
    clock[0] += 10
    lines.say("begun")
    lines.advance(25)
    clock[0] += 10
    lines.say("loss 0.5")
    first, second = capsys.readouterr().err.splitlines()
    assert first == "training  50 %  begun"
    assert second == "training  75 %  loss 0.5  20 s left"


def test_at_most_one_line_in_five_seconds(clock, capsys):
    lines = Lines("training", 5)
    for step in range(1, 6):
        lines.advance(1)
        lines.say(f"step {step}")
        clock[0] += 3
    assert capsys.readouterr().err.splitlines() == ["training  60 %  step 3  4 s left", "training 100 %  step 5"]


def test_without_a_total_there_is_no_percentage(clock, capsys):
    lines = Lines("training", None)
    lines.advance(3)
    clock[0] += 6
    lines.say("loss 0.5")
    assert capsys.readouterr().err == "training  loss 0.5\n"


def test_inside_a_block_the_title_is_that_of_the_block(clock, capsys):
    with replace_titles("seed 0: kd"), progress("distill (fresh)", 1) as bar:
        bar.advance(1)
        bar.say("done")
    with progress("distill (fresh)", 1) as bar:
        bar.advance(1)
        bar.say("done")
    assert capsys.readouterr().err == "seed 0: kd 100 %  done\ndistill (fresh) 100 %  done\n"


def test_parts_follow_titles(clock, capsys):
    for block in (replace_titles("seed 0: merge"), nullcontext()):
        with block, part("member 3 is added"), progress("perm_avg", 1) as bar:
            bar.advance(1)
            bar.say("done")
    assert capsys.readouterr().err.splitlines() == [
        "seed 0: merge, member 3 is added 100 %  done",
        "perm_avg, member 3 is added 100 %  done",
    ]


def test_quiet_prints_nothing(capsys):
    with progress("training", 3, quiet=True) as bar:
        assert isinstance(bar, Silent)
        bar.advance(1)
        bar.say("loss")
    assert capsys.readouterr() == ("", "")


def test_lines_without_a_terminal(capsys):
    with progress("training", 3, done=1) as bar:
        assert isinstance(bar, Lines)
        assert (bar.done, bar.total) == (1, 3)
    assert capsys.readouterr().out == ""


def test_a_bar_on_a_terminal(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setenv("TERM", "xterm")
    with progress("training", 8, done=2) as bar:
        bar.advance(4)
        bar.say("loss 0.5")
    assert "training" in shown.getvalue()
    assert "6/8" in shown.getvalue()
    assert "loss 0.5" in shown.getvalue()

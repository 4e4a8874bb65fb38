"""The page about methods of the user: its code, commands and recipe run, and its lists are those of the code."""

import json
import re
import shlex
from pathlib import Path

import pytest

from enfold.registry import GIVEN, PACKAGES, reserved_names
from enfold.run import RunDirectory

PAGE = (Path(__file__).parents[2] / "docs" / "your-own-method.md").read_text(encoding="utf-8")
GUIDE = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("\n\n".join(blocks("python")))
    (tmp_path / "first.yaml").write_text("\n".join(blocks("yaml")))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_the_commands_of_the_page_run(enfold, here, finished):
    commands = [shlex.split(line) for block in blocks("sh") for line in block.splitlines()]
    assert len(commands) == 6
    for name, *words in commands:
        assert name == "enfold"
        done = enfold(*[finished if word == "RUN" else word for word in words])
        assert done.code == 0, done.err
    labels = [step.label for step in RunDirectory.open(finished).recipe().steps]
    assert {"halfway", "BiasEnsemble", "LogitDistance", "mirrored"} <= set(labels)
    rows = json.loads((here / "runs" / "first" / "summary.json").read_text())["rows"]
    assert {"median", "biases", "distance"} <= set(rows)


def test_all_reserved_names_and_inputs_are_listed():
    (rule,) = re.findall(r"\*\*Reserved names\.\*\*.*?(?=\n- )", PAGE, re.DOTALL)
    names = set().union(*map(reserved_names, PACKAGES))
    assert {name for name in names if f"`{name}`" not in rule} == set()
    assert {name for name in names if f"`{name}`" not in GUIDE} == set()
    assert {name for name in GIVEN["merge"] if f"`{name}`" not in PAGE} == set()

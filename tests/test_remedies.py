"""Remedies of methods are read in Python, in recipes and on the command line: they name settings as `start: fresh`."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "enfold"
ROOMS = ("merge", "ensembles", "distill")
PYTHON = re.compile(r"\b\w+='|\b\w+=(True|False|None)\b|\b[A-Z]\w+\(\w+=")


def text(node: ast.expr) -> str:
    """A message as it is written, with {} for what is filled in."""
    match node:
        case ast.Constant(value=str(said)):
            return said
        case ast.JoinedStr(values=parts):
            return "".join(text(part) for part in parts)
        case ast.BinOp(left=left, right=right):
            return text(left) + text(right)
        case ast.IfExp(body=one, orelse=other):
            return f"{text(one)} {text(other)}"
    return "{}"


def messages(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("EnfoldError", "warnings.warn") and node.args:
            yield text(node.args[0])


@pytest.mark.parametrize("room", ROOMS)
def test_settings_are_written_as_in_a_recipe(room):
    found = [said for file in sorted((SOURCE / room).rglob("*.py")) for said in messages(file)]
    assert [said for said in found if PYTHON.search(said)] == []
    assert found  # it does find messages


def test_what_is_looked_for():
    assert PYTHON.search("use KD(start='fresh')")
    assert PYTHON.search("or set diagonal=True")
    assert PYTHON.search("pass BatchEnsemble(num_members=4)")
    assert not PYTHON.search("use start: fresh, got tie={} and num_members=3")

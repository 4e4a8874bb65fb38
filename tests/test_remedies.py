"""Messages of methods are in Python terms: options are written as keyword arguments, not as lines of a recipe."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "enfold"
PACKAGES = ("data", "distill", "engines", "ensembles", "merge", "metrics", "symmetry", "train")
RECIPE = re.compile(r"\b(?:pass|set|use) (?!lambda\b)[a-z_]+: [\w\[{(]|\b(?:recipe|steps:|--\w+)\b")


def text_of(node: ast.expr) -> str:
    """The message as it is written, with {} for values."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(text_of(part) for part in parts)
        case ast.BinOp(left=left, right=right):
            return text_of(left) + text_of(right)
        case ast.IfExp(body=one, orelse=other):
            return f"{text_of(one)} {text_of(other)}"
    return "{}"


def messages(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("EnfoldError", "warnings.warn") and node.args:
            yield text_of(node.args[0])


@pytest.mark.parametrize("package", PACKAGES)
def test_messages_are_in_python_terms(package):
    found = [message for file in sorted((SOURCE / package).rglob("*.py")) for message in messages(file)]
    assert [message for message in found if RECIPE.search(message)] == []
    assert found  # it does find messages


@pytest.mark.parametrize("package", PACKAGES)
def test_messages_have_a_remedy(package):
    """It follows a colon or a semicolon; messages that a function fills in are not checked."""
    found = [message for file in sorted((SOURCE / package).rglob("*.py")) for message in messages(file)]
    assert [message for message in found if not re.search(r"[:;?] |\{\}$", message)] == []


def test_recipe_terms_are_recognised():
    assert RECIPE.search("use start: random")
    assert RECIPE.search("or set train: {epochs: 3}")
    assert RECIPE.search("correct the recipe")
    assert not RECIPE.search("set repair='none', got tie={} and num_members=3: pass num_members >= 1")

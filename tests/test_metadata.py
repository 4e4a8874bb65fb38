"""Imports are declared: as dependencies, or in an extra if they are local imports."""

import ast
import re
import sys
import tomllib
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
import torch
import yaml

from enfold.cli.listings import PACKAGES
from enfold.errors import MissingExtra
from enfold.report.examples import encode_png
from enfold.report.page import render_error_page

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OUTSIDE = ("all", "dev", "docs", "examples")  # imported by no module of the package
EXTRAS = {name: each for name, each in PROJECT["optional-dependencies"].items() if name not in OUTSIDE}


def names(requirements: list[str]) -> set[str]:
    return {text.split(">=")[0].lower() for text in requirements}


def imported(tree: ast.AST, *, lazily: bool) -> set[str]:
    """Top-level packages that a module imports: when it is imported itself, or later, inside functions."""
    nodes = list(ast.walk(tree))
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
    typed = [node for node in nodes if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)]
    later, never = ({id(node) for each in found for node in ast.walk(each)} for found in (functions, typed))
    found: set[str] = set()
    for node in nodes:
        if id(node) in never or (id(node) in later) != lazily:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.split(".")[0])
    return found


parsed = cache(lambda file: ast.parse(file.read_text()))
installed = cache(packages_distributions)


@cache
def distributions(*, lazily: bool) -> set[str]:
    """Of all imports that neither Python nor enfold itself brings; adapters are imported by users only."""
    found: set[str] = set()
    for file in (ROOT / "src" / "enfold").rglob("*.py"):
        if file.parent.name != "integrations":
            found |= imported(parsed(file), lazily=lazily)
        elif lazily:
            found |= imported(parsed(file), lazily=True) | imported(parsed(file), lazily=False)
    owners = {name: installed().get(name, [name]) for name in found - set(sys.stdlib_module_names) - {"enfold"}}
    return {(name if name in names else names[0]).lower() for name, names in owners.items()}  # mlflow has three


def test_module_imports_are_dependencies():
    assert distributions(lazily=False) <= names(PROJECT["dependencies"])


def test_local_imports_are_dependencies_or_extras():
    declared = names(PROJECT["dependencies"]).union(*map(names, EXTRAS.values()))
    assert distributions(lazily=True) <= declared


def test_all_declared_dependencies_are_imported():
    declared = names(PROJECT["dependencies"]).union(*map(names, EXTRAS.values()))
    assert declared <= distributions(lazily=False) | distributions(lazily=True)


def test_doctor_knows_every_package_and_its_extra():
    for package, extra, _ in PACKAGES:
        assert package.lower() in names(EXTRAS[extra] if extra else PROJECT["dependencies"])
    declared = names(PROJECT["dependencies"]).union(*map(names, EXTRAS.values()))
    assert declared == {package.lower() for package, _, _ in PACKAGES}


@pytest.mark.parametrize(
    ("package", "work"),
    [
        ("PIL", lambda: encode_png(torch.zeros(1, 2, 2, dtype=torch.uint8))),
        ("jinja2", lambda: render_error_page("why", "now")),
        ("markupsafe", lambda: render_error_page("why", "now")),
    ],
)
def test_a_missing_package_is_named_with_its_install_line(package, work, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtra, match=r"pip install 'enfold\[report\]'"):
        work()


def test_the_version_is_the_newest_of_the_changelog_and_that_of_the_citation():
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    newest = next(each for each in headings if each != "Unreleased")
    version, date = re.fullmatch(r"(\d+\.\d+\.\d+) \((\d{4}-\d\d-\d\d)\)", newest).groups()
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert PROJECT["version"] == version == citation["version"]
    assert date == str(citation["date-released"])

"""Registry: every method file is a method; user code and installed packages add methods."""

import importlib
import json
import pkgutil
import sys
import warnings
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest
from torch import nn

import enfold.merge
from enfold import registry
from enfold.arguments import INPUTS, REQUIRED
from enfold.cli import main
from enfold.errors import EnfoldError
from enfold.io.usercode import looking_in
from enfold.registry import (
    GIVEN,
    NOT_METHODS,
    PACKAGES,
    STEP_KEYS,
    find_any,
    find_method,
    methods,
    reserved_names,
    suggest,
)
from enfold.run import StepSpec

EVERY = [pytest.param(kind, name, id=f"{kind}-{name}") for kind in PACKAGES for name in methods(kind)]
MERGE = '''"""Take one member.

    θ = θ_k                                                                                     (1)
"""

from typing import Annotated

from pydantic import Field
from torch import nn

from enfold.arguments import checked


@checked
def take_one(models, *, index: Annotated[int, Field(ge=0)] = 0) -> nn.Module:
    """Return a member.

    Args:
        models: An ensemble.
        index: The number of the member.
    """
    return models.member(index)
'''


@pytest.fixture
def added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A method file that is added to the package of merges, and nothing else."""
    (tmp_path / "take_one.py").write_text(MERGE)
    monkeypatch.setattr(enfold.merge, "__path__", [*enfold.merge.__path__, str(tmp_path)])
    methods.cache_clear()
    yield tmp_path
    methods.cache_clear()
    sys.modules.pop("enfold.merge.take_one", None)


@pytest.fixture
def small_recipe(tmp_path: Path) -> Path:
    """A recipe with one step, METHOD, on a few random images."""
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 255, (120, 1, 4, 4)).astype(np.uint8), np.arange(120) % 3
    np.savez(tmp_path / "d.npz", x_train=images[:90], y_train=labels[:90], x_test=images[90:], y_test=labels[90:])
    file = tmp_path / "recipe.yaml"
    file.write_text(
        f"data: {{source: {tmp_path / 'd.npz'}, val_size: 30}}\nnetwork: {{name: mlp, widths: [4]}}\nmembers: 2\n"
        "cost: false\ntrain: {epochs: 1}\nsteps:\n  - {method: METHOD, label: one, index: 1}\n"
    )
    return file


def call(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    monkeypatch.setattr(sys, "argv", ["enfold", *map(str, words)])
    with pytest.raises(SystemExit) as stopped:
        main()
    return int(stopped.value.code or 0)


@pytest.mark.parametrize("kind", PACKAGES)
def test_every_file_of_a_package_is_a_method(kind: str) -> None:
    package = importlib.import_module(PACKAGES[kind])
    files = [info.name for info in pkgutil.iter_modules(package.__path__) if not info.ispkg]
    assert list(methods(kind)) == [name for name in files if name not in NOT_METHODS]


@pytest.mark.parametrize(("kind", "name"), EVERY)
def test_every_method_is_a_public_name(kind: str, name: str) -> None:
    target, owner = methods(kind)[name].target, enfold.merge if kind == "merge" else enfold
    assert getattr(owner, target.__name__) is target
    assert target.__name__ in owner.__all__


@pytest.mark.parametrize(("kind", "name"), EVERY)
def test_a_method_has_an_idea_and_documented_options(kind: str, name: str) -> None:
    found = find_method(kind, name)
    assert (found.name, found.kind) == (name, kind)
    assert found.target.__name__.replace("_", "").lower() == name.replace("_", "")
    assert found.target.__module__ == f"{PACKAGES[kind]}.{name}"
    assert len(found.idea) > 20
    assert found.idea.endswith(".")
    for argument in found.arguments.values():
        assert len(argument.help) > 3, f"document {argument.name} in Args:"
        assert argument.default is not REQUIRED, "every option has a default"


def test_options_are_checked() -> None:
    kd = find_method("distill", "kd")
    assert kd.check({"temperature": 3.0}) == {"temperature": 3.0}
    with pytest.raises(EnfoldError, match=r"'kd' has no option 'alfa', did you mean 'alpha'\?"):
        kd.check({"alfa": 0.5})
    with pytest.raises(EnfoldError, match="temperature"):
        kd.check({"temperature": 0})


def test_a_wrong_name_suggests_the_right_one() -> None:
    with pytest.raises(EnfoldError, match=r"'kdd', did you mean 'kd'\?: choose one of "):
        find_method("distill", "kdd")
    with pytest.raises(EnfoldError, match="enfold train RUN swag"):
        find_method("merge", "swag")
    with pytest.raises(EnfoldError, match="zzz"):
        find_any("zzz")
    assert suggest("zzz", ["average"]) == ""
    assert find_method("merge", "weight-matching").name == "weight_matching"


def test_one_file_adds_a_method_to_registry_command_line_and_recipes(added, small_recipe, monkeypatch, capsys) -> None:
    found = find_method("merge", "take-one")
    assert (found.idea, list(found.arguments), found.inputs) == ("Take one member.", ["index"], {"models"})
    assert call(monkeypatch, "methods") == 0
    assert "take_one" in capsys.readouterr().out
    assert call(monkeypatch, "methods", "take-one", "--json") == 0
    (option,) = json.loads(capsys.readouterr().out)["options"]
    assert option == {"name": "index", "type": "int >= 0", "default": "0", "help": "The number of the member."}
    out, text = added / "out", small_recipe.read_text()
    small_recipe.write_text(text.replace("METHOD", "take_one").replace("index: 1", "index: -1"))
    assert call(monkeypatch, "run", small_recipe, out) == 2
    error = capsys.readouterr().err
    assert ("line 7" in error, "index must be" in error) == (True, True), error
    small_recipe.write_text(text.replace("METHOD", "take_one"))
    assert call(monkeypatch, "run", small_recipe, out, "--json") == 0
    assert json.loads(capsys.readouterr().out)["rows"]["one"]["member"] == [1]
    assert call(monkeypatch, "merge", out, "take-one", "--label", "zero", "--json") == 0
    assert json.loads(capsys.readouterr().out)["rows"]["zero"]["member"] == [0]


def test_a_method_of_the_user_in_a_recipe_needs_trust(tmp_path, small_recipe, monkeypatch, capsys) -> None:
    (tmp_path / "mine.py").write_text(MERGE.replace("take_one", "my_merge"))
    small_recipe.write_text(small_recipe.read_text().replace("METHOD", "mine.py:my_merge"))
    out = tmp_path / "out"
    assert call(monkeypatch, "run", small_recipe, out) == 2
    assert str(tmp_path / "mine.py") in capsys.readouterr().err
    assert not out.exists()
    assert call(monkeypatch, "run", small_recipe, out, "--trust-code", "--json") == 0
    assert json.loads(capsys.readouterr().out)["rows"]["one"]["member"] == [1]
    assert call(monkeypatch, "evaluate", out) == 2, "a run keeps no trust"
    assert call(monkeypatch, "evaluate", out, "--trust-code") == 0
    assert call(monkeypatch, "report", out) == 0, "a report runs no code"
    other = ["merge", out, f"{tmp_path / 'mine.py'}:my_merge", "--label", "other", "--trust-code"]
    assert call(monkeypatch, *other) == 0
    assert call(monkeypatch, "train", out, f"{tmp_path / 'mine.py'}:my_merge", "--trust-code") == 2, "another kind"


MINE = '''"""Several methods in one file."""
from torch import nn
from enfold import DistillationLoss, Ensemble, Perturbation

value = 3

def no_models(nets): return nets[0]
def late_models(a, b, models): return models[0]
def nothing_given(): return None
def labelled(models, *, label="x"): return models[0]
def at_the_start(models, *, init="x"): return models[0]

def documented(models):
    """Return the first.

    As it is.

    Args:
        models: An ensemble.
    """
    return models[0]

class Plain: pass
class Unfinished(Ensemble): pass
class Titled(DistillationLoss):
    def __init__(self, title=""): pass
    def target(self, context): return 0
    def loss(self, context): return 0
'''


@pytest.fixture
def mine(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    with looking_in([tmp_path], trusted=True):
        yield "mine.py"


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("value", "value"),
        ("no_models", "'nets'"),
        ("late_models", "parameter 3"),
        ("nothing_given", "no parameter"),
        ("labelled", "'label'"),
        ("at_the_start", "'init'"),
        ("Plain", "subclass of Ensemble"),
        ("Unfinished", "expand"),
        ("Titled", "'title'"),
        ("documentd", "documented"),
    ],
)
def test_a_reference_that_is_no_method_is_refused_by_what_is_wrong(mine, name, named) -> None:
    with pytest.raises(EnfoldError, match=named) as caught:
        find_any(f"{mine}:{name}")
    assert name in str(caught.value)


def test_a_file_without_an_object_is_refused_with_its_names_and_not_run(tmp_path) -> None:
    (tmp_path / "own.py").write_text("from math import sqrt\nraise RuntimeError\ndef f(models): pass\nclass C: pass\n")
    with looking_in([tmp_path]), pytest.raises(EnfoldError, match=r"defines f, C: write own\.py:f"):
        find_any("own.py")


def test_methods_of_one_file_are_described_by_their_own_docstrings(mine) -> None:
    found = find_method("merge", f"{mine}:documented")
    assert (found.idea, found.reference) == ("Return the first.", "As it is.")


def test_reserved_names_are_the_keys_of_steps_and_what_a_run_fills_in() -> None:
    assert StepSpec.model_fields.keys() == STEP_KEYS
    assert all(given <= INPUTS for given in GIVEN.values())
    assert {"label", "first", "init", "test"} <= reserved_names("merge")
    assert "init" not in reserved_names("ensemble"), "ensembles have the key network for that"
    assert not reserved_names("perturb") & {"label", "first", "seeds"}, "options of these are in a mapping of their own"


def installed_merge(models, *, times: int = 1) -> nn.Module:
    """Merge in a package of someone else.

    Args:
        models: An ensemble.
        times: How often.
    """
    return models.member(0)


def test_entry_points_add_methods_and_broken_ones_warn(monkeypatch) -> None:
    group = registry.GROUP
    entries = [
        EntryPoint("installed-merge", f"{__name__}:installed_merge", group),
        EntryPoint("broken", "no_such_module:x", group),
        EntryPoint("no-method", "json:loads", group),
        EntryPoint("average", f"{__name__}:installed_merge", group),
    ]
    monkeypatch.setattr(registry, "entry_points", lambda group: entries)
    methods.cache_clear()
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = methods("merge")
        assert found["installed_merge"].target is installed_merge
        assert found["average"].target is not installed_merge
        assert {"broken", "no_method", "average"} <= {
            name
            for name in ("broken", "no_method", "average")
            for each in caught
            if name.split("_")[0] in str(each.message)
        }
    finally:
        methods.cache_clear()

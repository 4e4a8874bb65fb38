"""The folder is the registry: every method file is a method, and a wrong name names the right one."""

import dataclasses
import importlib
import pkgutil
import sys
import types

import pytest

from enfold import EnfoldError
from enfold.registry import ROOMS, method, methods, nearest

NO_METHODS = ("deep_ensemble", "repair")  # what methods start from, and a step that follows them
EVERY = [pytest.param(room, name, id=f"{room}-{name}") for room in ROOMS for name in methods(room)]


@pytest.mark.parametrize("room", ROOMS)
def test_every_file_of_a_room_is_a_method(room):
    packages = [importlib.import_module(package) for package in ROOMS[room]]
    files = [info.name for package in packages for info in pkgutil.iter_modules(package.__path__) if not info.ispkg]
    assert list(methods(room)) == [name for name in files if name not in NO_METHODS]


@pytest.mark.parametrize(("room", "name"), EVERY)
def test_a_method_is_a_frozen_dataclass_with_an_idea(room, name):
    found = method(room, name)
    assert (found.name, found.room) == (name, room)
    called = "hydradistillation" if (room, name) == ("fold", "hydra") else name.replace("_", "")
    assert found.kind.__name__.lower() == called
    assert found.kind.__module__ in [f"{package}.{name}" for package in ROOMS[room]]
    assert found.idea.endswith(".")
    assert found.make() == found.kind()
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.make().anything = 1


def test_settings_are_the_fields():
    distill = method("fold", "kd")
    assert set(distill.fields) == {field.name for field in dataclasses.fields(distill.kind)}
    assert distill.make(temperature=3.0).temperature == 3.0
    with pytest.raises(EnfoldError, match=r"'kd' has no setting 'alfa', did you mean 'alpha'\?"):
        distill.make(alfa=0.5)
    with pytest.raises(EnfoldError, match=r"'kd' has no setting 'zzz': choose from .*temperature"):
        distill.make(zzz=1)


def test_a_wrong_name_names_the_right_one():
    with pytest.raises(EnfoldError, match=r"there is no fold 'kdd', did you mean 'kd'\?: choose one of "):
        method("fold", "kdd")
    with pytest.raises(EnfoldError, match=r"there is no fold 'zzz': choose one of "):
        method("fold", "zzz")
    assert nearest("zzz", ["average"]) == ""


def test_a_new_file_is_a_new_method(tmp_path, monkeypatch):
    """Hyphens and underscores are the same; what is no public dataclass of the file is no method."""
    (tmp_path / "weight_average.py").write_text(
        '"""Average the weights.\n\nMore."""\nfrom dataclasses import dataclass\n'
        "class Other: ...\n@dataclass(frozen=True)\nclass Helper: ...\n"
        "@dataclass(frozen=True)\nclass WeightAverage:\n    scale: float = 1.0\n"
    )
    (tmp_path / "plain.py").write_text('"""Not a method."""\nclass Plain: ...\n')
    room = types.ModuleType("enfold.trial")
    room.__path__ = [str(tmp_path)]
    room.__all__ = ["Other", "Plain", "WeightAverage"]
    monkeypatch.setitem(ROOMS, "trial", ("enfold.trial",))
    monkeypatch.setitem(sys.modules, "enfold.trial", room)
    assert list(methods("trial")) == ["weight_average"]
    found = method("trial", "weight-average")
    assert (found.idea, found.make(scale=2.0).scale) == ("Average the weights.", 2.0)
    methods.cache_clear()
    for name in ("weight_average", "plain"):
        monkeypatch.delitem(sys.modules, f"enfold.trial.{name}")

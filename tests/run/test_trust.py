"""Code that is named anywhere runs only with --trust-code, and every file that would run is shown."""

import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import yaml

from enfold.errors import EnfoldError
from enfold.io.usercode import code_files, is_reference, looking_in
from enfold.registry import PACKAGES, methods
from enfold.run import Recipe, RunDirectory, open_run, parse_recipe

VERBS = {
    "evaluate": ["evaluate"],
    "merge": ["merge", "average", "--label", "other"],
    "train": ["train", "batch_ensemble"],
    "alignment": ["analyse", "alignment"],
    "landscape": ["analyse", "landscape"],
    "report": ["report"],
    "card": ["report", "--card"],
}


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A file that leaves a trace where it is imported."""
    file = tmp_path / "hostile.py"
    file.write_text(
        f"import pathlib\npathlib.Path({str(tmp_path / 'ran')!r}).touch()\n"
        "from torch import nn\n"
        "def make(shape, num_classes):\n    return nn.Sequential(nn.Flatten(), nn.Linear(16, num_classes))\n"
    )
    return file


def edited(run: Path, **changes: Any) -> Path:
    """A run as it was received: its recipe says something else than it did."""
    recipe = run / "recipe.yaml"
    recipe.write_text(yaml.safe_dump({**yaml.safe_load(recipe.read_text()), **changes}))
    return run


def in_chain(reference: str) -> dict[str, Any]:
    """A student of a step behind another one."""
    return {"steps": ["average", {"method": "kd", "student": reference}]}


PLACES = {
    "network": lambda reference: {"network": {"name": reference}},
    "data": lambda reference: {"data": reference},
    "out-of-distribution": lambda reference: {"ood": [{"source": reference, "label": "other"}]},
    "network of a step": lambda reference: {"steps": [{"method": "batch_ensemble", "network": reference}]},
    "student": lambda reference: {"steps": [{"method": "kd", "student": {"name": reference}}]},
    "student in a chain": in_chain,
    "method": lambda reference: {"steps": [{"method": reference}]},
    "method with its family": lambda reference: {"steps": [{"method": reference, "family": "merge"}]},
    "perturbation": lambda reference: {"steps": [{"method": "kd", "perturb": {"method": reference}}]},
    "ensemble student": lambda reference: {"steps": [{"method": "kd", "student": {"method": reference}}]},
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_no_key_of_a_recipe_runs_code_without_trust(enfold, hostile, tmp_path, recipe_file, place):
    content = yaml.safe_load(recipe_file.read_text())
    recipe_file.write_text(yaml.safe_dump({**content, **place("hostile.py:make")}))
    done = enfold("run", recipe_file, tmp_path / "out")
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "--trust-code" in done.err
    assert f"({hostile})" in done.err, "the file that would run"
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("words", VERBS.values(), ids=VERBS)
def test_a_received_run_needs_trust(enfold, hostile, tmp_path, finished, words):
    content = {**in_chain("hostile.py:make"), **PLACES["out-of-distribution"]("hostile.py:make")}
    shutil.move(hostile, edited(finished, **content))
    place = 2 if words[0] == "analyse" else 1
    done = enfold(*words[:place], finished, *words[place:])
    assert not (tmp_path / "ran").exists()
    if words[0] != "report":  # which run nothing at all
        assert (done.code, f"({finished / 'hostile.py'})" in done.err) == (2, True)


@pytest.mark.parametrize("words", [["run", "RECIPE"], ["train"]], ids=["run", "train"])
def test_a_resumed_run_follows_its_own_recipe_which_is_checked_too(enfold, hostile, tmp_path, finished, words):
    """The recipe that is given names no code; that in the directory adds some."""
    mine = tmp_path / "mine.yaml"
    mine.write_text((finished / "recipe.yaml").read_text())
    shutil.move(hostile, edited(finished, **PLACES["network of a step"]("hostile.py:make")))
    given = [str(mine) if word == "RECIPE" else word for word in words]
    done = enfold(*given, finished, "--resume")
    assert (done.code, f"({finished / 'hostile.py'})" in done.err) == (2, True)
    assert not (tmp_path / "ran").exists()


def test_the_command_line_needs_trust(enfold, hostile, tmp_path, small_data, finished):
    student = ["--set", f"student={hostile}:make", "--label", "other"]
    for words in (
        ["train", tmp_path / "out", "--data", small_data, "--network", f"{hostile}:make"],
        ["distill", finished, "kd", *student],
        ["merge", finished, f"{hostile}:make"],
        ["methods", f"{hostile}:make"],
        ["data", f"{hostile}:make", "--check"],
    ):
        done = enfold(*words)
        assert (done.code, "--trust-code" in done.err) == (2, True), done.err
    assert not (tmp_path / "ran").exists()


def test_the_file_that_runs_is_shown_where_it_is_trusted_too(enfold, hostile, tmp_path, finished, monkeypatch):
    """Files are searched in the folder where the run was created before the current folder."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "hostile.py").write_text("raise RuntimeError('another file')")
    monkeypatch.chdir(tmp_path / "elsewhere")
    edited(finished, **PLACES["network of a step"]("hostile.py:make"))
    resume = ["run", finished / "recipe.yaml", finished, "--resume"]
    refused = enfold(*resume)
    assert f"({hostile})" in refused.err
    trusted = enfold(*resume, "--trust-code")
    assert trusted.code == 0, trusted.err
    assert f"enfold: running hostile.py:make ({hostile})\n" in trusted.err
    assert (tmp_path / "ran").exists()


def test_python_programs_need_trust(hostile, tmp_path, finished):
    edited(finished, network="hostile.py:make")
    with pytest.raises(EnfoldError, match="trust"):
        open_run(finished)
    assert open_run(finished, trust_code=True)[0].trust_code
    with looking_in([tmp_path]), pytest.raises(EnfoldError, match="trust"):
        parse_recipe("data: hostile.py:make").data.load()
    assert not (tmp_path / "ran").exists()


def test_a_module_and_its_packages_are_found_without_being_imported(tmp_path):
    package = tmp_path / "some_package" / "inner"
    package.mkdir(parents=True)
    for file in (package.parent / "__init__.py", package / "nets.py"):
        file.write_text("raise RuntimeError")
    with looking_in([tmp_path]):
        assert code_files("some_package.inner.nets:make") == [package.parent / "__init__.py", package / "nets.py"]
        assert code_files("some_package.other:make") == [package.parent / "__init__.py"]
        assert code_files("json:loads") == [Path(sys.modules["json"].__file__)]
        assert all(code_files(f"{name}:make") == [] for name in ("..evil", "nowhere", "~nobody/evil.py"))
    assert "some_package" not in sys.modules


def test_texts_that_are_not_references():
    assert all(map(is_reference, ("nets.py:make", "a.b:C.make", "/x y/nets.py:make", r"C:\nets.py:make")))
    assert not any(map(is_reference, ("mlp", "C:\\data.npz", "study: one", "12:30", ":make", "nets.py:")))


def places_of(schema: dict[str, Any], definitions: dict[str, Any], path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place of a JSON schema that may hold a text, as keys and list indices."""
    if "$ref" in schema:
        return places_of(definitions[schema["$ref"].rsplit("/", 1)[-1]], definitions, path)
    inner = [(branch, path) for branch in schema.get("anyOf", ())]
    inner += [(each, (*path, key)) for key, each in schema.get("properties", {}).items()]
    inner += [(schema["items"], (*path, 0))] if "items" in schema else []
    if schema.get("additionalProperties"):  # settings and arguments: any key
        inner.append(
            ({} if schema["additionalProperties"] is True else schema["additionalProperties"], (*path, "name"))
        )
    own = [path] if schema.get("type") == "string" or not {"type", "anyOf", "enum", "const"} & schema.keys() else []
    return own + [place for each, at in inner for place in places_of(each, definitions, at)]


def holding(path: tuple[Any, ...], value: Any) -> Any:
    """A tree with the value in that place."""
    for key in reversed(path):
        value = [value] if key == 0 else {key: value}
    return value


def settings() -> list[tuple[str, str, str]]:
    """Every option of every method, with its kind."""
    found = [method for kind in PACKAGES for method in methods(kind).values()]
    return [(method.kind, method.name, option) for method in found for option in method.arguments]


def test_every_text_of_the_schema_is_searched():
    """New fields are included: only names of rows and of the run are excluded."""
    schema = Recipe.model_json_schema()
    places = places_of(schema, schema["$defs"])
    trees = {".".join(map(str, path)): holding(path, "hostile.py:make") for path in places}
    assert {"network", "network.name", "data.source", "ood.0.source", "steps.0.network", "steps.0.method"} <= (
        trees.keys()
    )
    for kind, name, option in settings():
        key, value = f"{kind}/{name}/{option}", {"method": name, option: "hostile.py:make"}
        trees[key] = {"steps": [{"method": "kd", "perturb": value}] if kind == "perturb" else [value]}
        trees[f"student {key}"] = {"steps": [{"method": "kd", "student": value}]}
    with warnings.catch_warnings(action="ignore"):  # texts where there should be numbers
        ignored = {place for place, tree in trees.items() if not Recipe.model_construct(**tree).code_references()}
    assert ignored == {"name", "steps.0.label", "ood.0.label"}


def test_trust_is_not_stored(enfold, hostile, finished):
    edited(finished, **PLACES["network of a step"]("hostile.py:make"))
    assert enfold("evaluate", finished, "--trust-code").code == 0
    assert enfold("evaluate", finished).code == 2
    assert not RunDirectory.open(finished).trust_code

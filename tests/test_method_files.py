"""Methods are found by the names of their files; one file adds a method to everything that lists methods."""

import importlib
import json
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

import enfold
from enfold.errors import EnfoldError
from enfold.method_files import class_names, find_class, is_name_of, method_files, method_object
from fresh import run_python

ENSEMBLE = '''"""ShiftedEnsemble: common weights, and a shift of every bias for each member.

    b_m = b + spread ε_m,      ε_m ~ N(0, 1)                                                              (1)

No paper.
"""

import torch
from pydantic import PositiveInt
from torch import nn

from enfold.arguments import checked
from enfold.ensembles.common.efficient import EfficientEnsemble, refuse_ties
from enfold.errors import UnsuitableNetwork
from enfold.seeds import generator


@checked
class ShiftedEnsemble(EfficientEnsemble):
    """Common weights; every member has its own biases.

    Args:
        network: The network. It is not modified.
        num_members: The number of members.
        spread: The standard deviation of the shifts.
        seed: The seed of the shifts.
    """

    def __init__(
        self, network: nn.Module, num_members: PositiveInt = 4, *, spread: float = 1.0, seed: int = 0
    ) -> None:
        refuse_ties(network)
        biases = [name for name, _ in network.named_parameters() if name.endswith("bias")]
        if not biases:
            raise UnsuitableNetwork(f"network must have biases, but {type(network).__name__} has none: add biases")
        super().__init__(network, num_members, biases)
        self.spread, self.seed = spread, seed
        with torch.no_grad():
            for name in biases:
                for member, values in enumerate(self.own.state()[name]):
                    rng = generator(seed, "shifted_ensemble", name, member)
                    values += spread * torch.randn(values.shape, generator=rng)  # (1)
'''


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A package of methods with files of all kinds."""
    folder = tmp_path / "some_methods"
    (folder / "common").mkdir(parents=True)
    for name, text in {
        "__init__": "",
        "common/__init__": "",
        "_helper": "raise RuntimeError\n",
        "my_way": "from math import sqrt\nclass MyWAY: pass\nclass Other: pass\n",
        "a_function": "def a_function(): pass\n",
        "misnamed": "from pathlib import Path\nclass Another: pass\ndef one(): pass\ndef _private(): pass\n",
    }.items():
        (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("some_methods")
    for name in [each for each in sys.modules if each.partition(".")[0] == "some_methods"]:
        del sys.modules[name]


def test_files_and_classes_are_listed_without_being_imported(package):
    assert method_files(package.__path__) == ["a_function", "misnamed", "my_way"]
    assert class_names(Path(package.__path__[0])) == ["MyWAY"]
    assert not any(name.startswith("some_methods.") for name in sys.modules)


def test_objects_have_the_names_of_their_files(package):
    assert method_object(package, "my_way").__name__ == "MyWAY"
    assert method_object(package, "a_function").__name__ == "a_function"
    assert find_class(package, "MyWAY").__module__ == "some_methods.my_way"
    assert find_class(package, "MyWay") is None, "another name"
    assert find_class(package, "Other") is None, "no file of this name"
    assert (is_name_of("lora_ensemble", "LoRAEnsemble"), is_name_of("swa", "SWAG")) == (True, False)


def test_a_file_without_its_name_is_refused_with_the_names_that_it_defines(package):
    with pytest.raises(EnfoldError, match=r"misnamed\.py.* Misnamed .* misnamed, .* got Another, one:"):
        method_object(package, "misnamed")


def test_names_that_are_no_methods_are_missing():
    with pytest.raises(AttributeError, match="NoSuchMethod"):
        _ = enfold.NoSuchMethod
    with pytest.raises(AttributeError, match="NoSuchMethod"):
        _ = enfold.ensembles.NoSuchMethod


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package with one more file, and a small recipe that uses it."""
    folder = tmp_path_factory.mktemp("copied")
    shutil.copytree(Path(enfold.__file__).parent, folder / "enfold")
    (folder / "enfold" / "ensembles" / "shifted_ensemble.py").write_text(ENSEMBLE, encoding="utf-8")
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 255, (120, 1, 4, 4)).astype(np.uint8), np.arange(120) % 3
    np.savez(folder / "d.npz", x_train=images[:90], y_train=labels[:90], x_test=images[90:], y_test=labels[90:])
    (folder / "recipe.yaml").write_text(
        "data: {source: d.npz, val_size: 30}\nnetwork: {name: mlp, widths: [4]}\nmembers: 2\n"
        "cost: false\ntrain: {epochs: 1}\nsteps:\n  - {method: shifted_ensemble, label: one, spread: 0.5}\n"
    )
    return folder


def python(folder: Path, code: str, *argv: str) -> str:
    """Run code with the copied package and return what it prints."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "COLUMNS": "200"}
    return run_python(code, *argv, cwd=folder, env=environment, check=True).stdout


def test_one_file_adds_an_ensemble_to_python_and_the_registry(copied):
    code = (
        "import enfold, torch\nfrom enfold.registry import find_method\nfrom torch import nn\n"
        "assert find_method('ensemble', 'shifted-ensemble').target is enfold.ShiftedEnsemble\n"
        "assert enfold.ensembles.ShiftedEnsemble is enfold.ShiftedEnsemble\n"
        "assert {'ShiftedEnsemble'} <= {*enfold.__all__, *dir(enfold)} & {*enfold.ensembles.__all__}\n"
        "model = enfold.ShiftedEnsemble(nn.Linear(4, 3), 2).eval()\n"
        "enfold.save(model, 'model.safetensors')\n"
        "loaded = enfold.load('model.safetensors', nn.Linear(4, 3))\n"
        "print(type(loaded).__name__, torch.equal(loaded(torch.ones(1, 4)), model(torch.ones(1, 4))), enfold.__file__)"
    )
    assert python(copied, code).split() == ["ShiftedEnsemble", "True", str(copied / "enfold" / "__init__.py")]


def test_one_file_adds_an_ensemble_to_the_command_line_and_recipes(copied):
    code = (
        "import contextlib, json, sys\nfrom enfold.cli import main\n"
        "for words in json.loads(sys.argv[1]):\n"
        "    sys.argv[1:] = words\n"
        "    try: main()\n"
        "    except SystemExit as stopped: assert not stopped.code, stopped.code\n"
        "    print('=' * 9)\n"
    )
    commands = [
        ["methods"],
        ["train", "--help"],
        ["train", "out", "shifted-ensemble", "--help"],
        ["run", "recipe.yaml", "out", "--json"],
    ]
    listed, names, options, results, _ = python(copied, code, json.dumps(commands)).split("=" * 9 + "\n")
    assert "ShiftedEnsemble: common weights, and a shift of every bias" in listed
    assert "shifted_ensemble" in names
    assert "The standard deviation of the shifts." in options
    assert json.loads(results)["rows"]["one"]["scores"]["nll"]["values"]

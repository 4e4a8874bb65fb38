"""Errors in user code and files are one sentence with the place."""

import json
from pathlib import Path

import pytest
import yaml

from enfold.run.yaml_text import read_yaml


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(
        "import torch\n"
        "from torch import nn\n"
        "def boom():\n"
        "    return torch.zeros(2, 3) @ torch.zeros(2)\n"
        "def factory(shape, num_classes):\n"
        "    layers = []\n"
        "    return nn.Linear(layers[0], num_classes)\n"
        "class Broken(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layer = nn.Linear(16, 4)\n"
        "    def forward(self, x):\n"
        "        return self.layer(x)\n"
    )
    return path


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--data", "OWN:boom"], "'OWN:boom' must run without an error, got RuntimeError: "),
        (["--data", "OWN:boom"], " (line 4 of OWN)"),
        (["--network", "OWN:factory"], "got IndexError: list index out of range (line 7 of OWN)"),
        (["--network", "OWN:Broken"], "the network must take inputs of shape (1, 4, 4)"),
        (["--network", "OWN:Broken"], " (line 13 of OWN)"),
    ],
)
def test_errors_in_user_code_name_the_line(enfold, own, small_data, tmp_path, options, says):
    options = [option.replace("OWN", str(own)) for option in options]
    data = [] if "--data" in options else ["--data", small_data]
    done = enfold("train", tmp_path / "out", *data, *options, "--trust-code")
    assert (done.code, done.err.count("\n")) == (2, 2), done.err
    assert done.err.startswith(f"enfold: running {options[1]} ({own})\n")
    assert says.replace("OWN", str(own)) in done.err
    assert ("inputs" in done.err) == ("Broken" in options[1])
    assert not (tmp_path / "out").exists()


def test_a_start_of_another_kind_names_the_right_ones(enfold, finished):
    done = enfold("merge", finished, "repair", "--init", "averag")
    assert (done.code, "did you mean 'average'?" in done.err) == (2, True), done.err
    done = enfold("merge", finished, "repair")
    assert (done.code, "add init" in done.err) == (2, True), done.err


def test_repair_is_described_as_methods_are(enfold):
    shown = enfold("methods", "repair")
    assert shown.code == 0, shown.err
    assert all(word in shown.out for word in ("repair (merge)", "enfold merge RUN repair", "K. Jordan", "weights"))
    assert json.loads(enfold("methods", "repair", "--json").out)["kind"] == "merge"


@pytest.mark.parametrize("value", ["2020-13-45", "2020-12-24"])
def test_dates_are_read_as_text(enfold, tmp_path, small_data, value):
    done = enfold("train", tmp_path / "out", "--data", small_data, "--set", f"train.epochs={value}")
    assert done.code == 2
    assert f"'epochs' of train must be an integer, got '{value}'" in done.err


def test_text_similar_to_numbers(enfold, tmp_path, small_data):
    with pytest.raises(yaml.YAMLError):
        read_yaml("0b_")
    done = enfold("train", tmp_path / "out", "--data", small_data, "--set", "train.epochs=0b_")
    assert (done.code, "an override's value must be YAML" in done.err) == (2, True)

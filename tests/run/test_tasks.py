"""Recipes and runs of regression, dense classification, several labels and batches of a loader."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch

import enfold as library
from enfold.evaluate import score
from enfold.run.recipe import parse_recipe
from enfold.run.stored_predictions import from_tensors, to_tensors
from enfold.tasks import Classification, Regression, task_of

pytest.importorskip("sklearn")

TABULAR = """\
name: tabular
data: diabetes
task: {name: regression, head: gaussian, variance: softplus}
network: {name: mlp, widths: [8]}
members: 2
sizes: [2]
cost: false
train: {epochs: 2, batch_size: 64, lr: 0.01, select: last}
steps:
  - average
  - {method: kd, label: distilled}
  - {method: batch_ensemble, label: efficient}
"""

CODE = '''
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def draw(size, seed, *shape):
    return torch.randn(size, *shape, generator=torch.Generator().manual_seed(seed))


def segmentation():
    """Training, validation and test images with a class for each pixel, of which some are ignored."""

    def part(size, seed):
        images = draw(size, seed, 1, 6, 6)
        classes = (images[:, 0] > 0).long() + (images[:, 0] > 1).long()
        classes[:, 0, 0] = -100
        return images, classes

    return part(24, 0), part(12, 1), part(12, 2)


def labels():
    def part(size, seed):
        rows = draw(size, seed, 5)
        return rows, (rows[:, :3] + rows[:, 1:4] > 0).long()

    return part(64, 0), part(32, 1), part(32, 2)


def loaders():
    """Batches of dictionaries with a price."""

    def part(size, seed):
        rows = draw(size, seed, 4)
        pairs = [{"rows": each, "price": each.sum()} for each in rows]
        return DataLoader(pairs, batch_size=16, shuffle=seed == 0)

    split = lambda batch: ({"rows": batch["rows"]}, batch["price"])
    return {"train": part(64, 0), "val": part(32, 1), "test": part(32, 2), "unpack": split}


def wrong():
    return {"train": segmentation()[0]}


def tokens(num_classes=3):
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, num_classes, 1))


class Rows(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, rows):
        return self.layer(rows)
'''

DENSE = """\
name: dense
data: mine.py:segmentation
task: {name: classification, class_axis: 1}
network: mine.py:tokens
members: 2
cost: true
train: {epochs: 2, batch_size: 8, lr: 0.01, select: last}
steps:
  - {method: kd, label: distilled}
  - {method: weight_matching, label: matched}
"""


def digests(out: Path) -> dict[str, str]:
    """The checksums of weights and predictions."""
    return {
        str(path.relative_to(out)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(out.rglob("*.safetensors"))
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(CODE)
    (tmp_path / "tabular.yaml").write_text(TABULAR)
    (tmp_path / "dense.yaml").write_text(DENSE)
    return tmp_path


@pytest.fixture(scope="module")
def runs():
    return {}


@pytest.fixture
def tabular(enfold, folder, runs, tmp_path_factory) -> Path:
    """A copy of a finished run of the tabular recipe."""
    if "tabular" not in runs:
        runs["tabular"] = tmp_path_factory.mktemp("runs") / "tabular"
        assert enfold("run", folder / "tabular.yaml", runs["tabular"]).code == 0
    return Path(shutil.copytree(runs["tabular"], folder / "run"))


def rows_of(path: Path) -> dict:
    return json.loads((path / "summary.json").read_text())["rows"]


def test_a_tabular_regression(tabular):
    rows = rows_of(tabular)
    assert set(rows) == {"mean member", "ensemble", "ensemble of 2", "control", "average", "distilled", "efficient"}
    assert {"rmse", "nll", "crps", "coverage_90", "cnll", "scale"} <= rows["ensemble"]["scores"].keys()
    assert rows["ensemble"]["gain_recovered"]["mean"] == pytest.approx(1)
    table = (tabular / "table.md").read_text()
    assert "RMSE" in table
    assert "accuracy" not in table


def test_scores_are_those_of_the_stored_networks(tabular):
    data = library.data.load("diabetes")
    make = library.networks.factory({"name": "mlp", "widths": [8]}, (10,), 2)
    members = library.load(tabular / "members/members.safetensors", make)
    network = library.load(tabular / "steps/distilled.safetensors")  # no code is needed
    assert isinstance(members.task, Regression)
    assert task_of(network).head == "gaussian"
    rows = rows_of(tabular)
    for name, model in (("ensemble", members), ("distilled", network)):
        found = library.evaluate(model, data.test).scores
        assert found["nll"] == pytest.approx(rows[name]["scores"]["nll"]["mean"], rel=1e-5)


def test_killed_and_resumed_to_the_same_bits(enfold, interrupted, folder, tabular):
    out = folder / "again"
    for number in (2, 3):
        resume = ["--resume"] if out.exists() else []
        interrupted(number, "run", folder / "tabular.yaml", out, *resume)
    assert enfold("run", folder / "tabular.yaml", out, "--resume").code == 0
    assert digests(out) == digests(tabular)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_every_command(enfold, tabular):
    assert enfold("distill", tabular, "kd", "--label", "noisy", "--perturb", "gaussian").code == 0
    assert enfold("merge", tabular, "weight-matching", "--label", "matched").code == 0
    done = enfold("evaluate", tabular, "--json")
    assert done.code == 0
    assert {"noisy", "matched"} <= json.loads(done.out)["rows"].keys()
    assert enfold("report", tabular).code == 0
    page = (tabular / "report.html").read_text()
    assert "RMSE" in page
    assert "CRPS" in page
    done = enfold("compress", tabular, "--epochs", "1", "--json")
    assert done.code == 0, done.err
    assert (tabular / "compress" / "network.safetensors").is_file()
    assert enfold("drop", tabular, "noisy").code == 0


@pytest.mark.parametrize("command", [("analyse", "landscape"), ("analyse", "alignment")])
def test_analyses_of_classes_are_refused(enfold, tabular, command):
    done = enfold(*command, tabular)
    assert done.code == 2
    assert "one class per example" in done.err


def test_a_dry_run(enfold, folder):
    done = enfold("run", folder / "tabular.yaml", folder / "none", "--dry-run", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["trainings"] == 4
    assert not (folder / "none").exists()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_pixels(enfold, interrupted, folder):
    out, again = folder / "dense", folder / "again"
    assert enfold("run", folder / "dense.yaml", out).code != 0  # needs trust
    done = enfold("run", folder / "dense.yaml", out, "--trust-code")
    assert done.code == 0, done.err
    rows = rows_of(out)
    assert {"accuracy", "miou", "nll", "ece"} <= rows["distilled"]["scores"].keys()
    assert rows["distilled"]["cost"]["parameters"] < rows["ensemble"]["cost"]["parameters"]
    assert "mIoU" in (out / "table.md").read_text()
    interrupted(3, "run", folder / "dense.yaml", again, "--trust-code", "--set", "cost=false")
    assert enfold("run", folder / "dense.yaml", again, "--trust-code", "--set", "cost=false", "--resume").code == 0
    assert digests(out) == digests(again)
    assert enfold("report", out).code == 0
    assert enfold("compress", out, "--epochs", "1", "--trust-code").code == 0


OTHERS = {
    "labels": ("labels", "multilabel", "mlp", "map"),
    "loaders": ("loaders", "regression", "mine.py:Rows", "rmse"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_other_tasks(enfold, folder, name):
    data, task, network, metric = OTHERS[name]
    recipe = folder / "other.yaml"
    recipe.write_text(
        f"data: mine.py:{data}\ntask: {task}\nnetwork: {network}\nmembers: 2\n"
        "train: {epochs: 2, batch_size: 16, select: last}\nsteps: [{method: kd, label: distilled}, average]\n"
    )
    done = enfold("run", recipe, folder / "out", "--trust-code", "--json")
    assert done.code == 0, done.err
    assert metric in json.loads(done.out)["rows"]["distilled"]["scores"]
    assert enfold("report", folder / "out").code == 0


REFUSED = {
    "an unknown task": ("task: ranking", "task"),
    "an unknown option": ("task: {name: regression, heads: gaussian}", "heads"),
    "a task of a training setting": ("train: {task: regression}", "task"),
    "corruptions": ("task: regression\ncorruptions: {}", "corruptions"),
    "outputs of another task": ("task: {name: regression, head: gaussian}\nnetwork: mine.py:Rows", "network"),
    "data without test": ("data: mine.py:wrong", "mine.py:wrong"),
    "excluded classes": ("data: {source: diabetes, exclude_classes: [1]}", "exclude_classes"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_by_name(enfold, folder, name):
    text, named = REFUSED[name]
    keys = {line.split(":")[0] for line in text.splitlines()}
    rest = [line for line in ("data: mine.py:loaders", "network: mine.py:Rows") if line.split(":")[0] not in keys]
    (folder / "bad.yaml").write_text("\n".join([text, *rest, "members: 2"]) + "\n")
    done = enfold("run", folder / "bad.yaml", folder / "out", "--trust-code")
    assert done.code == 2
    assert named in done.err
    assert not (folder / "out").exists()


def test_the_task_of_a_recipe_is_stored():
    recipe = parse_recipe("task: {name: regression, quantiles: [0.1, 0.9]}")
    assert recipe.members_config(0).task == Regression(quantiles=(0.1, 0.9))
    assert parse_recipe(recipe.as_yaml()) == recipe
    assert parse_recipe("members: 2").members_config(0).task is None


@pytest.mark.parametrize(
    ("task", "outputs", "targets"),
    [
        (Classification(), torch.randn(2, 8, 3), torch.arange(8) % 3),
        (Classification(class_axis=1), torch.randn(2, 4, 3, 2, 2), torch.arange(16).view(4, 2, 2) % 3),
        (library.tasks.Multilabel(), torch.randn(2, 8, 3), torch.eye(3).repeat(3, 1)[:8]),
        (Regression(), torch.randn(2, 8), torch.randn(8)),
        (Regression(head="gaussian", variance="log"), torch.randn(2, 8, 2), torch.randn(8)),
        (Regression(head="uncertainty", variance="log"), torch.randn(2, 8, 3), torch.randn(8)),
        (Regression(quantiles=(0.1, 0.9)), torch.randn(2, 8, 2), torch.randn(8)),
    ],
)
def test_predictions_are_stored_and_read(task, outputs, targets):
    task = task.resolve(outputs, targets)
    predictions = task.predictions(task.flatten(outputs, targets)).with_weights((0.25, 0.75))
    tensors, about = to_tensors(predictions)
    found = from_tensors(tensors, json.loads(json.dumps(about)))
    assert type(found) is type(predictions)
    expected, scores = score(predictions), score(found)
    assert scores == pytest.approx(expected, rel=1e-5, nan_ok=True)

"""Bad batches, targets and outputs, through every function that takes them: refused by name, and nothing is changed."""

import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import enfold
from enfold.errors import EnfoldError
from enfold.tasks import Classification, Regression

X = torch.randn(32, 3, generator=torch.Generator().manual_seed(0))
Y = X[:, 0] - X[:, 1]
LABELS = (Y > 0).long()
IMAGES = torch.randn(8, 1, 4, 4, generator=torch.Generator().manual_seed(1))
QUIET = {"epochs": 1, "quiet": True}


class Dict(nn.Linear):
    """A network that takes a keyword."""

    def forward(self, rows):
        return super().forward(rows)


def mixed_structures():
    return [(X[:16], LABELS[:16]), {"rows": X[16:], "labels": LABELS[16:]}]


def some_nan():
    return torch.where(torch.arange(32) == 5, torch.nan, Y)


LINEAR = {"classes": lambda: Dict(3, 2), "numbers": lambda: Dict(3, 1), "gaussian": lambda: Dict(3, 2)}
CONVOLUTION = {"dense": lambda: nn.Conv2d(1, 3, 1)}
GAUSSIAN = Regression(head="gaussian", variance="variance")
ALL_IGNORED = (IMAGES, torch.full((8, 4, 4), -100))

# name -> network, examples, task, and what the message names
BAD = {
    "no labels": (LINEAR["classes"], [{"rows": X}], None, "target"),
    "no labels in a tuple": (LINEAR["classes"], [(X,)], None, "target"),
    "labels that are None": (LINEAR["classes"], [{"rows": X, "labels": None}], None, "target"),
    "another number of targets": (LINEAR["classes"], [(X, LABELS[:5])], None, "target per input|one"),
    "outputs of no task": (LINEAR["classes"], (X, torch.stack([Y] * 5, 1)), None, r"task.*\(32, 5\)"),
    "outputs of another task": (LINEAR["numbers"], (X, LABELS), "classification", "classes"),
    "a head of another width": (LINEAR["numbers"], (X, Y), GAUSSIAN, "two outputs per target"),
    "NaN": (LINEAR["numbers"], (X, some_nan()), "regression", "targets must be finite"),
    "NaN in a loader": (LINEAR["numbers"], DataLoader(list(zip(X, some_nan(), strict=True)), 8), None, "targets"),
    "infinite targets": (LINEAR["numbers"], (X, Y / 0), "regression", "targets must be finite"),
    "everything ignored": (CONVOLUTION["dense"], ALL_IGNORED, Classification(class_axis=1), "ignored|ignore_index"),
    "everything ignored in a loader": (CONVOLUTION["dense"], [ALL_IGNORED], Classification(class_axis=1), "ignore"),
    "a class too many": (LINEAR["classes"], (X, LABELS + 5), "classification", "between 0 and|0 \\.\\.\\."),
    "negative variances": (LINEAR["gaussian"], (X, Y), GAUSSIAN, "variance"),
}


def make_ensemble(make):
    torch.manual_seed(0)
    return enfold.DeepEnsemble(make, 2)


CALLS = {
    "fit": lambda make, data, task: enfold.fit(make_ensemble(make), data, task=task, **QUIET),
    "distill": lambda make, data, task: enfold.distill(
        make_ensemble(make), data, loss=enfold.KD(alpha=0.5), task=task, **QUIET
    ),
    "control": lambda make, data, task: enfold.train_control(make_ensemble(make), data, task=task, **QUIET),
    "evaluate": lambda make, data, task: enfold.evaluate(make_ensemble(make), data, task=task),
    "calibrate": lambda make, data, task: enfold.calibrate(make_ensemble(make), data, task=task),
    "compress": lambda make, data, task: enfold.compress(make_ensemble(make), data, data, task=task, epochs=1),
    "soup": lambda make, data, task: enfold.merge.soup(make_ensemble(make), data, task=task),
}


@pytest.mark.combinations
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", BAD)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_refused_by_name(name, call):
    make, data, task, named = BAD[name]
    with pytest.raises(EnfoldError, match=rf"(?s){named}") as error:
        CALLS[call](make, data, task)
    assert len(str(error.value)) < 700


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_batches_of_different_structures_are_used_as_they_are(call):
    """Each batch is split by itself; a network that takes keywords and positions learns from both."""
    CALLS[call](LINEAR["classes"], mixed_structures(), None)


def test_a_batch_without_targets_in_the_middle():
    network = Dict(3, 2)
    with pytest.raises(EnfoldError, match="target"):
        enfold.fit(network, [(X[:16], LABELS[:16]), {"rows": X[16:]}], **QUIET)


@pytest.mark.parametrize("name", ["NaN", "a head of another width", "outputs of no task", "negative variances"])
def test_nothing_is_changed(name):
    make, data, task, _ = BAD[name]
    torch.manual_seed(0)
    network = make()
    before = network.weight.clone()
    with pytest.raises(EnfoldError):
        enfold.fit(network, data, task=task, **QUIET)
    assert torch.equal(network.weight, before)
    assert enfold.tasks.task_of(network) is None


def test_some_batches_may_be_ignored_in_evaluation_only():
    task = Classification(class_axis=1)
    network = nn.Conv2d(1, 3, 1)
    good = (IMAGES, torch.zeros(8, 4, 4).long())
    row = enfold.evaluate(network, [good, ALL_IGNORED], task=task)
    assert math.isfinite(row.scores["nll"])
    assert row.scores == enfold.evaluate(network, [good], task=task).scores

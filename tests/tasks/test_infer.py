"""The task that follows from a batch, and what is refused because it does not."""

import pytest
import torch

from enfold.errors import EnfoldError, UnsupportedOutput
from enfold.tasks import Classification, FirstBatchTask, StudentTask, as_task, current_task, known_task
from enfold.tasks.binary import Binary
from enfold.tasks.multilabel import Multilabel
from enfold.tasks.regression import Regression


def zeros_and_ones(*shape):
    return torch.arange(torch.Size(shape).numel()).view(shape) % 2


FOUND = [
    ((6, 3), torch.tensor([0, 1, 2, 0, 1, 2]), Classification),
    ((6, 2), zeros_and_ones(6), Classification),
    ((6, 3, 4, 5), zeros_and_ones(6, 4, 5), Classification),
    ((6, 7, 3), zeros_and_ones(6, 7), Classification),
    ((6, 7, 3), zeros_and_ones(6, 7).masked_fill(torch.eye(6, 7).bool(), -100), Classification),
    ((6,), zeros_and_ones(6), Binary),
    ((6,), zeros_and_ones(6).bool(), Binary),
    ((6, 1), zeros_and_ones(6), Binary),
    ((6, 1), zeros_and_ones(6, 1), Binary),
    ((6, 1, 4, 5), zeros_and_ones(6, 4, 5), Binary),
    ((6, 1, 4, 5), zeros_and_ones(6, 1, 4, 5), Binary),
    ((6, 7, 1), zeros_and_ones(6, 7), Binary),
    ((6, 3), zeros_and_ones(6, 3), Multilabel),
    ((6, 3), zeros_and_ones(6, 3).bool(), Multilabel),
    ((6, 3), zeros_and_ones(6, 3).masked_fill(torch.eye(6, 3).bool(), -100), Multilabel),
    ((6,), torch.randn(6), Regression),
    ((6, 1), torch.randn(6), Regression),
    ((6, 3), torch.randn(6, 3).double(), Regression),
    ((6, 1, 4, 5), torch.rand(6, 4, 5), Regression),
]


@pytest.mark.parametrize(("out", "targets", "task"), FOUND)
def test_the_task_follows_from_shapes_and_types(out, targets, task):
    found = as_task(None).resolve(torch.zeros(2, *out), targets)
    assert type(found) is task
    found.flatten(torch.zeros(2, *out), targets)
    own = as_task(None).resolve(torch.zeros(2, *out), torch.stack([targets, targets]), own=True)
    assert type(own) is task


@pytest.mark.parametrize(
    ("out", "targets"),
    [
        ((6,), torch.arange(6)),  # classes or counts
        ((6, 1), torch.arange(6)),
        ((6, 3), torch.arange(18).view(6, 3)),
        ((6,), zeros_and_ones(6).float()),  # labels or numbers
        ((6, 3), zeros_and_ones(6, 3).float()),
        ((6, 3), torch.rand(6, 3).softmax(-1)),  # probabilities or numbers
        ((6, 4, 5), zeros_and_ones(6, 4, 5)),  # labels or positions
        ((6, 2), torch.randn(6)),  # means and variances
        ((6, 10), torch.arange(6).float()),  # classes as floats
        ((6, 3), torch.zeros(6, 4).long()),
        ((6, 3), torch.zeros(5).long()),
        ((6, 3), torch.zeros(6, 1).long()),
        ((6,), torch.zeros(()).long()),
    ],
)
def test_what_is_left_open_names_shapes_and_choices(out, targets):
    with pytest.raises(UnsupportedOutput, match="task must be named") as error:
        as_task(None).resolve(torch.zeros(2, *out), targets)
    message = str(error.value)
    for part in (str(out), str(tuple(targets.shape)), 'task="classification"', 'task="regression"', "head="):
        assert part in message
    assert str(targets.dtype).removeprefix("torch.") in message


@pytest.mark.parametrize("kind", [torch.int64, torch.bool], ids=str)
def test_one_hot_labels_are_left_open(kind):
    targets = torch.eye(3)[torch.tensor([0, 1, 2, 2, 0, 1])].to(kind)
    with pytest.raises(EnfoldError, match=r'one-hot.*argmax.*task="multilabel"'):
        as_task(None).resolve(torch.zeros(2, 6, 3), targets)


def test_nan_targets_are_refused_by_name():
    outputs, targets = torch.zeros(2, 6), torch.randn(6)
    targets[3] = torch.nan
    task = as_task(None).resolve(outputs, targets)
    with pytest.raises(EnfoldError, match="targets must be finite, got nan at index 3"):
        task.flatten(outputs, targets)


def test_targets_that_are_no_tensor():
    with pytest.raises(EnfoldError, match="targets must be a tensor, got dict"):
        as_task(None).resolve(torch.zeros(2, 6, 3), {"labels": torch.zeros(6)})


@pytest.mark.parametrize(
    ("name", "task"),
    [("classification", Classification), ("binary", Binary), ("multilabel", Multilabel), ("regression", Regression)],
)
def test_tasks_by_name(name, task):
    assert type(as_task(name)) is task
    assert as_task(name).name == name
    given = task()
    assert as_task(given) is given
    assert given.is_categorical == (name != "regression")


def test_unknown_names_are_refused():
    with pytest.raises(EnfoldError, match=r"task must be one of .*'ranking'"):
        as_task("ranking")


def test_classes_are_predicted_without_targets():
    found = as_task(None).predict(torch.zeros(2, 6, 3))
    torch.testing.assert_close(found.mean, torch.full((6, 3), 1 / 3))


# Tasks that are known after the first batch


def test_the_task_of_a_student_follows_from_its_own_outputs():
    teacher = Regression(head="gaussian", variance="softplus")
    for width, head in ((1, "point"), (2, "gaussian"), (3, "uncertainty")):
        task = StudentTask(teacher=teacher)
        assert known_task(task) is None
        assert task.resolve(torch.zeros(1, 6, width), torch.randn(6)).head == head
        assert known_task(task).head == head
        assert known_task(task).variance == "softplus"
    classes = StudentTask(teacher=as_task(None))
    assert type(classes.resolve(torch.zeros(1, 6, 3), torch.zeros(6).long())) is Classification


def test_a_task_keeps_what_follows_from_the_first_batch():
    task = FirstBatchTask(given=Regression(head="gaussian"))
    assert task.resolve(torch.ones(1, 6, 2, 4, 5), torch.zeros(6, 4, 5)).axis == 1
    assert current_task(task).axis == 1
    assert current_task(task).predict(torch.ones(1, 6, 2, 4, 5)).mean.shape == (6, 1, 4, 5)
    dense = FirstBatchTask(given=Classification())
    dense.resolve(torch.zeros(1, 6, 3, 4, 5), torch.zeros(6, 4, 5).long())
    assert current_task(dense).class_axis == 1

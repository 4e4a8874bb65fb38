"""After `fit`, an ensemble predicts without targets, whether its task was named or inferred."""

import pytest
import torch
from torch import nn

from enfold import DeepEnsemble, distill, fit
from enfold.errors import UnchangedWarning
from enfold.tasks import Classification, Regression

IMAGES = torch.randn(12, 1, 6, 6, generator=torch.Generator().manual_seed(0))
CLASSES = (IMAGES[:, 0] > 0).long()
SHORT = {"epochs": 1, "batch_size": 6, "quiet": True}


def dense(channels: int):
    return lambda: nn.Conv2d(1, channels, 3, padding=1)


@pytest.mark.parametrize("task", [None, "classification", Classification(class_weights=(1.0, 2.0, 3.0))])
@pytest.mark.parametrize("in_memory", [True, False])
def test_dense_classes(task, in_memory):
    train = (IMAGES, CLASSES) if in_memory else [(IMAGES[:6], CLASSES[:6]), (IMAGES[6:], CLASSES[6:])]
    ensemble = DeepEnsemble(dense(3), 2)
    fit(ensemble, train, task=task, **SHORT)
    assert ensemble.predict(IMAGES[:4]).mean.shape == (4, 3, 6, 6)
    assert ensemble.predict(IMAGES[:4]).classes.shape == (4, 6, 6)


def test_dense_regression():
    ensemble = DeepEnsemble(dense(2), 2)
    fit(ensemble, (IMAGES, IMAGES[:, 0]), task=Regression(head="gaussian", variance="log"), **SHORT)
    assert ensemble.predict(IMAGES[:4]).mean.shape == (4, 1, 6, 6)


def test_an_exhausted_generator_trains():
    ensemble = DeepEnsemble(dense(3), 2)
    fit(ensemble, iter([(IMAGES, CLASSES)]), task="classification", **SHORT)
    assert ensemble(IMAGES).shape == (2, 12, 3, 6, 6)


def test_the_warning_of_an_unchanged_student_names_the_criterion():
    inputs, targets = IMAGES.flatten(1), IMAGES[:, 0, 0, 0]
    ensemble = DeepEnsemble(lambda: nn.Linear(36, 1), 2)
    fit(ensemble, (inputs, targets), **SHORT)
    with pytest.warns(UnchangedWarning, match="lower MSE"):
        distill(ensemble, (inputs, targets), (inputs, targets), lr=1e3, **SHORT)

"""Warnings about members that are one function."""

import warnings

import pytest
import torch

from enfold import DeepEnsemble
from enfold.data import Data, Split
from enfold.ensembles.batch_ensemble import BatchEnsemble
from enfold.metrics.predictions import Predictions
from enfold.networks import MLP
from enfold.train import TrainConfig, fit
from enfold.train.diversity import LowDiversityWarning, describe_similarity


@pytest.fixture
def data():
    torch.manual_seed(0)
    inputs = torch.randn(96, 6)
    labels = (inputs[:, 0] + 0.8 * torch.randn(96) > 0).long()
    return Data(Split(inputs, labels), Split(inputs[:48], labels[:48]), Split(inputs, labels), 2, (6,))


def test_equal_members_give_a_warning(data):
    members = BatchEnsemble(MLP(6, [8], 2), num_members=3, init="ones")
    with pytest.warns(LowDiversityWarning, match="nearly identical"):
        fit(members, data, config=TrainConfig(epochs=2, order="shared"), quiet=True)


def test_members_of_a_deep_ensemble_give_no_warning(data):
    members = DeepEnsemble(lambda: MLP(6, [32], 2), 3)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        fit(members, data, config=TrainConfig(epochs=2), quiet=True)
    assert told == []


def test_single_members_and_diverse_pairs_give_no_warning():
    labels = torch.tensor([0, 1, 0, 1])
    first = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4], [0.6, 0.4]]).log()
    assert describe_similarity(Predictions(first[None], labels)) is None
    assert "nearly identical" in describe_similarity(Predictions(torch.stack([first, first]), labels))
    assert describe_similarity(Predictions(torch.stack([first, first.flip(1)]), labels)) is None
    close = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4], [0.99, 0.01]]).log()
    assert describe_similarity(Predictions(torch.stack([first, close]), labels)) is None, (
        "same classes, other probabilities"
    )


def test_agreement_on_a_solved_problem_gives_no_warning():
    labels = torch.tensor([0, 1, 0, 1])
    first = torch.tensor([[0.99, 0.01], [0.01, 0.99], [0.99, 0.01], [0.01, 0.99]]).log()
    second = torch.tensor([[0.98, 0.02], [0.02, 0.98], [0.98, 0.02], [0.02, 0.98]]).log()
    assert describe_similarity(Predictions(torch.stack([first, second]), labels)) is None
    assert describe_similarity(Predictions(torch.stack([first, first]), labels)) is not None

"""The cross-entropy of each member is torch's own, label smoothing included."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from enfold.data.batches import Batch
from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.ensembles.mixed_ensemble import MixedEnsemble
from enfold.train import cross_entropy
from enfold.train.objective import batch_outputs


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(3, 7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def labels() -> torch.Tensor:
    return torch.randint(5, (3, 7), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("smoothing", [0.0, 0.1, [0.0, 0.2, 0.9]])
def test_cross_entropy_equals_torch_for_separate_batches(logits, labels, smoothing):
    found = cross_entropy(smoothing).of_outputs(logits, Batch(torch.empty(0), labels, own=True))
    amounts = smoothing if isinstance(smoothing, list) else [smoothing] * 3
    for index, amount in enumerate(amounts):
        expected = F.cross_entropy(logits[index], labels[index], label_smoothing=amount)
        torch.testing.assert_close(found[index], expected)


def test_cross_entropy_equals_torch_for_a_common_batch(logits, labels):
    found = cross_entropy(0.1).of_outputs(logits, Batch(torch.empty(0), labels[0]))
    expected = [F.cross_entropy(one, labels[0], label_smoothing=0.1) for one in logits]
    torch.testing.assert_close(found, torch.stack(expected))


def test_gradients_of_smoothed_losses(logits, labels):
    logits.requires_grad_()
    cross_entropy([0.0, 0.2, 0.5]).of_outputs(logits, Batch(torch.empty(0), labels, own=True)).sum().backward()
    again = logits.detach().clone().requires_grad_()
    pairs = zip(again, labels, (0.0, 0.2, 0.5), strict=True)
    sum(F.cross_entropy(own, target, label_smoothing=amount) for own, target, amount in pairs).backward()
    torch.testing.assert_close(logits.grad, again.grad)


def test_logits_of_every_kind_of_model():
    networks = [nn.Linear(4, 3), nn.Linear(4, 3)]
    inputs = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(2))
    shared = Batch(inputs[0], torch.zeros(6, dtype=torch.long))
    own = Batch(inputs, torch.zeros(2, 6, dtype=torch.long), own=True)
    expected = torch.stack([network(inputs[0]) for network in networks])
    torch.testing.assert_close(batch_outputs(DeepEnsemble(networks), shared), expected)
    torch.testing.assert_close(batch_outputs(MixedEnsemble(networks), shared), expected)
    torch.testing.assert_close(batch_outputs(networks[0], shared), expected[:1])
    alone = Batch(inputs[:1], torch.zeros(1, 6, dtype=torch.long), own=True)
    torch.testing.assert_close(batch_outputs(networks[0], alone), expected[:1])
    each = torch.stack([network(x) for network, x in zip(networks, inputs, strict=True)])
    torch.testing.assert_close(batch_outputs(DeepEnsemble(networks), own), each)


@pytest.mark.parametrize("own", [False, True])
def test_losses_of_half_precision_are_computed_in_float32(own):
    members = DeepEnsemble([nn.Linear(4, 3), nn.Linear(4, 3)])
    inputs, labels = torch.randn(2, 6, 4), torch.randint(3, (2, 6))
    batch = Batch(inputs, labels, True) if own else Batch(inputs[0], labels[0])
    expected = cross_entropy()(members, batch)
    found = cross_entropy()(members.half(), batch)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=0, atol=5e-3)
    assert cross_entropy()(members.double(), batch).dtype == torch.float64

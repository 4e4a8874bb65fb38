"""Tasks given by name are completed by the first batch."""

import torch
from torch import nn

import enfold


def test_dense_classes_by_name_predict_after_training():
    inputs = torch.randn(12, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    targets = (inputs[:, 0] > 0).long()
    ensemble = enfold.DeepEnsemble(nn.Conv2d(1, 3, 3, padding=1), 2)
    enfold.fit(ensemble, (inputs, targets), epochs=1, task="classification", quiet=True)
    prediction = ensemble.predict(inputs)
    assert prediction.mean.shape == (12, 3, 4, 4)
    assert prediction.classes.shape == prediction.total.shape == (12, 4, 4)


def test_an_evaluation_batch_without_targets_is_skipped():
    inputs, targets = torch.randn(8, 1, 4, 4), torch.randint(3, (8, 4, 4))
    empty = torch.full((2, 4, 4), -100)
    network = nn.Conv2d(1, 3, 3, padding=1)
    batches = [(inputs, targets), (torch.randn(2, 1, 4, 4), empty)]
    assert len(enfold.predict(network, batches)) == len(enfold.predict(network, batches[:1])) == 8 * 16

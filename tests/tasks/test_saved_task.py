"""An ensemble is saved with its task."""

import pytest
import torch
from torch import nn

import enfold
from enfold.tasks import Classification
from enfold.tasks.multilabel import Multilabel
from enfold.tasks.regression import Regression

X = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "task",
    [
        Regression(),
        Regression(head="gaussian", variance="softplus", beta=0.5),
        Regression(quantiles=(0.1, 0.5, 0.9)),
        Multilabel(),
        Classification(class_weights=(1.0, 2.0)),
    ],
)
def test_a_loaded_ensemble_predicts_as_before(tmp_path, task):
    width = {"gaussian": 2, "quantiles": 3}.get(getattr(task, "head", ""), 1 if isinstance(task, Regression) else 2)
    targets = X[:, :1] if isinstance(task, Regression) else (X[:, :2] > 0).float()
    targets = (X[:, 0] > 0).long() if type(task) is Classification else targets
    ensemble = enfold.DeepEnsemble(nn.Linear(3, width), 3)
    enfold.fit(ensemble, (X, targets), epochs=1, task=task, quiet=True)
    enfold.save(ensemble, tmp_path / "ensemble.safetensors")
    loaded = enfold.load(tmp_path / "ensemble.safetensors", nn.Linear(3, width))
    assert loaded.task == ensemble.task
    first, second = ensemble.predict(X), loaded.predict(X)
    assert torch.equal(first.mean, second.mean)
    assert torch.equal(first.epistemic, second.epistemic)


def test_what_fit_inferred_is_used_by_predict():
    ensemble = enfold.DeepEnsemble(nn.Linear(3, 1), 3)
    assert ensemble.task is None
    enfold.fit(ensemble, (X, X[:, :1] * 2), epochs=1, quiet=True)
    assert ensemble.task == Regression(head="point")
    outputs = ensemble(X)
    prediction = ensemble.predict(X)
    torch.testing.assert_close(prediction.mean, outputs.mean(0))
    torch.testing.assert_close(prediction.epistemic, outputs.var(0, correction=0))

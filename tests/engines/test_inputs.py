"""A wrong input size is one sentence with the shape, what the network takes and torch's own words; bugs stay bugs."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from enfold.calibrate import calibrate
from enfold.data import Data, Split
from enfold.ensembles.batch_ensemble import BatchEnsemble
from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.errors import EnfoldError, WrongShape
from enfold.evaluate import predict
from enfold.train import TrainConfig, fit


def make_linear() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3))


def make_convolutional() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))


def data_of(shape: tuple[int, ...]) -> Data:
    part = Split(torch.randn(8, *shape), torch.arange(8) % 3)
    return Data(part, Split(part.inputs[:0], part.labels[:0]), part, 3, shape)


def models(make) -> dict[str, nn.Module]:
    return {"network": make(), "members": DeepEnsemble(make, 2), "share": BatchEnsemble(make(), 2)}


@pytest.mark.parametrize("kind", ["network", "members", "share"])
@pytest.mark.parametrize(
    ("make", "shape", "takes"),
    [
        (make_linear, (3, 2), "first layer takes 12 features"),
        (make_convolutional, (1, 8, 8), r"first layer takes \(3, height, width\)"),
    ],
)
def test_failing_first_batches_are_reported(kind, make, shape, takes):
    data, said = data_of(shape), rf"Sequential, whose {takes}, fails on inputs of shape \({shape[0]}, {shape[1]}"
    calls = [
        lambda model: predict(model, data.test),
        lambda model: fit(model, data, config=TrainConfig(epochs=1), quiet=True),
    ]
    if kind != "network":
        calls.append(lambda model: model(data.train.inputs))
    for call in calls:
        with pytest.raises(WrongShape, match=said) as raised:
            call(models(make)[kind])
        cause = raised.value.__cause__
        assert isinstance(cause, RuntimeError)
        assert " ".join(str(cause).split()) in str(raised.value)
        assert isinstance(raised.value, EnfoldError)
        assert str(raised.value).endswith("change the network, or reshape the data")


class Broken(nn.Module):
    """A bug of the user's own, on its `fails`-th call."""

    def __init__(self, error: Exception, fails: int = 1) -> None:
        super().__init__()
        self.layer, self.error, self.left = nn.Linear(4, 3), error, fails

    def forward(self, inputs: Tensor) -> Tensor:
        self.left -= 1
        if self.left == 0:
            raise self.error
        return self.layer(inputs)


@pytest.mark.parametrize(
    ("error", "fails"),
    [
        (ZeroDivisionError("division by zero"), 1),
        (RuntimeError("out of ideas"), 1),
        (torch.OutOfMemoryError("no room for size 3"), 1),
        (RuntimeError("the size of tensor a must match"), 2),  # the first batch went well
    ],
)
def test_other_exceptions_are_raised_unchanged(error, fails):
    with pytest.raises(type(error)) as raised:
        predict(Broken(error, fails), data_of((4,)).test, batch_size=4)
    assert raised.value is error


# Arrays


@pytest.mark.parametrize("kind", ["members", "share", "calibrated"])
def test_predictions_of_arrays_are_those_of_tensors(kind):
    data = data_of((12,))
    model = calibrate(make_linear(), data.train) if kind == "calibrated" else models(make_linear)[kind]
    rows = np.random.default_rng(0).normal(size=(5, 12))
    expected = model.predict(torch.tensor(rows, dtype=torch.float32))
    for given in (rows, rows.astype(np.float32), rows[::-1].copy()[::-1]):
        assert torch.equal(model.predict(given).mean, expected.mean)


def test_arrays_of_images_have_their_channels_moved_as_in_data_sets():
    ensemble = DeepEnsemble(make_convolutional, 2)
    images = np.random.default_rng(0).random((4, 8, 8, 3), dtype=np.float32)
    expected = ensemble.predict(torch.from_numpy(images).permute(0, 3, 1, 2))
    assert torch.equal(ensemble.predict(images).mean, expected.mean)


def test_several_inputs_may_be_arrays_by_name():
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, left: Tensor, right: Tensor) -> Tensor:
            return self.layer(left + right)

    ensemble = DeepEnsemble(Sum, 2)
    left, right = np.ones((4, 3)), torch.ones(4, 3)
    expected = ensemble.predict(left=right, right=right)
    assert torch.equal(ensemble.predict(left=left, right=right).mean, expected.mean)


def test_arrays_without_numbers_are_refused():
    with pytest.raises(EnfoldError, match="inputs must be an array of numbers"):
        DeepEnsemble(make_linear, 2).predict(np.array([["a"]]))

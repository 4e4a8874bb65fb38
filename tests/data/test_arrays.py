import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from sklearn.preprocessing import StandardScaler

from enfold.data.arrays import as_inputs, as_labels, as_split, channel_statistics, check_split
from enfold.data.dataset import Data, Split
from enfold.errors import EnfoldError


@pytest.mark.parametrize(
    ("dtype", "shape", "expected_dtype", "expected_shape"),
    [
        (np.uint8, (5, 28, 28), torch.uint8, (5, 1, 28, 28)),
        (np.uint8, (5, 32, 32, 3), torch.uint8, (5, 3, 32, 32)),
        (np.uint8, (5, 3, 32, 32), torch.uint8, (5, 3, 32, 32)),
        (np.uint8, (5, 784), torch.uint8, (5, 784)),
        (np.float64, (5, 20), torch.float32, (5, 20)),
        (np.float64, (5, 8, 8, 1), torch.float32, (5, 1, 8, 8)),
        (np.float16, (5, 7, 9), torch.float32, (5, 7, 9)),
        (np.int32, (5, 12), torch.int64, (5, 12)),
        (np.bool_, (5, 4), torch.float32, (5, 4)),
    ],
)
def test_types_and_shapes(dtype, shape, expected_dtype, expected_shape):
    inputs = as_inputs(np.ones(shape, dtype), "x")
    assert inputs.dtype == expected_dtype
    assert inputs.shape == expected_shape
    assert inputs.is_contiguous()


def test_channels_are_moved_not_reinterpreted():
    array = np.arange(2 * 5 * 5 * 3, dtype=np.uint8).reshape(2, 5, 5, 3)
    inputs = as_inputs(array, "x")
    assert inputs[1, 2, 3, 4].item() == array[1, 3, 4, 2]


@pytest.mark.parametrize("array", [np.zeros(5), np.zeros((5, 2), dtype="U3"), np.zeros((5, 2), dtype=complex)])
def test_refuses_inputs_that_are_not_numeric_arrays(array):
    with pytest.raises(EnfoldError, match="one row per example"):
        as_inputs(array, "x")


@pytest.mark.parametrize("array", [np.array([[1], [0]]), np.array([1.0, 0.0]), np.array([1, 0], np.uint8)])
def test_labels_of_whole_numbers(array):
    torch.testing.assert_close(as_labels(array, "y"), torch.tensor([1, 0]))


@pytest.mark.parametrize("array", [np.eye(3), np.array([0.5, 1.0]), np.array([np.nan, 1.0]), np.array(["cat", "dog"])])
def test_refuses_labels_that_are_not_integers(array):
    with pytest.raises(EnfoldError, match="y must be one integer"):
        as_labels(array, "y")


def test_refuses_a_mismatch_of_counts():
    with pytest.raises(EnfoldError, match="got 4 inputs and 3 labels"):
        as_split(np.zeros((4, 2)), np.zeros(3, int), "x and y")


@pytest.mark.parametrize(
    ("labels", "message"), [([0, -1], "must not be negative, got -1"), ([0, 3], r"0 \.\.\. 2 for 3 classes, got 3")]
)
def test_refuses_labels_out_of_range(labels, message):
    with pytest.raises(EnfoldError, match=message):
        check_split(Split(torch.zeros(2, 1), torch.tensor(labels)), 3, "here")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_refuses_inputs_that_are_not_finite_and_names_the_first(value):
    inputs = torch.zeros(3000, 2)
    inputs[2500, 1] = inputs[2600, 0] = value
    with pytest.raises(EnfoldError, match="in example 2500 of here"):
        check_split(Split(inputs, torch.zeros(3000, dtype=torch.long)), 3, "here")


def test_refuses_an_empty_split():
    with pytest.raises(EnfoldError, match="at least one example"):
        check_split(Split(torch.zeros(0, 2), torch.zeros(0, dtype=torch.long)), 3, "here")


def test_statistics_of_bytes_against_numpy():
    images = torch.randint(0, 256, (50, 3, 6, 5), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    reference = images.numpy().astype(np.float64) / 255
    mean, std = channel_statistics(images)
    np.testing.assert_allclose(mean, reference.mean((0, 2, 3)), rtol=1e-12)
    np.testing.assert_allclose(std, reference.std((0, 2, 3)), rtol=1e-12)


@settings(deadline=None, derandomize=True, max_examples=30)
@given(hnp.arrays(np.float32, (9, 4), elements=st.floats(-1000, 1000, width=32)))
def test_statistics_of_features_against_scikit_learn(features):
    scaler = StandardScaler().fit(features.astype(np.float64))
    mean, std = channel_statistics(torch.from_numpy(features))
    np.testing.assert_allclose(mean, scaler.mean_, rtol=1e-9, atol=1e-9)
    varying = scaler.var_ > 1e-12
    np.testing.assert_allclose(np.array(std)[varying], np.sqrt(scaler.var_[varying]), rtol=1e-6)


def test_statistics_across_chunks_and_far_from_zero():
    inputs = 1e4 + torch.randn(5000, 2, 3, generator=torch.Generator().manual_seed(0))
    mean, std = channel_statistics(inputs)
    reference = inputs.double().numpy()
    np.testing.assert_allclose(mean, reference.mean((0, 2)), rtol=1e-12)
    np.testing.assert_allclose(std, reference.std((0, 2)), rtol=1e-9)


def test_a_constant_channel_normalises_to_zeros():
    inputs = torch.full((4, 2), 7.0)
    mean, std = channel_statistics(inputs)
    split = Split(inputs, torch.zeros(4, dtype=torch.long))
    data = Data(split, split, split, 1, (2,), mean=mean, std=std)
    torch.testing.assert_close(data.prepare(inputs), torch.zeros(4, 2))


def test_whole_numbers_are_not_normalised():
    assert channel_statistics(torch.ones(4, 2, dtype=torch.long)) is None

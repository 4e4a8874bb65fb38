import pickle

import numpy as np
import pytest
import torch

from enfold.data import load
from enfold.errors import EnfoldError


def arrays(count=40, offset=0):
    numbers = np.arange(count)
    return np.repeat(numbers + offset, 16).reshape(count, 4, 4).astype(np.uint8), numbers % 4


@pytest.fixture
def keras(tmp_path):
    def save(**more):
        x_train, y_train = arrays(80)
        x_test, y_test = arrays(20, 100)
        content = {"x_train": x_train, "y_train": y_train, "x_test": x_test, "y_test": y_test, **more}
        np.savez(tmp_path / "own.npz", **{name: array for name, array in content.items() if array is not None})
        return tmp_path / "own.npz"

    return save


def test_keras_arrays(keras, tmp_path):
    data = load(keras())
    assert (len(data.train), len(data.val), len(data.test)) == (72, 8, 20)
    assert data.shape == (1, 4, 4)
    assert data.num_classes == 4
    torch.testing.assert_close(data.test.inputs[:, 0, 0, 0].long(), torch.arange(100, 120))
    pool = torch.cat([data.train.inputs, data.val.inputs])[:, 0, 0, 0]
    assert sorted(pool.tolist()) == list(range(80))
    assert data.source == f"own.npz from {tmp_path}"


@pytest.mark.parametrize("name", ["validation", "val"])
def test_a_given_validation_split_is_used(keras, name):
    inputs, labels = arrays(12, 200)
    path = keras(**{f"x_{name}": inputs, f"y_{name}": labels})
    data = load(path)
    assert (len(data.train), len(data.val)) == (80, 12)
    assert data.val.inputs.min() == 200
    pooled = load(path, val_size=30)
    assert (len(pooled.train), len(pooled.val)) == (62, 30)


def test_names_of_classes(keras):
    data = load(keras(names=np.array(["a", "b", "c", "d", "e"])))
    assert data.names == ("a", "b", "c", "d", "e")
    assert data.num_classes == 5


def test_inputs_and_labels_are_split_with_a_fixed_test_split(tmp_path):
    inputs, labels = np.random.default_rng(0).normal(size=(100, 3)), np.arange(100) % 5
    np.savez(tmp_path / "points.npz", inputs=inputs, labels=labels)
    first, second = load(tmp_path / "points.npz", seed=0), load(tmp_path / "points.npz", seed=1)
    assert (len(first.train), len(first.val), len(first.test)) == (72, 8, 20)
    assert first.shape == (3,)
    torch.testing.assert_close(first.test.inputs, second.test.inputs, rtol=0, atol=0)
    assert not torch.equal(first.val.inputs, second.val.inputs)
    assert torch.bincount(first.test.labels).tolist() == [4] * 5
    assert first.mean is not None
    assert len(first.mean) == 3


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"y_train": None}, "y_train"),
        ({"x_test": None}, "x_test"),
        ({"x_train": None, "y_train": None}, "got x_test, y_test"),
        ({"y_train": np.zeros(79, int)}, "80 inputs and 79 labels"),
        ({"y_test": np.full(20, 4)}, r"0 \.\.\. 3 for 4 classes, got 4 in the test split"),
        ({"y_train": np.full(80, -1)}, "must not be negative, got -1 in the train split"),
        ({"x_test": np.zeros((20, 5, 5), np.uint8)}, r"torch\.uint8 \(1, 5, 5\)"),
        ({"x_test": np.zeros((20, 4, 4))}, r"got torch\.float32 \(4, 4\) in the test split"),
        ({"x_train": np.full((80, 2), np.nan), "x_test": np.zeros((20, 2))}, "NaN or infinity in example 0"),
        ({"x_test": np.zeros((0, 4, 4), np.uint8), "y_test": np.zeros(0, int)}, "test split .*at least one example"),
    ],
)
def test_refusals(keras, more, message):
    with pytest.raises(EnfoldError, match=message) as caught:
        load(keras(**more))
    assert "\n" not in str(caught.value)


class Evil:
    def __reduce__(self):
        return (print, ("unpickled",))


@pytest.mark.parametrize("kind", ["objects", "pickle", "text", "truncated", "npy"])
def test_never_unpickles_and_refuses_other_files(keras, tmp_path, capsys, kind):
    path = keras()
    whole = path.read_bytes()
    if kind == "objects":
        keras(x_train=np.array([Evil()] * 80, dtype=object))
    elif kind == "npy":
        with path.open("wb") as file:
            np.save(file, np.zeros(3))
    else:
        path.write_bytes({"pickle": pickle.dumps(Evil()), "text": b"hello", "truncated": whole[:-30]}[kind])
    with pytest.raises(EnfoldError, match=r"\.npz file of plain arrays"):
        load(path)
    assert capsys.readouterr().out == ""

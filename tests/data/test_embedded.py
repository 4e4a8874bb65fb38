import ast
import sys
from pathlib import Path

import pytest
import torch
from sklearn.datasets import load_digits

from enfold.data import check, fashion_mini, load
from enfold.errors import EnfoldError


@pytest.fixture(scope="module")
def mini():
    return load("fashion-mini")


def test_fashion_mini_sizes_and_class_balance(mini):
    assert [torch.bincount(part.labels).tolist() for part in (mini.train, mini.val, mini.test)] == [
        [1000] * 10,
        [200] * 10,
        [500] * 10,
    ]
    assert mini.train.inputs.shape == (10_000, 1, 28, 28)
    assert mini.train.inputs.dtype == torch.uint8
    assert mini.num_classes == len(mini.names) == 10
    assert fashion_mini.FILE.stat().st_size <= 7_000_000


def test_fashion_mini_images_are_upright(mini):
    """Boots have their sole below and trousers are taller than wide: rows and columns were not exchanged."""
    images = mini.train.inputs.float()[:, 0]
    trousers = images[mini.train.labels == mini.names.index("Trouser")].mean(0)
    assert (trousers.sum(0) > 500).sum() < (trousers.sum(1) > 500).sum()
    boots = images[mini.train.labels == mini.names.index("Ankle boot")].mean(0)
    assert boots[14:].sum() > boots[:14].sum()


def test_fashion_mini_splits_are_disjoint(mini):
    parts = [{image.numpy().tobytes() for image in part.inputs} for part in (mini.train, mini.val, mini.test)]
    assert len(parts[0] & parts[1]) == len(parts[0] & parts[2]) == len(parts[1] & parts[2]) == 0


def test_prepared_training_pixels_have_mean_0_and_deviation_1(mini):
    prepared = mini.prepare(mini.train.inputs)
    torch.testing.assert_close(prepared.mean(), torch.tensor(0.0), atol=1e-4, rtol=0)
    torch.testing.assert_close(prepared.std(), torch.tensor(1.0), atol=1e-4, rtol=0)


def test_another_validation_size_pools_train_and_validation(mini):
    data = load("fashion-mini", val_size=500, train_size=300, seed=7)
    assert (len(data.train), len(data.val), len(data.test)) == (300, 500, 5000)
    assert torch.bincount(data.val.labels).tolist() == [50] * 10
    assert torch.bincount(data.train.labels).tolist() == [30] * 10
    torch.testing.assert_close(data.test.inputs, mini.test.inputs, rtol=0, atol=0)


def test_a_damaged_file_is_found(monkeypatch, tmp_path):
    assert check("fashion-mini") == []
    damaged = tmp_path / "fashion_mini.npz"
    damaged.write_bytes(fashion_mini.FILE.read_bytes()[:-1] + b"!")
    monkeypatch.setattr(fashion_mini, "FILE", damaged)
    (problem,) = check("fashion-mini")
    assert "SHA-256" in problem
    monkeypatch.setattr(fashion_mini, "FILE", tmp_path / "absent.npz")
    (problem,) = check("fashion-mini")
    assert "install enfold again" in problem


def test_the_licence_is_included():
    text = fashion_mini.FILE.with_name("fashion_mini.LICENSE.txt").read_text(encoding="utf-8")
    assert "MIT License" in text
    assert "Zalando SE" in text


def test_digits_are_complete_and_the_test_split_is_fixed():
    data, again = load("digits"), load("digits", seed=9)
    assert (len(data.train), len(data.val), len(data.test)) == (1197, 200, 400)
    assert data.shape == (1, 8, 8)
    joined = torch.cat([part.inputs for part in (data.train, data.val, data.test)]).mul(16).flatten(1)
    assert sorted(joined.tolist()) == sorted(load_digits().data.tolist())
    for part in ("train", "val", "test"):
        torch.testing.assert_close(getattr(data, part).inputs, getattr(again, part).inputs, rtol=0, atol=0)
    assert 0 <= data.train.inputs.min() < data.train.inputs.max() == 1
    assert torch.bincount(data.test.labels).min() >= 38


def test_digits_without_scikit_learn(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(EnfoldError, match=r"scikit-learn.*enfold\[data\]"):
        load("digits")
    assert "enfold[data]" in check("digits")[0]


def test_no_data_module_imports_an_optional_package():
    folder = Path(fashion_mini.__file__).parent
    for path in folder.glob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = {alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names}
        names |= {node.module or "" for node in tree.body if isinstance(node, ast.ImportFrom)}
        assert names.isdisjoint({"PIL", "sklearn", "sklearn.datasets", "matplotlib"}), path

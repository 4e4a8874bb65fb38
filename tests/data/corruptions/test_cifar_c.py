import pickle

import numpy as np
import pytest
import torch

from enfold.data.corruptions import cifar_c, cifar_c_kinds, read_cifar_c
from enfold.errors import EnfoldError


def write(folder, count):
    """Two kinds; the first images of severity s have the value s in the upper rows of their green channel."""
    for kind in ("fog", "gaussian_noise"):
        images = np.lib.format.open_memmap(folder / f"{kind}.npy", "w+", np.uint8, (5 * count, 32, 32, 3))  # sparse
        for severity in range(5):
            images[severity * count : severity * count + 3, :2, :, 1] = severity + 1
            images[severity * count + 2, 0, 5, 2] = 77
        images.flush()
    np.save(folder / "labels.npy", np.tile(np.arange(count) % 10, 5).astype(np.uint8))
    return folder


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Twelve images a severity."""
    monkeypatch.setattr(cifar_c, "IMAGES", 12)
    return write(tmp_path, 12)


@pytest.mark.parametrize("severity", [1, 2, 3, 4, 5])
def test_a_severity_is_its_slice(folder, severity):
    split = read_cifar_c(folder, "fog", severity)
    assert split.inputs.shape == (12, 3, 32, 32)
    assert split.inputs.dtype == torch.uint8
    assert split.inputs[:3, 1, :2].unique().tolist() == [severity]
    assert split.inputs[2, 2, 0, 5] == 77
    assert split.inputs[3:].sum() == 0
    assert split.labels.dtype == torch.int64
    assert split.labels.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]
    assert split.source == "CIFAR-10-C"
    assert split.name == f"CIFAR-10-C fog {severity}"


def test_files_of_the_official_size(tmp_path):
    split = read_cifar_c(write(tmp_path, 10_000), "fog", 5)
    assert split.inputs.shape == (10_000, 3, 32, 32)
    assert split.inputs[:3, 1, :2].unique().tolist() == [5]


def test_a_hundred_classes(folder):
    np.save(folder / "labels.npy", np.tile(np.arange(88, 100), 5))
    split = read_cifar_c(str(folder), "fog", 1)
    assert split.source == "CIFAR-100-C"
    assert int(split.labels.max()) == 99


def test_available_kinds(folder):
    assert cifar_c_kinds(folder) == ("gaussian_noise", "fog")
    assert cifar_c_kinds(folder / "nowhere") == ()


def test_a_missing_file(folder):
    with pytest.raises(EnfoldError, match=r"frost\.npy must exist.*got a folder with gaussian_noise, fog"):
        read_cifar_c(folder, "frost", 1)
    (folder / "labels.npy").unlink()
    with pytest.raises(EnfoldError, match=r"labels\.npy must exist"):
        read_cifar_c(folder, "fog", 1)
    with pytest.raises(EnfoldError, match="no kind of corruption"):
        read_cifar_c(folder / "nowhere", "fog", 1)


def test_wrong_names_and_severities(folder):
    with pytest.raises(EnfoldError, match="did you mean 'fog'"):
        read_cifar_c(folder, "fogg", 1)
    with pytest.raises(EnfoldError, match="got 6"):
        read_cifar_c(folder, "fog", 6)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((12, 32, 32, 3), np.uint8), r"of shape \(60, 32, 32, 3\), got uint8 of shape \(12, 32, 32, 3\)"),
        (np.zeros((5, 3), np.float32), r"got float32 of shape \(5, 3\)"),
    ],
)
def test_wrong_arrays(folder, array, message):
    np.save(folder / "fog.npy", array)
    with pytest.raises(EnfoldError, match=message):
        read_cifar_c(folder, "fog", 1)


def test_files_without_arrays(folder):
    whole = (folder / "fog.npy").read_bytes()[:-1]
    np.savez(folder / "pixelate.npz", a=np.zeros(3))
    bad = {
        "fog": whole,
        "snow": b"",
        "frost": b"\x93NUMPY",
        "contrast": pickle.dumps([1, 2]),
        "pixelate": (folder / "pixelate.npz").read_bytes(),
    }
    for kind, content in bad.items():
        (folder / f"{kind}.npy").write_bytes(content)
        with pytest.raises(EnfoldError, match=rf"{kind}\.npy'? must (be|have)"):
            read_cifar_c(folder, kind, 1)


def test_pickled_objects_are_refused(folder):
    np.save(folder / "fog.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(EnfoldError, match=r"cannot be read .*extract the official archive again"):
        read_cifar_c(folder, "fog", 1)

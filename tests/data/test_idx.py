import numpy as np
import pytest
import torch

from enfold.data import idx
from enfold.errors import EnfoldError


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_reads_both_splits_plain_or_gzipped(tmp_path, tiny, suffix):
    train, test = idx.read_idx_folder(tiny.write(tmp_path, tiny.idx(), suffix))
    assert train.inputs.shape == (60, 1, 28, 28)
    assert test.inputs.shape == (20, 1, 28, 28)
    assert train.inputs.dtype == torch.uint8
    assert train.labels.dtype == torch.int64
    torch.testing.assert_close(train.inputs[:, 0, 3, 5], torch.arange(60, dtype=torch.uint8))
    torch.testing.assert_close(test.labels, torch.arange(20) % 10)


def test_bytes_are_read_in_row_major_order(tmp_path, tiny):
    array = np.arange(2 * 3 * 4).reshape(2, 3, 4)
    (tmp_path / "images").write_bytes(tiny.idx_bytes(array))
    torch.testing.assert_close(idx.read_idx(tmp_path / "images", 3), torch.from_numpy(array).to(torch.uint8))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda content: content[:-1], "bytes after its header"),
        (lambda content: content + b"x", "bytes after its header"),
        (lambda content: content[:10], "magic number 00000803"),
        (lambda content: b"", "starts with nothing"),
        (lambda content: b"\x89PNG" + content[4:], "starts with 89504e47"),
        (lambda content: b"\0\0\x0d\x03" + content[4:], "starts with 00000d03"),
    ],
)
def test_refuses_damaged_and_other_files(tmp_path, tiny, damage, message):
    files = tiny.idx()
    tiny.write(tmp_path, {**files, idx.TEST_IMAGES: damage(files[idx.TEST_IMAGES])})
    with pytest.raises(EnfoldError, match=message) as caught:
        idx.read_idx_folder(tmp_path)
    assert idx.TEST_IMAGES in str(caught.value)


def test_refuses_a_labels_file_in_the_place_of_images(tmp_path, tiny):
    files = tiny.idx()
    tiny.write(tmp_path, {**files, idx.TRAIN_IMAGES: files[idx.TRAIN_LABELS]})
    with pytest.raises(EnfoldError, match="starts with 00000801"):
        idx.read_idx_folder(tmp_path)


def test_refuses_images_and_labels_of_different_number(tmp_path, tiny):
    files = tiny.idx()
    tiny.write(tmp_path, {**files, idx.TRAIN_LABELS: files[idx.TEST_LABELS]})
    with pytest.raises(EnfoldError, match="60 images and 20 labels"):
        idx.read_idx_folder(tmp_path)


@pytest.mark.parametrize("damage", [lambda content: content[:-20], lambda content: b"not gzip at all"])
def test_refuses_a_broken_gzip(tmp_path, tiny, damage):
    tiny.write(tmp_path, tiny.idx(), ".gz")
    path = tmp_path / f"{idx.TRAIN_IMAGES}.gz"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(EnfoldError, match="gzip file"):
        idx.read_idx_folder(tmp_path)

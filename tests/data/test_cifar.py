import io
import tarfile

import pytest
import torch

from enfold.data import cifar
from enfold.errors import EnfoldError


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_reads_channels_first_and_joins_the_batches(tmp_path, tiny, suffix):
    folder = tiny.write(tmp_path, tiny.cifar_files(), suffix)
    train, test = cifar.read_cifar_folder(folder, ["data_batch_1.bin", "data_batch_2.bin"], ["test_batch.bin"], 1)
    assert train.inputs.shape == (60, 3, 32, 32)
    assert test.inputs.shape == (20, 3, 32, 32)
    assert train.inputs[37, :, 0, 0].tolist() == train.inputs[37, :, 31, 31].tolist() == [7, 8, 9]
    torch.testing.assert_close(test.labels, torch.arange(20) % 10)


def test_fine_labels_are_used(tmp_path, tiny):
    (tmp_path / "train.bin").write_bytes(tiny.cifar_bytes(12, label_bytes=2))
    split = cifar.read_records(tmp_path / "train.bin", 2)
    torch.testing.assert_close(split.labels, torch.arange(12) % 10)
    assert split.inputs[5, :, 4, 4].tolist() == [5, 6, 7]


@pytest.mark.parametrize("content", [b"", b"x", b"x" * 3072, b"x" * 3074])
def test_refuses_incomplete_records(tmp_path, content):
    (tmp_path / "batch.bin").write_bytes(content)
    with pytest.raises(EnfoldError, match=f"records of 3073 bytes, got {len(content)} bytes"):
        cifar.read_records(tmp_path / "batch.bin", 1)


def test_only_the_listed_files_are_extracted(tmp_path, tiny):
    archive = tmp_path / "place" / "cifar-10-binary.tar.gz"
    archive.parent.mkdir()
    archive.write_bytes(tiny.cifar_archive())
    cifar.extract(archive, archive.parent / "cifar-10-batches-bin", ["data_batch_1.bin", "test_batch.bin"])
    written = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert written == {
        "place/cifar-10-binary.tar.gz",
        "place/cifar-10-batches-bin/data_batch_1.bin",
        "place/cifar-10-batches-bin/test_batch.bin",
    }
    assert (archive.parent / "cifar-10-batches-bin/test_batch.bin").read_bytes() == tiny.cifar_bytes(20)


def test_a_link_in_the_archive_is_not_followed(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("secret")
    archive = tmp_path / "archive.tar.gz"
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        link = tarfile.TarInfo("folder/train.bin")
        link.type, link.linkname = tarfile.SYMTYPE, str(secret)
        tar.addfile(link)
    archive.write_bytes(buffer.getvalue())
    with pytest.raises(EnfoldError, match=r"must contain folder/train\.bin"):
        cifar.extract(archive, tmp_path / "folder", ["train.bin"])
    assert not (tmp_path / "folder").exists()


@pytest.mark.parametrize("damage", [lambda content: content[:-40], lambda content: b"no archive"])
def test_refuses_a_broken_archive(tmp_path, tiny, damage):
    archive = tmp_path / "archive.tar.gz"
    archive.write_bytes(damage(tiny.cifar_archive()))
    with pytest.raises(EnfoldError, match=r"tar\.gz archive"):
        cifar.extract(archive, tmp_path / "cifar-10-batches-bin", ["missing.bin"])

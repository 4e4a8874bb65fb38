import gzip
import os
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from enfold.data import Data, Split, catalogue, check, fetch, idx, load
from enfold.data.official import CIFAR100, CIFAR100_CLASSES
from enfold.data.sources import SOURCES
from enfold.errors import EnfoldError

REAL = os.environ.get("ENFOLD_DATA")


@pytest.fixture
def mnist(monkeypatch, tiny, server):
    source = tiny.mnist(server.address)
    monkeypatch.setitem(SOURCES, "mnist", source)
    return source


@pytest.fixture
def cifar10(monkeypatch, tiny, server):
    archive = tiny.cifar_archive()
    server.files["cifar-10-binary.tar.gz"] = archive
    monkeypatch.setitem(SOURCES, "cifar10", tiny.cifar(archive, server.address))
    return archive


def pack(files):
    return {f"{name}.gz": gzip.compress(content, mtime=0) for name, content in files.items()}


def test_files_are_found_under_root_the_variable_and_the_cache(mnist, tiny, tmp_path, monkeypatch, server):
    for place in ("given", "variable", "cache/enfold"):
        tiny.write(tmp_path / place / "mnist", tiny.idx(), ".gz" if place == "variable" else "")
    assert load("mnist").source == f"mnist from {tmp_path}/cache/enfold/mnist"
    monkeypatch.setenv("ENFOLD_DATA", str(tmp_path / "variable"))
    assert load("mnist").source == f"mnist from {tmp_path}/variable/mnist"
    monkeypatch.setenv("ENFOLD_DATA", str(tmp_path / "nowhere"))
    assert load("mnist").source == f"mnist from {tmp_path}/cache/enfold/mnist"
    assert load("mnist", root=tmp_path / "given").source == f"mnist from {tmp_path}/given/mnist"
    assert server.requests == []


def test_splits_of_an_official_set(mnist, tiny, tmp_path):
    tiny.write(tmp_path / "mnist", tiny.idx())
    data = load("mnist", root=tmp_path, val_size=0.5)
    assert (len(data.train), len(data.val), len(data.test)) == (30, 30, 20)
    pool = torch.cat([data.train.inputs, data.val.inputs])[:, 0, 0, 0]
    assert sorted(pool.tolist()) == list(range(60))
    torch.testing.assert_close(data.train.inputs[:, 0, 0, 0].long() % 10, data.train.labels)
    expected = data.train.inputs.double() / 255
    assert data.mean == pytest.approx([expected.mean().item()])
    assert data.std == pytest.approx([expected.std(correction=0).item()])


def test_the_seed_determines_the_split_except_the_test_split(mnist, tiny, tmp_path):
    tiny.write(tmp_path / "mnist", tiny.idx())
    first, same, other = (load("mnist", root=tmp_path, val_size=20, train_size=20, seed=seed) for seed in (1, 1, 2))
    for part in ("train", "val"):
        assert torch.equal(getattr(first, part).inputs, getattr(same, part).inputs)
        assert not torch.equal(getattr(first, part).inputs, getattr(other, part).inputs)
    assert torch.equal(first.test.inputs, other.test.inputs)
    assert torch.bincount(first.train.labels).tolist() == [2] * 10
    assert set(first.train.inputs[:, 0, 0, 0].tolist()).isdisjoint(first.val.inputs[:, 0, 0, 0].tolist())


def test_missing_files_are_downloaded_and_present_ones_are_not(mnist, tiny, tmp_path, server):
    server.files = pack(tiny.idx())
    tiny.write(tmp_path / "mnist", {idx.TRAIN_IMAGES: tiny.idx()[idx.TRAIN_IMAGES]})
    data = load("mnist", root=tmp_path)
    assert len(data.test) == 20
    assert {name for name, _ in server.requests} == {f"{name}.gz" for name in tiny.idx()} - {f"{idx.TRAIN_IMAGES}.gz"}
    load("mnist", root=tmp_path)
    assert len(server.requests) == 3


def test_fetch_downloads_to_the_first_folder_and_returns_it(mnist, tiny, tmp_path, server, monkeypatch):
    server.files = pack(tiny.idx())
    monkeypatch.setenv("ENFOLD_DATA", str(tmp_path / "mine"))
    assert fetch("mnist") == tmp_path / "mine" / "mnist"
    assert check("mnist") == []


def test_without_download_the_error_names_files_and_folder(mnist, tmp_path, server):
    with pytest.raises(EnfoldError, match="mnist must be downloaded") as caught:
        load("mnist", root=tmp_path, download=False)
    assert all(name in str(caught.value) for name in mnist.files)
    assert str(tmp_path / "mnist") in str(caught.value)
    assert server.requests == []


def test_an_unreachable_network_gives_one_sentence_with_the_remedy(tiny, tmp_path, monkeypatch):
    monkeypatch.setitem(SOURCES, "cifar10", tiny.cifar(b""))
    with pytest.raises(EnfoldError, match=r"put data_batch_1\.bin, .* or cifar-10-binary\.tar\.gz into") as caught:
        load("cifar10", root=tmp_path)
    assert "\n" not in str(caught.value)


def test_an_archive_is_downloaded_unpacked_and_removed(cifar10, tiny, tmp_path, server):
    data = load("cifar10", root=tmp_path)
    assert (len(data.train), len(data.val), len(data.test)) == (54, 6, 20)
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == {".lock", *tiny.cifar_files()}
    assert check("cifar10", root=tmp_path) == []


def test_an_existing_archive_is_used_and_retained(cifar10, tmp_path, server):
    (tmp_path / "cifar-10-binary.tar.gz").write_bytes(cifar10)
    assert check("cifar10", root=tmp_path) == []
    assert load("cifar10", root=tmp_path).shape == (3, 32, 32)
    assert (tmp_path / "cifar-10-binary.tar.gz").exists()
    assert (tmp_path / "cifar-10-batches-bin" / "test_batch.bin").exists()
    assert server.requests == []


def test_an_archive_with_another_checksum_is_not_unpacked(cifar10, tmp_path):
    (tmp_path / "cifar-10-binary.tar.gz").write_bytes(cifar10[:-1])
    with pytest.raises(EnfoldError, match=r"tar\.gz must have the MD5"):
        load("cifar10", root=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["cifar-10-binary.tar.gz"]


def test_truncated_files_are_detected(cifar10, tiny, tmp_path):
    files = tiny.cifar_files()
    tiny.write(tmp_path / "cifar-10-batches-bin", {**files, "data_batch_2.bin": files["data_batch_2.bin"][: 3073 * 29]})
    with pytest.raises(EnfoldError, match=r"training split of cifar10 .*\(60, 3, 32, 32\), got \(59,"):
        load("cifar10", root=tmp_path)


def test_labels_of_another_data_set_are_detected(mnist, tiny, tmp_path):
    wrong = tiny.idx_bytes(torch.arange(60).numpy())
    tiny.write(tmp_path / "mnist", {**tiny.idx(), idx.TRAIN_LABELS: wrong})
    with pytest.raises(
        EnfoldError, match=r"labels must be 0 \.\.\. 9 for 10 classes, got 59 in the train split of mnist"
    ):
        load("mnist", root=tmp_path)


def test_check_finds_a_changed_byte_in_a_gzipped_file(mnist, tiny, tmp_path):
    files = tiny.idx()
    tiny.write(tmp_path / "mnist", files, ".gz")
    assert check("mnist", root=tmp_path) == []
    tiny.write(tmp_path / "mnist", {idx.TEST_LABELS: files[idx.TEST_LABELS][:-1] + b"\5"}, ".gz")
    (problem,) = check("mnist", root=tmp_path)
    assert idx.TEST_LABELS in problem
    with pytest.raises(EnfoldError, match="must have content with the MD5"):
        fetch("mnist", root=tmp_path)


def test_check_reports_missing_and_unreadable_files(mnist, tiny, tmp_path):
    (problem,) = check("mnist", root=tmp_path)
    assert "must be downloaded" in problem
    tiny.write(tmp_path / "mnist", tiny.idx(), ".gz")
    (tmp_path / "mnist" / f"{idx.TRAIN_IMAGES}.gz").write_bytes(b"broken")
    (problem,) = check("mnist", root=tmp_path)
    assert "gzip file" in problem


def test_check_of_a_path_reads_it(tmp_path):
    (problem,) = check(str(tmp_path / "absent.npz"))
    assert "must be a file or folder" in problem
    (tmp_path / "own.py").write_text(OWN)
    assert check(f"{tmp_path}/own.py:data") == []


def test_a_folder_that_cannot_be_written_to_is_named(mnist, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(EnfoldError, match="must be writable"):
        fetch("mnist", root=tmp_path / "file")


def test_catalogue(mnist, tiny, tmp_path):
    tiny.write(tmp_path / "mnist", tiny.idx())
    rows = {row.name: row for row in catalogue(root=tmp_path)}
    assert list(rows) == ["fashion-mini", "digits", "diabetes", "fashion-mnist", "mnist", "cifar10", "cifar100"]
    assert rows["mnist"].present
    assert rows["mnist"].path == tmp_path / "mnist"
    assert rows["mnist"].bytes == sum(len(content) for content in tiny.idx().values())
    assert not rows["cifar100"].present
    assert rows["cifar100"].path is None
    assert rows["cifar100"].bytes == 168_513_733
    assert rows["fashion-mini"].present
    assert all(
        row.description and row.licence and row.classes in (10, 100) for row in rows.values() if row.name != "diabetes"
    )
    assert rows["diabetes"].classes == 0  # a regression


def test_cifar100_reads_the_fine_labels(monkeypatch, tiny, tmp_path):
    from dataclasses import replace

    monkeypatch.setitem(SOURCES, "cifar100", replace(CIFAR100, counts=(40, 20)))
    files = {"train.bin": tiny.cifar_bytes(40, 2), "test.bin": tiny.cifar_bytes(20, 2)}
    tiny.write(tmp_path / "cifar-100-binary", files)
    data = load("cifar100", root=tmp_path)
    assert data.num_classes == len(set(CIFAR100_CLASSES)) == 100
    torch.testing.assert_close(data.test.labels, torch.arange(20) % 10)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fashion_mnist", "did you mean 'fashion-mnist'"),
        ("CIFAR-10", "did you mean 'cifar10'"),
        ("qqq", "qqq"),
        ("sub/folder", "'sub/folder'"),
        ("data.npz", r"'data\.npz'"),
        (Path("mnist"), "'mnist' must be a file or folder"),
    ],
)
def test_unknown_names_and_paths(name, message):
    with pytest.raises(EnfoldError, match=message):
        load(name)


def test_fetch_refuses_an_unknown_name():
    with pytest.raises(EnfoldError, match="did you mean 'cifar100'"):
        fetch("cifar-100")


def test_a_file_of_another_kind_is_refused(tmp_path):
    (tmp_path / "table.csv").write_text("1,2")
    with pytest.raises(EnfoldError, match="name_or_path"):
        load(tmp_path / "table.csv")


@pytest.mark.parametrize("options", [{"val_size": 60}, {"val_size": -1}, {"train_size": 55}, {"size": 32}])
def test_impossible_options_are_refused(mnist, tiny, tmp_path, options):
    tiny.write(tmp_path / "mnist", tiny.idx())
    with pytest.raises(EnfoldError, match=f"{next(iter(options))}"):
        load("mnist", root=tmp_path, **options)


OWN = """
import torch
from enfold.data import Data, Split

def data(label=1):
    split = Split(torch.arange(40.0).view(40, 1), torch.arange(40) % 2)
    return Data(split, split[:10], split[:6], 2, (1,))

def loader():
    return data().replace(train=[(torch.zeros(3, 1), torch.zeros(3))])

def wrong():
    return [1, 2]

def negative():
    return data().replace(test=Split(torch.zeros(1, 1), torch.tensor([-1])))
"""


@pytest.fixture
def own(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    return f"{tmp_path}/own.py"


def test_user_data(own):
    data = load(f"{own}:data")
    assert isinstance(data, Data)
    assert data.source == f"{own}:data"
    assert (len(data.train), len(data.val)) == (40, 10)


def test_user_data_can_be_split_again(own):
    data = load(f"{own}:data", val_size=20, train_size=10)
    assert isinstance(data.train, Split)
    assert (len(data.train), len(data.val), len(data.test)) == (10, 20, 6)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("wrong", {}, r"must be a function without arguments that returns enfold\.Data, got list"),
        ("negative", {}, "-1 in the test split"),
        ("loader", {"train_size": 5}, "train_size .*got list as train"),
        ("data", {"size": 3}, "size must"),
        ("nothing", {}, "must define 'nothing'"),
    ],
)
def test_user_data_are_checked(own, name, options, message):
    with pytest.raises(EnfoldError, match=message):
        load(f"{own}:{name}", **options)


def test_a_user_loader_is_unchanged(own):
    data = load(f"{own}:loader")
    assert not isinstance(data.train, Split | DataLoader)
    assert len(data.train) == 1


@pytest.mark.skipif(not REAL, reason="set ENFOLD_DATA to a folder with the official files")
@pytest.mark.parametrize("name", ["fashion-mnist", "mnist", "cifar10", "cifar100"])
def test_the_official_files(name, monkeypatch):
    monkeypatch.setenv("ENFOLD_DATA", REAL)
    if SOURCES[name].find(None) is None:
        pytest.skip(f"{name} is not in {REAL}")
    assert check(name) == []
    data = load(name, download=False)
    assert (len(data.train), len(data.val), len(data.test)) == SOURCES[name].sizes
    assert data.shape == SOURCES[name].shape
    counts = torch.bincount(data.val.labels).double() / len(data.val)
    expected = torch.bincount(torch.cat([data.train.labels, data.val.labels])).double()
    torch.testing.assert_close(counts, expected / expected.sum(), atol=1 / len(data.val), rtol=0)
    # The published statistics of the whole training part; ours are of the part without validation.
    published = {"fashion-mnist": (0.2860, 0.3530), "mnist": (0.1307, 0.3081), "cifar10": (0.4914, 0.2470)}
    if name in published:
        assert (data.mean[0], data.std[0]) == pytest.approx(published[name], abs=2e-3)


@pytest.mark.skipif(not REAL, reason="set ENFOLD_DATA to a folder with the official files")
def test_fashion_mini_is_a_subset_of_the_official_data(monkeypatch):
    monkeypatch.setenv("ENFOLD_DATA", REAL)
    source = SOURCES["fashion-mnist"]
    if source.find(None) is None:
        pytest.skip(f"fashion-mnist is not in {REAL}")
    whole, mini = source.read(source.find(None)), load("fashion-mini")

    def keys(part):
        pairs = zip(part.inputs, part.labels.tolist(), strict=True)
        return {(image.numpy().tobytes(), label) for image, label in pairs}

    assert keys(mini.train) | keys(mini.val) <= keys(whole.train)
    assert keys(mini.test) <= keys(whole.test)

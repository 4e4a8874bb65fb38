"""Streams: every example once, in an order that follows the seed, with memory for the buffer only."""

import io
import tarfile
from collections import Counter

import numpy as np
import pytest
import torch
from torch import nn

import enfold
from enfold.data import Stream
from enfold.errors import EnfoldError

pq = pytest.importorskip("pyarrow.parquet")


def write_parquet(path, numbers, fixed=True):
    import pyarrow

    inputs = [[float(n), -float(n)] for n in numbers]
    x = pyarrow.array(inputs, pyarrow.list_(pyarrow.float32(), 2)) if fixed else inputs
    table = {"x": x, "y": [n % 2 for n in numbers], "other": [""] * len(numbers)}
    pq.write_table(pyarrow.table(table), path)


def write_tar(path, numbers, image=None):
    with tarfile.open(path, "w") as archive:
        for n in numbers:
            content = image or png(n)
            for ending, value in (("png", content), ("cls", str(n % 2).encode())):
                entry = tarfile.TarInfo(f"part/{n:04d}.{ending}")
                entry.size = len(value)
                archive.addfile(entry, io.BytesIO(value))


def png(number):
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(np.full((2, 3), number, np.uint8)).save(file, "PNG")
    return file.getvalue()


@pytest.fixture(params=["parquet", "tar", "rows"])
def stream(request, tmp_path):
    numbers, kind = list(range(50)), request.param
    if kind == "rows":
        rows = [{"x": [float(n), -float(n)], "y": n % 2} for n in numbers]
        return lambda **options: Stream(rows, inputs="x", target="y", batch_size=8, **options)
    write = write_parquet if kind == "parquet" else write_tar
    for index in range(3):
        options = {"fixed": index > 0} if kind == "parquet" else {}  # lists of one length, and of any
        write(tmp_path / f"shard-{index}.{kind}", numbers[index::3], **options)
    names = ("x", "y") if kind == "parquet" else ("png", "cls")
    source = tmp_path / f"*.{kind}"
    return lambda **options: Stream(source, inputs=names[0], target=names[1], batch_size=8, **options)


def numbers(batches):
    flat = [value for inputs, _ in batches for value in inputs.flatten(1)[:, 0].tolist()]
    scale = 255 if max(flat) < 1 else 1
    return [round(scale * value) for value in flat]


def test_every_example_is_there_once_in_any_order(stream):
    for shuffle in (0, 4, 1000):
        batches = list(stream(shuffle=shuffle))
        assert [len(targets) for _, targets in batches] == [8] * 6 + [2]
        assert Counter(numbers(batches)) == Counter(range(50))
        for inputs, targets in batches:
            assert targets.tolist() == [number % 2 for number in numbers([(inputs, targets)])]


def test_the_order_follows_the_seed(stream):
    orders = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        orders.append(numbers(stream(shuffle=10)))
    assert orders[0] == orders[1] != orders[2]
    assert numbers(stream()) == numbers(stream())


def test_a_stream_reads_no_more_than_its_buffer():
    read = []

    class Rows:
        def __iter__(self):
            for n in range(10_000):
                read.append(n)
                yield {"x": [float(n)], "y": 0}

    batches = iter(Stream(Rows(), inputs="x", target="y", batch_size=4, shuffle=16))
    next(batches)
    assert len(read) <= 16 + 4
    for _ in range(10):
        next(batches)
    assert len(read) <= 16 + 44


def test_a_resumed_training_has_the_same_bits(stream, tmp_path, monkeypatch):
    def network():
        shape = next(iter(stream()))[0].shape[1:]
        return nn.Sequential(nn.Flatten(), nn.Linear(shape.numel(), 2))

    settings = {"epochs": 3, "lr": 1e-2, "select": "last", "quiet": True}
    whole, resumed = enfold.DeepEnsemble(network, 2), enfold.DeepEnsemble(network, 2)
    enfold.fit(whole, stream(shuffle=10), **settings)

    def stop(epoch):
        raise KeyboardInterrupt

    file = tmp_path / "checkpoint.safetensors"
    with pytest.raises(KeyboardInterrupt):
        enfold.fit(resumed, stream(shuffle=10), checkpoint=file, on_epoch=stop, **settings)
    enfold.fit(resumed, stream(shuffle=10), checkpoint=file, **settings)
    for name, value in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value)


def test_a_transform_is_applied_to_each_example(stream):
    inputs, _ = next(iter(stream(transform=lambda each: each.float().sum()[None])))
    assert inputs.shape == (8, 1)


@pytest.mark.slow
def test_a_streaming_dataset_of_hugging_face():
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"x": [[1.0], [2.0], [3.0]], "y": [0, 1, 0]}).to_iterable_dataset()
    (batch,) = Stream(rows, inputs="x", target="y", batch_size=3)
    assert batch[0].tolist() == [[1.0], [2.0], [3.0]]


@pytest.mark.parametrize("kind", ["parquet", "tar"])
def test_damaged_files_are_refused(tmp_path, kind):
    file = tmp_path / f"shard.{kind}"
    (write_parquet if kind == "parquet" else write_tar)(file, range(20))
    content = file.read_bytes()
    names = {"inputs": "x", "target": "y"} if kind == "parquet" else {"inputs": "png", "target": "cls"}
    for damaged in (content[: len(content) // 3 + 7], content[: len(content) // 2], b"", b"\x00\x01" * 700):
        file.write_bytes(damaged)
        with pytest.raises(EnfoldError, match="cannot be read"):
            list(Stream(file, **names))


def test_an_image_that_cannot_be_read_is_refused(tmp_path):
    write_tar(tmp_path / "a.tar", range(3), image=b"no image")
    with pytest.raises(EnfoldError, match="must be an image"):
        list(Stream(tmp_path / "a.tar", inputs="png", target="cls"))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: Stream(folder / "*.parquet", inputs="x", target="y"), "matches none"),
        (lambda folder: Stream(folder / "a.csv", inputs="x", target="y"), "matches none"),
        (lambda folder: Stream([folder / "a.csv"], inputs="x", target="y"), r"a\.csv"),
        (lambda folder: Stream([{"x": 1}], inputs="x", target="y", shuffle=-1), "shuffle"),
        (lambda folder: list(Stream([{"x": 1}], inputs="x", target="y")), "must have 'y'"),
        (lambda folder: list(Stream([{"x": [1], "y": 0}, {"x": [1, 2], "y": 0}], inputs="x", target="y")), "one shape"),
    ],
)
def test_wrong_arguments_are_refused(tmp_path, make, message):
    with pytest.raises(EnfoldError, match=message):
        make(tmp_path)


def test_a_missing_column_is_named(tmp_path):
    write_parquet(tmp_path / "a.parquet", range(3))
    with pytest.raises(EnfoldError, match="must have the column 'z', got other, x, y"):
        list(Stream(tmp_path / "a.parquet", inputs="z", target="y"))

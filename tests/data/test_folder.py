import sys

import numpy as np
import pytest
import torch
from PIL import Image

from enfold.data import load
from enfold.errors import EnfoldError, MissingExtra


def save(path, value, size=(6, 5), mode="RGB"):
    path.parent.mkdir(parents=True, exist_ok=True)
    height, width = size
    Image.new(mode, (width, height), value).save(path)


def fill(folder, classes=("cat", "dog"), count=10, **options):
    for label, name in enumerate(classes):
        for number in range(count):
            value = (100 * label, number, 7) if options.get("mode", "RGB") == "RGB" else 100 * label + number
            save(folder / name / f"{number}.png", value, **options)
    return folder


def test_a_class_per_subfolder(tmp_path):
    data = load(fill(tmp_path / "pets"))
    assert (len(data.train), len(data.val), len(data.test)) == (14, 2, 4)
    assert data.names == ("cat", "dog")
    assert data.shape == (3, 6, 5)
    assert data.train.inputs.dtype == torch.uint8
    torch.testing.assert_close(data.train.inputs[:, 0, 0, 0].long(), 100 * data.train.labels)
    assert (data.train.inputs[:, 2] == 7).all()
    assert data.source == f"pets from {tmp_path}"


@pytest.mark.parametrize("validation", ["validation", "val"])
def test_splits_as_subfolders(tmp_path, validation):
    for part, count in (("train", 6), (validation, 2), ("test", 3)):
        fill(tmp_path / part, count=count)
    data = load(tmp_path)
    assert (len(data.train), len(data.val), len(data.test)) == (12, 4, 6)
    assert data.names == ("cat", "dog")


def test_train_may_be_a_class(tmp_path):
    data = load(fill(tmp_path, ("car", "plane", "train")))
    assert data.names == ("car", "plane", "train")


def test_pixel_positions_are_preserved(tmp_path):
    array = np.arange(4 * 3 * 3, dtype=np.uint8).reshape(4, 3, 3)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for number in range(5):
            Image.fromarray(array).save(tmp_path / name / f"{number}.png")
    data = load(tmp_path)
    torch.testing.assert_close(data.test.inputs[0], torch.from_numpy(array).permute(2, 0, 1))


def test_mixed_folders_are_read_as_colour(tmp_path):
    grey = load(fill(tmp_path / "grey", mode="L"))
    assert grey.shape == (1, 6, 5)
    mixed = fill(tmp_path / "mixed", mode="L")
    save(mixed / "dog" / "colour.png", (1, 2, 3))
    assert load(mixed).shape == (3, 6, 5)


def test_other_files_and_hidden_folders_are_ignored(tmp_path):
    fill(tmp_path)
    (tmp_path / ".cache").mkdir()
    (tmp_path / "readme.txt").write_text("pets")
    (tmp_path / "cat" / "notes.txt").write_text("a cat")
    assert load(tmp_path).names == ("cat", "dog")


def test_unequal_sizes_are_reported_and_size_resolves_them(tmp_path):
    fill(tmp_path)
    save(tmp_path / "dog" / "big.png", (1, 2, 3), size=(9, 11))
    with pytest.raises(EnfoldError, match=r"got 9 x 11 in .*big\.png and 6 x 5 in .*pass size="):
        load(tmp_path)
    assert load(tmp_path, size=8).shape == (3, 8, 8)
    assert load(tmp_path, size=(8, 4)).shape == (3, 8, 4)


def test_resizing_averages(tmp_path):
    stripes = np.zeros((8, 8), np.uint8)
    stripes[:, ::2] = 200
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for number in range(5):
            Image.fromarray(stripes).save(tmp_path / name / f"{number}.png")
    shrunk = load(tmp_path, size=2).train.inputs.float()
    assert (shrunk - 100).abs().max() < 30  # taking every fourth pixel would give 200


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / "empty").mkdir(), "got none in .*empty"),
        (lambda folder: (folder / "dog" / "bad.png").write_bytes(b"no image"), r"readable, got .*bad\.png"),
        (lambda folder: save(folder / "dog" / "deep.png", 1000, mode="I;16"), r"mode I;16 in .*deep\.png"),
        (lambda folder: fill(folder / "train"), "got none in .*train"),
    ],
)
def test_refusals(tmp_path, spoil, message):
    spoil(fill(tmp_path))
    with pytest.raises(EnfoldError, match=message) as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_truncated_image_is_named(tmp_path):
    noise = np.random.default_rng(0).integers(0, 255, (6, 5, 3), dtype=np.uint8)
    fill(tmp_path)
    Image.fromarray(noise).save(tmp_path / "dog" / "cut.png")
    whole = (tmp_path / "dog" / "cut.png").read_bytes()
    (tmp_path / "dog" / "cut.png").write_bytes(whole[:70])
    with pytest.raises(EnfoldError, match=r"readable, got .*cut\.png"):
        load(tmp_path)


@pytest.mark.parametrize("classes", [(), ("cat",)])
def test_refuses_less_than_two_classes(tmp_path, classes):
    with pytest.raises(EnfoldError, match=f"two classes, got {len(classes)}"):
        load(fill(tmp_path, classes))


def test_refuses_a_class_that_only_the_test_split_has(tmp_path):
    fill(tmp_path / "train")
    fill(tmp_path / "test", ("cat", "dog", "emu"))
    with pytest.raises(EnfoldError, match="got 'emu' only in"):
        load(tmp_path)


def test_without_pillow_the_install_line_is_given(tmp_path, monkeypatch):
    fill(tmp_path)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MissingExtra, match=r"enfold\[data\]"):
        load(tmp_path)

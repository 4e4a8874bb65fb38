"""Folders of ImageNet and TinyImageNet: read, with the official validation images as the test split, or refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image

from enfold.data import load
from enfold.errors import EnfoldError
from imagenet_folders import WNIDS, save, tiny


def ilsvrc(folder: Path) -> Path:
    inner = folder / "ILSVRC" / "Data" / "CLS-LOC"
    lines = ["ImageId,PredictionString\n"]
    for label, wnid in enumerate(WNIDS):
        for number in range(20):
            save(inner / "train" / wnid / f"{wnid}_{number}.JPEG", 80 * label, 8 + number % 3)
        name = f"ILSVRC2012_val_{label:08d}"
        save(inner / "val" / f"{name}.JPEG", 80 * label)
        lines.append(f"{name},{wnid} 1 2 3 4 {wnid} 5 6 7 8\n")
    (folder / "LOC_val_solution.csv").write_text("".join(lines))
    (folder / "LOC_synset_mapping.txt").write_text("n01440764 tench, Tinca tinca\nn02012849 crane\nn03126707 crane\n")
    return folder


def by_class(folder: Path) -> Path:
    for label, wnid in enumerate(WNIDS):
        for part, count in (("train", 20), ("val", 2)):
            for number in range(count):
                save(folder / part / wnid / f"{number}.JPEG", 80 * label)
    return folder


@pytest.mark.parametrize(("make", "test"), [(tiny, 6), (ilsvrc, 3), (by_class, 6)])
def test_the_official_validation_images_are_the_test_split(make, test, tmp_path):
    data = load(make(tmp_path / "data"), size=8)
    assert (len(data.train), len(data.val), len(data.test)) == (54, 6, test)
    assert (data.num_classes, data.shape) == (3, (3, 8, 8))
    for part in (data.train, data.val, data.test):
        red = part.inputs[:, 0, 4, 4].float() / 80
        torch.testing.assert_close(red.round().long(), part.labels)


def test_classes_have_words_where_these_are_unique(tmp_path):
    assert load(tiny(tmp_path / "tiny")).names == ("tench", "crane", "lathe")
    assert load(ilsvrc(tmp_path / "large"), size=8).names == WNIDS  # two cranes


def test_other_folders_with_train_and_val_are_as_before(tmp_path):
    for part, count in (("train", 10), ("val", 2)):
        for label, name in enumerate(("cat", "dog")):
            for number in range(count):
                save(tmp_path / part / name / f"{number}.JPEG", 80 * label)
    data = load(tmp_path)
    assert (len(data.val), len(data.test)) == (4, 4)  # val is the validation split


def damage(folder: Path, how: str) -> Path:
    labels = folder / "val" / "val_annotations.txt"
    text = labels.read_text()
    if how == "line":
        labels.write_text(text + "val_9.JPEG n01440764\n")
    elif how == "class":
        labels.write_text(text.replace(WNIDS[1], "n99999999"))
    elif how == "label":
        labels.write_text(text.splitlines(keepends=True)[0])
    elif how == "text":
        labels.write_bytes(b"\xff\xfe\x00binary")
    elif how == "large":
        with labels.open("r+b") as file:
            file.truncate(2**30)  # sparse
    elif how == "image":
        (folder / "val" / "images" / "val_0.JPEG").write_bytes(b"not an image")
    elif how == "name":
        (folder / "train" / WNIDS[0]).rename(folder / "train" / "tench")
    elif how == "empty":
        for file in (folder / "train" / WNIDS[2] / "images").iterdir():
            file.unlink()
    else:
        (folder / "val" / "images").rename(folder / "val" / "elsewhere")
    return folder


@pytest.mark.parametrize(
    ("how", "named"),
    [
        ("line", "line 7 of .*val_annotations"),
        ("class", "n99999999"),
        ("label", "val_1.JPEG"),
        ("text", "val_annotations"),
        ("large", "at most 64 MB"),
        ("image", "val_0.JPEG"),
        ("name", "tench"),
        ("empty", WNIDS[2]),
        ("gone", "images"),
    ],
)
def test_odd_files_are_refused_by_name(how, named, tmp_path):
    with pytest.raises(EnfoldError, match=named):
        load(damage(tiny(tmp_path / "tiny"), how))


def test_an_image_that_is_a_bomb_is_refused(tmp_path, monkeypatch):
    folder = tiny(tmp_path / "tiny")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    save(folder / "train" / WNIDS[0] / "images" / "z.JPEG", 0, size=20)
    with pytest.raises(EnfoldError, match=r"z\.JPEG"):
        load(folder, size=8)


def test_images_of_different_sizes_need_a_size(tmp_path):
    with pytest.raises(EnfoldError, match="size"):
        load(ilsvrc(tmp_path / "data"))

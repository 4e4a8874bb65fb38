"""The public data sets: files, URLs and checksums."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from enfold.data import cifar, idx
from enfold.data.dataset import Split
from enfold.data.download import Remote, download, download_lock
from enfold.data.parts import Parts
from enfold.data.raw import content_md5, file_md5, find_file
from enfold.data.source import Source, roots
from enfold.errors import EnfoldError


@dataclass(frozen=True)
class Official(Source):
    """A data set in the original files, plain or gzipped, in one folder of the data root."""

    folder: str
    files: dict[str, str]  # MD5 of the content by file name
    remotes: tuple[Remote, ...]  # one gzipped file each, or one archive of the folder
    counts: tuple[int, int]  # examples of the official training and test split
    reader: Callable[[Path], tuple[Split, Split]]

    @property
    def archive(self) -> Remote | None:
        """The archive of all files, if there is one."""
        return self.remotes[0] if self.remotes[0].name.endswith(".tar.gz") else None

    def find(self, root: Path | None) -> Path | None:
        """Return the first folder with all files, or an archive that has not been extracted."""
        for place in roots(root):
            if not self._missing(place):
                return place / self.folder
            if self.archive and (place / self.archive.name).is_file():
                return place / self.archive.name
        return None

    def fetch(self, root: Path | None) -> Path:
        """Download missing files; an archive is extracted and removed.

        Raises:
            EnfoldError: If the download fails or the folder is not writable.
        """
        if found := self.find(root):
            return found
        place = roots(root)[0]
        try:
            with download_lock(place):
                return self.find(root) or self._download(place)
        except OSError as error:
            raise EnfoldError(
                f"the data folder must be writable, got {error}: set ENFOLD_DATA to a writable folder"
            ) from error

    def absence(self, root: Path | None) -> str:
        """Return the message about missing files, with their names and folder."""
        return f"{self.name} must be downloaded, but its files are missing: fetch it, or {self._remedy(roots(root)[0])}"

    def read(self, path: Path) -> Parts:
        """Return the splits with uint8 images; an archive is extracted first."""
        if path.is_file():
            self._verify_archive(path)
            path = self._unpack(path)
        train, test = self.reader(path)
        for split, count, part in ((train, self.counts[0], "training"), (test, self.counts[1], "test")):
            if tuple(split.inputs.shape) != (count, *self.shape):
                raise EnfoldError(
                    f"the {part} split of {self.name} must have the shape {(count, *self.shape)}, got "
                    f"{tuple(split.inputs.shape)} in {path}: replace the files by the official ones"
                )
        return Parts(train, None, test, len(self.classes), f"{self.name} from {path.resolve()}", self.classes)

    def problems(self, path: Path) -> list[str]:
        """Return a message for each file whose checksum is wrong."""
        try:
            if path.is_file():
                self._verify_archive(path)
                return []
            return [
                f"{file} must have content with the MD5 {md5}, got {found}: delete it and fetch it again"
                for name, md5 in self.files.items()
                if (file := find_file(path, name)) and (found := content_md5(file)) != md5
            ]
        except EnfoldError as error:
            return [str(error)]

    def bytes(self, path: Path | None) -> int:
        """Return the size of the files, or of the download if they are missing."""
        if path is None:
            return sum(remote.bytes for remote in self.remotes)
        files = [path] if path.is_file() else [find_file(path, name) for name in self.files]
        return sum(file.stat().st_size for file in files if file)

    def _remedy(self, place: Path) -> str:
        other = f" or {self.archive.name} into {place}" if self.archive else " (plain or with .gz)"
        return f"put {', '.join(self.files)} into {place / self.folder}{other}, or set ENFOLD_DATA to another folder"

    def _download(self, place: Path) -> Path:
        if self.archive:
            archive = place / self.archive.name
            download(self.archive, archive, self._remedy(place))
            self._unpack(archive)
            archive.unlink()
        for remote in self.remotes:
            if remote.name.removesuffix(".gz") in self._missing(place):
                download(remote, place / self.folder / remote.name, self._remedy(place))
        return place / self.folder

    def _missing(self, place: Path) -> list[str]:
        return [name for name in self.files if not find_file(place / self.folder, name)]

    def _verify_archive(self, path: Path) -> None:
        if self.archive and (found := file_md5(path)) != self.archive.md5:
            raise EnfoldError(f"{path} must have the MD5 {self.archive.md5}, got {found}: delete it and fetch it again")

    def _unpack(self, archive: Path) -> Path:
        folder = archive.parent / self.folder
        cifar.extract(archive, folder, list(self.files))
        return folder


FASHION_CLASSES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip
CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
CIFAR100_CLASSES = (
    "apple", "aquarium_fish", "baby", "bear", "beaver", "bed", "bee", "beetle", "bicycle", "bottle", "bowl", "boy",
    "bridge", "bus", "butterfly", "camel", "can", "castle", "caterpillar", "cattle", "chair", "chimpanzee", "clock",
    "cloud", "cockroach", "couch", "crab", "crocodile", "cup", "dinosaur", "dolphin", "elephant", "flatfish",
    "forest", "fox", "girl", "hamster", "house", "kangaroo", "keyboard", "lamp", "lawn_mower", "leopard", "lion",
    "lizard", "lobster", "man", "maple_tree", "motorcycle", "mountain", "mouse", "mushroom", "oak_tree", "orange",
    "orchid", "otter", "palm_tree", "pear", "pickup_truck", "pine_tree", "plain", "plate", "poppy", "porcupine",
    "possum", "rabbit", "raccoon", "ray", "road", "rocket", "rose", "sea", "seal", "shark", "shrew", "skunk",
    "skyscraper", "snail", "snake", "spider", "squirrel", "streetcar", "sunflower", "sweet_pepper", "table", "tank",
    "telephone", "television", "tiger", "tractor", "train", "trout", "tulip", "turtle", "wardrobe", "whale",
    "willow_tree", "wolf", "woman", "worm",
)  # fmt: skip

_FASHION = "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion"
_MNIST = "https://ossci-datasets.s3.amazonaws.com/mnist"
_TORONTO = "https://www.cs.toronto.edu/~kriz"

FASHION_MNIST = Official(
    name="fashion-mnist",
    description="grey images of clothes",
    licence="MIT",
    classes=FASHION_CLASSES,
    shape=(1, 28, 28),
    sizes=(55_000, 5_000, 10_000),
    folder="fashion-mnist",
    files={
        idx.TRAIN_IMAGES: "f4a8712d7a061bf5bd6d2ca38dc4d50a",
        idx.TRAIN_LABELS: "9018921c3c673c538a1fc5bad174d6f9",
        idx.TEST_IMAGES: "8181f5470baa50b63fa0f6fddb340f0a",
        idx.TEST_LABELS: "15d484375f8d13e6eb1aabb0c3f46965",
    },
    remotes=(
        Remote(f"{_FASHION}/{idx.TRAIN_IMAGES}.gz", "8d4fb7e6c68d591d4c3dfef9ec88bf0d", 26_421_880),
        Remote(f"{_FASHION}/{idx.TRAIN_LABELS}.gz", "25c81989df183df01b3e8a0aad5dffbe", 29_515),
        Remote(f"{_FASHION}/{idx.TEST_IMAGES}.gz", "bef4ecab320f06d8554ea6380940ec79", 4_422_102),
        Remote(f"{_FASHION}/{idx.TEST_LABELS}.gz", "bb300cfdad3c16e7a12a480ee83cd310", 5_148),
    ),
    counts=(60_000, 10_000),
    reader=idx.read_idx_folder,
)

MNIST = Official(
    name="mnist",
    description="grey images of handwritten digits",
    licence="CC BY-SA 3.0",
    classes=tuple("0123456789"),
    shape=(1, 28, 28),
    sizes=(55_000, 5_000, 10_000),
    folder="mnist",
    files={
        idx.TRAIN_IMAGES: "6bbc9ace898e44ae57da46a324031adb",
        idx.TRAIN_LABELS: "a25bea736e30d166cdddb491f175f624",
        idx.TEST_IMAGES: "2646ac647ad5339dbf082846283269ea",
        idx.TEST_LABELS: "27ae3e4e09519cfbb04c329615203637",
    },
    remotes=(
        Remote(f"{_MNIST}/{idx.TRAIN_IMAGES}.gz", "f68b3c2dcbeaaa9fbdd348bbdeb94873", 9_912_422),
        Remote(f"{_MNIST}/{idx.TRAIN_LABELS}.gz", "d53e105ee54ea40749a09fcbcd1e9432", 28_881),
        Remote(f"{_MNIST}/{idx.TEST_IMAGES}.gz", "9fb629c4189551a2d022fa330f9573f3", 1_648_877),
        Remote(f"{_MNIST}/{idx.TEST_LABELS}.gz", "ec29112dd5afa0611ce80d1b7f02629c", 4_542),
    ),
    counts=(60_000, 10_000),
    reader=idx.read_idx_folder,
)

CIFAR10 = Official(
    name="cifar10",
    description="small colour photographs of animals and vehicles",
    licence="none stated (Krizhevsky, 2009)",
    classes=CIFAR10_CLASSES,
    shape=(3, 32, 32),
    sizes=(45_000, 5_000, 10_000),
    folder="cifar-10-batches-bin",
    files={
        "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
        "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
        "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
        "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
        "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
        "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
    },
    remotes=(Remote(f"{_TORONTO}/cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530", 170_052_171),),
    counts=(50_000, 10_000),
    reader=partial(
        cifar.read_cifar_folder,
        train=tuple(f"data_batch_{number}.bin" for number in range(1, 6)),
        test=("test_batch.bin",),
        label_bytes=1,
    ),
)

CIFAR100 = Official(
    name="cifar100",
    description="small colour photographs of 100 classes",
    licence="none stated (Krizhevsky, 2009)",
    classes=CIFAR100_CLASSES,
    shape=(3, 32, 32),
    sizes=(45_000, 5_000, 10_000),
    folder="cifar-100-binary",
    files={"train.bin": "6172c7755cfe09b2fe270c85cebc1b15", "test.bin": "4499cfba6c016c1be1438163640a0898"},
    remotes=(Remote(f"{_TORONTO}/cifar-100-binary.tar.gz", "03b5dce01913d631647c71ecec9e9cb8", 168_513_733),),
    counts=(50_000, 10_000),
    reader=partial(cifar.read_cifar_folder, train=("train.bin",), test=("test.bin",), label_bytes=2),
)

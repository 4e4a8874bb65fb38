"""fashion-mini: a stratified subset of Fashion-MNIST in the package, which needs no download.

10,000 training and 2,000 validation images from the official training split and 5,000 test images from the official
test split, with balanced classes, built by ``tools/make_fashion_mini.py``. Fashion-MNIST is © 2017 Zalando SE (Zalando
Research) under the MIT licence, see ``fashion_mini.LICENSE.txt``: Xiao, Rasul, Vollgraf, "Fashion-MNIST: a novel image
dataset for benchmarking machine learning algorithms", 2017, arXiv:1708.07747.
"""

from __future__ import annotations

from pathlib import Path

from enfold.data.dataset import Split
from enfold.data.npz import read_npz
from enfold.data.official import FASHION_CLASSES
from enfold.data.parts import Parts
from enfold.data.source import Source
from enfold.io.files import sha256

FILE = Path(__file__).with_name("fashion_mini.npz")
SHA256 = "644e0b4161930f0861cea8b0549998741b012034df7d056ed999f8111832d5b5"


class FashionMini(Source):
    """The data set in the package."""

    def find(self, root: Path | None) -> Path | None:
        """Return the path of the file next to this module."""
        return FILE if FILE.is_file() else None

    def absence(self, root: Path | None) -> str:
        """Return the message about a broken installation."""
        return f"{FILE} must be in the package, but it is not: install enfold again"

    def read(self, path: Path) -> Parts:
        """Return the splits with uint8 images of shape (1, 28, 28)."""
        stored = read_npz(path)
        parts = {part: _transpose(getattr(stored, part)) for part in ("train", "val", "test")}
        return Parts(**parts, num_classes=len(self.classes), source="fashion-mini in enfold", names=self.classes)

    def problems(self, path: Path) -> list[str]:
        """Return a message if the checksum of the file is wrong."""
        found = sha256(path)
        return [] if found == SHA256 else [f"{path} must have the SHA-256 {SHA256}, got {found}: install enfold again"]

    def bytes(self, path: Path | None) -> int:
        """Return the size of the file."""
        return path.stat().st_size if path else 0


def _transpose(split: Split) -> Split:
    """Return the transposed images; the file stores columns, which compress 6 % better."""
    return Split(split.inputs.transpose(2, 3).contiguous(), split.labels)


FASHION_MINI = FashionMini(
    name="fashion-mini",
    description="a stratified subset of Fashion-MNIST, included in the package",
    licence="MIT",
    classes=FASHION_CLASSES,
    shape=(1, 28, 28),
    sizes=(10_000, 2_000, 5_000),
)

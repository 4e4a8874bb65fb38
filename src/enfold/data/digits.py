"""The digits of scikit-learn: 1,797 handwritten digits of 8 x 8 pixels, with a fixed split."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch

from enfold.data.dataset import Split
from enfold.data.parts import Parts, divide
from enfold.data.source import Source
from enfold.errors import MissingExtra

SPLIT_SEED = 0
LEVELS = 16  # maximum pixel value: the number of dark pixels in a block of 4 x 4


class Digits(Source):
    """The digits of scikit-learn."""

    def find(self, root: Path | None) -> Path | None:
        """Return the folder of scikit-learn without importing it."""
        spec = importlib.util.find_spec("sklearn")
        return Path(spec.origin).parent if spec and spec.origin else None

    def absence(self, root: Path | None) -> str:
        """Return the message about the missing package."""
        return str(MissingExtra("scikit-learn", "data", "the data set digits"))

    def read(self, path: Path) -> Parts:
        """Return the splits with floats in [0, 1] of shape (1, 8, 8)."""
        from sklearn.datasets import load_digits

        raw = load_digits()
        images = torch.from_numpy(raw.images).float().div_(LEVELS)[:, None]
        everything = Split(images, torch.from_numpy(raw.target).long())
        rest, test = divide(everything, self.sizes[2], SPLIT_SEED)
        train, validation = divide(rest, self.sizes[1], SPLIT_SEED)
        return Parts(train, validation, test, len(self.classes), "digits from scikit-learn", self.classes)

    def problems(self, path: Path) -> list[str]:
        """Return no problems: the package has its own tests."""
        return []

    def bytes(self, path: Path | None) -> int:
        """Return the size of the file, 0 without scikit-learn."""
        file = path / "datasets" / "data" / "digits.csv.gz" if path else None
        return file.stat().st_size if file and file.exists() else 0


DIGITS = Digits(
    name="digits",
    description="handwritten digits of 8 x 8 grey levels (UCI, as in scikit-learn)",
    licence="CC BY 4.0",
    classes=tuple("0123456789"),
    shape=(1, 8, 8),
    sizes=(1_197, 200, 400),
)

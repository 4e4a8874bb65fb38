"""The diabetes data of scikit-learn: 442 patients, ten measurements each, and the progression of the disease."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch

from enfold.data.dataset import Split
from enfold.data.parts import Parts, divide
from enfold.data.source import Source
from enfold.errors import MissingExtra

SPLIT_SEED = 0
MEAN, STD = 152.0, 77.0  # of all 442 targets, rounded


class Diabetes(Source):
    """The diabetes data of scikit-learn, for regression."""

    def find(self, root: Path | None) -> Path | None:
        """Return the folder of scikit-learn without importing it."""
        spec = importlib.util.find_spec("sklearn")
        return Path(spec.origin).parent if spec and spec.origin else None

    def absence(self, root: Path | None) -> str:
        """Return the message about the missing package."""
        return str(MissingExtra("scikit-learn", "data", "the data set diabetes"))

    def read(self, path: Path) -> Parts:
        """Return the splits with ten floats per patient, and targets (y - 152) / 77."""
        from sklearn.datasets import load_diabetes

        raw = load_diabetes(scaled=False)
        targets = (torch.from_numpy(raw.target).float() - MEAN) / STD
        everything = Split(torch.from_numpy(raw.data).float(), targets)
        rest, test = divide(everything, self.sizes[2], SPLIT_SEED)
        train, validation = divide(rest, self.sizes[1], SPLIT_SEED)
        return Parts(train, validation, test, None, "diabetes from scikit-learn")

    def problems(self, path: Path) -> list[str]:
        """Return no problems: the package has its own tests."""
        return []

    def bytes(self, path: Path | None) -> int:
        """Return the size of the file, 0 without scikit-learn."""
        file = path / "datasets" / "data" / "diabetes_data_raw.csv.gz" if path else None
        return file.stat().st_size if file and file.exists() else 0


DIABETES = Diabetes(
    name="diabetes",
    description="regression: progression of diabetes after a year, (y - 152) / 77, from ten measurements",
    licence="public domain",
    classes=(),
    shape=(10,),
    sizes=(282, 60, 100),
)

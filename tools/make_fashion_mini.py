"""Build src/enfold/data/fashion_mini.npz from the official IDX files: python tools/make_fashion_mini.py FOLDER

The same files and seed give the same bytes: fixed order, fixed time stamps, LZMA.
"""

from __future__ import annotations

import argparse
import zipfile
from pathlib import Path

import numpy as np
import torch

from enfold.data.dataset import Split
from enfold.data.fashion_mini import FASHION_MINI, FILE
from enfold.data.official import FASHION_MNIST
from enfold.data.parts import divide
from enfold.io.files import atomic_path, sha256

SEED = 20170825  # the day Fashion-MNIST was published


def select(folder: Path, seed: int) -> dict[str, Split]:
    """Select training and validation split from the official training data, and the test split from the test data."""
    if problems := FASHION_MNIST.problems(folder):
        raise SystemExit(problems[0])
    official_train, official_test = FASHION_MNIST.reader(folder)
    train_size, validation_size, test_size = FASHION_MINI.sizes
    _, chosen = divide(official_train, train_size + validation_size, seed)
    train, validation = divide(chosen, validation_size, seed)
    _, test = divide(official_test, test_size, seed)
    return {"train": train, "validation": validation, "test": test}


def write(parts: dict[str, Split], path: Path) -> None:
    """Write one .npz, with images column by column, which compresses better than row by row."""
    with atomic_path(path) as temporary, zipfile.ZipFile(temporary, "w") as archive:
        for part, split in parts.items():
            columns = split.inputs[:, 0].transpose(1, 2).contiguous().numpy()
            for name, array in ((f"x_{part}", columns), (f"y_{part}", split.labels.numpy().astype(np.uint8))):
                entry = zipfile.ZipInfo(f"{name}.npy", date_time=(1980, 1, 1, 0, 0, 0))
                entry.compress_type = zipfile.ZIP_LZMA
                with archive.open(entry, "w") as file:
                    np.lib.format.write_array(file, array, allow_pickle=False)


def main() -> None:
    """Build the file and print the constants of the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="with the four IDX files of Fashion-MNIST, plain or gzipped")
    parser.add_argument("--output", type=Path, default=FILE)
    parser.add_argument("--seed", type=int, default=SEED)
    arguments = parser.parse_args()
    parts = select(arguments.folder, arguments.seed)
    write(parts, arguments.output)
    counts = {part: torch.bincount(split.labels).tolist() for part, split in parts.items()}
    print(f"{arguments.output}: {arguments.output.stat().st_size} bytes, SHA-256 {sha256(arguments.output)}")
    print(f"examples per class: {counts}")


if __name__ == "__main__":
    main()

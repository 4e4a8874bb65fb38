"""Data: sources, splits, batches and augmentation."""

from enfold.data.augment import augmentation
from enfold.data.corruptions import Corrupted, corrupt, corrupt_split, read_cifar_c
from enfold.data.dataset import Data, Split
from enfold.data.sources import catalogue, check, fetch, load
from enfold.data.splits import fold_numbers
from enfold.data.stream import Stream

__all__ = [
    "Corrupted",
    "Data",
    "Split",
    "Stream",
    "augmentation",
    "catalogue",
    "check",
    "corrupt",
    "corrupt_split",
    "fetch",
    "fold_numbers",
    "load",
    "read_cifar_c",
]

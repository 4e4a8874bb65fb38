"""Common corruptions of images, to measure accuracy and calibration under distribution shift.

Hendrycks and Dietterich, "Benchmarking neural network robustness to common corruptions and perturbations", ICLR 2019,
arXiv:1903.12261. The kinds and severities of the paper in batched PyTorch, seeded by image; docs/corruptions.md lists
the differences.
"""

from enfold.data.corruptions.cifar_c import cifar_c_kinds, read_cifar_c
from enfold.data.corruptions.split import Corrupted
from enfold.data.corruptions.suite import KINDS, SEVERITIES, STANDARD, corrupt, corrupt_split, corruptions

__all__ = [
    "KINDS",
    "SEVERITIES",
    "STANDARD",
    "Corrupted",
    "cifar_c_kinds",
    "corrupt",
    "corrupt_split",
    "corruptions",
    "read_cifar_c",
]

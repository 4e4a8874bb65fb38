"""Distillation: `distill()`, its losses and its perturbations.

The package is callable: ``enfold.distill(teacher, train, val, loss=enfold.KD())`` calls `enfold.distill.distill`.
"""

import sys
from types import ModuleType

from enfold.distill.cached import CachedTeacher
from enfold.distill.control import train_control
from enfold.distill.dirichlet import Dirichlet
from enfold.distill.distill import distill, make_objective
from enfold.distill.loss import DistillationLoss
from enfold.distill.out_of_fold import OutOfFoldTeacher
from enfold.distill.perturbation import Perturbation

__all__ = [
    "CachedTeacher",
    "Dirichlet",
    "DistillationLoss",
    "OutOfFoldTeacher",
    "Perturbation",
    "distill",
    "make_objective",
    "train_control",
]


class _Package(ModuleType):
    __call__ = staticmethod(distill)


sys.modules[__name__].__class__ = _Package

"""Distillation losses: one file per loss, imported when it is first used.

The class of a file has its name without underscores: `ae_kd.py` has `AEKD`.
"""

import pkgutil
from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    for module in pkgutil.iter_modules(__path__):
        if module.name.replace("_", "") == name.lower():
            return getattr(import_module(f"{__name__}.{module.name}"), name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")

"""The modules and the callback of `enfold.integrations.lightning` for the package `pytorch_lightning`.

The two packages have the same classes under different names, and a Trainer accepts its own modules only.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from enfold.errors import MissingExtra
from enfold.integrations.lightning_base import CollectHooks, DistillHooks, EnsembleHooks

try:
    pl: Any = import_module("pytorch_lightning")
except ImportError as error:
    raise MissingExtra("pytorch-lightning", "lightning", "enfold.integrations.pytorch_lightning") from error


class EnsembleModule(EnsembleHooks, pl.LightningModule):  # type: ignore[misc]
    """The `EnsembleModule` of `enfold.integrations.lightning`."""


class DistillModule(DistillHooks, pl.LightningModule):  # type: ignore[misc]
    """The `DistillModule` of `enfold.integrations.lightning`."""


class CollectCallback(CollectHooks, pl.Callback):  # type: ignore[misc]
    """The `CollectCallback` of `enfold.integrations.lightning`."""

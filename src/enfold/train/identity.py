"""The identity of a training: what a checkpoint must match, as digests."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from enfold.data import Data
from enfold.data.content import content
from enfold.ensemble import Ensemble
from enfold.io.files import digest
from enfold.io.identity import plain
from enfold.train.config import TrainConfig
from enfold.train.data_parallel import complete

ADDRESS = re.compile(" at 0x[0-9a-fA-F]+")  # in the repr of an object; it differs between processes


def training_identity(
    model: nn.Module, data: Data, objective: object, config: TrainConfig, start: str
) -> dict[str, Any]:
    """Return the properties that a checkpoint must match: data, initial weights, network, loss and settings.

    Args:
        model: The model before training.
        data: Training and validation examples.
        objective: The loss.
        config: Settings of the training.
        start: Digest of the initial weights.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in _tensors(model)}
    ensemble = model if isinstance(model, Ensemble) else None
    network = ensemble.skeleton.network if ensemble is not None and ensemble.is_expandable else model
    method = "" if ensemble is None else f"{type(ensemble).__name__}{ensemble.options()}"
    return plain(
        {
            **content(data, ("train", "val")),
            "initial weights": start,
            "network": digest([], f"{shapes}{network!r}"),
            "method": digest([], method),
            "loss": digest([], ADDRESS.sub("", f"{objective!r} {_settings(objective)}")),
            "config": config.changes(),
        }
    )


@dataclass
class _Interrupted:
    """A training in this process that may be resumed with the same, partially trained model."""

    checkpoint: Path | None
    start: str  # digest of the initial weights
    end: str = ""  # digest of the weights at the interruption


_interrupted: WeakKeyDictionary[nn.Module, _Interrupted] = WeakKeyDictionary()


def initial_weights(model: nn.Module, checkpoint: Path | None) -> str:
    """Return a digest of the initial weights, also for a model whose training was interrupted."""
    now, known = _digest_weights(model), _interrupted.get(model)
    if known is None or known.checkpoint != checkpoint or now not in (known.start, known.end):
        known = _interrupted[model] = _Interrupted(checkpoint, now)
    return known.start


def record_end(model: nn.Module) -> None:
    """Record the weights with which a training with a checkpoint ended, from which the same model may resume."""
    if model in _interrupted:
        _interrupted[model].end = _digest_weights(model)


def _digest_weights(model: nn.Module) -> str:
    return digest(complete(tensor) for _, tensor in _tensors(model))


def _settings(objective: object) -> str:
    """Return what the repr of a loss may not contain: its attributes, or the code of a function."""
    code = getattr(objective, "__code__", None)
    return repr(getattr(objective, "__dict__", {})) if code is None else f"{code.co_code!r}{code.co_consts!r}"


def _tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [(name, value) for name, value in model.state_dict().items() if isinstance(value, Tensor)]

"""Train an ensemble in one expression, and a network for options that do not depend on it."""

from typing import Any, TypeVar

from torch import nn

from enfold import Ensemble, TrainConfig, fit

E = TypeVar("E", bound=Ensemble)


def any_network() -> nn.Module:
    """Return a small network with a norm, for ensembles of which only the options are tested."""
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))


def fitted(ensemble: E, data: Any, config: TrainConfig | None = None, *, quiet: bool = True, **settings: Any) -> E:
    """Train an ensemble by its own procedure and return it."""
    fit(ensemble, data, config=config, quiet=quiet, **settings)
    return ensemble

"""What a search trains: the routes of a setting, and the controls on labels that they are compared with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch import nn

from enfold.compress.distillations import find_distillations
from enfold.compress.efficient import find_ensembles
from enfold.compress.routes import Route, Setting
from enfold.compress.runner import Runner
from enfold.distill.control import train_control
from enfold.engines.initialization import initialize_member
from enfold.loggers import Log
from enfold.metrics.predictions import RowPredictions
from enfold.train import fit

Control = tuple[str, Callable[[int, Path | None, Log], nn.Module]]
"""The description of a control, and its training from the number of epochs, the file of its checkpoint and its log."""


def find_routes(
    setting: Setting, found: RowPredictions, merged: nn.Module | None = None, *, expensive: bool
) -> list[Route]:
    """Return the routes that train something, most promising first.

    Args:
        setting: What routes start from.
        found: Predictions of the members on validation examples.
        merged: The merge that distillations may start from.
        expensive: Whether to include expensive routes.
    """
    if setting.members.num_members < 2:
        return []
    routes = list(find_distillations(setting, merged, expensive=expensive))
    return [*routes[:2], *find_ensembles(setting, found, expensive=expensive), *routes[2:]]


def make_controls(setting: Setting, runner: Runner) -> dict[str, Control]:
    """Return the trainings on labels that routes are compared with, by name.

    Args:
        setting: What routes start from.
        runner: What runs the trials.
    """
    if not setting.has_networks or not runner.allows(1, 1):
        return {}

    def control(epochs: int, checkpoint: Path | None, log: Log) -> nn.Module:
        return train_control(
            setting.best_member(),
            setting.data,
            config=setting.settings(epochs),
            checkpoint=checkpoint,
            on_epoch=runner.guard,
            logger=log,
            title="control",
            quiet=runner.quiet,
        )

    def refit(epochs: int, checkpoint: Path | None, log: Log) -> nn.Module:
        network = initialize_member(setting.best_member(), setting.config.seed, -1, trained=True)[0]
        fit(
            network,
            setting.data,
            config=setting.settings(epochs),
            checkpoint=checkpoint,
            on_epoch=runner.guard,
            logger=log,
            title="refit",
            quiet=runner.quiet,
        )
        return network

    found: dict[str, Control] = {"control": ("one member trained as long on the labels", control)}
    if setting.folds is not None:
        found["refit"] = ("one network refitted on all data", refit)
    return found

"""The loggers of one training: a failure never ends the training, and records never change it."""

from __future__ import annotations

import functools
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar, cast

import numpy as np
import torch

from enfold.errors import EnfoldError, closest, level_outside
from enfold.loggers.logger import Logger
from enfold.loggers.mlflow import MLflow
from enfold.loggers.tensorboard import TensorBoard
from enfold.loggers.wandb import WandB

F = TypeVar("F", bound=Callable[..., Any])

LOGGERS: dict[str, Callable[[], Logger]] = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow}
"""The loggers that have a name; they are made with their defaults."""

METHODS = ("log_settings", "log_metrics", "close")


class LoggerWarning(UserWarning):
    """A logger failed; the training continues, and records may be missing there."""


@dataclass
class _Shared:
    """The base of a log and its parts."""

    loggers: tuple[Logger, ...]
    failed: set[int] = field(default_factory=set)
    settings: dict[str, Any] = field(default_factory=dict)
    users: int = 0


class Log:
    """The loggers of a call. It is closed by the outermost `with`, so that a call can pass it to the trainings in it.

    Args:
        loggers: The loggers.
    """

    def __init__(self, loggers: Sequence[Logger] = ()) -> None:
        self._shared, self._prefix = _Shared(tuple(loggers)), ""

    def part(self, name: str) -> Log:
        """Return the log of one training of several: names of settings and metrics begin with ``name/``."""
        found = Log()
        found._shared, found._prefix = self._shared, f"{self._prefix}{name}/"
        return found

    def __bool__(self) -> bool:
        return bool(self._shared.loggers)

    def __enter__(self) -> Self:
        self._shared.users += 1
        return self

    def __exit__(self, *error: object) -> None:
        self._shared.users -= 1
        if not self._shared.users:
            self.close()

    def log_settings(self, settings: Mapping[str, Any]) -> None:
        """Record settings; a part records those that differ from the settings of all."""
        known = self._shared.settings
        plain = {name: _plain(value) for name, value in settings.items()}
        if self._prefix:
            plain = {self._prefix + name: each for name, each in plain.items() if known.get(name, ...) != each}
        known.update(plain)
        if plain:
            self._call("log_settings", plain)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Record metrics at a step."""
        self._call("log_metrics", {self._prefix + name: float(value) for name, value in metrics.items()}, step)

    def close(self) -> None:
        """Close all loggers."""
        self._call("close")

    def _call(self, method: str, content: dict[str, Any] | None = None, *args: int) -> None:
        for logger in self._shared.loggers:
            copies = () if content is None else (dict(content),)
            try:
                with _unchanged_random_state():
                    getattr(logger, method)(*copies, *args)
            except Exception as error:
                self._warn(logger, method, error)

    def _warn(self, logger: Logger, method: str, error: Exception) -> None:
        if id(logger) in self._shared.failed:
            return
        self._shared.failed.add(id(logger))
        warnings.warn(
            f"the logger {type(logger).__name__} failed in {method} ({type(error).__name__}: {error}): the training "
            "continues, and its records may be missing there",
            LoggerWarning,
            stacklevel=level_outside(),
        )


LoggerLike = Logger | str | Sequence[Logger | str] | None
"""The values that `logger=` accepts: an object with the methods of `Logger`, a name, or a list of these."""


def as_log(logger: LoggerLike | Log) -> Log:
    """Return the loggers of a call.

    Args:
        logger: A logger, "tensorboard", "wandb" or "mlflow", a list of these, or None.

    Raises:
        EnfoldError: If it is none of these.
        MissingExtra: If the package of a name is not installed.
    """
    if isinstance(logger, Log):
        return logger
    several = isinstance(logger, Sequence) and not isinstance(logger, str)
    given = list(cast("Sequence[Logger | str]", logger)) if several else [] if logger is None else [logger]
    return Log([_as_logger(each) for each in given])


def with_log(function: F) -> F:
    """Return a function that gets its `logger=` as a `Log`, which is closed when the function ends.

    Args:
        function: A function with the keyword argument `logger`.
    """

    @functools.wraps(function)
    def call(*args: Any, logger: LoggerLike | Log = None, **kwargs: Any) -> Any:
        with as_log(logger) as log:
            return function(*args, logger=log, **kwargs)

    return cast("F", call)


def _as_logger(logger: Any) -> Logger:
    if isinstance(logger, str):
        if logger not in LOGGERS:
            near = closest(logger, LOGGERS)
            suggestion = f", did you mean '{near}'?" if near else ""
            raise EnfoldError(f"logger must be one of {', '.join(LOGGERS)}, got '{logger}'{suggestion}: change logger")
        return LOGGERS[logger]()
    missing = [name for name in METHODS if not callable(getattr(logger, name, None))]
    if missing or isinstance(logger, type):
        got = f"the class {logger.__name__}" if isinstance(logger, type) else f"a {type(logger).__name__}"
        lacks = f" without {missing[0]}" if missing else ""
        raise EnfoldError(
            f"logger must be an object with the methods {', '.join(METHODS)}, got {got}{lacks}: pass "
            "'tensorboard', 'wandb', 'mlflow', or such an object"
        )
    return cast("Logger", logger)


def _plain(value: Any) -> Any:
    """Return a setting as a number, text, boolean or None, which every tracker can store."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return ", ".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


@contextmanager
def _unchanged_random_state() -> Iterator[None]:
    """Restore the random generators after the block: a logger that draws from them must not change a training."""
    python, numpy_state = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy_state)

"""Weights & Biases: one run per training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from enfold.errors import MissingExtra


class WandB:
    """Log to a run of Weights & Biases.

    An active run of `wandb.init` is used and left open; otherwise a run is started with the first record and finished
    at the end of the training. The metrics are shown over the number of epochs.

    Args:
        project: The project; None for that of an active run, or "enfold".
        name: The name of the run.
        **options: Further arguments of `wandb.init`, such as mode="offline", dir, group, or an id of a run with
            resume="allow", with which a resumed training continues its curves.
    """

    def __init__(self, project: str | None = None, name: str | None = None, **options: Any) -> None:
        try:
            import wandb
        except ImportError as error:
            raise MissingExtra("wandb", "wandb", "logger='wandb'") from error
        self._package = wandb
        self._options = {"project": project or "enfold", "name": name, **options}
        self._run: Any = None
        self._is_own = False

    @property
    def run(self) -> Any:
        """The run, for records of your own."""
        if self._run is None:
            active = self._package.run
            self._is_own = active is None
            self._run = self._package.init(**self._options) if active is None else active
            self._run.define_metric("*", step_metric="epoch")
        return self._run

    def log_settings(self, settings: Mapping[str, Any]) -> None:
        """Add to the configuration of the run."""
        self.run.config.update(dict(settings), allow_val_change=True)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Log the metrics with the step as "epoch"."""
        self.run.log({**metrics, "epoch": step})  # its own step must grow over all trainings of a run

    def close(self) -> None:
        """Finish the run if it was started here; further records start another one."""
        run, self._run = self._run, None
        if run is not None and self._is_own:
            run.finish()

"""MLflow: one run per training, in the tracking store of the environment or of a URI."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any

from enfold.errors import MissingExtra

_FORBIDDEN = re.compile(r"[^\w\-. :/]")  # in names of metrics and parameters
_LONGEST = 6000  # characters of the value of a parameter
_BATCH = 100  # parameters in one request


class MLflow:
    """Log to a run of MLflow.

    An active run of `mlflow.start_run` is used and left open; otherwise a run is started with the first record and
    ended at the end of the training.

    Args:
        experiment: The experiment; it is made if it does not exist.
        name: The name of the run.
        tracking_uri: The store, such as "sqlite:///mlflow.db" or the address of a server; None for that of the
            environment.
        resume: Continue the latest run of this name in the experiment, if there is one.
    """

    def __init__(
        self,
        experiment: str = "enfold",
        name: str | None = None,
        *,
        tracking_uri: str | None = None,
        resume: bool = False,
    ) -> None:
        try:
            import mlflow
        except ImportError as error:
            raise MissingExtra("mlflow", "mlflow", "logger='mlflow'") from error
        self._package = mlflow
        self.experiment, self.name, self.tracking_uri, self.resume = experiment, name, tracking_uri, resume
        self._client: Any = None
        self._run_id: str | None = None
        self._is_own = False
        self._known: dict[str, str] = {}

    @property
    def client(self) -> Any:
        """The client of the store."""
        if self._client is None:
            self._client = self._package.MlflowClient(tracking_uri=self.tracking_uri)
        return self._client

    @property
    def run_id(self) -> str:
        """The identifier of the run, for records of your own."""
        if self._run_id is None:
            run = self._package.active_run() if self.tracking_uri is None else None
            self._is_own = run is None
            if run is None:
                run = self._start()
            self._run_id, self._known = run.info.run_id, dict(run.data.params)
        return self._run_id

    def _start(self) -> Any:
        found = self.client.get_experiment_by_name(self.experiment)
        experiment = self.client.create_experiment(self.experiment) if found is None else found.experiment_id
        run = self._latest(experiment)
        if run is None:
            return self.client.create_run(experiment, run_name=self.name)
        self.client.update_run(run.info.run_id, status="RUNNING")
        return run

    def _latest(self, experiment: str) -> Any:
        if not self.resume or self.name is None:
            return None
        name = self.name.replace("'", "\\'")
        found = self.client.search_runs([experiment], f"attributes.run_name = '{name}'", max_results=1)
        return found[0] if found else None

    def log_settings(self, settings: Mapping[str, Any]) -> None:
        """Record parameters; they cannot change in MLflow, so a later value becomes a tag of the same name."""
        run, entities = self.run_id, self._package.entities
        values = {_FORBIDDEN.sub("_", name): str(value)[:_LONGEST] for name, value in settings.items()}
        new = [entities.Param(name, value) for name, value in values.items() if name not in self._known]
        tags = [entities.RunTag(name, value) for name, value in values.items() if self._known.get(name, value) != value]
        for start in range(0, max(len(new), len(tags)), _BATCH):
            part = slice(start, start + _BATCH)
            self.client.log_batch(run, params=new[part], tags=tags[part])
        self._known = values | self._known

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Record the metrics in one request."""
        run, now, metric = self.run_id, int(1000 * time.time()), self._package.entities.Metric
        found = [metric(_FORBIDDEN.sub("_", name), float(value), now, step) for name, value in metrics.items()]
        self.client.log_batch(run, metrics=found)

    def close(self) -> None:
        """End the run; further records start another one."""
        run, self._run_id = self._run_id, None
        if run is not None and self._is_own:
            self.client.set_terminated(run)

"""MLflow: the server of ``MLFLOW_TRACKING_URI``, else a folder ``mlruns`` beside the run folder."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

from mlflow.entities import Metric, Param, RunStatus
from mlflow.tracking import MlflowClient

from convmesh.config.load import dotted
from convmesh.training.sinks.tracker import RunAbout

_MOST_PARAMETERS = 100
_LONGEST_VALUE = 500


class MLflow:
    """A run of MLflow, within the experiment that is named like the project; ``MLFLOW_EXPERIMENT_NAME`` counts more.

    Args:
        about: The run.
    """

    def __init__(self, about: RunAbout) -> None:
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:
            # MLflow 3 wants a database in its place, which its slim package can't open, and asks to be told this.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            uri = (about.run_dir.parent / "mlruns").as_uri()
        self.place = uri
        self._client = MlflowClient(tracking_uri=uri)
        self._number = about.number("mlflow") or self._create(about)
        about.keep_number("mlflow", self._number)
        if about.update:
            self._client.update_run(self._number, status=RunStatus.to_string(RunStatus.RUNNING))

    def _create(self, about: RunAbout) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or about.project
        known = self._client.get_experiment_by_name(name)
        experiment = known.experiment_id if known is not None else self._client.create_experiment(name)
        number: str = self._client.create_run(experiment, run_name=about.name).info.run_id
        settings = [Param(key, str(value)[:_LONGEST_VALUE]) for key, value in dotted(about.config).items()]
        for start in range(0, len(settings), _MOST_PARAMETERS):
            self._client.log_batch(number, params=settings[start : start + _MOST_PARAMETERS])
        return number

    def log(self, scalars: Mapping[str, float], *, update: int) -> None:
        """Adds points."""
        now = int(1000 * time.time())
        self._client.log_batch(
            self._number, metrics=[Metric(name, value, now, update) for name, value in scalars.items()]
        )

    def close(self) -> None:
        """Ends the run."""
        self._client.set_terminated(self._number)

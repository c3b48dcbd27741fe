"""MLflow: by MLFLOW_TRACKING_URI, else a database beside the runs: `mlflow ui --backend-store-uri sqlite:///FILE`."""

import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # before its import, which would begin to report


from detector.reporting.journal import Event, WindowRow
from detector.reporting.loggers.scalars import flat, of_epoch, of_window
from detector.reporting.reports import EpochRow, Facts, Had

SECONDS = 10.0  # what is logged is sent so often
AT_ONCE = 1000  # metrics that MLflow takes in one call
PARAMS_AT_ONCE = 100
TAG = "detector.run"
STATES = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


class MLflow:
    def __init__(self) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # before its import, which would begin to report
        import mlflow
        import mlflow.entities

        self._mlflow, self._of = mlflow, mlflow.entities

    def begin(self, facts: Facts) -> Had:
        for library in ("mlflow", "alembic"):  # which tell how they make their tables
            logging.getLogger(library).setLevel(logging.WARNING)
        project = facts.folder.parent
        uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{(project / 'mlflow.db').as_posix()}"
        self._client = self._mlflow.MlflowClient(uri)
        self._metrics: list[Any] = []
        self._sent = time.monotonic()
        experiment = self._experiment(None if os.environ.get("MLFLOW_TRACKING_URI") else project / "mlflow")
        before = None if facts.left else self._run(experiment, facts.identity)
        if before is not None:
            self._id = before.info.run_id
            self._client.update_run(self._id, status="RUNNING")
            return Had(self._last("window/lr"), self._last("epoch/lr"))
        tags = {TAG: facts.identity, "detector.folder": str(facts.folder)}
        self._id = self._client.create_run(experiment, tags=tags, run_name=facts.folder.name).info.run_id
        params = [self._of.Param(key, value[:6000]) for key, value in flat(facts.settings).items()]
        for first in range(0, len(params), PARAMS_AT_ONCE):
            self._client.log_batch(self._id, params=params[first : first + PARAMS_AT_ONCE])
        return Had()

    def window(self, row: WindowRow) -> None:
        self._add(of_window(row), row.window, row.time)

    def epoch(self, row: EpochRow, window: int) -> None:
        self._add(of_epoch(row), int(row["epoch"]), time.time())

    def event(self, event: Event) -> None:
        self._client.log_batch(
            self._id, tags=[self._of.RunTag(f"detector.{event.kind.replace(' ', '_')}", event.text[:5000])]
        )

    def picture(self, path: Path) -> None:
        self._client.log_artifact(self._id, str(path))

    def end(self, state: str) -> None:
        self._send()
        self._client.set_terminated(self._id, STATES[state])

    def _experiment(self, artifacts: Path | None) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "detector")
        if (there := self._client.get_experiment_by_name(name)) is not None:
            return there.experiment_id
        return self._client.create_experiment(name, artifacts and artifacts.as_uri())

    def _run(self, experiment: str, identity: str) -> Any | None:
        """The latest that was logged of the run."""
        found = self._client.search_runs([experiment], f"tags.`{TAG}` = '{identity}'", order_by=["start_time DESC"])
        return found[0] if found else None

    def _last(self, name: str) -> int:
        return max((metric.step for metric in self._client.get_metric_history(self._id, name)), default=0)

    def _add(self, values: Mapping[str, float], step: int, when: float) -> None:
        """Metrics are sent in batches: a server may be far away. Those that a kill loses, the journal has."""
        self._metrics += [self._of.Metric(name, value, round(1000 * when), step) for name, value in values.items()]
        if len(self._metrics) >= AT_ONCE // 2 or time.monotonic() - self._sent > SECONDS:
            self._send()

    def _send(self) -> None:
        for first in range(0, len(self._metrics), AT_ONCE):
            self._client.log_batch(self._id, self._metrics[first : first + AT_ONCE])
        self._metrics, self._sent = [], time.monotonic()

"""A run of MLflow, by its own package.

All attempts have one run there, found by its tag ``llmctl.run_id``. Of iterations that are done again after a resume
the first numbers stay; the computation is the same.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag

from trainer.trackers.protocol import SAMPLES, Outcome, RunFacts

if TYPE_CHECKING:
    from trainer.config.sections.logging import LoggingConfig

_ID_TAG = "llmctl.run_id"
_DEFAULT_EXPERIMENT = "Default"
# Limits of one request (mlflow/utils/validation.py).
_MOST_METRICS, _MOST_PARAMS, _LONGEST_PARAM = 1000, 100, 6000
_NOT_IN_NAMES = re.compile(r"[^\w\-. :/]")
_STATUS: Mapping[Outcome, str] = {"completed": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


class MlflowRun:
    """Tracker that logs to one run of MLflow."""

    def __init__(self, logging: LoggingConfig) -> None:
        """Take server, experiment and name from ``logging``."""
        self._logging = logging
        self._client: Any = None
        self._id = ""
        self._is_new = True
        self._last: dict[str, int] = {}

    def begin(self, facts: RunFacts) -> int:
        """Create the run with the config as parameters, or go on with it; the last iteration that it has."""
        self._client = MlflowClient(tracking_uri=self._logging.mlflow_tracking_uri)
        name = self._logging.mlflow_experiment or _DEFAULT_EXPERIMENT
        experiment = self._client.get_experiment_by_name(name)
        experiment_id = experiment.experiment_id if experiment is not None else self._client.create_experiment(name)
        known = self._client.search_runs([experiment_id], f"tags.`{_ID_TAG}` = '{facts.run_id}'", max_results=1)
        self._is_new = not known
        if known:
            self._id = known[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
        else:
            run_name = self._logging.mlflow_run_name or facts.name
            run = self._client.create_run(experiment_id, tags={_ID_TAG: facts.run_id}, run_name=run_name)
            self._id = run.info.run_id
            # Parameters cannot be changed later; layout and origin are tags, since a resume may change them.
            params = [Param(key, str(value)[:_LONGEST_PARAM]) for key, value in _flat(facts.config)]
            for start in range(0, len(params), _MOST_PARAMS):
                self._client.log_batch(self._id, params=params[start : start + _MOST_PARAMS])
        facts_of_attempt = {"layout": facts.layout, "origin": facts.origin}
        self._client.log_batch(self._id, tags=[RunTag(key, str(value)) for key, value in _flat(facts_of_attempt)])
        return self._last_of(SAMPLES)

    def log(self, iteration: int, scalars: Mapping[str, float]) -> None:
        """Log a row, without the numbers that have been logged at this iteration."""
        now = int(time.time() * 1000)
        names = {_NOT_IN_NAMES.sub("_", name): value for name, value in scalars.items()}
        metrics = [
            Metric(name, value, now, iteration) for name, value in names.items() if iteration > self._last_of(name)
        ]
        for start in range(0, len(metrics), _MOST_METRICS):
            self._client.log_batch(self._id, metrics=metrics[start : start + _MOST_METRICS])
        self._last |= {metric.key: iteration for metric in metrics}

    def end(self, outcome: Outcome) -> None:
        """Set the status of the run."""
        self._client.set_terminated(self._id, status=_STATUS[outcome])

    def _last_of(self, name: str) -> int:
        """The last iteration at which a number has been logged; 0 without."""
        if name not in self._last:
            history = [] if self._is_new else self._client.get_metric_history(self._id, name)
            self._last[name] = max((point.step for point in history), default=0)
        return self._last[name]


def _flat(values: Mapping[str, Any], group: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{group}{key}.")
        else:
            yield f"{group}{key}", value

"""A run in MLflow: one MLflow run per strategy, in an experiment that is named after the scenario."""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ..errors import UserError
from .flatten import flatten, numbers
from .folder import write_json
from .sinks import error_line

if TYPE_CHECKING:
    from ..config import ExperimentConfig
    from .folder import RunFolder

_NOT_IN_NAMES = re.compile(r"[^\w\-. /]", re.ASCII)
_METRICS_AT_ONCE, _PARAMS_AT_ONCE, _LONGEST_PARAM = 1000, 100, 6000
_FILES = ("config.toml", "environment.json", "summary.json", "report.md", "report.html", "accuracy.png")
_PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}


class MlflowSink:
    """Logs to the server, or the file, that MLFLOW_TRACKING_URI names, else to MLflow's own default.

    An MLflow run has the resolved configuration as params, the numbers of every round as metrics at the step
    of that round, seed, versions and configuration hash as tags, and in the end the summary's figures and the
    report. Which MLflow run it is stands in ``RUN/<strategy>/mlflow.json``.
    """

    def __init__(self) -> None:
        self._run = ""
        self._last = -1

    def check(self, config: ExperimentConfig) -> None:
        """Raise UserError without the package mlflow, or if the tracking server does not answer."""
        for variable, value in _PATIENCE.items():
            os.environ.setdefault(variable, value)  # a server that is gone must not hold a run up for minutes
        try:
            import mlflow
        except ImportError as error:
            raise UserError("--mlflow needs MLflow: pip install 'fedplat[mlflow]'") from error
        for name in ("mlflow", "alembic"):
            logging.getLogger(name).setLevel(logging.WARNING)
        try:
            self._client = mlflow.MlflowClient()
            self._uri = _without_password(mlflow.get_tracking_uri())
            self._experiment(config.name)
        except Exception as error:
            raise UserError(
                f"--mlflow: the experiment '{config.name}' cannot be opened at "
                f"{_without_password(mlflow.get_tracking_uri())}: {error_line(error)}. "
                f"MLFLOW_TRACKING_URI says where MLflow is"
            ) from error

    def start(self, folder: RunFolder, strategy: str, records: Sequence[Mapping[str, Any]]) -> None:
        """Go on with the MLflow run that the folder names, or make one, and add the rounds that it lacks."""
        kept = folder.log(strategy).path / "mlflow.json"
        self._run = self._known_run(kept) or self._new_run(folder, strategy)
        if not kept.exists() or json.loads(kept.read_text())["run_id"] != self._run:
            kept.parent.mkdir(parents=True, exist_ok=True)
            write_json(kept, {"tracking_uri": self._uri, "run_id": self._run})
        steps = [metric.step for metric in self._client.get_metric_history(self._run, "round")]
        self._last = max(steps, default=-1)
        for record in records:
            self.round(record)

    def round(self, record: Mapping[str, Any]) -> None:
        """Log a round, unless it is there already."""
        from mlflow.entities import Metric

        step = record["round"]
        if step <= self._last:
            return
        now = int(time.time() * 1000)
        found = _named(numbers(record))
        # "round" comes last: with it, the whole round is there.
        found["round"] = found.pop("round")
        metrics = [Metric(name, value, now, step) for name, value in found.items()]
        for some in _batches(metrics, _METRICS_AT_ONCE):
            self._client.log_batch(self._run, metrics=some)
        self._last = step

    def end(self, complete: bool) -> None:
        """Mark the MLflow run as finished, or as stopped."""
        if self._run:
            self._client.set_terminated(self._run, "FINISHED" if complete else "KILLED")
            self._run = ""

    def finish(self, folder: RunFolder, strategy: str, summary: Mapping[str, Any]) -> None:
        """Log the figures of the summary under ``summary/`` and the files of the report."""
        from mlflow.entities import Metric

        run_id = self._known_run(folder.log(strategy).path / "mlflow.json")
        if run_id is None:
            return
        there = self._client.get_run(run_id).data.metrics
        now = int(time.time() * 1000)
        metrics = [
            Metric(name, value, now, folder.config.rounds)
            for name, value in _named(numbers({"summary": summary})).items()
            if there.get(name) != value
        ]
        for some in _batches(metrics, _METRICS_AT_ONCE):
            self._client.log_batch(run_id, metrics=some)
        for name in _FILES:
            if (path := folder.path / name).exists():
                self._client.log_artifact(run_id, str(path))

    def _experiment(self, name: str) -> str:
        found = self._client.get_experiment_by_name(name)
        return str(found.experiment_id if found else self._client.create_experiment(name))

    def _known_run(self, kept: Path) -> str | None:
        """Return the MLflow run that a file names, None if it is elsewhere or was deleted."""
        from mlflow.exceptions import MlflowException

        if not kept.exists():
            return None
        told = json.loads(kept.read_text())
        if told["tracking_uri"] != self._uri:
            return None
        try:
            run = self._client.get_run(told["run_id"])
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return None
            raise
        return str(run.info.run_id) if run.info.lifecycle_stage == "active" else None

    def _new_run(self, folder: RunFolder, strategy: str) -> str:
        from mlflow.entities import Param

        config = folder.config
        tags = {
            "strategy": strategy,
            "seed": config.seed,
            "config_hash": config.digest(),
            "folder": folder.path.resolve(),
            **{f"version.{k}": v for k, v in _versions(folder.environment).items()},
        }
        made = self._client.create_run(
            self._experiment(config.name),
            tags={name: str(value) for name, value in tags.items()},
            run_name=f"{strategy}, seed {config.seed}",
        )
        run_id = str(made.info.run_id)
        params = [Param(name, value) for name, value in _params(config.to_dict(), strategy).items()]
        for some in _batches(params, _PARAMS_AT_ONCE):
            self._client.log_batch(run_id, params=some)
        return run_id


def _params(config: Mapping[str, Any], strategy: str) -> dict[str, str]:
    """Return a configuration as params of one of its strategies; what is said of the others is left out.

    >>> both = {"strategies": ["mean", "krum"], "strategy": {"mean": {}, "krum": {"f": 2}}, "seed": 1}
    >>> _params(both, "krum")
    {'seed': '1', 'strategy': 'krum', 'strategy.f': '2'}
    """
    found = {key: value for key, value in config.items() if key not in ("strategies", "strategy")}
    own = (config.get("strategy") or {}).get(strategy) or {}
    texts = {**flatten(found), "strategy": strategy, **flatten({"strategy": own})}
    return {k: str(v)[:_LONGEST_PARAM] for k, v in _named(texts).items()}


def _named(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values under names that MLflow takes."""
    return {_NOT_IN_NAMES.sub("_", name): value for name, value in values.items()}


def _versions(environment: Mapping[str, Any]) -> dict[str, Any]:
    names = ("fedplat", "commit", "python", "flwr", "torch", "numpy")
    return {name: environment[name] for name in names if environment.get(name)}


def _without_password(uri: str) -> str:
    """Return an address without who logs in to it.

    >>> _without_password("https://me:secret@mlflow.example/x"), _without_password("sqlite:///mlflow.db")
    ('https://mlflow.example/x', 'sqlite:///mlflow.db')
    """
    parts = urlsplit(uri)
    if "@" not in parts.netloc:
        return uri
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def _batches(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]

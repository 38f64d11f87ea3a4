"""MLflow's tracking, by its own package. https://mlflow.org/docs/latest/api_reference/python_api/mlflow.client.html"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lockstep.config.loggers import Mlflow
from lockstep.errors import ConfigError
from lockstep.record.logger import About, Sample

_ID = "lockstep.id"  # the tag by which a run is found again that was made a moment before its process was killed
_STATUSES = {"completed": "FINISHED", "stopped early": "FINISHED", "failed": "FAILED"}
_BY_SERVER = ("http", "https", "databricks")
_DATABASES = ("sqlite", "postgresql", "mysql", "mssql")
_LONGEST_NAME = 250
_LONGEST_PARAMETER, _MOST_PARAMETERS = 6000, 100  # of a value, and of one request


class MlflowLogger:
    def __init__(self, settings: Mlflow) -> None:
        self._settings = settings

    @staticmethod
    def check(settings: Mlflow, environment: Mapping[str, str]) -> None:
        """Before training: a place to log to that the installed packages can use."""
        place = settings.tracking_uri or environment.get("MLFLOW_TRACKING_URI")
        if not place:
            raise ConfigError(
                "log.mlflow.tracking_uri: missing: name a server's URL or a folder, or set MLFLOW_TRACKING_URI"
            )
        scheme = place.partition(":")[0].partition("+")[0] if "://" in place else ""
        if scheme in _DATABASES and importlib.util.find_spec("sqlalchemy") is None:
            raise ConfigError(
                f"log.mlflow.tracking_uri: {scheme}:// needs the whole of mlflow: pip install mlflow; or name a folder"
            )

    def start(self, about: About) -> dict[str, Any]:
        given = self._settings.tracking_uri or os.environ["MLFLOW_TRACKING_URI"]
        # A folder that is named by where we are is still meant after a resume from elsewhere.
        same = about.kept.get("given") == given
        place = str(about.kept["tracking_uri"]) if same else _absolute(given)
        if place.startswith("file:"):
            os.environ.setdefault(
                "MLFLOW_ALLOW_FILE_STORE", "true"
            )  # which the config has asked for by naming a folder
        mlflow: Any = importlib.import_module("mlflow")
        self._metric, self._param = mlflow.entities.Metric, mlflow.entities.Param
        self._client = mlflow.MlflowClient(tracking_uri=place)
        experiment = self._experiment()
        self._run_id = (about.kept.get("run_id") if same else None) or self._found(experiment, about)
        if self._run_id is None:
            name = self._settings.name or about.name
            tags = {**self._settings.tags, _ID: about.id}
            self._run_id = self._client.create_run(experiment, run_name=name, tags=tags).info.run_id
            self._log_parameters(about.config)
        else:
            self._client.update_run(self._run_id, status="RUNNING")
        return {"run_id": self._run_id, "tracking_uri": place, "given": given}

    def log(self, step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        numbers = [self._metric(_name(name), float(value), now, step) for name, value in values.items()]
        self._client.log_batch(self._run_id, metrics=numbers)

    def log_sample(self, sample: Sample) -> None:
        inside = Path("samples") / f"step-{sample.step:08d}" / Path(sample.name).parent
        self._client.log_artifact(self._run_id, str(sample.file), artifact_path=inside.as_posix())

    def finish(self, status: str) -> None:
        self._client.set_terminated(self._run_id, status=_STATUSES.get(status, "KILLED"))

    def _experiment(self) -> str:
        found = self._client.get_experiment_by_name(self._settings.experiment)
        return str(found.experiment_id if found else self._client.create_experiment(self._settings.experiment))

    def _found(self, experiment: str, about: About) -> str | None:
        runs = self._client.search_runs([experiment], filter_string=f"tags.`{_ID}` = '{about.id}'", max_results=1)
        return str(runs[0].info.run_id) if runs else None

    def _log_parameters(self, config: Mapping[str, Any]) -> None:
        named = {_name(name): str(value)[:_LONGEST_PARAMETER] for name, value in _leaves(config)}
        leaves = [self._param(name, value) for name, value in named.items()]
        for begin in range(0, len(leaves), _MOST_PARAMETERS):
            self._client.log_batch(self._run_id, params=leaves[begin : begin + _MOST_PARAMETERS])


def _absolute(place: str) -> str:
    """A folder as a URL; other URLs as they are."""
    if "://" in place and not place.startswith("file:"):
        return place
    path = place.removeprefix("file://").removeprefix("file:")
    return place if place in _BY_SERVER else Path(path).absolute().as_uri()


def _name(name: str) -> str:
    """As it takes names: a path of letters, digits and a few signs. It refuses a whole row for another one."""
    parts = [re.sub(r"[^\w.\- :]", "_", part).strip() for part in name.split("/")]
    return "/".join(part if part.strip(".") else "_" for part in parts)[:_LONGEST_NAME]


def _leaves(node: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(node, Mapping) and node:
        for key, value in node.items():
            yield from _leaves(value, f"{at}.{key}" if at else str(key))
    else:
        yield at, node

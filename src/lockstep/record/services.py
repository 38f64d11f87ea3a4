"""Loggers for TensorBoard, Weights & Biases and MLflow, each through its own package.

https://docs.wandb.ai/ref/python/,
https://mlflow.org/docs/latest/api_reference/python_api/mlflow.client.html
"""

from __future__ import annotations

import html
import importlib
import inspect
import os
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.config.load import to_yaml
from lockstep.config.loggers import Mlflow, Wandb
from lockstep.config.plain import did_you_mean, leaves
from lockstep.errors import ConfigError
from lockstep.record.logger import About, Sample


class TensorBoardLogger:
    takes_back = True  # a resumed run hides what it is about to write again
    keeps_nothing = True  # its event files are its whole state

    _writer: Any

    def start(self, about: About) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = about.folder / "tensorboard"
        self._writer = SummaryWriter(str(folder), purge_step=about.step + 1 if folder.exists() else None)
        self._writer.add_text("config", f"```yaml\n{to_yaml(about.config)}\n```", about.step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def log_sample(self, sample: Sample) -> None:
        if sample.kind == "image":
            self._writer.add_image(sample.name, sample.value, sample.step, dataformats="HWC")
        elif sample.kind == "text":
            self._writer.add_text(sample.name, f"```\n{sample.value}\n```", sample.step)
        else:
            self._writer.add_text(sample.name, _markdown(sample.value.columns, sample.value.rows), sample.step)

    def finish(self, status: str) -> None:
        self._writer.close()


def _markdown(columns: list[str], rows: list[list[Any]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(
        "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in line) + " |" for line in lines
    )


_OURS = ("config", "resume", "dir")
_EXIT_CODES = {"completed": 0, "stopped early": 0}


class WandbLogger:
    delay = 60.0  # its process writes, or uploads, every 15 s, and ends at once when ours is killed

    def __init__(self, settings: Wandb) -> None:
        self._settings = settings
        known = inspect.signature(importlib.import_module("wandb").init).parameters if settings.arguments else ()
        for name in settings.arguments:
            if name in _OURS:
                raise ConfigError(f"log.wandb.{name}: Lockstep sets it, so that a restart goes on with the same run")
            if name not in known:
                raise ConfigError(f"log.wandb.{name}: wandb.init has no such argument, {did_you_mean(name, known)}")

    @staticmethod
    def check(settings: Wandb, environment: Mapping[str, str]) -> None:
        """Refuses to start without a key, where one is needed."""
        variables = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")
        files = [environment.get("NETRC", "~/.netrc"), "~/_netrc"]  # where `wandb login` writes
        mode = settings.mode or environment.get("WANDB_MODE") or "online"
        has_key = any(map(environment.get, variables)) or any(Path(each).expanduser().is_file() for each in files)
        if mode == "online" and not has_key:
            raise ConfigError(
                "log.wandb: there is no key: set WANDB_API_KEY (or `wandb login`), or log.wandb.mode: "
                "offline, which keeps the run in its folder for `wandb sync`"
            )

    def start(self, about: About) -> dict[str, Any]:
        wandb: Any = importlib.import_module("wandb")
        given = self._settings.arguments
        settings = {
            "console": "off",  # the output is in logs/
            "silent": True,
            "x_disable_meta": True,  # command lines may hold keys
            "init_timeout": about.timeout,
            "finish_timeout": about.timeout,
            **given.pop("settings", {}),
        }
        chosen = {"id": about.id, "name": about.name, **given}
        chosen |= {"project": self._settings.project, "mode": self._settings.mode}
        self._wandb = wandb
        self._run = wandb.init(
            **{name: value for name, value in chosen.items() if value is not None},
            config=about.config,
            dir=str(about.folder),
            resume="allow",
            settings=wandb.Settings(**settings),
        )
        self._step = 0
        return {"id": self._run.id, "url": self._run.url if self._run.settings.mode == "online" else None}

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        # It takes steps in their order only, and ignores what it has already.
        self._step = max(step, self._step)
        self._run.log(dict(values), step=self._step)

    def log_sample(self, sample: Sample) -> None:
        value = sample.value
        if sample.kind == "image":
            shown = self._wandb.Image(value[:, :, 0] if value.shape[2] == 1 else value)
        elif sample.kind == "text":
            shown = self._wandb.Html(f"<pre>{html.escape(value)}</pre>", inject=False)
        else:
            shown = self._wandb.Table(columns=value.columns, data=value.rows, allow_mixed_types=True)
        self.log(sample.step, {sample.name: shown})

    def finish(self, status: str) -> None:
        if status == "preempted":
            self._run.mark_preempting()
        self._run.finish(exit_code=_EXIT_CODES.get(status, 1))

    def abandon(self) -> None:
        """Kills the package's process, which at exit would wait for a server that does not answer. What it has written
        stays, for `wandb sync`."""
        connection = sys.modules["wandb.sdk.wandb_setup"]._singleton._connection  # there is no public way to it
        connection._cleanup()
        connection._proc._process.kill()


_STATUSES = {"completed": "FINISHED", "stopped early": "FINISHED", "failed": "FAILED"}
_BY_SERVER = ("http", "https", "databricks")
_LONGEST_NAME = 250
_LONGEST_PARAMETER, _MOST_PARAMETERS = 6000, 100  # of a value, and of one request


class MlflowLogger:
    def __init__(self, settings: Mlflow) -> None:
        self._settings = settings

    @staticmethod
    def check(settings: Mlflow, environment: Mapping[str, str]) -> None:
        """Refuses to start without a tracking URI."""
        place = settings.tracking_uri or environment.get("MLFLOW_TRACKING_URI")
        if not place:
            raise ConfigError(
                "log.mlflow.tracking_uri: missing: name a server's URL or a folder, or set MLFLOW_TRACKING_URI"
            )

    def start(self, about: About) -> dict[str, Any]:
        given = self._settings.tracking_uri or os.environ["MLFLOW_TRACKING_URI"]
        place = _absolute(given)
        if place.startswith("file:"):
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        mlflow: Any = importlib.import_module("mlflow")
        self._metric, param = mlflow.entities.Metric, mlflow.entities.Param
        self._client = mlflow.MlflowClient(tracking_uri=place)
        found = self._client.get_experiment_by_name(self._settings.experiment)
        experiment = found.experiment_id if found else self._client.create_experiment(self._settings.experiment)
        self._run_id = about.kept.get("run_id") if about.kept.get("tracking_uri") == place else None
        if self._run_id is None:
            name = self._settings.name or about.name
            made = self._client.create_run(experiment, run_name=name, tags=self._settings.tags)
            self._run_id = made.info.run_id
            named = {_name(name): str(value)[:_LONGEST_PARAMETER] for name, value in leaves(about.config)}
            parameters = [param(name, value) for name, value in named.items()]
            for begin in range(0, len(parameters), _MOST_PARAMETERS):
                self._client.log_batch(self._run_id, params=parameters[begin : begin + _MOST_PARAMETERS])
        else:
            self._client.update_run(self._run_id, status="RUNNING")
        return {"run_id": self._run_id, "tracking_uri": place}

    def log(self, step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        numbers = [self._metric(_name(name), float(value), now, step) for name, value in values.items()]
        self._client.log_batch(self._run_id, metrics=numbers)

    def log_sample(self, sample: Sample) -> None:
        inside = Path("samples") / f"step-{sample.step:08d}" / Path(sample.name).parent
        self._client.log_artifact(self._run_id, str(sample.file), artifact_path=inside.as_posix())

    def finish(self, status: str) -> None:
        self._client.set_terminated(self._run_id, status=_STATUSES.get(status, "KILLED"))


def _absolute(place: str) -> str:
    """Returns a folder as a URL, and other URLs as they are."""
    if "://" in place and not place.startswith("file:"):
        return place
    path = place.removeprefix("file://").removeprefix("file:")
    return place if place in _BY_SERVER else Path(path).absolute().as_uri()


def _name(name: str) -> str:
    """Returns a name that MLflow takes: it refuses a whole row for one with other characters."""
    parts = [re.sub(r"[^\w.\- :]", "_", part).strip() for part in name.split("/")]
    return "/".join(part if part.strip(".") else "_" for part in parts)[:_LONGEST_NAME]

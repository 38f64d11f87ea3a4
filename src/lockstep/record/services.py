"""Loggers for TensorBoard, Weights & Biases, MLflow and Trackio, each through its own package.

https://docs.wandb.ai/ref/python/, https://huggingface.co/docs/trackio,
https://mlflow.org/docs/latest/api_reference/python_api/mlflow.client.html
"""

from __future__ import annotations

import configparser
import contextlib
import html
import importlib
import importlib.util
import json
import netrc
import os
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from lockstep import run_files
from lockstep.config.load import to_yaml
from lockstep.config.loggers import Mlflow, Trackio, Wandb
from lockstep.config.plain import leaves
from lockstep.errors import ConfigError
from lockstep.record.logger import About, Sample, check_arguments
from lockstep.record.timeline import LIVE_FILE, TIMELINE_FILE


class TensorBoardLogger:
    takes_back = True  # a resumed run hides what it is about to write again
    keeps_nothing = True  # its event files are its whole state

    _writer: Any
    _details: Details

    def start(self, about: About) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = about.folder / "tensorboard"
        self._writer = SummaryWriter(str(folder), purge_step=about.step + 1 if folder.exists() else None)
        self._writer.add_text("config", f"```yaml\n{to_yaml(about.config)}\n```", about.step)
        self._details = Details(about.folder)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in {**values, **self._details.newest()}.items():
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


_EVERY_SECONDS = 5.0
_RANKS = 64  # with more, only the largest lag and memory have a chart
_PHASES = ("roll call", "compile", "validate", "save")


class Details:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._next = 0.0

    def newest(self) -> dict[str, float]:
        """Returns numbers by name every few seconds, and nothing in between."""
        if time.monotonic() < self._next:
            return {}
        self._next = time.monotonic() + _EVERY_SECONDS
        return {**self._of_ranks(), **self._of_phases()}

    def _of_ranks(self) -> dict[str, float]:
        found: dict[str, float] = {}
        try:
            ranks = json.loads(run_files.read_text(self._folder / LIVE_FILE))["ranks"]
            for key, name in (("lag", "lag_seconds"), ("memory", "memory_bytes")):
                values = {int(each["rank"]): float(each[key]) for each in ranks if each[key] is not None}
                if values:
                    found[f"{name}/most"] = max(values.values())
                if len(values) <= _RANKS:
                    found |= {f"{name}/rank-{rank}": value for rank, value in values.items()}
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            return {}
        return found

    def _of_phases(self) -> dict[str, float]:
        """Returns the seconds in each phase so far, over all starts of the run."""
        spent = dict.fromkeys(_PHASES, 0.0)
        training, since = 0.0, None
        try:
            for line in run_files.read_text(self._folder / TIMELINE_FILE).splitlines():
                entry: dict[str, Any] = json.loads(line)
                at, until, kind = float(entry["at"]), entry["until"], entry["kind"]
                if kind in spent and until is not None:
                    spent[kind] += float(until) - at
                    training -= float(until) - at if since is not None else 0.0
                elif kind in ("start", "restart", "end", "train"):
                    training += at - since if since is not None else 0.0
                    since = at if kind == "train" else None
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            return {}
        training += time.time() - since if since is not None else 0.0
        return {f"time_seconds/{kind}": each for kind, each in {"train": max(training, 0.0), **spent}.items()}


_OURS = ("config", "resume", "dir")
_EXIT_CODES = {"completed": 0, "stopped early": 0}


class WandbLogger:
    delay = 60.0  # its process writes, or uploads, every 15 s, and ends at once when ours is killed

    def __init__(self, settings: Wandb) -> None:
        self._settings = settings
        if settings.arguments:
            check_arguments(settings.arguments, "wandb", _OURS)

    @staticmethod
    def check(settings: Wandb, environment: Mapping[str, str]) -> None:
        """Refuses to start without a key, where one is needed."""
        mode, server = _mode_and_server(settings, environment)
        if mode == "online" and not _has_key(server, environment):
            raise ConfigError(
                f"log.wandb: there is no key for {server}: set WANDB_API_KEY (or `wandb login`), or log.wandb.mode: "
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


def _mode_and_server(settings: Wandb, environment: Mapping[str, str]) -> tuple[str, str]:
    """Returns them as wandb finds them: in the config, the environment, its settings files."""
    files = configparser.ConfigParser()
    here = Path(environment.get("WANDB_DIR", ".")) / "wandb" / "settings"
    own = Path(environment.get("WANDB_CONFIG_DIR", Path.home() / ".config" / "wandb")) / "settings"
    with contextlib.suppress(configparser.Error, OSError, UnicodeDecodeError):
        files.read([own, here])
    written = dict(files["default"]) if files.has_section("default") else {}
    mode = settings.mode or environment.get("WANDB_MODE") or written.get("mode")
    if not mode and written.get("disabled") == "true":
        mode = "offline"
    given = settings.arguments.get("settings")
    asked = given.get("base_url") if isinstance(given, Mapping) else None
    server = asked or environment.get("WANDB_BASE_URL") or written.get("base_url") or "https://api.wandb.ai"
    return mode or "online", str(server)


def _has_key(server: str, environment: Mapping[str, str]) -> bool:
    if environment.get("WANDB_API_KEY") or environment.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    named = [environment["NETRC"]] if environment.get("NETRC") else ["~/.netrc", "~/_netrc"]
    for file in named:
        with contextlib.suppress(OSError, netrc.NetrcParseError, UnicodeDecodeError):
            if netrc.netrc(os.path.expanduser(file)).authenticators(urlsplit(server).netloc):  # noqa: PTH111  as netrc takes it
                return True
    return False


_ID = "lockstep.id"  # a tag, which finds a run that was made just before its process was killed
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
        """Refuses a tracking URI that is missing, or that the installed packages cannot use."""
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
        # A relative folder means the same one after a resume from elsewhere.
        same = about.kept.get("given") == given
        place = str(about.kept["tracking_uri"]) if same else _absolute(given)
        if place.startswith("file:"):
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
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
        named = {_name(name): str(value)[:_LONGEST_PARAMETER] for name, value in leaves(config)}
        parameters = [self._param(name, value) for name, value in named.items()]
        for begin in range(0, len(parameters), _MOST_PARAMETERS):
            self._client.log_batch(self._run_id, params=parameters[begin : begin + _MOST_PARAMETERS])


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


class TrackioLogger:
    delay = 30.0  # its thread, which sends later, is killed with ours

    def __init__(self, settings: Trackio) -> None:
        self._settings = settings
        if settings.arguments:
            check_arguments(settings.arguments, "trackio", ("config", "resume"))

    def start(self, about: About) -> dict[str, Any]:
        self._trackio: Any = importlib.import_module("trackio")
        given = self._settings.arguments
        # It identifies runs by name, and another run's folder may have the same one elsewhere.
        name = str(about.kept.get("name") or given.pop("name", None) or f"{about.name}-{about.id[:6]}")
        chosen = {"project": self._settings.project, **given, "name": name}
        self._run = self._trackio.init(**chosen, config=about.config, resume="allow")
        # It would keep a step that is sent again twice. The last step that it has may not be complete.
        self._has = int(getattr(self._run, "_next_step", 0)) - 1
        return {"name": name, "project": self._settings.project}

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        if step >= self._has:
            self._run.log(dict(values), step=step)

    def log_sample(self, sample: Sample) -> None:
        value = sample.value
        if sample.kind == "image":
            shown = self._trackio.Image(str(sample.file))
        elif sample.kind == "text":
            shown = self._trackio.Markdown(f"```\n{value}\n```")
        else:
            shown = self._trackio.Table(columns=value.columns, data=value.rows)
        self.log(sample.step, {sample.name: shown})

    def finish(self, status: str) -> None:
        self._run.finish()

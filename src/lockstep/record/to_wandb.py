"""Weights & Biases, by its own package. https://docs.wandb.ai/ref/python/"""

from __future__ import annotations

import configparser
import contextlib
import html
import importlib
import netrc
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from lockstep.config.loggers import Wandb
from lockstep.errors import ConfigError
from lockstep.record.logger import About, Sample, check_arguments

_OURS = ("config", "resume", "dir")
_EXIT_CODES = {"completed": 0, "stopped early": 0}


class WandbLogger:
    delay = 60.0  # its own process writes, or uploads, every 15 s, and ends at once where ours is killed

    def __init__(self, settings: Wandb) -> None:
        self._settings = settings
        if settings.arguments:
            check_arguments(settings.arguments, "wandb", _OURS)

    @staticmethod
    def check(settings: Wandb, environment: Mapping[str, str]) -> None:
        """Before training: a key, where one is needed."""
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
            "console": "off",  # what is printed is in logs/
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
        # It takes steps in their order alone, and ignores what it has already: so what is sent once more does no harm.
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
        """At exit its package waits for a process of its own, which waits for a server that does not answer. What that
        process has written down stays, for `wandb sync`."""
        connection = sys.modules["wandb.sdk.wandb_setup"]._singleton._connection  # there is no public way to it
        connection._cleanup()
        connection._proc._process.kill()


def _mode_and_server(settings: Wandb, environment: Mapping[str, str]) -> tuple[str, str]:
    """As wandb finds them: the config, the environment, its settings files."""
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

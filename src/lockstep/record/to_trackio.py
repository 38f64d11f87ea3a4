"""Trackio, by its own package. https://huggingface.co/docs/trackio"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from lockstep.config.loggers import Trackio
from lockstep.record.logger import About, Sample, check_arguments


class TrackioLogger:
    delay = 30.0  # what it was given waits for a thread of its own, which is killed with ours

    def __init__(self, settings: Trackio) -> None:
        self._settings = settings
        if settings.arguments:
            check_arguments(settings.arguments, "trackio", ("config", "resume"))

    def start(self, about: About) -> dict[str, Any]:
        self._trackio: Any = importlib.import_module("trackio")
        given = self._settings.arguments
        # It knows its runs by their names, and a run's folder may have that of another elsewhere.
        name = str(about.kept.get("name") or given.pop("name", None) or f"{about.name}-{about.id[:6]}")
        chosen = {"project": self._settings.project, **given, "name": name}
        self._run = self._trackio.init(**chosen, config=about.config, resume="allow")
        # It would keep a step that is sent once more a second time. It counts on from the last that it has, which may
        # not be complete.
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

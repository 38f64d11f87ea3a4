"""TensorBoard's event files, in the run's folder."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep import run_files
from lockstep.config.load import to_yaml
from lockstep.record.logger import About, Sample
from lockstep.record.timeline import LIVE_FILE, TIMELINE_FILE


class TensorBoardLogger:
    takes_back = True  # a resumed run hides what it is about to write again
    keeps_nothing = True  # its own files are all that it goes on with

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
_RANKS = 64  # of more, only the slowest and the fullest have a chart
_PHASES = ("roll call", "compile", "validate", "save")  # what has an end of its own, beside training


class Details:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._next = 0.0

    def newest(self) -> dict[str, float]:
        """By name, every few seconds; nothing in between, and nothing of what cannot be read."""
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
        """Seconds so far, of all starts of the run."""
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

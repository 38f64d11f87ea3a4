"""torch.profiler, for cpu and cuda: a Chrome trace, which Perfetto shows."""

from __future__ import annotations

import secrets
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function


class TorchBackend:
    def __init__(self, runtime: str) -> None:
        self._activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if runtime == "cuda" else [])]
        self._profile: profile | None = None
        self._folder = Path()

    def start(self, folder: Path) -> None:
        self._folder = folder
        self._profile = profile(activities=self._activities)
        self._profile.start()

    def stop(self) -> Path:
        stopped = self._stopped()
        # The name that torch's own tools look for: WORKER.NANOSECONDS.pt.trace.json.gz
        file = self._folder / f"{self._folder.name}.{time.time_ns()}.pt.trace.json.gz"
        partial = file.with_name(f".{secrets.token_hex(8)}.partial.json.gz")
        try:
            stopped.export_chrome_trace(str(partial))
            partial.replace(file)
        finally:
            partial.unlink(missing_ok=True)
        return file

    def abandon(self) -> None:
        self._stopped()

    def step(self, number: int) -> AbstractContextManager[Any]:
        return record_function(f"ProfilerStep#{number}")  # the name that tools look for

    def mark(self, name: str) -> AbstractContextManager[Any]:
        return record_function(name)

    def _stopped(self) -> profile:
        running, self._profile = self._profile, None
        assert running is not None
        running.stop()
        return running

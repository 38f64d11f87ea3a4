"""Ray's `fit()` beside the driver's main thread, and the failures that its controller sees."""

from __future__ import annotations

import threading
from typing import Any

from ray.train import UserCallback


class BackgroundFit:
    """`fit()` of a Trainer or Tuner in a thread of its own: the main thread hears signals and shows what comes in."""

    def __init__(self, trainer: Any) -> None:
        self.result: Any = None
        self.error: Exception | None = None
        self._trainer = trainer
        self._thread = threading.Thread(target=self._run, name="lockstep-ray-train", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self.result = self._trainer.fit()
        except Exception as error:
            self.error = error


class ReportedFailures(UserCallback):  # type: ignore[misc]
    """Runs beside Ray Train's controller, and passes on which workers it saw fail."""

    def __init__(self, mailbox: Any) -> None:
        self._mailbox = mailbox

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        errors = {rank: f"{type(error).__name__}: {error}" for rank, error in worker_exceptions.items()}
        self._mailbox.tell.remote([{"kind": "died", "errors": errors}])

"""Loggers of one's own for tests: one that remembers, ones that raise or hang, and ones that are misspelt."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, ClassVar

from lockstep.record.logger import About, Sample


class Memory:
    """What it was called with, in this process."""

    calls: ClassVar[list[tuple[Any, ...]]] = []
    abouts: ClassVar[list[About]] = []

    def __init__(self, greeting: str = "hello") -> None:
        self.greeting = greeting

    def start(self, about: About) -> dict[str, Any]:
        Memory.abouts.append(about)
        Memory.calls.append(("start", about.step, self.greeting))
        return {"remote": about.kept.get("remote", f"made for {about.id}")}

    def log(self, step: int, values: Mapping[str, float]) -> None:
        Memory.calls.append(("log", step, dict(values)))

    def finish(self, status: str) -> None:
        Memory.calls.append(("finish", status))

    @classmethod
    def forget(cls) -> None:
        cls.calls, cls.abouts = [], []

    @classmethod
    def points(cls, name: str) -> list[int]:
        return [call[1] for call in cls.calls if call[0] == "log" and name in call[2]]


class Album(Memory):
    """Takes samples, too."""

    def log_sample(self, sample: Sample) -> None:
        Memory.calls.append(("sample", sample.step, sample.kind, sample.name, sample.value))


class Slow(Memory):
    """What it was given is safe a while later."""

    delay = 60.0


class Unsaid(Memory):
    delay = None


class Faulty(Memory):
    """Raises, or hangs for ever, in one of its methods."""

    def __init__(self, method: str, how: str) -> None:
        super().__init__()
        self.method, self.how = method, how

    def start(self, about: About) -> dict[str, Any]:
        self._misbehave("start")
        return super().start(about)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._misbehave("log")
        super().log(step, values)

    def finish(self, status: str) -> None:
        self._misbehave("finish")
        super().finish(status)

    def _misbehave(self, method: str) -> None:
        if method == self.method and self.how == "raise":
            raise ConnectionError("the service said no")
        if method == self.method and self.how == "exit":
            raise SystemExit(3)
        if method == self.method and self.how == "hang":
            threading.Event().wait()


class Unserializable(Memory):
    def start(self, about: About) -> dict[str, Any]:
        return {"client": object()}


class Misspelt:
    def start(self, about: About) -> None: ...

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def finnish(self, status: str) -> None: ...

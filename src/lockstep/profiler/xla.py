"""torch_xla's profiler: plugins/profile/<time>/<host>.xplane.pb, which TensorBoard's profile plugin reads.

A trace may be started once SPMD is switched on, which the runtime does before anything else. `xp.Trace` also names the
operations of the graph under way, `torch_xla.sync()` refuses to run inside of one, and `xp.StepTrace` calls it.
A profile must not change what is compiled or when: a region here is the event alone, the class that both derive from.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.profiler as xp

_Event = torch_xla._XLAC.profiler.TraceMe


class XlaBackend:
    def __init__(self) -> None:
        self._folder = Path()

    def start(self, folder: Path) -> None:
        self._folder = folder
        xm.wait_device_ops()  # what was queued before belongs to the steps before
        xp.start_trace(str(folder))

    def stop(self) -> Path:
        xm.wait_device_ops()
        xp.stop_trace()
        return max((self._folder / "plugins" / "profile").iterdir())  # they are named by their time

    def abandon(self) -> None:
        # There is no way to stop without writing.
        self.stop()

    def step(self, number: int) -> AbstractContextManager[Any]:
        event: AbstractContextManager[Any] = _Event("train", step_num=number, _r=1)  # by these a viewer knows a step
        return event

    def mark(self, name: str) -> AbstractContextManager[Any]:
        event: AbstractContextManager[Any] = _Event(name)
        return event

"""Safe points of a loop that brings its own data: without run.batches, they follow run.step."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from lockstep.runtime.base import Runtime
from lockstep.runtime.generators import generator_states, set_generator_states
from lockstep.train.pulse import Asked

# So many steps after the last safe point there is another, though an optimizer has not stepped since.
_MOST_STEPS = 50


class OwnDataSteps:
    """Decides where the steps of such a loop end, and acts there on a request to save or to leave.

    What follows run.step in an iteration (a scheduler, a target network, run.log) belongs to the step as well, and only
    the loop knows it. So a request waits for the next call of a module, which is in the next iteration, and is carried
    out before that. Random numbers that were drawn for it by then are drawn again in the resumed run.
    """

    def __init__(self, runtime: Runtime, act: Callable[[Asked], None]) -> None:
        self._runtime, self._act = runtime, act
        self._stepped: set[int] = set()
        self._steps = 0
        self._asked: Asked | None = None
        self._states: dict[str, Any] = {}
        self._hook: RemovableHandle | None = None

    def end_here(self, optimizer: object, optimizers: int) -> bool:
        """Whether the step of this optimizer is the last of an iteration: all of them have stepped since the last."""
        self._stepped.add(id(optimizer))
        self._steps += 1
        if len(self._stepped) < optimizers and self._steps < _MOST_STEPS:
            return False
        self._stepped.clear()
        self._steps = 0
        return True

    def defer(self, asked: Asked) -> None:
        """Act on a request as soon as the next module is called by this thread."""
        thread = threading.get_ident()

        def before_forward(module: Any, inputs: Any) -> None:
            if threading.get_ident() == thread:
                self.act(redraw=True)

        self._asked, self._states = asked, generator_states(self._runtime)
        self._hook = register_module_forward_pre_hook(before_forward)

    def act(self, redraw: bool = False) -> None:
        """Act on the request that was deferred, if there is one; with `redraw`, as of the end of its step."""
        if self._asked is None or self._hook is None:
            return
        asked, self._asked = self._asked, None
        self._hook.remove()
        now = generator_states(self._runtime)
        if redraw:
            set_generator_states(self._runtime, self._states)
        try:
            self._act(asked)
        finally:
            set_generator_states(self._runtime, now)

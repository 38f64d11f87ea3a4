"""Messages between the ranks and the driver, both ways: one small actor beside the driver."""

from __future__ import annotations

import asyncio
from typing import Any

from lockstep.ray.folder_store import FolderStore

Event = dict[str, Any]

# How long anybody waits for an answer of the mailbox, which has nothing else to do, before the cluster counts as lost.
ANSWER_SECONDS = 60.0


class Mailbox:
    """Plain data only. Nothing here waits for ever: whoever asks says for how long."""

    def __init__(self, folder: str) -> None:
        self._folder_store = FolderStore(folder)
        self._events: list[Event] = []
        self._news = asyncio.Event()
        self._requests: dict[str, str] = {}
        self._saves = 0
        self._closed = False

    async def tell(self, events: list[Event]) -> dict[str, Any]:
        """Messages for the driver; what the ranks are asked for in return."""
        self._events.extend(events)
        if events:
            self._news.set()
        return {"leave": self._requests.get("leave"), "saves": self._saves}

    async def take(self, wait: float) -> list[Event]:
        """What came in since the last time, as soon as there is something."""
        try:
            await asyncio.wait_for(self._news.wait(), wait)
        except TimeoutError:
            return []
        self._news.clear()
        events, self._events = self._events, []
        return events

    async def ask_to_leave(self, reason: str) -> None:
        self._requests.setdefault("leave", reason)

    async def ask_to_save(self) -> None:
        self._saves += 1

    async def close(self) -> None:
        """No attempt may begin from here on: what failed would fail again, or the user has had enough."""
        self._closed = True

    async def may_begin(self) -> bool:
        return not self._closed

    async def folder_store(self, what: str, *arguments: Any) -> Any:
        """Something of the run's folder, for a rank that does not see it; in a thread, since disks take their time."""
        if what.startswith("_"):
            raise ValueError(f"{what!r} is not for ranks to call")
        return await asyncio.to_thread(getattr(self._folder_store, what), *arguments)

"""What can be saved and restored."""

from __future__ import annotations

from typing import Any, Protocol


class Stateful(Protocol):
    """Anything whose state belongs into a checkpoint."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> Any: ...

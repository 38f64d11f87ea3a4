"""Compiling takes longer than a step, the first time and whenever a shape changes."""

from __future__ import annotations

from typing import Any

from lockstep.whereabouts import Whereabouts


def be_patient_while_compiling(whereabouts: Whereabouts) -> None:
    """Give a rank more time whenever torch begins to compile something."""
    from torch._dynamo import callback

    @callback.on_compile_start
    def began(*about: Any) -> None:
        whereabouts.be_patient()

"""The other end of a question: `python -m lockstep.doctor.answer TOPIC ARGUMENTS`, one JSON message per line."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

from lockstep.doctor.ask import Stage
from lockstep.errors import LockstepError


def main(topic: str, *arguments: str) -> None:
    # Libraries print what they like: standard output is moved out of their way.
    channel = os.dup(1)
    os.dup2(2, 1)
    threading.Thread(target=_leave_with_the_asker, daemon=True).start()

    stages = ["starting"]

    def tell(**message: Any) -> None:
        os.write(channel, json.dumps(message).encode() + b"\n")

    def stage(name: str) -> None:
        stages.append(name)
        tell(stage=name)

    try:
        tell(answer=_look(topic, stage, *arguments))
    except LockstepError as error:
        tell(trouble=str(error))
    except Exception as error:
        from lockstep.doctor.dependencies import culprit

        # Not the stage is to blame where something fails that is loaded along with what the stage names.
        module = culprit(error)
        about = f"loading {module}" if isinstance(error, ImportError) and module else stages[-1]
        tell(trouble=f"{about}: {type(error).__name__}: {error}", module=module)
    # The answer is given: a library that hangs or crashes while it is taken apart does not change it.
    os._exit(0)


def _look(topic: str, stage: Stage, *arguments: str) -> Any:
    from lockstep.doctor import bucket, dependencies, disk, launched, network, step

    topics: dict[str, Callable[..., Any]] = {
        "dependencies": dependencies.look,
        "hostname": network.look_up,
        "disk": disk.look,
        "bucket": bucket.look,
        "runtime": step.look,
        "processes": launched.look,
    }
    return topics[topic](stage, *arguments)


def _leave_with_the_asker() -> None:
    os.read(0, 1)
    os._exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Whether runs can be written to a bucket."""

from __future__ import annotations

import time
from typing import Any

from lockstep.doctor.ask import Answer, Stage
from lockstep.doctor.check import Check
from lockstep.doctor.units import duration


def look(stage: Stage, url: str) -> dict[str, Any]:
    """In a process of its own: a service that does not answer keeps whoever asks it waiting."""
    from lockstep.mirror.bucket import Bucket
    from lockstep.mirror.url import parse

    stage(f"writing to {url}")
    began = time.perf_counter()
    Bucket(parse(url, "--out")).probe("--out")
    return {"url": url, "seconds": time.perf_counter() - began}


def judge(answer: Answer) -> Check:
    if answer.value is None:
        remedy = "" if answer.trouble.startswith("--out") else "check the network, or name another place with --out"
        return Check("bucket", "fail", answer.trouble, remedy)
    took = duration(answer.value["seconds"])
    found = f"{answer.value['url']} can be written, listed, read and deleted from; one object takes {took}"
    return Check("bucket", "ok", found, data=answer.value)

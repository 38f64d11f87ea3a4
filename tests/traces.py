"""What tests read in traces."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

REGIONS = ("data", "forward", "backward", "optimizer", "checkpoint", "validate")


def torch_traces(run: Path, rank: int = 0) -> list[Path]:
    return sorted((run / "profile" / f"proc_{rank}").glob("*.pt.trace.json.gz"))


def slices(trace: Path) -> list[dict[str, Any]]:
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    return [event for event in events if event.get("cat") == "user_annotation"]


def named(trace: Path) -> Counter[str]:
    """How often each region and each step is in a trace."""
    return Counter(event["name"] for event in slices(trace))

"""Folders of runs as they might have come to be, made in a moment: for what reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

BEGAN = 1_790_000_000.0


def lines(file: Path, *found: Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    text = "".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in found)
    file.write_text(text, encoding="utf-8")


def entry(after: float, kind: str, until: float | None = None, **more: Any) -> dict[str, Any]:
    return {"at": BEGAN + after, "until": None if until is None else BEGAN + until, "kind": kind, **more}


def rows(count: int, every: int = 1, **more: Any) -> list[dict[str, Any]]:
    """Rows of training, and of a validation after every hundred steps."""
    found: list[dict[str, Any]] = []
    for step in range(every, count + 1, every):
        loss = 2.0 / step + 0.1 * (step % 7)
        found.append({"step": step, "epoch": step // 100, "train/loss": loss, "lr": 0.01, "gradient_norm": 1.0 + loss,
                      **more, "examples_per_second": 1000.0 + step % 13})  # fmt: skip
        if step % 100 == 0:
            found.append({"step": step, "epoch": step // 100, "train/epoch_loss": 0.5, "val/loss": 1.0 / step})
    return found


def completed(folder: Path, count: int = 300, ranks: int = 4, slow: int | None = 2, **summary: Any) -> Path:
    """A run of some ranks of which one is slow, that came to its end."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("task: {type: 'a.py:A'}\nprocesses: 4\ntrain: {epochs: 3}\n", encoding="utf-8")
    lines(folder / "metrics.jsonl", *rows(count))
    told = {"status": "completed", "reason": None, "epoch": 3, "step": count, "seconds": 55.0, "runtime": "cpu",
            "strategy": "ddp", "metrics": {"val/loss": 0.1}, "best": {"metric": "val/loss", "value": 0.1, "step": 300},
            "samples_per_second": 640.0, **summary}  # fmt: skip
    (folder / "summary.json").write_text(json.dumps(told), encoding="utf-8")
    places = [{"rank": rank, "host": f"host-{rank // 2}", "device": "cpu", "physical_device": f"d{rank}", "pid": rank,
               "torch": "2.9"} for rank in range(ranks)]  # fmt: skip
    (folder / "topology.json").write_text(json.dumps({"world_size": ranks, "ranks": places}), encoding="utf-8")
    saves = [entry(10 + at, kind, 10.5 + at, step=at) for at in range(5, 50, 5) for kind in ("validate",)]
    lines(folder / "timeline.jsonl", entry(0, "start", world_size=ranks), entry(4, "roll call", 5),
          entry(8, "train", step=0), *saves, entry(60, "end", status="completed"))  # fmt: skip
    busy = [[0.05 if rank == slow else 0.01 for rank in range(ranks)]] * 50
    lines(folder / "lags.jsonl", *({"at": BEGAN + 9 + at, "since": BEGAN + 8 + at, "step": 6 * at, "busy": each}
                                   for at, each in enumerate(busy)))  # fmt: skip
    return folder


def failed(folder: Path, restarted: bool = False) -> Path:
    """A run whose second rank raised something with markup in it."""
    completed(folder, 120, ranks=2, slow=None, status="failed" if not restarted else "completed")
    note = "ValueError: <script>alert(1)</script> is no batch\nand more of it"
    trace = 'Traceback (most recent call last):\n  File "task.py", line 7, in loss\n    return x < 1 & y\n'
    who = {"rank": 1, "host": "host-0", "note": note, "traceback": trace, "world_size": 2}
    if restarted:
        lines(folder / "timeline.jsonl", entry(0, "start"), entry(4, "roll call", 5), entry(8, "train", step=0),
              entry(20, "save", 21, step=80), entry(30, "restart", **who, attempt=1), entry(36, "roll call", 37),
              entry(40, "train", step=80), entry(60, "end", status="completed"))  # fmt: skip
    else:
        lines(folder / "timeline.jsonl", entry(0, "start"), entry(4, "roll call", 5), entry(8, "train", step=0),
              entry(30, "end", status="failed", **who))  # fmt: skip
    return folder

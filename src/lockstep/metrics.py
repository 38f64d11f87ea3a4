"""Numbers about a run: collected without waiting for the device, summed exactly over ranks, written as rows."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from lockstep.errors import ConfigError
from lockstep.plain import finite

Row = dict[str, Any]
SPEED = "examples_per_second"  # what rows of training have, and others do not
# name -> (weighted sum, weight)
Sums = dict[str, list[float]]


class Meter:
    """Values of this rank since the last reading, kept where they were computed until somebody reads them."""

    def __init__(self) -> None:
        self._values: dict[str, list[tuple[int, int, Any]]] = {}

    def add(self, step: int, examples: int, values: Mapping[str, Any]) -> None:
        """Note values that are means over so many examples."""
        for name, value in values.items():
            kept = value.detach() if isinstance(value, torch.Tensor) else value
            if isinstance(kept, torch.Tensor) and kept.numel() != 1:
                raise ConfigError(
                    f"{name!r}: only single numbers can be logged, got shape {list(kept.shape)}; log a mean"
                )
            self._values.setdefault(name, []).append((step, examples, kept))

    def read(self, leave_out_bad: bool = False) -> tuple[Sums, tuple[int, float] | None]:
        """Weighted sums, with one wait for the device per name, and the first step whose loss is not finite.

        With `leave_out_bad`, values that are not finite are left out of the sums, and nothing is called bad.
        """
        values, self._values = self._values, {}
        sums: Sums = {}
        first_bad: tuple[int, float] | None = None
        for name, entries in values.items():
            found = numbers([value for _, _, value in entries])
            counted = [(number, n) for number, (_, n, _) in zip(found, entries, strict=True) if n]
            if leave_out_bad:
                counted = [(number, n) for number, n in counted if math.isfinite(number)]
            sums[name] = [math.fsum(number * n for number, n in counted), float(sum(n for _, n in counted))]
            if name == "loss" and not leave_out_bad:
                bad = [(step, number) for number, (step, _, _) in zip(found, entries, strict=True)
                       if not math.isfinite(number)]  # fmt: skip
                first_bad = bad[0] if bad else None
        return sums, first_bad


class Totals:
    """Sums over all ranks since some boundary."""

    def __init__(self) -> None:
        self.sums: Sums = {}

    def add(self, sums: Mapping[str, Iterable[float]]) -> None:
        for name, (total, weight) in sums.items():
            have = self.sums.setdefault(name, [0.0, 0.0])
            have[0] += total
            have[1] += weight

    def means(self) -> dict[str, float]:
        return {name: total / weight for name, (total, weight) in self.sums.items() if weight}

    def take(self) -> dict[str, float]:
        """The means, starting anew."""
        means, self.sums = self.means(), {}
        return means


class Writer(Protocol):
    def write(self, row: Row) -> None: ...

    def close(self) -> None: ...


class JsonlWriter:
    """One JSON object per line, each line whole."""

    def __init__(self, path: Path) -> None:
        self._stream = path.open("a", encoding="utf-8")

    def write(self, row: Row) -> None:
        self._stream.write(json.dumps(finite(row)) + "\n")
        self._stream.flush()

    def close(self) -> None:
        self._stream.close()


class TensorBoardWriter:
    """Event files for TensorBoard; a resumed run hides what it is about to write again."""

    def __init__(self, folder: Path, purge_after_step: int | None = None) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ConfigError(
                "log.tensorboard: true needs the tensorboard package: pip install 'lockstep-train[tensorboard]', "
                "or set log.tensorboard to false"
            ) from None
        purge = None if purge_after_step is None else purge_after_step + 1
        self._writer = SummaryWriter(str(folder), purge_step=purge)

    def write(self, row: Row) -> None:
        for name, value in row.items():
            if name not in ("step", "epoch") and isinstance(value, (int, float)):
                self._writer.add_scalar(name, value, row["step"])

    def close(self) -> None:
        self._writer.close()


def read_rows(path: Path) -> list[Row]:
    """The rows of a jsonl file; a last line that a kill cut short is left out."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def drop_rows_after(path: Path, step: int, training_step: int | None = None) -> None:
    """Forget rows that a resumed run will write again, replacing the file in one move.

    Those of training may be further back than the rest: the row that a run ends with comes after its last checkpoint.
    """
    if not path.exists():
        return
    last = {True: step if training_step is None else training_step, False: step}
    kept = [json.dumps(row) + "\n" for row in read_rows(path) if row.get("step", 0) <= last[SPEED in row]]
    replacement = path.with_suffix(".partial")
    replacement.write_text("".join(kept), encoding="utf-8")
    replacement.replace(path)


def write_json(path: Path, value: Any) -> None:
    """Write a whole JSON file or none."""
    temporary = path.with_name(f".{path.name}.partial")
    text = json.dumps(finite(value), indent=1) + "\n"
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def numbers(values: list[Any]) -> list[float]:
    """Single values as numbers, with one wait for the device where it can be."""
    tensors = [each for each in values if isinstance(each, torch.Tensor)]
    # Putting them together on an XLA device would be one more program to compile, for every number of values.
    if len(tensors) < len(values) or any(each.device.type == "xla" for each in tensors):
        return [float(value) for value in values]
    return [float(number) for number in torch.stack([v.reshape(()) for v in tensors]).double().cpu().tolist()]

"""TensorBoard's event files, in the run's folder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lockstep.config.load import to_yaml
from lockstep.record.details import Details
from lockstep.record.logger import About, Sample


class TensorBoardLogger:
    takes_back = True  # a resumed run hides what it is about to write again
    keeps_nothing = True  # its own files are all that it goes on with

    _writer: Any
    _details: Details

    def start(self, about: About) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = about.folder / "tensorboard"
        self._writer = SummaryWriter(str(folder), purge_step=about.step + 1 if folder.exists() else None)
        self._writer.add_text("config", f"```yaml\n{to_yaml(about.config)}\n```", about.step)
        self._details = Details(about.folder)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in {**values, **self._details.newest()}.items():
            self._writer.add_scalar(name, value, step)

    def log_sample(self, sample: Sample) -> None:
        if sample.kind == "image":
            self._writer.add_image(sample.name, sample.value, sample.step, dataformats="HWC")
        elif sample.kind == "text":
            self._writer.add_text(sample.name, f"```\n{sample.value}\n```", sample.step)
        else:
            self._writer.add_text(sample.name, _markdown(sample.value.columns, sample.value.rows), sample.step)

    def finish(self, status: str) -> None:
        self._writer.close()


def _markdown(columns: list[str], rows: list[list[Any]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(
        "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in line) + " |" for line in lines
    )

"""`launch.slurm`: what a batch job asks for. Values go to sbatch as they are, each as an argument of its own."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema, model_validator

from lockstep.config.values import Seconds, Section, seconds_of

UNLIMITED = "UNLIMITED"
_DAY, _HOUR, _MINUTE = 86_400, 3_600, 60
# What follows from other settings, or what a job of ours depends on.
OURS = {
    "parsable": "the job's number is read from what sbatch prints",
    "wrap": "the script is Lockstep's",
    "array": "a sweep makes one",
    "job-name": "set name",
    "nodes": "set launch.slurm.nodes",
    "ntasks": "set processes",
    "ntasks-per-node": "set launch.slurm.tasks_per_node",
    "cpus-per-task": "set launch.slurm.cpus_per_task",
    "gpus-per-node": "set launch.slurm.gpus_per_node",
    "partition": "set launch.slurm.partition",
    "account": "set launch.slurm.account",
    "qos": "set launch.slurm.qos",
    "time": "set launch.slurm.time",
    "signal": "set launch.slurm.signal_before",
    "requeue": "set launch.slurm.requeue",
    "no-requeue": "set launch.slurm.requeue",
    "output": "it is in the run's folder",
    "error": "it is in the run's folder",
    "open-mode": "a job that is requeued goes on with its output",
    "chdir": "it is the folder that the command is given in",
    "export": "the run's secret travels in the environment of the job",
    "export-file": "the run's secret travels in the environment of the job",
    "wait": "the command does not wait for the job",
}


_LIMIT = (
    'not a time limit of SLURM; write hours:minutes:seconds ("12:00:00"), minutes:seconds ("90:00"), days-hours '
    '("2-12", "2-12:30:00"), "90 minutes", "12 hours" or UNLIMITED'
)


def _plain(text: str) -> str:
    if not text or not text.isprintable():
        raise ValueError("must be text in one line, without control characters")
    return text


Text = Annotated[str, AfterValidator(_plain)]


def limit_in_seconds(text: str) -> float | None:
    """What a time limit in SLURM's words comes to; None: there is none. Raises ValueError."""
    if text.upper() in (UNLIMITED, "INFINITE"):
        return None
    clock = re.fullmatch(r"(?:(\d{1,5})-)?(\d{1,7})(?::(\d{1,5}))?(?::(\d{1,5}))?", text)
    if clock is None or not ("-" in text or ":" in text):
        seconds = seconds_of(text) if clock is None else None
        if seconds is None:
            raise ValueError(_LIMIT)
        return seconds
    days, first, second, third = (int(each) if each else 0 for each in clock.groups())
    if clock[1] is not None:
        return float(days * _DAY + first * _HOUR + second * _MINUTE + third)
    if clock[4] is not None:
        return float(first * _HOUR + second * _MINUTE + third)
    return float(first * _MINUTE + second)


def _limit(text: Any) -> str:
    """As SLURM reads it. A bare number is minutes to SLURM and seconds in the rest of a config: neither is guessed."""
    if not isinstance(text, str):
        raise ValueError(_LIMIT)
    seconds = limit_in_seconds(text)
    if seconds is None:
        return UNLIMITED
    if seconds < _MINUTE:
        raise ValueError("must be one minute at least: SLURM counts in minutes")
    if ":" in text or "-" in text:
        return text
    hours, rest = divmod(int(seconds), _HOUR)
    return f"{hours}:{rest // _MINUTE:02d}:{rest % _MINUTE:02d}"


def _option(name: str) -> str:
    if not re.fullmatch(r"[a-z][a-z0-9-]*", name):
        raise ValueError(f"{name!r} is no long option of sbatch; write it without dashes before it: mem, constraint")
    if name in OURS:
        raise ValueError(f"{name} is not for extra: {OURS[name]}")
    return name


def _value(value: Any) -> str | int | bool:
    if isinstance(value, (bool, int)):
        return value
    if not isinstance(value, str):
        raise ValueError("must be text, a whole number, or true for an option without a value")
    return _plain(value)


Option = Annotated[Any, AfterValidator(_value), WithJsonSchema({"type": ["string", "integer", "boolean"]})]


class Slurm(Section):
    """The job that `launch: slurm` submits."""

    partition: Text | None = None
    account: Text | None = None
    qos: Text | None = None
    nodes: int = Field(1, gt=0, le=1_000_000)
    tasks_per_node: int | None = Field(None, gt=0, le=65_536, description="processes / nodes where not given")
    cpus_per_task: int | None = Field(None, gt=0, le=65_536)
    gpus_per_node: int | None = Field(None, gt=0, le=65_536)
    time: Annotated[str, BeforeValidator(_limit)] | None = Field(
        None, description="the limit, as SLURM writes it; that of the partition where not given"
    )
    signal_before: Seconds = Field(120.0, le=65_535, description="ask to save so long before; timeouts.stop at least")
    requeue: bool = Field(True, description="a run that was asked to save queues again, and goes on")
    extra: dict[Annotated[str, AfterValidator(_option)], Option] = Field(
        {}, description="further options of sbatch by their long names; true for one without a value"
    )

    @model_validator(mode="after")
    def _time_to_save(self) -> Slurm:
        limit = limit_in_seconds(self.time) if self.time is not None else None
        if limit is not None and limit <= self.signal_before:
            raise ValueError(
                f"the time limit {self.time} is {limit:g} s, and signal_before is {self.signal_before:g} s: the run "
                "would be asked to save as soon as it starts"
            )
        return self

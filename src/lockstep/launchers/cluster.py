"""`launch: ray`: starts the ranks of a run on a Ray cluster and waits for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.launchers import checks
from lockstep.launchers.base import Ended, Out, Say
from lockstep.mirror.url import Url, place

if TYPE_CHECKING:
    from lockstep.config.schema import RunConfig
    from lockstep.launchers.resume import Resumed


@dataclass(frozen=True)
class RayPlan:
    text: str

    def render(self) -> str:
        return self.text


def plan(config: RunConfig, out: Out, folder: str | None = None) -> tuple[RunConfig, RayPlan]:
    from lockstep.ray.installed import require_ray

    require_ray()
    from lockstep.ray.controller import described

    checks.check_imports(config, elsewhere=is_elsewhere(config))
    return config, RayPlan(described(config))


@contextmanager
def train(config: RunConfig, out: Out, say: Say) -> Iterator[Ended]:
    from lockstep.mirror.mark import mirrored

    out = _shared_by_nodes(config, out)
    _check(config)
    from lockstep.ray.controller import launch

    with ExitStack() as mirroring:
        mirrors = []

        def make_folder(resolved: RunConfig) -> Path:
            folder = out.new(resolved)
            mirrors.append(mirroring.enter_context(mirrored(folder, resolved, say)))
            return folder

        config, folder, result = launch(config, make_folder)
        yield Ended(result.exit_code, config, folder, result, mirrors[0])


@contextmanager
def resume(config: RunConfig, run: Resumed, say: Say) -> Iterator[Ended]:
    from lockstep.mirror.mark import mirrored
    from lockstep.record import folder_lock

    folder = run.folder()
    with folder_lock.locked(folder), mirrored(folder, config, say) as mirror:
        _check(config)
        from lockstep.ray.controller import launch

        config, folder, result = launch(config, lambda resolved: run.prepare(folder, resolved), held=True)
        yield Ended(result.exit_code, config, folder, result, mirror)


def describe(config: RunConfig) -> str:
    return "on a Ray cluster"


def is_elsewhere(config: RunConfig) -> bool:
    """Returns whether the ranks run on other machines than this one, with what is installed there."""
    from lockstep.ray.installed import address_of

    return address_of(config.launch.ray) is not None


def _check(config: RunConfig) -> None:
    from lockstep.ray.installed import require_answer, require_ray

    require_ray()
    require_answer(config.launch.ray)
    checks.check_names(config)


def _shared_by_nodes(config: RunConfig, out: Out) -> Out:
    """Returns launch.ray.storage in place of `out` where it is set, checked."""
    from lockstep.record import run_folder

    if out.final:
        return out
    if config.launch.ray.storage:
        out = Out(place(config.launch.ray.storage, "launch.ray.storage"), "launch.ray.storage")
    if isinstance(out.place, Url):
        out.check()
    else:
        run_folder.require_folder(out.place, out.setting)
    return out

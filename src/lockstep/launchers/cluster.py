"""`launch: ray`: starts the ranks of a run on a Ray cluster and waits for them."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.launchers import checks
from lockstep.launchers.base import Ended, Out, Say
from lockstep.mirror.url import Url, place

if TYPE_CHECKING:
    from lockstep.config.schema import RunConfig
    from lockstep.distributed.failure import Result
    from lockstep.launchers.resume import Resumed
    from lockstep.ray.controller import Folder


def plan(config: RunConfig, out: Out, folder: str | None = None) -> tuple[RunConfig, str]:
    from lockstep.ray.installed import require_ray

    require_ray()
    from lockstep.ray.controller import described

    checks.check_imports(config, elsewhere=is_elsewhere(config))
    return config, described(config)


@contextmanager
def train(config: RunConfig, out: Out, say: Say) -> Iterator[Ended]:
    from lockstep.record import folder_lock

    out = _shared_by_nodes(config, out)
    _check(config)
    from lockstep.ray.controller import Folder, launch

    with ExitStack() as holding:

        def make_folder(resolved: RunConfig) -> Folder:
            folder = out.new(resolved)
            if isinstance(out.place, Url):
                handed_over = _hand_over(folder, resolved, holding, say)
                shutil.rmtree(folder, ignore_errors=True)
                return handed_over
            holding.enter_context(folder_lock.locked(folder))
            return Folder(folder)

        yield _ended(*launch(config, make_folder))


@contextmanager
def resume(config: RunConfig, run: Resumed, say: Say) -> Iterator[Ended]:
    from lockstep.mirror.mark import mark_of
    from lockstep.record import folder_lock

    folder = run.folder()
    in_bucket = mark_of(folder) is not None
    with ExitStack() as holding:
        if not in_bucket:
            holding.enter_context(folder_lock.locked(folder))
        _check(config)
        from lockstep.ray.controller import Folder, launch

        def make_folder(resolved: RunConfig) -> Folder:
            if in_bucket:
                return _hand_over(folder, resolved, holding, say, run.prepare)
            run.prepare(folder, resolved)
            return Folder(folder)

        yield _ended(*launch(config, make_folder))


def _hand_over(
    folder: Path,
    config: RunConfig,
    holding: ExitStack,
    say: Say,
    prepare: Callable[[Path, RunConfig], Path] = lambda folder, config: folder,
) -> Folder:
    """Brings a bucket up to date and lets go of it: rank 0, on whichever node it is, holds the run from here on.

    Returns a folder for what the driver itself writes down.
    """
    from lockstep.mirror.mark import mirrored
    from lockstep.ray.controller import Folder
    from lockstep.record import folder_lock

    with folder_lock.locked(folder), mirrored(folder, config, say) as mirror:
        assert mirror is not None
        prepare(folder, config)
        mirror.follow_branch()
    notes = holding.enter_context(tempfile.TemporaryDirectory(prefix="lockstep-ray-", ignore_cleanup_errors=True))
    return Folder(Path(notes), mirror.url)


def _ended(config: RunConfig, folder: Folder, result: Result) -> Ended:
    if folder.url is not None:
        from lockstep.mirror import staging

        with suppress(Exception):  # how the run ended is known without it
            staging.outline(folder.url, folder.path)
    return Ended(result.exit_code, config, folder.path, result, url=folder.url)


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

"""Takes a snapshot of the state and writes it, while training waits or while it goes on."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from lockstep.checkpoint import codec, tensor_file
from lockstep.checkpoint.background import Background, WritesInBackground
from lockstep.checkpoint.retention import best_first, to_delete
from lockstep.checkpoint.snapshot import Snapshot, now, versions, write
from lockstep.checkpoint.storage import CheckpointStorage
from lockstep.config.schema import Checkpoint, Keep
from lockstep.distributed.activity import Activity
from lockstep.errors import CheckpointError

logger = logging.getLogger(__name__)


class CheckpointWriter(WritesInBackground):
    """Writes checkpoints of one run, at most one at a time: by rank 0, which has whole tensors."""

    def __init__(
        self,
        store: CheckpointStorage,
        settings: Checkpoint,
        limit: float = 1800.0,
        activity: Activity | None = None,
        to_host: Callable[[list[torch.Tensor]], list[torch.Tensor]] = list,
    ) -> None:
        """Writing may take `limit` seconds. `to_host` fetches tensors that cannot be copied from where they are, all
        at once; others it leaves alone."""
        self._to_host = to_host
        self.store, self._keep, self._asynchronous = store, settings.keep, settings.asynchronous
        self._background = Background(store.folder, limit, activity or Activity())
        self._buffers: dict[str, torch.Tensor] = {}
        self._before_the_first: Callable[[], Any] | None = None
        self.last_step: int | None = None

    def save(self, step: int, model: Mapping[str, torch.Tensor], state: Any, about: Mapping[str, Any]) -> None:
        """Take the snapshot now; write it here, or in the background where saving is asynchronous."""
        self.finish()  # one at a time: a disk slower than the interval holds training back, and never piles up
        with self._background.within_limit():
            snapshot = self._take(step, model, state, about)
            self.last_step = step
            self._write_and_tidy(
                lambda: self._write(snapshot),
                lambda: delete_old(self.store, step, self._keep),
                wait=not self._asynchronous,
            )

    def _take(self, step: int, model: Mapping[str, torch.Tensor], state: Any, about: Mapping[str, Any]) -> Snapshot:
        model, tree, tensors = self.fetch(model, state)
        check_types("model", model)
        check_types("state", tensors)
        shared = codec.shared_names(model)
        copy = copier(self._buffers)
        snapshot = Snapshot(
            step=step,
            model={name: copy(f"model/{name}", each) for name, each in model.items() if name not in shared},
            shared=shared,
            tree=tree,
            tensors={name: copy(f"state/{name}", each) for name, each in tensors.items()},
            about={**about, "created": now(), "versions": versions()},
        )
        if any(each.is_cuda for each in [*model.values(), *tensors.values()]):
            torch.cuda.synchronize()  # the copies were queued; training must not overwrite what they still read
        return snapshot

    def fetch(self, model: Mapping[str, torch.Tensor], state: Any) -> tuple[codec.Tensors, Any, codec.Tensors]:
        """What is to be saved, off the device; where tensors are spread over hosts, all of them do this together."""
        tree, tensors = codec.pack(state)
        fetched = iter(self._to_host([*model.values(), *tensors.values()]))
        return {name: next(fetched) for name in model}, tree, {name: next(fetched) for name in tensors}

    def _write(self, snapshot: Snapshot) -> None:
        began = time.monotonic()
        if self._before_the_first is not None:
            self._before_the_first()
            self._before_the_first = None
        path = write(self.store, snapshot)
        logger.info(
            "saved %s (%.1f MB in %.2f s)", path.name, snapshot.bytes / 1e6, time.monotonic() - began,
            extra={"repeats": "saved"},
        )  # fmt: skip


def delete_old(store: CheckpointStorage, step: int, keep: Keep) -> None:
    """Delete what need not be kept now that a step is saved, and have `best` lead to the best of what is."""
    # Whatever is newer was put there by somebody else: it is not weighed, or it would cost what was just saved.
    ours = [each for each in store.saved() if each.step <= step]
    best = best_first([each for each in ours if each.whole], keep.mode) if keep.best else []
    store.link_best(best[0].step if best else None)
    for old in to_delete(ours, keep.last, keep.best, keep.mode):
        store.delete(old)


def check_types(part: str, tensors: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        problem = tensor_file.unsupported(tensor)
        if problem is not None:
            raise CheckpointError(f"{part}: {name!r} cannot be saved: {problem}")


def copier(buffers: dict[str, torch.Tensor]) -> Callable[[str, torch.Tensor], torch.Tensor]:
    """Copies tensors to host buffers that are kept from save to save: fresh memory costs more than the copy."""

    def copy(name: str, tensor: torch.Tensor) -> torch.Tensor:
        buffer = buffers.get(name)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            buffers[name] = buffer
        return buffer.copy_(tensor, non_blocking=tensor.is_cuda)

    return copy

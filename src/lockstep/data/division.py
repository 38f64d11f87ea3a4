"""Who reads what of a stream: the lanes of one rank, from the beginning of a pass or from where it was left."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from lockstep.data.lanes import Lane
from lockstep.data.portions import Cut
from lockstep.data.sources import OWN, PIECES, WHOLE
from lockstep.errors import ConfigError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Division:
    """How a stream is divided among ranks, and each rank's part among its workers."""

    name: str  # of the stream
    kind: str
    order: list[int]  # of the pieces, in this pass
    cut: Cut
    workers: int

    @property
    def lanes(self) -> int:
        """How many readers a rank has: no more than it has pieces for."""
        wanted = max(self.workers, 1)
        return max(1, min(wanted, -(-len(self.order) // self.cut.shares))) if self.kind == PIECES else wanted

    def begin(self) -> list[Lane]:
        return self._divided(self.order)

    def resume(self, saved: dict[str, Any]) -> list[Lane]:
        """The lanes of this rank, of what all ranks had left; `saved` is what they had."""
        cut, shares = self.cut, saved["shares"]
        if self.kind == WHOLE:  # all lanes of all ranks were at the same place
            return [Lane.of(shares[0][0]) for _ in range(self.lanes)]
        if len(shares) == cut.shares and len(shares[cut.share]) == self.lanes:
            return [Lane.of(each) for each in shares[cut.share]]
        if self.kind == OWN:
            raise ConfigError(
                f"{self.name}: it divides itself (is_share), and this pass was begun with {len(shares)} ranks x "
                f"{len(shares[0])} readers, so that {cut.shares} x {self.lanes} cannot go on with it: go on with as "
                "many as before, or from a checkpoint at the end of an epoch. A stream with num_shards and "
                "shard(num_shards, index) can be divided anew"
            )
        return self._divided_anew([Lane.of(each) for share in shares for each in share])

    def check(self, resumes: bool) -> None:
        """Refuse a stream of which a rank would have nothing; say where dividing it costs something."""
        cut, pieces, readers = self.cut, len(self.order), self.cut.shares * max(self.workers, 1)
        if self.kind != WHOLE and cut.batch_size < cut.shares:
            raise ConfigError(
                f"batch_size: {cut.batch_size} examples of {self.name} cannot be shared by {cut.shares} ranks, each of "
                f"which takes them from a part of its own: set it to {cut.shares} or more"
            )
        if resumes:
            return
        if self.kind == PIECES and pieces < cut.shares:
            raise ConfigError(
                f"{self.name}: {pieces} shards for {cut.shares} ranks leave {cut.shares - pieces} of them without any: "
                f"write the data into {readers} shards or more (ranks x workers), or train with {pieces} processes or "
                "fewer"
            )
        if self.kind == PIECES and pieces < readers:
            logger.info(
                "%s: %d shards for %d ranks x %d workers: workers without any are not started. Write the data into %d "
                "shards or more, or set data.workers to %d",
                self.name, pieces, cut.shares, self.workers, readers, pieces // cut.shares,
            )  # fmt: skip
        if self.kind == WHOLE and readers > 1:
            logger.info(
                "%s has no shards to divide (num_shards, shard), or fewer than ranks: each of %d readers (ranks x "
                "workers) reads all of it, and every rank keeps its part of each batch", self.name, readers,
            )  # fmt: skip

    def _divided(self, order: list[int]) -> list[Lane]:
        if self.kind != PIECES:
            return [Lane([0], number=number) for number in range(self.lanes)]
        mine = order[self.cut.share :: self.cut.shares]
        return [Lane(mine[number :: self.lanes], number=number) for number in range(self.lanes)]

    def _divided_anew(self, lanes: list[Lane]) -> list[Lane]:
        """Every remaining piece once: one that was begun is finished by one reader."""
        marks = {piece: mark for lane in lanes for piece, mark in lane.marks.items()}
        left = {piece for lane in lanes for piece in lane.pieces}
        remaining = [piece for piece in self.order if piece in left]
        remaining.sort(key=lambda piece: piece not in marks)
        logger.info(
            "%s: %d of %d shards are left, %d of them begun; they are divided anew among %d ranks x %d readers",
            self.name, len(remaining), len(self.order), len(marks), self.cut.shares, self.lanes,
        )  # fmt: skip
        divided = self._divided(remaining)
        for lane in divided:
            lane.marks = {piece: marks[piece] for piece in lane.pieces if piece in marks}
        return divided

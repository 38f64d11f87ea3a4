"""The `data` section: what training is fed with, in which order, and by whom."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from lockstep.config.section import Section, as_mapping


class Split(Section):
    """Fractions of the task's train_data that become training, validation and test data."""

    train: float = Field(gt=0, le=1)
    val: float = Field(0.0, ge=0, lt=1)
    test: float = Field(0.0, ge=0, lt=1)

    @model_validator(mode="after")
    def _sums_to_one(self) -> Split:
        total = self.train + self.val + self.test
        if not math.isclose(total, 1.0, abs_tol=1e-6):
            raise ValueError(
                f"the fractions must sum to one, but train {self.train:g} + val {self.val:g} + test {self.test:g} "
                f"= {total:g}"
            )
        return self


class Ordering(Section):
    """In which order an epoch visits its examples."""

    type: Literal["shuffled", "sequential", "weighted", "buckets", "own"]
    replacement: bool = Field(True, description="weighted: whether an example that was drawn may be drawn again")
    count: int | None = Field(None, gt=0, description="weighted: examples in an epoch; as many as there are")
    weights: str | None = Field(
        None, description="weighted: a file of numpy's (.npy), in place of the task's weights()"
    )
    window: int | None = Field(None, gt=0, description="buckets: batches that are sorted by length together; 100")
    lengths: str | None = Field(None, description="buckets: a file of numpy's (.npy), in place of the task's lengths()")

    @model_validator(mode="after")
    def _of_the_type(self) -> Ordering:
        for type_, names in (("weighted", ("count", "weights")), ("buckets", ("window", "lengths"))):
            given = [name for name in names if getattr(self, name) is not None]
            if given and self.type != type_:
                raise ValueError(f"{given[0]} is for type: {type_}, but the type is {self.type}")
        if not self.replacement and self.type != "weighted":
            raise ValueError(f"replacement is for type: weighted, but the type is {self.type}")
        return self


class Data(Section):
    workers: int = Field(0, ge=0)
    pin_memory: bool | None = Field(None, description="page-locked host memory; where not given, with CUDA")
    prefetch: int | None = Field(None, gt=0, le=10_000, description="batches that every worker fetches ahead")
    drop_last: bool = False
    shuffle: bool = Field(True, description="false is short for order: sequential")
    shuffle_buffer: int | None = Field(
        None, gt=1, description="for streams: shuffle the examples of each shard in blocks of so many"
    )
    order: Annotated[Ordering, as_mapping(Ordering)] | None = Field(
        None, description="where not given: the task's own, if it has one, else shuffled"
    )
    split: Split | None = None

    @model_validator(mode="before")
    @classmethod
    def _order_and_shuffle(cls, given: Any) -> Any:
        """Both are kept so that they say the same, also in the config that a run writes down."""
        if not isinstance(given, dict) or given.get("order") is None:
            return given
        order, shuffle = given["order"], given.get("shuffle")
        asked = order.get("type") if isinstance(order, dict) else getattr(order, "type", order)
        if asked == "sequential" and shuffle is None:
            return {**given, "shuffle": False}
        if isinstance(shuffle, bool) and shuffle == (asked == "sequential"):
            raise ValueError(
                f"shuffle: {str(shuffle).lower()} and order: {asked} contradict each other: leave shuffle out"
            )
        return given

    @model_validator(mode="after")
    def _prefetch_needs_workers(self) -> Data:
        if self.prefetch is not None and self.workers == 0:
            raise ValueError(f"prefetch: {self.prefetch} needs workers to do it; set data.workers to 1 or more")
        return self

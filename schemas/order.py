"""The blocks of each step: a pure function of seed, epoch and step.

It does not depend on the number of replicas. A batch never spans two segments, so that existing
steps do not change when a segment is appended; the last batch of a segment may be short.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from schemas.config.job import OrderConfig
from schemas.hashing import splitmix64


@dataclass(frozen=True, slots=True)
class Step:
    """The blocks of one global batch.

    Attributes:
        train_step: position in the run, from 0.
        epoch: pass over the training range, from 0.
        segment: index of the segment in the dataset.
        positions: (blocks,) int64, positions among the segment's training blocks, in batch order.
    """

    train_step: int
    epoch: int
    segment: int
    positions: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Order:
    """The global order of a run.

    Attributes:
        num_blocks: training blocks of each segment, in dataset order.
        blocks_per_batch: blocks of a full batch.
        epochs: passes over the training range.
        config: shuffle and seed.
    """

    num_blocks: tuple[int, ...]
    blocks_per_batch: int
    epochs: int
    config: OrderConfig
    _ends: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """For each segment one after its last step in an epoch, for bisection."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "_ends", tuple(accumulate(self.steps_per_segment)))

    @property
    def steps_per_segment(self) -> tuple[int, ...]:
        """Steps of each segment in one epoch."""
        return tuple(-(-n // self.blocks_per_batch) for n in self.num_blocks)

    @property
    def num_steps(self) -> int:
        """Steps of the whole run."""
        return self.epochs * self._steps_per_epoch

    @property
    def _steps_per_epoch(self) -> int:
        return self._ends[-1] if self._ends else 0

    def step(self, train_step: int) -> Step:
        """Return the blocks of a step.

        Raises:
            ValueError: the step is outside [0, num_steps).
        """
        if not 0 <= train_step < self.num_steps:
            raise ValueError(
                f"train_step must be in [0, {self.num_steps}), got train_step={train_step}; "
                "add epochs or segments"
            )
        epoch, rest = divmod(train_step, self._steps_per_epoch)
        segment = bisect_right(self._ends, rest)  # skips segments without steps
        order = block_order(self.config, epoch, segment, self.num_blocks[segment])
        first = self._ends[segment - 1] if segment else 0
        start = (rest - first) * self.blocks_per_batch
        return Step(train_step, epoch, segment, order[start : start + self.blocks_per_batch])


@lru_cache(maxsize=16)
def block_order(
    config: OrderConfig, epoch: int, segment: int, num_blocks: int
) -> NDArray[np.int64]:
    """Return the training blocks of one segment in the order of one epoch.

    Returns:
        (num_blocks,) int64, a permutation of 0 to num_blocks - 1.
    """
    order = np.arange(num_blocks, dtype=np.int64)
    if config.shuffle == "blocks":
        seed = splitmix64([config.seed])
        key = splitmix64(splitmix64(seed + np.uint64(epoch)) + np.uint64(segment))
        order = np.argsort(splitmix64(order.view(np.uint64) ^ key), kind="stable")
    order.setflags(write=False)  # shared by all callers
    return order

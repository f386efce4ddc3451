"""The blocks of each step: a pure function of seed, epoch and step.

It does not depend on the number of replicas. A batch never spans two segments, so that existing
steps do not change when a segment is appended; the last batch of a segment may be short.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field, replace
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
        shuffle_keys: shuffle key of each segment, unsigned 64 bits, on which the order of its
            blocks depends instead of its index, so that it is the same in every selection of
            segments; their indexes if empty.
    """

    num_blocks: tuple[int, ...]
    blocks_per_batch: int
    epochs: int
    config: OrderConfig
    shuffle_keys: tuple[int, ...] = ()
    _ends: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """For each segment one after its last step in an epoch, for bisection."""

    def __post_init__(self) -> None:
        keys = self.shuffle_keys or tuple(range(len(self.num_blocks)))
        if len(keys) != len(self.num_blocks):
            raise ValueError(
                f"each segment must have a shuffle key, got {len(keys)} keys for "
                f"{len(self.num_blocks)} segments"
            )
        object.__setattr__(self, "shuffle_keys", keys)
        object.__setattr__(self, "_ends", tuple(accumulate(self.steps_per_segment)))

    @property
    def steps_per_segment(self) -> tuple[int, ...]:
        """Steps of each segment in one epoch."""
        return tuple(-(-n // self.blocks_per_batch) for n in self.num_blocks)

    @property
    def num_steps(self) -> int:
        """Steps of the whole run."""
        return self.epochs * self.steps_per_epoch

    @property
    def steps_per_epoch(self) -> int:
        """Steps of one epoch over all segments."""
        return self._ends[-1] if self._ends else 0

    @property
    def distinct_epochs(self) -> int:
        """Epochs that differ in the order of blocks: 1 unless blocks are shuffled."""
        return 1 if self.config.shuffle == "none" else self.epochs

    def of_segment(self, segment: int) -> Order:
        """Return the order of one segment alone, over the distinct epochs only."""
        return replace(
            self,
            num_blocks=self.num_blocks[segment : segment + 1],
            epochs=self.distinct_epochs,
            shuffle_keys=self.shuffle_keys[segment : segment + 1],
        )

    def first_step(self, segment: int) -> int:
        """Return the first step of a segment, given by its index, in the first epoch."""
        return self._ends[segment - 1] if segment else 0

    def locate(self, train_step: int) -> tuple[int, int, int]:
        """Return the epoch of a step, the index of its segment, and its number in the segment.

        Raises:
            ValueError: the step is outside [0, num_steps).
        """
        if not 0 <= train_step < self.num_steps:
            raise ValueError(
                f"train_step must be in [0, {self.num_steps}), got train_step={train_step}; "
                "add epochs or segments"
            )
        epoch, rest = divmod(train_step, self.steps_per_epoch)
        segment = bisect_right(self._ends, rest)  # skips segments without steps
        return epoch, segment, rest - self.first_step(segment)

    def step(self, train_step: int) -> Step:
        """Return the blocks of a step; raise ValueError if it is outside [0, num_steps)."""
        epoch, segment, step_of_segment = self.locate(train_step)
        key, num_blocks = self.shuffle_keys[segment], self.num_blocks[segment]
        order = block_order(self.config, epoch, key, num_blocks)
        start = step_of_segment * self.blocks_per_batch
        return Step(train_step, epoch, segment, order[start : start + self.blocks_per_batch])


def blocks_of_rank(num_blocks: int, rank: int, world_size: int) -> slice:
    """Return the blocks of a batch that belong to a rank; sizes differ by one block at most.

    Example:
        >>> [blocks_of_rank(2, rank, 3) for rank in range(3)]
        [slice(0, 1, None), slice(1, 2, None), slice(2, 2, None)]
    """
    start, end = (-(-num_blocks * r // world_size) for r in (rank, rank + 1))
    return slice(start, end)


@lru_cache(maxsize=16)
def block_order(
    config: OrderConfig, epoch: int, shuffle_key: int, num_blocks: int
) -> NDArray[np.int64]:
    """Return the training blocks of one segment in the order of one epoch.

    Args:
        config: shuffle and seed.
        epoch: pass over the training range.
        shuffle_key: of the segment, unsigned 64 bits; without effect if blocks are not shuffled.
        num_blocks: training blocks of the segment.

    Returns:
        (num_blocks,) int64, a permutation of 0 to num_blocks - 1.
    """
    order = np.arange(num_blocks, dtype=np.int64)
    if config.shuffle == "blocks":
        seed = splitmix64([config.seed])
        key = splitmix64(splitmix64(seed + np.uint64(epoch)) + np.uint64(shuffle_key))
        order = np.argsort(splitmix64(order.view(np.uint64) ^ key), kind="stable")
    order.setflags(write=False)  # shared by all callers
    return order

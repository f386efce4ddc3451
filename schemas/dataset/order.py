"""The blocks of each step: a pure function of seed, epoch and step.

It does not depend on the number of replicas. A batch never spans two segments, so that existing
steps do not change when a segment is appended; the last batch of a segment may be short.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from heapq import heapreplace
from itertools import accumulate, pairwise
from math import gcd

import numpy as np
from numpy.typing import NDArray

from presage.schemas.config.job import OrderConfig
from presage.schemas.hashing import splitmix64


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
        row_groups: for each segment (num_blocks,) int32 as bytes: the row group of each block,
            numbered by first appearance; if empty, each segment has one.
        steps_per_segment: steps of each segment in one epoch.
    """

    num_blocks: tuple[int, ...]
    blocks_per_batch: int
    epochs: int
    config: OrderConfig
    shuffle_keys: tuple[int, ...] = ()
    row_groups: tuple[bytes, ...] = field(default=(), repr=False)
    steps_per_segment: tuple[int, ...] = field(init=False, repr=False, compare=False)
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
        if not self.row_groups:
            one_each = tuple(bytes(4 * count) for count in self.num_blocks)
            object.__setattr__(self, "row_groups", one_each)
        steps = tuple(-(-count // self.blocks_per_batch) for count in self.num_blocks)
        object.__setattr__(self, "steps_per_segment", steps)
        object.__setattr__(self, "_ends", tuple(accumulate(steps)))

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
            row_groups=self.row_groups[segment : segment + 1],
        )

    def blocks_of(self, epoch: int, segment: int) -> NDArray[np.int64]:
        """Return the positions of a segment's training blocks in the order of an epoch."""
        return block_order(
            self.config,
            epoch,
            self.shuffle_keys[segment],
            self.row_groups[segment],
            self.blocks_per_batch,
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
        start = step_of_segment * self.blocks_per_batch
        chosen = self.blocks_of(epoch, segment)[start : start + self.blocks_per_batch]
        return Step(train_step, epoch, segment, chosen)


EQUAL_WORK = 1.05
"""Equal numbers of blocks are preferred where the largest work is within this of the least."""


def split_by_work(work: Sequence[float], speeds: Sequence[float]) -> list[slice]:
    """Cut blocks into one run for each of some workers, so that the last to finish is the earliest.

    Args:
        work: of each block, positive.
        speeds: work per time of each worker, positive; runs are in this order.

    Example:
        >>> split_by_work([1, 1, 1, 3], [1, 1])
        [slice(0, 3, None), slice(3, 4, None)]
    """
    ends = [0.0, *accumulate(work)]

    def cuts(time: float) -> list[int]:
        bounds = [0]
        for speed in speeds:
            bounds.append(bisect_right(ends, ends[bounds[-1]] + time * speed) - 1)
        return bounds

    low, high = 0.0, ends[-1] / min(speeds) * (1 + 1e-9)
    for _ in range(48):
        middle = (low + high) / 2
        low, high = (low, middle) if cuts(middle)[-1] == len(work) else (middle, high)
    return [slice(start, end) for start, end in pairwise(cuts(high))]


def runs_of_ranks(work: Sequence[float], world_size: int) -> list[slice]:
    """Cut the blocks of a batch into runs with nearly equal work, one for each rank.

    They are those of `even_part` where these are within `EQUAL_WORK` of the best: then ranks
    keep to their lanes.
    """
    equal = [even_part(len(work), rank, world_size) for rank in range(world_size)]
    largest = max(sum(work[run]) for run in equal)
    if largest <= EQUAL_WORK * sum(work) / world_size:  # so within that of the best, too
        return equal
    best = split_by_work(work, [1.0] * world_size)
    least = max(sum(work[run]) for run in best)
    return equal if largest <= EQUAL_WORK * least else best


def even_part(count: int, part: int, num_parts: int) -> slice:
    """Return one of several parts of a sequence, whose sizes differ by one at most.

    Example:
        >>> [even_part(2, part, 3) for part in range(3)]
        [slice(0, 1, None), slice(1, 2, None), slice(2, 2, None)]
    """
    start, end = (-(-count * p // num_parts) for p in (part, part + 1))
    return slice(start, end)


NUM_LANES = 8
"""Most lanes of a batch, fixed in the format."""
SHUFFLED_ROW_GROUPS = 16
"""Row groups whose blocks are mixed at a time, fixed in the format; a reader of all lanes has them
in memory."""


@lru_cache(maxsize=16)
def block_order(
    config: OrderConfig,
    epoch: int,
    shuffle_key: int,
    row_groups: bytes,
    blocks_per_batch: int,
) -> NDArray[np.int64]:
    """Return the training blocks of one segment in the order of one epoch.

    The row groups of a segment are dealt to lanes, and a batch takes equally many blocks of each
    lane, in the order of the lanes. So a rank reads only the row groups of its own lanes, if the
    number of ranks divides that of lanes. The blocks that some lanes have in excess come last: they
    are cut into one run for each lane, and dealt like lanes.

    Args:
        config: shuffle and seed.
        epoch: pass over the training range.
        shuffle_key: of the segment, unsigned 64 bits; without effect if blocks are not shuffled.
        row_groups: of the segment, as in `Order`.
        blocks_per_batch: blocks of a full batch; the lanes are its greatest common divisor with 8,
            or one where there are fewer row groups.

    Returns:
        (num_blocks,) int64, a permutation of 0 to num_blocks - 1.
    """
    row_group = np.frombuffer(row_groups, np.int32)
    num_blocks, sizes = len(row_group), np.bincount(row_group)
    sequence, draws = np.arange(len(sizes)), None
    if config.shuffle == "blocks":
        seed = splitmix64([config.seed])
        key = splitmix64(splitmix64(seed + np.uint64(epoch)) + np.uint64(shuffle_key))
        draws = _draws(key, num_blocks)
        sequence = np.argsort(_draws(splitmix64(key), len(sizes)), kind="stable")
    num_lanes = gcd(blocks_per_batch, NUM_LANES)
    if num_lanes > len(sizes):
        num_lanes = 1
    lanes = _lanes(row_group, sizes, sequence, draws, num_lanes)
    per_lane = blocks_per_batch // num_lanes
    num_equal = num_blocks if num_lanes == 1 else min(map(len, lanes)) // per_lane * per_lane
    excess = np.concatenate([lane[num_equal:] for lane in lanes])
    lanes = [lane[:num_equal] for lane in lanes]
    if draws is not None:
        reach = (SHUFFLED_ROW_GROUPS / num_lanes - 1) / 2
        lanes = [_mix(lane, row_group[lane], draws[lane], reach) for lane in lanes]
    runs = _equal_runs(excess, blocks_per_batch, num_lanes)
    order = np.concatenate([_deal(lanes, per_lane), _deal(runs, per_lane)])
    order.setflags(write=False)  # shared by all callers
    return order


def _draws(key: NDArray[np.uint64], count: int) -> NDArray[np.float64]:
    """Return (count,) pseudorandom numbers in [0, 1)."""
    bits = splitmix64(np.arange(count, dtype=np.uint64) ^ key)
    return (bits >> np.uint64(11)).astype(np.float64) / (1 << 53)


def _lanes(
    row_group: NDArray[np.int32],
    sizes: NDArray[np.int64],
    sequence: NDArray[np.int64],
    draws: NDArray[np.float64] | None,
    num_lanes: int,
) -> list[NDArray[np.int64]]:
    """Give each row group of a sequence to the lane with the fewest blocks.

    Returns:
        The blocks of each lane in stored order, or, if there are draws, by the sequence of their
        row groups and by draw within one.
    """
    lengths = [(0, lane) for lane in range(num_lanes)]  # a heap
    lane_of = np.empty(len(sizes), np.int64)
    for each in sequence.tolist():
        length, lane = lengths[0]
        lane_of[each] = lane
        heapreplace(lengths, (length + int(sizes[each]), lane))
    keys = [lane_of[row_group]]
    if draws is not None:
        keys = [draws, np.argsort(sequence)[row_group], *keys]
    ends = np.cumsum(np.bincount(keys[-1], minlength=num_lanes))
    return np.split(np.lexsort(keys), ends[:-1])


def _mix(
    blocks: NDArray[np.int64],
    row_group: NDArray[np.int32],
    draws: NDArray[np.float64],
    reach: float,
) -> NDArray[np.int64]:
    """Spread the blocks of each row group over the row groups that are at most `reach` away.

    Source: py1e of MosaicML's Streaming.
    """
    place = np.cumsum(np.diff(row_group, prepend=row_group[:1]) != 0)
    low = np.maximum(place - reach, 0)
    high = np.minimum(place + 1 + reach, place[-1:] + 1)
    return blocks[np.argsort(low + draws * (high - low), kind="stable")]


def _equal_runs(
    blocks: NDArray[np.int64], blocks_per_batch: int, num_runs: int
) -> list[NDArray[np.int64]]:
    """Cut blocks into consecutive runs that fill batches together."""
    num_full, last = divmod(len(blocks), blocks_per_batch)
    lasts = [even_part(last, run, num_runs) for run in range(num_runs)]
    per_batch = blocks_per_batch // num_runs
    lengths = [num_full * per_batch + each.stop - each.start for each in lasts]
    return np.split(blocks, np.cumsum(lengths)[:-1])


def _deal(lanes: Sequence[NDArray[np.int64]], per_lane: int) -> NDArray[np.int64]:
    """Take `per_lane` blocks of each lane in turn until all are empty."""
    turn = np.concatenate([np.arange(len(lane)) // per_lane for lane in lanes])
    return np.concatenate(lanes)[np.argsort(turn, kind="stable")]

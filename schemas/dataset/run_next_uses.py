"""Next uses of the rows of a run, over all segments and epochs.

Those that cross segments or epochs are in a temporary file of 4 bytes per row and segment, for
shuffled blocks also per epoch, for others of 12 bytes while they are linked.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from itertools import count, islice
from tempfile import TemporaryFile
from threading import Lock
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from presage.schemas.arrays import jagged_of, offsets_of, stable_order
from presage.schemas.config.train import CacheConfig
from presage.schemas.dataset.accesses import (
    DECODED_CACHE_BYTES,
    READ_THREADS,
    ListsOfSegments,
    RowNumbering,
    TableAccesses,
    num_unique_rows,
)
from presage.schemas.dataset.checked_files import (
    CheckedFile,
    DecodedListCache,
    ListFiles,
    rows_before,
)
from presage.schemas.dataset.opened import Index, OpenDataset
from presage.schemas.dataset.order import Order
from presage.schemas.errors import SchemaError
from presage.schemas.kernels import oracle as kernels
from presage.schemas.layout import reuse_columns
from presage.schemas.oracle.cache_plan import reuse_distance
from presage.schemas.oracle.next_uses import NEVER, clip_to_horizon
from presage.schemas.oracle.reuse import (
    StepReuse,
    bounds_up_to,
    next_bound,
    peak_cache_rows,
    sum_reuse,
)

HEAP_BYTES = 64 << 20
"""Next uses beyond the segment that are kept in memory; more are in a temporary file."""


class NextUses:
    """Next uses of a table's rows over a whole run, step by step. Not thread-safe.

    The parts of the index have the next uses within a segment and an epoch. The next use of a row
    after its last one there follows from the first uses in all later segments and epochs, in one
    pass from the last to the first. If blocks are not shuffled, one pass serves all epochs: each is
    the one before, shifted by its steps.

    The last uses of a segment and epoch are in the order of step and number: the i-th distance
    `NEVER` of its lists belongs to the i-th row in this order, so no access list is read.
    """

    def __init__(
        self,
        dataset: OpenDataset,
        index: Index,
        table: str,
        numbering: RowNumbering | None = None,
        cache: DecodedListCache | None = None,
    ) -> None:
        """Link segments and epochs; distances within them are read on demand."""
        self._order, self._parts, self._table = index.order, index.parts, table
        self._dataset, self._numbering = dataset, numbering
        self._lists = ListsOfSegments(lambda segment: index.parts[segment].steps(table, cache))
        # by segment and distinct epoch: the step of the next use after the last one, in the order
        # of last uses, and the first entry of each step
        self._later: dict[tuple[int, int], tuple[NDArray[np.int32], NDArray[np.int64]]] = {}
        if len(index.parts) > 1 or index.order.epochs > 1:
            self._link(self.numbering)

    @property
    def numbering(self) -> RowNumbering:
        """Numbers of the table's rows, read when they are first needed."""
        if self._numbering is None:
            self._numbering = RowNumbering(self._dataset, self._table)
        return self._numbering

    @property
    def num_rows(self) -> int:
        """Distinct rows of the table over all segments."""
        if self._numbering is None:
            return num_unique_rows(self._dataset, self._table)
        return len(self._numbering.rows)

    def __len__(self) -> int:
        return self._order.num_steps

    def __getitem__(self, train_step: int) -> NDArray[np.int32]:
        """Return the distances of a step's entries, in ascending order of the segment's numbers."""
        epoch, segment, step = self._order.locate(train_step)
        lists = self._lists.of(segment)
        if not len(lists):
            return np.empty(0, np.int32)
        stored = min(epoch, self._order.distinct_epochs - 1)
        distances = lists[stored * self._order.steps_per_segment[segment] + step]
        if not self._later:
            return distances
        distances = distances.copy()
        distances[distances == NEVER] = self._distances_beyond(train_step, epoch, segment, step)
        return distances

    def __iter__(self) -> Iterator[NDArray[np.int32]]:
        """Yield the distances of each step."""
        return map(self.__getitem__, range(len(self)))

    def within(self, steps: range) -> Iterator[NDArray[np.int32]]:
        """Yield the distances of steps, `NEVER` for uses beyond the last of them."""
        return (clip_to_horizon(self[step], step, steps.stop) for step in steps)

    def reuse(self, distance: int, end_step: int | None = None) -> StepReuse:
        """Return the reuse within a distance, or within the bound of reuse that follows it.

        Uses from `end_step` on, that of a segment, are left out; None: none are.
        """
        end_step, distance = len(self) if end_step is None else end_step, next_bound(distance)
        bounds = bounds_up_to(distance)
        columns = self._reuse_columns(
            ["num_rows", *reuse_columns("next", bounds), *reuse_columns("previous", bounds)]
        )
        num_rows = next(columns)
        following, preceding = (sum(islice(columns, len(bounds))) for _ in range(2))
        uses, next_uses = self._links_beyond(distance, end_step)
        kept = np.ravel(following) + np.bincount(uses, minlength=len(self))
        returning = np.ravel(preceding) + np.bincount(next_uses, minlength=len(self))
        return StepReuse(
            num_rows.ravel()[:end_step].astype(np.int64), kept[:end_step], returning[:end_step]
        )

    def last_uses(self, every: int) -> NDArray[np.int64]:
        """Return how many rows of each step are not used again before a multiple of `every`.

        They are too many rather than too few: those whose next use is further than the last bound
        of reuse before the multiple are counted, unless it is in another segment or epoch.
        """
        bounds = bounds_up_to(every - 1)
        columns = self._reuse_columns(["num_rows", *reuse_columns("next", bounds)])
        last = next(columns).astype(np.int64)
        steps_after = every - 1 - np.arange(len(self)).reshape(last.shape) % every
        for bound, again in zip(bounds, columns, strict=True):
            np.subtract(last, again, out=last, where=steps_after >= bound)
        uses, next_uses = self._links_beyond(every - 1, len(self))
        again_beyond = uses[uses // every == next_uses // every]
        return last.ravel() - np.bincount(again_beyond, minlength=len(self))

    def _reuse_columns(self, names: Sequence[str]) -> Iterator[NDArray[np.int32]]:
        """Yield columns of reuse by step of the run, (epochs, steps_per_epoch)."""
        order, table = self._order, self._table
        shapes = [(order.distinct_epochs, length) for length in order.steps_per_segment]
        with ThreadPoolExecutor(READ_THREADS) as pool:
            parts = list(pool.map(lambda part: part.reuse(table, names), self._parts))
        for name in names:
            stored = [part.get(name, np.empty(0, np.int32)) for part in parts]
            columns = [
                column.reshape(shape) if len(column) else np.zeros(shape, np.int32)
                for column, shape in zip(stored, shapes, strict=True)
            ]
            column = np.concatenate(columns, axis=1)
            yield np.broadcast_to(column, (order.epochs, order.steps_per_epoch))

    def _links_beyond(
        self, distance: int, end_step: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the steps of uses, and of the next ones in another segment or epoch before a step.

        Only those at most `distance` later; for each row in turn.
        """
        order = self._order
        uses, next_uses = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for (segment, stored), (later, starts) in self._later.items():
            steps = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
            steps += stored * order.steps_per_epoch + order.first_step(segment)
            is_near = (later != NEVER) & (later - steps <= distance)
            is_repeated = stored == order.distinct_epochs - 1
            for epoch in range(stored, order.epochs if is_repeated else stored + 1):
                origin = (epoch - stored) * order.steps_per_epoch
                uses.append(steps[is_near] + origin)
                next_uses.append(later[is_near].astype(np.int64) + origin)
        is_before = np.concatenate(next_uses) < end_step
        return np.concatenate(uses)[is_before], np.concatenate(next_uses)[is_before]

    def _distances_beyond(
        self, train_step: int, epoch: int, segment: int, step: int
    ) -> NDArray[np.int32]:
        """Return the distances of the rows whose last use in segment and epoch is in a step."""
        stored = min(epoch, self._order.distinct_epochs - 1)
        origin = (epoch - stored) * self._order.steps_per_epoch  # from which `later` counts
        later, starts = self._later[segment, stored]
        later = later[starts[step] : starts[step + 1]]
        is_used = (later != NEVER) & (later < len(self) - origin)
        return np.where(is_used, later - np.int32(train_step - origin), np.int32(NEVER))

    def _link(self, numbering: RowNumbering) -> None:
        """Go through the segments and distinct epochs from the last to the first."""
        order = self._order
        used = [s for s, uses in enumerate(numbering.is_used) if uses]
        free = allocate(sum(numbering.counts) * order.distinct_epochs)
        next_step = np.full(len(numbering.rows), NEVER, np.int32)  # of each row
        kept: dict[int, tuple[NDArray[np.int32], NDArray[np.int32]]] = {}
        if order.distinct_epochs < order.epochs:  # first uses in the epoch that follows
            kept = self._keep_uses(used, numbering.counts)
            for segment in reversed(used):
                first, _ = kept[segment]
                start = order.steps_per_epoch + order.first_step(segment)
                next_step[numbering.of_segment(segment)] = first + start
        for epoch in reversed(range(order.distinct_epochs)):
            for segment in reversed(used):
                first, last = kept.get(segment) or self._parts[segment].uses(self._table, epoch)
                numbers = numbering.of_segment(segment)
                later, free = np.split(free, [len(first)])
                later[:] = next_step[numbers][stable_order(last)]
                counts = np.bincount(last, minlength=order.steps_per_segment[segment])
                self._later[segment, epoch] = later, offsets_of(counts)
                start = epoch * order.steps_per_epoch + order.first_step(segment)
                next_step[numbers] = first + start

    def _keep_uses(
        self, used: Sequence[int], counts: Sequence[int]
    ) -> dict[int, tuple[NDArray[np.int32], NDArray[np.int32]]]:
        free, kept = allocate(2 * sum(counts)), {}
        for segment in used:
            first, last, free = np.split(free, [counts[segment], 2 * counts[segment]])
            kept[segment] = first, last

        def read(segment: int) -> None:
            kept[segment][0][:], kept[segment][1][:] = self._parts[segment].uses(self._table, 0)

        with ThreadPoolExecutor(READ_THREADS) as pool:
            list(pool.map(read, used))
        return kept


def most_cached_rows(
    tables: Iterable[NextUses], cache: CacheConfig, first_step: int = 0, end_step: int | None = None
) -> int:
    """Return the most rows of some tables that a cache needs or keeps, from counts of reuse.

    They are those of `required_rows`, or more: a lookahead that is no bound of the counts is that
    of the next one, see `NextUses.reuse`.
    """
    reuse = [next_uses.reuse(reuse_distance(cache), end_step) for next_uses in tables]
    return peak_cache_rows(sum_reuse(reuse), cache.prefetch_steps, first_step)


class SharedNextUses:
    """Next uses of the tables of a run, linked once for all that hold them at a time."""

    def __init__(self, dataset: OpenDataset, order: Order) -> None:
        self._dataset, self._order = dataset, order
        self._tables = WeakValueDictionary[str, NextUses]()

    @cached_property
    def index(self) -> Index:
        """The index of the order; SchemaError if it is not built."""
        return self._dataset.index_for(self._order)

    @property
    def is_indexed(self) -> bool:
        """Whether the index is built."""
        try:
            return bool(self.index)
        except SchemaError:
            return False

    def of(self, table: str) -> NextUses:
        """Return the next uses of a table."""
        next_uses = self._tables.get(table)
        if next_uses is None:
            next_uses = self._tables[table] = NextUses(self._dataset, self.index, table)
        return next_uses


def next_steps(
    dataset: OpenDataset,
    index: Index,
    table: str,
    numbering: RowNumbering,
    first_step: int,
    end_step: int,
) -> NDArray[np.int64]:
    """Return for each number the first step in [first_step, end_step) that uses it, -1 for none.

    First and last uses suffice except for rows that the segment of `first_step` uses both before
    and after that step: its access lists are read until all of these have occurred.
    """
    order, num_segments = index.order, len(index.parts)
    steps = np.full(len(numbering.rows), end_step)
    if first_step >= end_step:
        return np.full(len(steps), -1)
    epoch, segment, step_of_segment = order.locate(first_step)
    for distance in reversed(range(num_segments + 1)):
        epochs, other = divmod(segment + distance, num_segments)
        start = (epoch + epochs) * order.steps_per_epoch + order.first_step(other)
        if start >= end_step or not numbering.is_used[other]:
            continue
        numbers = numbering.of_segment(other)
        stored = min(epoch + epochs, order.distinct_epochs - 1)
        first, last = index.parts[other].uses(table, stored)
        if not distance:
            is_between = (first < step_of_segment) & (step_of_segment <= last)
            blocks = order.blocks_of(epoch, segment)
            step_of_block = np.empty(len(blocks), np.int32)
            step_of_block[blocks] = np.arange(len(blocks)) // order.blocks_per_batch
            first[is_between] = _next_steps_within(
                dataset.segments[segment].access_files(table),
                index.parts[segment].steps(table),
                stored * order.steps_per_segment[segment],
                step_of_block,
                is_between,
                step_of_segment,
            )
            numbers = np.arange(len(steps))[numbers][last >= step_of_segment]
            first = first[last >= step_of_segment]
        steps[numbers] = start + first
    return np.where(steps < end_step, steps, -1)


def _next_steps_within(
    files: Sequence[CheckedFile],
    distances: ListFiles,
    first_list: int,
    step_of_block: NDArray[np.int32],
    is_between: NDArray[np.bool_],
    step: int,
) -> NDArray[np.int64]:
    """Return the first use from a step on of rows that a segment uses before it and afterwards.

    Either from the access lists that follow, or from those before and their distances, about twice
    as much to read for each step.

    Args:
        files: access lists of the segment.
        distances: of its steps.
        first_list: that of its first step.
        step_of_block: of the segment.
        is_between: for each number whether to return its use.
        step: of the segment.
    """
    num_steps = np.int32(step_of_block.max(initial=-1) + 1)
    first_uses = np.where(is_between, num_steps, np.int32(-1))
    if 3 * step > num_steps:
        _keep_first_steps(
            files, np.where(step_of_block < step, num_steps, step_of_block), first_uses
        )
        return first_uses[is_between].astype(np.int64)
    steps_ago = np.int32(step - 1) - step_of_block
    _keep_first_steps(files, np.where(steps_ago < 0, num_steps, steps_ago), first_uses)
    later, first = [np.empty(0, np.int64)], 0  # in the order of last uses, then of numbers
    for lists in distances.between(first_list, first_list + step):
        again = np.repeat(np.arange(first, first + lists.num_rows), lists.lengths) + lists.values
        later.append(again[again >= step])
        first += lists.num_rows
    result = np.empty(np.count_nonzero(is_between), np.int64)
    result[stable_order(np.int32(step - 1) - first_uses[is_between])] = np.concatenate(later)
    return result


def _keep_first_steps(
    files: Sequence[CheckedFile], step_of_block: NDArray[np.int32], steps: NDArray[np.int32]
) -> None:
    """Lower `steps`, by number, to the least step of a block that uses it.

    Row groups without a step below the largest of `steps` are not read; those of early steps are
    read first.
    """
    of_files = np.split(step_of_block, rows_before(files)[1:-1])
    lock = Lock()

    def read(file: CheckedFile, of_file: NDArray[np.int32]) -> None:
        of_row_groups = np.split(of_file, np.cumsum(file.rows_per_row_group)[:-1])
        by_step = sorted(enumerate(of_row_groups), key=lambda pair: int(pair[1].min()))
        if of_file.max(initial=-1) < steps.max(initial=-1):
            file.prefetch()
        for row_group, of_lists in by_step:
            if of_lists.min() >= steps.max(initial=-1):
                break
            gaps = jagged_of(file.read_row_group(row_group, ["gaps"])["gaps"])
            with lock:
                kernels.lower_steps(gaps.values, gaps.offsets, of_lists, steps)
        file.close()

    firsts = [int(of_file.min(initial=np.iinfo(np.int32).max)) for of_file in of_files]
    by_first = np.argsort(firsts, kind="stable").tolist()
    with ThreadPoolExecutor(READ_THREADS) as pool:
        list(pool.map(lambda number: read(files[number], of_files[number]), by_first))


def allocate(count: int) -> NDArray[np.int32]:
    """Return an array in memory, or in a temporary file if it is larger than `HEAP_BYTES`."""
    if 4 * count <= HEAP_BYTES:
        return np.empty(count, np.int32)
    with TemporaryFile() as file:  # the mapping keeps it after it is closed
        return np.memmap(file, np.int32, "w+", shape=(count,))


def open_table(dataset: OpenDataset, index: Index, table: str) -> tuple[TableAccesses, NextUses]:
    """Return the accesses of a table and their next uses; repeated passes share a cache."""
    cache = DecodedListCache(DECODED_CACHE_BYTES)
    accesses = TableAccesses(dataset, table, index.order, cache)
    return accesses, NextUses(dataset, index, table, accesses.numbering, cache)


def indexed_steps(
    dataset: OpenDataset, index: Index, table: str
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int32]]]:
    """Yield each step's ascending numbers and next-use distances."""
    accesses, next_uses = open_table(dataset, index, table)
    return map(accesses.entries, count(), next_uses)

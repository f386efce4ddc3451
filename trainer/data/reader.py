"""Read the batches of a dataset in training order, from decoded row groups.

A row group is decoded once an epoch and kept until its last block is read; blocks of a batch that
are neighbours in a row group are collated as one range.
"""

from __future__ import annotations

import errno
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from presage.schemas.arrays import offsets_of
from presage.schemas.dataset.checked_files import OPEN_FILES, CheckedFile, OpenFiles
from presage.schemas.dataset.defaults import missing_column_defaults, read_with_defaults
from presage.schemas.dataset.group_files import read_group
from presage.schemas.dataset.history_files import HistoryReader
from presage.schemas.dataset.history_windows import HistoryRows, HistorySpec, read_history
from presage.schemas.dataset.opened import OpenDataset, Segment
from presage.schemas.dataset.order import Order, Step, even_part, runs_of_ranks
from presage.schemas.layout import DATA_DIRECTORIES, EVALUATION, TRAIN, part_path
from presage.trainer.data.collate import (
    CollatedBatch,
    Microbatches,
    PartOfBlock,
    Range,
    RowGroupBlocks,
    collate,
    make_microbatches,
)
from presage.trainer.data.decode import (
    SAMPLES,
    BatchSpec,
    BlockCounts,
    RowGroup,
    decode,
    padding_row_group,
)
from presage.trainer.data.shared_row_groups import SharedRowGroups, open_shared_row_groups

CACHE_BYTES = 512 << 20
"""Decoded row groups that training keeps, besides those with blocks that are still to be read."""
STEPS_BEHIND = 16
"""Steps that a process may be behind another one that reads the same row groups."""
AHEAD_STEPS, AHEAD_ROW_GROUPS = 16, 8
"""Row groups at a store are fetched so many steps before they are read, at most so many at once."""

_RowGroupKey = tuple[int, int]
"""Segment, and index of the row group in `_BlockIndex`."""
T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Microbatch:
    """Samples of a step: all of some of its blocks, or some of one from `first_sample` on."""

    blocks: slice
    num_samples: int
    first_sample: int = 0


class _BlockIndex:
    """Row group, and index in it, of each block of a segment."""

    def __init__(self, segment: Segment, groups: Sequence[str], *, expanded: bool) -> None:
        self.segment = segment
        self._blocks = segment.block_ids
        self.num_samples = segment.column("num_samples")
        self.weight = segment.blocks["weight"].to_numpy()
        self.num_deleted = segment.num_deleted_per_block
        self._uniques = {group: segment.num_unique(group) for group in groups}
        lookups = segment.column("num_lookups" if expanded else "num_lookups_dedup")
        self.work = self.num_samples + lookups  # and unique tuples, of each block
        if not expanded:
            self.work += sum(self._uniques.values())
        keys = segment.column("file") << 32 | segment.column("row_group")
        self._keys, self.row_group, counts = np.unique(
            keys, return_inverse=True, return_counts=True
        )
        self._sorted = np.lexsort((self._blocks, self.row_group))
        self._offsets = offsets_of(counts)
        self.index_in_row_group = np.empty(len(keys), np.int64)
        first = np.repeat(self._offsets[:-1], counts)
        self.index_in_row_group[self._sorted] = np.arange(len(keys)) - first

    def place(self, row_group: int) -> tuple[int, int]:
        """Return the file of a row group, and its index in the file."""
        file, index = divmod(int(self._keys[row_group]), 1 << 32)
        return file, index

    def counts(self, row_group: int) -> BlockCounts:
        """Return the blocks of a row group, in file order."""
        positions = self._sorted[self._offsets[row_group] : self._offsets[row_group + 1]]
        return BlockCounts(
            blocks=self._blocks[positions],
            samples=self.num_samples[positions],
            uniques={group: counts[positions] for group, counts in self._uniques.items()},
        )

    def last_steps(self, order: NDArray[np.int64], blocks_per_batch: int) -> NDArray[np.int64]:
        """Return the last step of the segment that reads each row group, -1 if none does.

        `order` are the positions of the blocks of an epoch in training order.
        """
        last = np.full(len(self._keys), -1)
        np.maximum.at(last, self.row_group[order], np.arange(len(order)) // blocks_per_batch)
        return last


class Reader:
    """Reads the batch of any step; the result depends on the step alone. Not thread-safe."""

    def __init__(
        self,
        dataset: OpenDataset,
        order: Order,
        spec: BatchSpec,
        *,
        split: str = TRAIN,
        expanded: bool = False,
        find_shared: bool = False,
        lookups: bool = True,
        equal_batches: bool = False,
        num_sharing: int = 1,
        microbatch_samples: int | None = None,
    ) -> None:
        """Index the blocks of all segments; no data file is opened.

        Args:
            dataset: open dataset.
            order: global order over the split.
            spec: columns of a batch.
            split: which blocks `order` orders.
            expanded: undo the deduplication, for comparison.
            find_shared: set `CollatedBatch.shared`, for models that compute shared features once.
            lookups: set `CollatedBatch.lookups` and `CollatedBatch.groups`.
            equal_batches: give ranks equally many blocks, not blocks with equal work.
            num_sharing: processes that read the same steps. Those of one machine share decoded row
                groups.
            microbatch_samples: of a microbatch; None: each block is one.
        """
        self._block_samples = dataset.job.data.block_samples
        self._microbatch_samples = microbatch_samples or self._block_samples
        self._cache_bytes = CACHE_BYTES // num_sharing
        self._shared: SharedRowGroups | None = None
        if num_sharing > 1:
            self._shared = open_shared_row_groups(_identity(dataset, spec))
        self._equal_batches = equal_batches
        self._lookups = lookups
        self._spec = spec
        self.order = order
        self._expanded = expanded
        self._find_shared = find_shared
        self._segments = [_BlockIndex(s, spec.groups, expanded=expanded) for s in dataset.segments]
        self._split_positions = [s.positions(split) for s in dataset.segments]
        self._absent = [missing_column_defaults(dataset, s) for s in dataset.segments]
        self._histories = {
            h.name: HistoryReader(dataset.every_segment, h.name, h.columns, h.most_events)
            for h in spec.histories
        }
        self._files = OpenFiles(OPEN_FILES)
        self._decoded: OrderedDict[_RowGroupKey, RowGroup] = OrderedDict()
        self._num_bytes = 0
        # Epoch, segment and step in the segment that is read; None: the evaluation split is.
        self._current: tuple[int, int, int] | None = None
        self._last_steps = (-1, -1), np.empty(0, np.int64)  # of an epoch and a segment
        self._is_remote = any(s.directory.local is None for s in dataset.segments)

    def read(self, train_step: int) -> CollatedBatch:
        """Return the batch of a step.

        Raises:
            SchemaError: a file is missing, its checksum differs, or its content does not fit.
        """
        return self.read_rank(train_step, 0, 1)

    def read_rank(
        self, train_step: int, rank: int, world_size: int, num_padding: int = 0
    ) -> CollatedBatch:
        """Return the samples of a step that belong to a rank, none if it has no block.

        Args:
            train_step: position in the run.
            rank: of the process, from 0.
            world_size: number of ranks.
            num_padding: samples of weight 0 to append.

        Raises:
            SchemaError: a file is missing, its checksum differs, or its content does not fit.
        """
        step = self._begin_step(train_step)
        chosen = self._positions(step)[self._blocks_of_ranks(step, world_size)[rank]]
        batch = self._assemble(step, chosen, num_padding)
        self._fetch_ahead(train_step + 1)
        return batch

    def samples_per_rank(self, train_step: int, world_size: int) -> list[int]:
        """Return the number of samples of each rank in a step."""
        step = self.order.step(train_step)
        counts = self._segments[step.segment].num_samples[self._positions(step)]
        return [int(counts[run].sum()) for run in self._blocks_of_ranks(step, world_size)]

    def total_weight(self, train_step: int) -> float:
        """Return the sum of the weights of all samples of a step, equal in every rank.

        Where samples have weights, blocks with deleted ones are decoded.
        """
        step = self._begin_step(train_step)
        positions, blocks = self._positions(step), self._segments[step.segment]
        weights, num_deleted = blocks.weight[positions], blocks.num_deleted[positions]
        if self._spec.weight is None:
            weights = weights - num_deleted
        else:
            changed = np.flatnonzero(num_deleted)
            stored = self._stored_blocks(step.segment, positions[changed])
            weights[changed] = [self._row_group(key).block_weights[i] for key, i in stored]
        return float(weights.sum())

    def read_microbatches(
        self,
        train_step: int,
        run: slice = slice(None),
        rows: Mapping[str, NDArray[np.int64]] | None = None,
    ) -> Microbatches:
        """Return microbatches of a step.

        Args:
            train_step: position in the run.
            run: microbatches of the step; may be empty only if `rows` is given.
            rows: by table, all rows of the step; None: the rows of the chosen blocks.

        Raises:
            SchemaError: a file is missing, its checksum differs, or its content does not fit.
        """
        step = self._begin_step(train_step)
        microbatches = self.microbatches(step)
        chosen = range(len(microbatches))[run]
        batches = [self._collate(step, self._ranges_of(step, microbatches[i])) for i in chosen]
        self._fetch_ahead(train_step + 1)
        work = sum(self.microbatch_work(step)[run])
        return make_microbatches(step, len(microbatches), chosen.start, batches, rows, work)

    def microbatches(self, step: Step) -> list[Microbatch]:
        """Return the samples of each microbatch of a training step."""
        counts, size = self.num_samples_of(step).tolist(), self._microbatch_samples
        if size >= self._block_samples:
            per_microbatch = size // self._block_samples
            starts = range(0, len(counts), per_microbatch)
            cuts = [slice(start, min(start + per_microbatch, len(counts))) for start in starts]
            return [Microbatch(blocks, sum(counts[blocks])) for blocks in cuts]
        return [
            Microbatch(slice(block, block + 1), min(size, count - first), first)
            for block, count in enumerate(counts)
            for first in range(0, count, size)
        ]

    def evaluation_batches(self) -> Iterator[CollatedBatch]:
        """Yield the samples of the evaluation split once, in stored order."""
        count, self._current = 0, None
        for index, segment in enumerate(self._segments):
            positions = segment.segment.positions(EVALUATION)
            for start in range(0, len(positions), self.order.blocks_per_batch):
                chosen = positions[start : start + self.order.blocks_per_batch]
                yield self._assemble(Step(count, 0, index, chosen), chosen)
                count += 1

    def close(self) -> None:
        """Drop decoded row groups, and leave shared memory."""
        self._decoded.clear()
        if self._shared is not None:
            self._shared.close()

    def blocks_of(self, step: Step) -> NDArray[np.int64]:
        """Return the ids of a training step's blocks, in batch order."""
        return self._segments[step.segment].segment.block_ids[self._positions(step)]

    def num_samples_of(self, step: Step) -> NDArray[np.int64]:
        """Return the number of samples of each of a training step's blocks, in batch order."""
        return self._segments[step.segment].num_samples[self._positions(step)]

    def _begin_step(self, train_step: int) -> Step:
        self._current = self.order.locate(train_step)
        return self.order.step(train_step)

    def microbatch_work(self, step: Step) -> list[float]:
        """Return the work of each microbatch of a training step."""
        work, counts = self.work(step), self.num_samples_of(step)
        return [
            float(work[m.blocks].sum() * m.num_samples / counts[m.blocks].sum())
            for m in self.microbatches(step)
        ]

    def work(self, step: Step) -> NDArray[np.int64]:
        """Return the work of each of a training step's blocks, in batch order."""
        return self._segments[step.segment].work[self._positions(step)]

    def _blocks_of_ranks(self, step: Step, world_size: int) -> list[slice]:
        if self._equal_batches:
            count = len(step.positions)
            return [even_part(count, rank, world_size) for rank in range(world_size)]
        return runs_of_ranks(self.work(step).tolist(), world_size)

    def _positions(self, step: Step) -> NDArray[np.int64]:
        """Return the positions of a step's blocks among all blocks of their segment."""
        return self._split_positions[step.segment][step.positions]

    def _stored_blocks(
        self, segment: int, positions: NDArray[np.int64]
    ) -> Iterator[tuple[_RowGroupKey, int]]:
        """Yield where each block is stored: its row group, and its index in it."""
        blocks = self._segments[segment]
        row_groups = blocks.row_group[positions].tolist()
        indices = blocks.index_in_row_group[positions].tolist()
        for row_group, index in zip(row_groups, indices, strict=True):
            yield (segment, row_group), index

    def _ranges_of(self, step: Step, microbatch: Microbatch) -> list[Range]:
        positions = self._positions(step)[microbatch.blocks]
        if self._microbatch_samples >= self._block_samples:
            return self._block_ranges(step, positions)
        ((key, block),) = self._stored_blocks(step.segment, positions)
        end = microbatch.first_sample + microbatch.num_samples
        return [PartOfBlock(self._row_group(key), block, microbatch.first_sample, end)]

    def _assemble(
        self, step: Step, positions: NDArray[np.int64], num_padding: int = 0
    ) -> CollatedBatch:
        ranges = self._block_ranges(step, positions)
        if num_padding or not ranges:
            ranges.append(RowGroupBlocks(padding_row_group(self._spec, num_padding), 0, 1))
        return self._collate(step, ranges)

    def _block_ranges(self, step: Step, positions: NDArray[np.int64]) -> list[Range]:
        """Return blocks; those that are neighbours in a row group are one range."""
        ranges: list[RowGroupBlocks] = []
        for key, index in self._stored_blocks(step.segment, positions):
            row_group = self._row_group(key)
            if ranges and ranges[-1].row_group is row_group and ranges[-1].end == index:
                ranges[-1] = RowGroupBlocks(row_group, ranges[-1].start, index + 1)
            else:
                ranges.append(RowGroupBlocks(row_group, index, index + 1))
        return list(ranges)

    def _collate(self, step: Step, ranges: Sequence[Range]) -> CollatedBatch:
        return collate(
            self._spec,
            step,
            ranges,
            expanded=self._expanded,
            find_shared=self._find_shared,
            lookups=self._lookups,
        )

    def _row_group(self, key: _RowGroupKey) -> RowGroup:
        if key not in self._decoded:
            decoded = self._decode(key) if self._shared is None else self._share(key, self._shared)
            self._decoded[key] = decoded
            self._num_bytes += decoded.num_bytes
            self._evict()
        self._decoded.move_to_end(key)
        return self._decoded[key]

    def _share(self, key: _RowGroupKey, shared: SharedRowGroups) -> RowGroup:
        """Return a row group from shared memory, or decode it here if there is no room."""
        try:
            return shared.get(self._shared_name(key), lambda: self._decode(key))
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            return self._decode(key)

    def _shared_name(self, key: _RowGroupKey) -> str:
        return f"{self._segments[key[0]].segment.id}-{key[1]}"

    def _evict(self) -> None:
        """Remove row groups that are not read again in the epoch while all are too large.

        Evaluation keeps none: it reads each once.
        """
        cache_bytes = 0 if self._current is None else self._cache_bytes
        for key in list(self._decoded)[:-1]:
            if self._num_bytes <= cache_bytes:
                return
            if not self._is_live(key):
                self._num_bytes -= self._decoded.pop(key).num_bytes
                if self._shared is not None:
                    self._shared.discard(self._shared_name(key))

    def _is_live(self, key: _RowGroupKey) -> bool:
        """Return whether the current or a later step of the segment reads a row group.

        Other processes may be some steps behind.
        """
        segment, row_group = key
        if self._current is None or self._current[1] != segment:
            return False
        epoch, segment, step = self._current
        if self._last_steps[0] != (epoch, segment):
            blocks = self._split_positions[segment][self.order.blocks_of(epoch, segment)]
            last = self._segments[segment].last_steps(blocks, self.order.blocks_per_batch)
            self._last_steps = (epoch, segment), last
        behind = 0 if self._shared is None else STEPS_BEHIND
        return bool(self._last_steps[1][row_group] + behind >= step)

    def _decode(self, key: _RowGroupKey) -> RowGroup:
        segment, blocks = key[0], self._segments[key[0]]
        file, row_group = blocks.place(key[1])
        open_file = partial(self._file, segment)

        def read(owner: str, columns: list[str]) -> pa.Table:
            def read_present(present: list[str]) -> pa.Table:
                if owner == SAMPLES:
                    return open_file(part_path(file, "samples")).read_row_group(row_group, present)
                return read_group(open_file, owner, file, row_group, present, as_views=True)

            return read_with_defaults(read_present, columns, self._absent[segment])

        def join(
            history: HistorySpec, keys: pa.Array, times: pa.Array, counts: NDArray[np.int64]
        ) -> HistoryRows:
            reader = self._histories[history.name]
            segment_id = blocks.segment.id
            tables, dtype = self._spec.tables, self._spec.dtype
            return read_history(history, tables, dtype, reader, segment_id, keys, times, counts)

        decoded = decode(self._spec, blocks.counts(key[1]), read, join)
        return decoded.without(blocks.segment.deleted_rows(file, row_group))

    def _fetch_ahead(self, first_step: int) -> None:
        """Begin to fetch the next row groups that are not in memory, if files are at a store."""
        if not self._is_remote:
            return
        ahead: dict[_RowGroupKey, None] = {}
        for train_step in range(first_step, min(first_step + AHEAD_STEPS, self.order.num_steps)):
            step = self.order.step(train_step)
            for key, _ in self._stored_blocks(step.segment, self._positions(step)):
                if key not in self._decoded:
                    ahead[key] = None
            if len(ahead) >= AHEAD_ROW_GROUPS:
                break
        for segment, index in islice(ahead, AHEAD_ROW_GROUPS):
            file, row_group = self._segments[segment].place(index)
            for path in self._paths(segment, file):
                self._file(segment, path).prefetch(row_group)

    def _paths(self, segment: int, file: int) -> list[str]:
        """Return the files that the row groups of one part are decoded from."""
        owners = {"samples", *self._spec.groups, *self._spec.columns}
        paths = (path.split("/") for path in self._segments[segment].segment.files)
        return [
            "/".join(parts)
            for parts in paths
            if f"{parts[0]}/" in DATA_DIRECTORIES and parts[-1] == part_path(file)
            if parts[-2] in owners  # `samples`, a group, or the feature of buffers
        ]

    def _file(self, segment: int, path: str) -> CheckedFile:
        opened = self._segments[segment].segment
        make = partial(opened.file, path, texts_as_codes=True)
        return self._files.get((segment, path), make)


def _identity(dataset: OpenDataset, spec: BatchSpec) -> str:
    """Return a text that differs where decoded row groups do."""
    segments = [segment.reference.manifest_sha256 for segment in dataset.segments]
    deleted = dataset.manifest.tombstones_sha256
    return repr((str(dataset.directory), deleted, segments, dataset.column_types, spec))


def prefetch(
    function: Callable[[T], R], items: Iterable[T], depth: int
) -> Generator[R, None, None]:
    """Yield function(item) of each item in order, computed up to `depth` ahead in one thread.

    `function` should compute without torch, whose operators start helper threads that spin between
    its calls; torch.set_num_threads(1) would limit threads of the caller, too.
    """
    remaining = iter(items)
    with ThreadPoolExecutor(1, "reader") as pool:
        pending: list[Future[R]] = [pool.submit(function, i) for i in islice(remaining, depth)]
        try:
            while pending:
                result = pending.pop(0).result()
                pending.extend(pool.submit(function, i) for i in islice(remaining, 1))
                yield result
        finally:
            for future in pending:
                future.cancel()

"""A store for tables larger than memory with sequential I/O only, ordered by next use.

The cache plan gives the next use of each evicted row. Rows are appended to one file per bucket of
`BUCKET_STEPS` steps; a bucket is read whole when its first step comes, and deleted. A row that no
bucket holds for a step was never used before: it gets its initial values. Rows without a next use
go to a file that is only read for checkpoints.

Rows of far steps go to wider buckets. With `FAN_OUT` = 2, at step 0, the buckets are of the steps

    level 0  |0-3|4-7|8-11|12-15|
    level 1                     |16-23|24-31|
    level 2                                 |32-47|48-63| ...

The next bucket of a level is split into narrower ones while the one before it is trained, a part at
a time. So few buckets share the buffer, and writes are long whatever the number of steps.

A row can only be fetched at the step that it was written for. The files do not outlive the
process: a run resumes from its checkpoint.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from presage.schemas.arrays import find_sorted
from presage.schemas.dataset.accesses import RowNumbering
from presage.schemas.dataset.opened import OpenDataset
from presage.schemas.dataset.order import Order
from presage.schemas.dataset.run_next_uses import next_steps
from presage.schemas.errors import PlanError, SchemaError
from presage.schemas.oracle.cache_plan import NEVER_AGAIN
from presage.trainer.stores.bucket_files import (
    MERGE_CHUNK_BYTES,
    BucketFiles,
    Entries,
    SortedRuns,
    clear_directory,
    concatenate_entries,
)
from presage.trainer.stores.store import (
    Records,
    RowsAndRecords,
    TableLayout,
    WriteBack,
    empty_records,
    initial_records,
    merge_records,
)

BUCKET_STEPS = 4
"""Steps per file; the rows that they fetch are in memory at once."""
FAN_OUT = 256
"""Buckets that a wider one is split into."""
_LEVELS = 3
"""Widths of buckets; the widest have `FAN_OUT` ** 2 * `BUCKET_STEPS` steps."""
_LEVEL = 1 << 40
"""Key of the first bucket of a level, divided by the level."""
BUFFER_BYTES = 32 << 20
"""Maximum bytes that are buffered for long writes; the fullest bucket is written first."""
_FINAL_FILES = ("final-0.bin", "final-1.bin")
_RESIDENT = "resident.bin"
NextUses = Callable[[str, NDArray[np.int64]], NDArray[np.int64]]
"""(table, rows) to the step that uses each row next, or `NEVER_AGAIN`."""


def log_store(layouts: Mapping[str, TableLayout], directory: Path) -> FutureLog:
    """Return an empty log; files of an earlier run are deleted."""
    clear_directory(directory)
    directory.mkdir(parents=True, exist_ok=True)
    return FutureLog(layouts, directory)


class FutureLog:
    """Rows of all tables, each stored for one later step; not thread-safe."""

    def __init__(
        self,
        layouts: Mapping[str, TableLayout],
        directory: Path,
        *,
        bucket_steps: int = BUCKET_STEPS,
        fan_out: int = FAN_OUT,
        buffer_bytes: int = BUFFER_BYTES,
    ) -> None:
        """Start empty, in an empty folder; all tables have one shape."""
        first = next(iter(layouts.values()))
        self.layouts = layouts
        self._index = {table: index for index, table in enumerate(layouts)}
        self._layout = first
        self._files = BucketFiles(directory, first)
        self._bucket_steps, self._fan_out = bucket_steps, fan_out
        self._buffer_bytes = buffer_bytes
        self._buffers: dict[int, list[Entries]] = defaultdict(list)
        self._buffered: dict[int, int] = defaultdict(int)  # bytes, by bucket
        self._buffered_bytes = 0
        self._due: dict[int, list[Entries]] = defaultdict(list)  # by step, of buckets in memory
        self._fetched: dict[int, Entries] = {}  # by step, fetched but not trained yet
        self._read_until = 0  # earlier narrow buckets are in memory or consumed
        self._final = _FINAL_FILES[0]  # rows without a known next use
        self._run_files = BucketFiles(directory, first, chunk_bytes=MERGE_CHUNK_BYTES)
        self._runs: SortedRuns | None = None  # contents at the last checkpoint

    def fetch(self, train_step: int, rows: Mapping[str, NDArray[np.int64]]) -> dict[str, Records]:
        """Return the rows of a step: those stored for it, and initial values for the others.

        The arrays are read-only: the log shares them until the step is over.

        Args:
            train_step: ascending from call to call.
            rows: table to distinct rows.

        Raises:
            PlanError: a row that was stored for this step is not in `rows`.
        """
        self._read_buckets(train_step)
        due = concatenate_entries(self._due.pop(train_step, []), self._layout)
        due = due.take(np.lexsort((due.rows, due.tables)))
        self._fetched[train_step] = due
        results = {table: self._records(table, due, wanted) for table, wanted in rows.items()}
        num_stored = sum(count for _, count in results.values())
        if num_stored != len(due):
            raise PlanError(
                f"plan fetches {num_stored} of {len(due)} rows stored for step {train_step}; "
                "rebuild the dataset's index"
            )
        return {table: records for table, (records, _) in results.items()}

    def write(self, train_step: int, leaving: Mapping[str, WriteBack]) -> None:
        """Write rows that are evicted after a step, or copies of rows that stay cached.

        Args:
            train_step: the step.
            leaving: rows by table. Those without `next_use` are copies of cached rows for the next
                checkpoint; they replace those of the previous call.

        Raises:
            SchemaError: the disk is full.
        """
        for step in [step for step in self._fetched if step <= train_step]:
            del self._fetched[step]
        self._drop_runs()
        self._files.remove(_RESIDENT)
        copies = [{t: back} for t, back in leaving.items() if back.next_use is None]
        if copies:
            self._files.append(_RESIDENT, map(self._entries, copies))
        self._put(self._entries({t: b for t, b in leaving.items() if b.next_use is not None}))
        self._flush_buffers()

    def reschedule(self, next_uses: NextUses) -> None:
        """Move rows without a known next use to the buckets of steps that are known now.

        Args:
            next_uses: returns steps whose rows have not been fetched.

        Raises:
            SchemaError: the disk is full.
        """
        old, self._final = self._final, _FINAL_FILES[1 - _FINAL_FILES.index(self._final)]
        for entries in chain(self._files.read(old), self._take_buffer(NEVER_AGAIN)):
            self._put(replace(entries, next_use=self._next_uses(entries, next_uses)))
            self._flush_buffers()
        self._files.remove(old)

    def _next_uses(self, entries: Entries, next_uses: NextUses) -> NDArray[np.int64]:
        steps = np.full(len(entries), NEVER_AGAIN)
        for table, index in self._index.items():
            of_table = entries.tables == index
            steps[of_table] = next_uses(table, entries.rows[of_table])
        return steps

    def contents(self, table: str) -> Iterator[RowsAndRecords]:
        """Yield all rows of a table and their records; call after writing the cached rows.

        The first call reads the files once for all tables and sorts them on disk.
        """
        if self._runs is None:
            self._runs = SortedRuns(self._run_files, len(self.layouts))
            self._runs.add(self._all_entries())
        yield from self._runs.table(self._index[table])

    def notify_checkpoint(self, train_step: int) -> None:
        """Do nothing: the checkpoint has a copy of all rows."""

    def close(self) -> None:
        """Do nothing: no file is open between calls."""

    def _records(self, table: str, due: Entries, wanted: NDArray[np.int64]) -> tuple[Records, int]:
        index = self._index[table]
        start, end = np.searchsorted(due.tables, [index, index + 1])
        stored = due.rows[start:end]
        if np.array_equal(stored, wanted):
            return Records(due.block[start:end], self._layout.dim), len(wanted)
        hit, at = find_sorted(stored, wanted)
        hits = Records(due.block[start + at[hit]], self._layout.dim)
        records = merge_records(hit, hits, initial_records(self.layouts[table], wanted[~hit]))
        return records, len(hits)

    def _entries(self, leaving: Mapping[str, WriteBack]) -> Entries:
        counts = [len(back.rows) for back in leaving.values()]
        tables = np.array([self._index[table] for table in leaving], np.int32)
        rows = [back.rows for back in leaving.values()]
        next_use = [
            np.full(count, NEVER_AGAIN) if back.next_use is None else back.next_use
            for count, back in zip(counts, leaving.values(), strict=True)
        ]
        blocks = [back.records.block for back in leaving.values()]
        empty = [np.empty(0, np.int64)]
        return Entries(
            np.repeat(tables, counts),
            np.concatenate(empty + rows),
            np.concatenate(empty + next_use),
            np.concatenate([empty_records(self._layout, 0).block, *blocks]),
        )

    def _put(self, entries: Entries) -> None:
        for bucket, part in _group_by(self._buckets_of(entries.next_use), entries):
            if 0 <= bucket < self._read_until:
                self._add_due(part)
            else:
                self._buffers[bucket].append(part)
                self._buffered[bucket] += part.num_bytes
                self._buffered_bytes += part.num_bytes

    def _buckets_of(self, steps: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the bucket of each step, -1 for `NEVER_AGAIN`.

        That is the narrowest one whose wider bucket is the current one or the next one, or before.
        """
        narrow = steps // self._bucket_steps
        buckets = narrow
        for level in range(1, _LEVELS):
            width = self._fan_out**level
            is_far = narrow // width > self._read_until // width + 1
            buckets = np.where(is_far, level * _LEVEL + narrow // width, buckets)
        return buckets

    def _take_buffer(self, bucket: int) -> list[Entries]:
        self._buffered_bytes -= self._buffered.pop(bucket, 0)
        return self._buffers.pop(bucket, [])

    def _add_due(self, entries: Entries) -> None:
        for step, part in _group_by(entries.next_use, entries):
            self._due[step].append(part)

    def _read_buckets(self, train_step: int) -> None:
        while self._read_until <= train_step // self._bucket_steps:
            number = self._read_until
            for level in reversed(range(1, _LEVELS)):
                self._split_next(level, number)
            for entries in chain(self._files.read(_bucket_name(number)), self._take_buffer(number)):
                self._add_due(entries)
            self._files.remove(_bucket_name(number))
            self._read_until = number + 1

    def _split_next(self, level: int, number: int) -> None:
        """Move a part of the next bucket of a level into narrower ones before `number` is read.

        The parts are chosen so that it is empty when its first step comes.
        """
        width = self._fan_out**level
        current, position = divmod(number, width)
        bucket = level * _LEVEL + current + 1
        for entries in self._take_buffer(bucket):
            self._put(entries)
        name = _bucket_name(bucket)
        num_chunks = self._files.num_chunks(name)
        for _ in range(-(-num_chunks // (width - position))):
            self._put(self._files.take_first(name))
            self._flush_buffers()
        if num_chunks and not self._files.num_chunks(name):
            self._files.remove(name)

    def _flush_buffers(self) -> None:
        while self._buffered_bytes > self._buffer_bytes:
            bucket = max(self._buffered, key=self._buffered.__getitem__)
            name = self._final if bucket == NEVER_AGAIN else _bucket_name(bucket)
            self._files.append(name, self._buffers[bucket])
            self._take_buffer(bucket)

    def _all_entries(self) -> Iterator[Entries]:
        yield from self._fetched.values()
        for parts in chain(self._due.values(), self._buffers.values()):
            yield from parts
        for name in self._files.names():
            yield from self._files.read(name)

    def _drop_runs(self) -> None:
        if self._runs is not None:
            self._runs.remove()
            self._runs = None


def _group_by(keys: NDArray[np.integer], entries: Entries) -> Iterator[tuple[int, Entries]]:
    """Yield the entries of each key, keys ascending."""
    order = np.argsort(keys, kind="stable")
    distinct, starts = np.unique(keys[order], return_index=True)
    # not strict: np.split of no entries returns one empty part
    for key, chosen in zip(distinct.tolist(), np.split(order, starts[1:]), strict=False):
        yield key, entries.take(chosen)


def _bucket_name(bucket: int) -> str:
    level, number = divmod(bucket, _LEVEL)
    return f"bucket-{level}-{number:08d}.bin"


class NextUseLookup:
    """Finds the next use of rows in the index; one table in memory at a time."""

    def __init__(
        self,
        dataset: OpenDataset,
        order: Order,
        until: int | None = None,
        *,
        allow_unknown: bool = False,
    ) -> None:
        """Read nothing yet.

        Args:
            dataset: open dataset.
            order: global order of the run.
            until: end of the known steps; None: the whole run.
            allow_unknown: accept rows that the dataset never uses, such as those of a warm start.
        """
        self._dataset = dataset
        self._order = order
        self._until = order.num_steps if until is None else until
        self._allow_unknown = allow_unknown
        self._loaded = ("", -1)  # table and first step
        self._rows = np.empty(0, np.int64)
        self._steps = np.empty(0, np.int64)

    def __call__(self, table: str, first_step: int, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the first step from `first_step` on that uses each row, or `NEVER_AGAIN`.

        The first call for a table reads the access lists of one segment, and the first uses in the
        others. Memory is up to 40 bytes per row of the table while they are read, 16 afterwards.

        Raises:
            SchemaError: the dataset never uses a row.
        """
        if self._loaded != (table, first_step):
            self._load(table, first_step)
        if not len(rows) or not len(self._rows):
            return self._never_used(rows)
        at = np.minimum(np.searchsorted(self._rows, rows), len(self._rows) - 1)
        used = self._rows[at] == rows
        if not used.all():
            self._never_used(rows[~used])
        return np.where(used, self._steps[at], NEVER_AGAIN)

    def _never_used(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        if len(rows) and not self._allow_unknown:
            raise SchemaError(
                f"checkpoint has rows of {self._loaded[0]!r} that the dataset does not use; "
                "resume the run with the dataset that it was trained on"
            )
        return np.full(len(rows), NEVER_AGAIN, np.int64)

    def _load(self, table: str, first_step: int) -> None:
        numbering = RowNumbering(self._dataset, table)
        index = self._dataset.index_for(self._order)
        steps = next_steps(self._dataset, index, table, numbering, first_step, self._until)
        order = np.argsort(numbering.rows)
        self._rows, self._steps = numbering.rows[order], steps[order]
        self._loaded = (table, first_step)

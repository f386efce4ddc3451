"""A store for tables larger than memory, ordered by next use: all its I/O is sequential."""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from schemas.accesses import TableAccesses
from schemas.arrays import Array
from schemas.cache_plan import NEVER_AGAIN
from schemas.dataset import Dataset
from schemas.errors import PlanError, SchemaError
from schemas.order import Order
from trainer.rows import initial_rows
from trainer.stores.api import Records, StepStore, TableLayout, WriteBack
from trainer.stores.bucket_files import MERGE_CHUNK_BYTES as RUN_PIECE_BYTES
from trainer.stores.bucket_files import (
    BucketFiles,
    Entries,
    SortedRuns,
    Traffic,
    concatenate_entries,
)


class NextUseLookup:
    """Answers for one table after the other, from the access lists of the steps to come."""

    def __init__(
        self, dataset: Dataset, order: Order, until: int | None = None, *, others: bool = False
    ) -> None:
        """Keep the parts; lists are read when a table is asked for.

        Args:
            dataset: open dataset.
            order: global order of the run.
            until: one after the last step that is known; the whole run when None.
            others: whether rows may come that the dataset never uses, of a run that it began with.
        """
        self._dataset = dataset
        self._order = order
        self._until = order.num_steps if until is None else until
        self._others = others
        self._of = ("", -1)
        self._rows = np.empty(0, np.int64)
        self._steps = np.empty(0, np.int64)

    def __call__(self, table: str, first_step: int, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the first step from `first_step` on that uses each row, or `NEVER_AGAIN`.

        Linear in the accesses of these steps, once for a table; up to 40 bytes for each of its rows
        while they are read, 16 after that.

        Raises:
            SchemaError: the dataset never uses a row.
        """
        if self._of != (table, first_step):
            self._read(table, first_step)
        if not len(rows) or not len(self._rows):
            return self._unknown(rows)
        at = np.minimum(np.searchsorted(self._rows, rows), len(self._rows) - 1)
        known = self._rows[at] == rows
        if not known.all():
            self._unknown(rows[~known])
        return np.where(known, self._steps[at], NEVER_AGAIN)

    def _unknown(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return that rows are never used, where such may come."""
        if len(rows) and not self._others:
            raise SchemaError(
                f"rows of the checkpoint must be of the dataset, got others in {self._of[0]!r}; "
                "resume the run with the dataset that it was trained on"
            )
        return np.full(len(rows), NEVER_AGAIN, np.int64)

    def _read(self, table: str, first_step: int) -> None:
        accesses = TableAccesses(self._dataset, table, self._order)
        steps = np.full(len(accesses.rows), NEVER_AGAIN, np.int64)
        for step in range(self._until - 1, first_step - 1, -1):
            steps[accesses.numbers(step)] = step
        order = np.argsort(accesses.rows)
        self._rows, self._steps = accesses.rows[order], steps[order]
        self._of = (table, first_step)


# A store for tables larger than memory, ordered by the future: all its I/O is sequential.
#
# The plan knows when a row that leaves the cache is used next. Rows are appended to one file per
# bucket of such steps, and a bucket is read whole when its first step comes due; then its space
# is given back. A row that no file holds for a step was never used: its first values are made,
# not read. Rows that no step uses again go to a file that only checkpoints read.
#
# Rows can only be fetched at the step that they were written for. What is here is lost with the
# process, and a run goes on from its checkpoint.

BUCKET_STEPS = 4
"""Steps of one file: what they fetch is in memory at once."""
BUFFER_BYTES = 32 << 20
"""Most bytes that wait in memory for a long write; the fullest bucket is written first."""
_FINAL, _RESIDENT = "final-{}.bin", "resident.bin"
_FINALS = tuple(_FINAL.format(number) for number in range(2))
NextUses = Callable[[str, NDArray[np.int64]], NDArray[np.int64]]
"""(table, rows) to the step that uses each row next, or `NEVER_AGAIN`."""


class FutureLog:
    """Rows of all tables, each written down for one later step; one thread at a time calls."""

    def __init__(
        self,
        layouts: Mapping[str, TableLayout],
        directory: Path,
        *,
        bucket_steps: int = BUCKET_STEPS,
        buffer_bytes: int = BUFFER_BYTES,
    ) -> None:
        """Start empty.

        Args:
            layouts: tables by name, all of one shape.
            directory: an empty folder.
            bucket_steps: steps of one file.
            buffer_bytes: most bytes that wait for a long write.
        """
        first = next(iter(layouts.values()))
        self._layouts = layouts
        self._index = {table: index for index, table in enumerate(layouts)}
        self._dim, self._dtype = first.dim, first.dtype
        self._width = first.dim + first.state_width
        self._files = BucketFiles(directory, self._width, first.dtype)
        self._bucket_steps = bucket_steps
        self._buffer_bytes = buffer_bytes
        self._buffers: dict[int, list[Entries]] = defaultdict(list)
        self._buffered: dict[int, int] = defaultdict(int)
        self._due: dict[int, list[Entries]] = defaultdict(list)  # of the buckets in memory
        self._handed: dict[int, Entries] = {}  # fetched, and not yet used
        self._read_until = 0  # buckets before are in memory, or over
        self._num_buckets = 0  # that may have a file
        self._final = _FINAL.format(0)  # rows that no step is known to use
        self._run_files = BucketFiles(
            directory, self._width, first.dtype, chunk_bytes=RUN_PIECE_BYTES
        )
        self._runs: SortedRuns | None = None  # of what was there at the last checkpoint

    @property
    def traffic(self) -> Traffic:
        """What was read and written so far."""
        return self._files.traffic

    def fetch(self, train_step: int, rows: Mapping[str, NDArray[np.int64]]) -> dict[str, Records]:
        """Return the rows of a step: those written down for it, and first values for the others.

        The arrays are for reading alone: the log holds the same until the step is over.

        Args:
            train_step: the step, ascending from call to call.
            rows: table to distinct rows.

        Raises:
            PlanError: a row that was written down for this step is not asked for.
        """
        self._read_buckets(train_step)
        due = concatenate_entries(self._due.pop(train_step, []), self._width, self._dtype)
        due = due.take(np.lexsort((due.rows, due.tables)))
        self._handed[train_step] = due
        found = {table: self._records(table, due, wanted) for table, wanted in rows.items()}
        num_found = sum(count for _, count in found.values())
        if num_found != len(due):
            raise PlanError(
                f"plan must fetch the rows written down for step {train_step}, got {num_found} of "
                f"{len(due)}; rebuild the dataset's index"
            )
        return {table: records for table, (records, _) in found.items()}

    def write(self, train_step: int, leaving: Mapping[str, WriteBack]) -> None:
        """Take the rows that leave the cache after a step, or copies of those that stay.

        Args:
            train_step: the step.
            leaving: rows by table. Where the next use is not known they are copies of what stays
                cached, for the checkpoint that follows; they replace those of the last time.

        Raises:
            SchemaError: the disk is full.
        """
        for step in [step for step in self._handed if step <= train_step]:
            del self._handed[step]
        self._forget_runs()
        copies = {t: back for t, back in leaving.items() if back.next_use is None}
        self._files.remove(_RESIDENT)
        if copies:
            self._files.append(_RESIDENT, [self._entries(copies)])
        entries = self._entries({t: b for t, b in leaving.items() if b.next_use is not None})
        buckets = entries.next_use // self._bucket_steps  # NEVER_AGAIN is bucket -1
        for bucket, part in _by(buckets, entries):
            self._keep(bucket, part)
        self._write_long_ones()

    def reschedule(self, next_uses: NextUses) -> None:
        """Write the rows that no step was known to use down for those that are known now.

        One read of their file, and one write of all of them.

        Args:
            next_uses: of steps whose rows have not been fetched.

        Raises:
            SchemaError: the disk is full.
        """
        old, self._final = self._final, _FINAL.format(1 - _FINALS.index(self._final))
        self._buffered.pop(NEVER_AGAIN, None)
        waiting = self._buffers.pop(NEVER_AGAIN, [])
        for entries in chain(self._files.read(old), waiting):
            for bucket, part in self._rescheduled(entries, next_uses):
                self._keep(bucket, part)
            self._write_long_ones()
        self._files.remove(old)

    def _rescheduled(self, entries: Entries, next_uses: NextUses) -> Iterator[tuple[int, Entries]]:
        steps = np.full(len(entries), NEVER_AGAIN)
        for table, index in self._index.items():
            mine = entries.tables == index
            steps[mine] = next_uses(table, entries.rows[mine])
        return _by(steps // self._bucket_steps, replace(entries, next_use=steps))

    def contents(self, table: str) -> Iterator[tuple[NDArray[np.int64], Records]]:
        """Yield all rows of a table and their records, after `write` of what stays cached.

        The first call reads the files once for all tables, and sorts them beside.
        """
        if self._runs is None:
            self._runs = SortedRuns(self._run_files, len(self._layouts))
            self._runs.add(self._everything())
        for rows, block in self._runs.table(self._index[table]):
            yield rows, self._split(block)

    def notify_checkpoint(self, train_step: int) -> None:
        """Do nothing: a checkpoint has its own copy of all rows."""

    def close(self) -> None:
        """Do nothing: no file is open between calls."""

    def _records(self, table: str, due: Entries, wanted: NDArray[np.int64]) -> tuple[Records, int]:
        index, layout = self._index[table], self._layouts[table]
        start, end = np.searchsorted(due.tables, [index, index + 1])
        written = due.rows[start:end]
        if np.array_equal(written, wanted):
            return self._split(due.block[start:end]), len(wanted)
        at = np.searchsorted(written, wanted)
        hit = np.zeros(len(wanted), bool)
        inside = at < len(written)
        hit[inside] = written[at[inside]] == wanted[inside]
        records = Records(
            np.empty((len(wanted), self._dim), self._dtype),
            np.zeros((len(wanted), self._width - self._dim), self._dtype),
        )
        block = due.block[start + at[hit]]
        records.values[hit], records.state[hit] = block[:, : self._dim], block[:, self._dim :]
        records.values[~hit] = initial_rows(
            wanted[~hit], table=table, seed=layout.seed, dim=self._dim, dtype=self._dtype
        )
        return records, int(hit.sum())

    def _split(self, block: Array) -> Records:
        return Records(block[:, : self._dim], block[:, self._dim :])

    def _entries(self, leaving: Mapping[str, WriteBack]) -> Entries:
        counts = [len(back.rows) for back in leaving.values()]
        tables = np.array([self._index[table] for table in leaving], np.int32)
        rows = [back.rows for back in leaving.values()]
        next_use = [
            np.full(count, NEVER_AGAIN) if back.next_use is None else back.next_use
            for count, back in zip(counts, leaving.values(), strict=True)
        ]
        block = np.empty((sum(counts), self._width), self._dtype)
        end = 0
        for count, back in zip(counts, leaving.values(), strict=True):
            start, end = end, end + count
            block[start:end, : self._dim] = back.records.values
            block[start:end, self._dim :] = back.records.state
        none = [np.empty(0, np.int64)]
        return Entries(
            np.repeat(tables, counts),
            np.concatenate(none + rows),
            np.concatenate(none + next_use),
            block,
        )

    def _keep(self, bucket: int, entries: Entries) -> None:
        if 0 <= bucket < self._read_until:
            self._come_due(entries)
            return
        self._buffers[bucket].append(entries)
        self._buffered[bucket] += entries.num_bytes

    def _come_due(self, entries: Entries) -> None:
        for step, part in _by(entries.next_use, entries):
            self._due[step].append(part)

    def _read_buckets(self, train_step: int) -> None:
        bucket = train_step // self._bucket_steps
        for number in range(self._read_until, bucket + 1):
            for entries in self._files.read(_bucket_name(number)):
                self._come_due(entries)
            self._files.remove(_bucket_name(number))
            for entries in self._buffers.pop(number, []):
                self._come_due(entries)
            self._buffered.pop(number, None)
        self._read_until = max(self._read_until, bucket + 1)

    def _write_long_ones(self) -> None:
        while sum(self._buffered.values()) > self._buffer_bytes:
            bucket = max(self._buffered, key=lambda number: self._buffered[number])
            name = self._final if bucket == NEVER_AGAIN else _bucket_name(bucket)
            self._files.append(name, self._buffers[bucket])
            del self._buffers[bucket], self._buffered[bucket]
            self._num_buckets = max(self._num_buckets, bucket + 1)

    def _everything(self) -> Iterator[Entries]:
        yield from self._handed.values()
        for parts in self._due.values():
            yield from parts
        for parts in self._buffers.values():
            yield from parts
        names = [_bucket_name(number) for number in range(self._read_until, self._num_buckets)]
        for name in (self._final, _RESIDENT, *names):
            yield from self._files.read(name)

    def _forget_runs(self) -> None:
        if self._runs is not None:
            self._runs.remove()
            self._runs = None


def log_stores(layouts: Mapping[str, TableLayout], directory: Path) -> dict[str, StepStore]:
    """Return an empty log of all tables in a folder, replacing that of an earlier run."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    log = FutureLog(layouts, directory)
    return {table: StepStore(log, layout) for table, layout in layouts.items()}


def _by(keys: NDArray[np.integer], entries: Entries) -> Iterator[tuple[int, Entries]]:
    """Yield the entries of each key, keys ascending."""
    order = np.argsort(keys, kind="stable")
    found, starts = np.unique(keys[order], return_index=True)
    # not strict: no entries are split into one part of none
    for key, chosen in zip(found.tolist(), np.split(order, starts[1:]), strict=False):
        yield key, entries.take(chosen)


def _bucket_name(bucket: int) -> str:
    return f"bucket-{bucket:08d}.bin"

"""The interface of embedding stores, and a thread that calls a store in order."""

from __future__ import annotations

import mmap
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from presage.schemas.arrays import Array
from presage.schemas.errors import SchemaError
from presage.schemas.rows import initial_rows

_CHUNK_BYTES, _CHUNK_ROWS = 4 << 20, 1 << 14
"""Bytes and rows of one chunk of `Store.contents`, at most."""


class StoreUnavailableError(Exception):
    """A store process cannot be reached or did not answer in time."""

    def __init__(self, reason: str, address: str = "") -> None:
        super().__init__(reason)
        self.address = address


class SlotMapChangedError(Exception):
    """A store does not own the requested slots, or lost the caller's session."""


class BehindError(SchemaError):
    """The caller requests rows as of a step that other replicas have passed."""


class RowsLostError(SchemaError):
    """Acknowledged writes are lost from all stores; the run must return to a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableLayout:
    """Shape, type and initial values of the rows of one table."""

    table: str
    """Table name."""
    dim: int
    """Embedding dimension."""
    state_width: int
    """Optimizer state values per row."""
    dtype: str
    """float32 or float64."""
    seed: int
    """Seed of the initial values."""

    @property
    def width(self) -> int:
        """Numbers of a row with its state."""
        return self.dim + self.state_width

    @property
    def row_bytes(self) -> int:
        """Bytes of a row with its id and state."""
        return 8 + self.width * np.dtype(self.dtype).itemsize

    def initial_values(self, rows: NDArray[np.int64]) -> Array:
        """Return the values of ascending rows that were never written, (n, dim)."""
        return initial_rows(rows, table=self.table, seed=self.seed, dim=self.dim, dtype=self.dtype)


@dataclass(frozen=True, slots=True)
class Records:
    """Rows of one table, each with its optimizer state beside its values.

    Attributes:
        block: (n, dim + state_width).
        dim: width of the values.
    """

    block: Array
    dim: int

    @property
    def values(self) -> Array:
        """(n, dim), a view."""
        return self.block[:, : self.dim]

    @property
    def state(self) -> Array:
        """(n, state_width), a view."""
        return self.block[:, self.dim :]

    def __len__(self) -> int:
        return len(self.block)

    def take(self, chosen: slice | NDArray[Any]) -> Records:
        """Return some of the records: views of a slice, copies at positions or for a mask."""
        return Records(self.block[chosen], self.dim)

    def put(
        self, positions: NDArray[np.integer] | NDArray[np.bool_] | slice, records: Records
    ) -> None:
        """Overwrite the records at some positions."""
        self.block[positions] = records.block

    def grown(self, num_rows: int) -> Records:
        """Return at least `num_rows` records that begin with these; see the function `grown`."""
        if num_rows <= len(self):
            return self
        return Records(grown(self.block, num_rows), self.dim)


def chunks_of(num_rows: int, block: Array) -> Iterator[slice]:
    """Yield slices that cover rows in order, each of at most 4 MiB of `block` and 16,384 rows."""
    size = max(1, min(_CHUNK_ROWS, _CHUNK_BYTES // max(1, block.shape[1] * block.itemsize)))
    for start in range(0, num_rows, size):
        yield slice(start, min(start + size, num_rows))


def enlarge(array: Array, size: int, fill: int | None = None) -> Array:
    """Return an array of `size` rows: those of another, then `fill`, or uninitialized ones."""
    larger = np.empty((size, *array.shape[1:]), array.dtype)
    larger[: len(array)] = array
    if fill is not None:
        larger[len(array) :] = fill
    return larger


_COPIED_BYTES = 64 << 20
"""Bytes up to which a growing array is copied."""
_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # since Python 3.13
_MEMORY_BYTES = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def doubled(num_rows: int) -> int:
    """Return the capacity of a growing array of some rows, a power of two."""
    return max(1024, 1 << (num_rows - 1).bit_length())


def grown(array: Array, num_rows: int) -> Array:
    """Return an array of at least `num_rows` rows that begins with those of another.

    Beyond 64 MiB it gets addresses for as many rows as the machine has memory for. Pages that are
    never written use none, so from then on it grows in place: a step neither waits for a copy of
    all rows, nor needs memory for them twice. Where addresses are limited it is doubled.
    """
    capacity, row_bytes = doubled(num_rows), array.dtype.itemsize * int(np.prod(array.shape[1:]))
    if capacity * row_bytes > _COPIED_BYTES:
        with suppress(OSError):
            larger = _reserved(array, max(capacity, _MEMORY_BYTES // row_bytes), row_bytes)
            larger[: len(array)] = array
            return larger
    return enlarge(array, capacity)


def _reserved(array: Array, num_rows: int, row_bytes: int) -> Array:
    """Return an array of the type and width of another, which uses no memory yet."""
    # otherwise a fork may fail, which the kernel checks against all addresses
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    pages = mmap.mmap(-1, num_rows * row_bytes, flags=flags)
    with suppress(OSError):
        pages.madvise(mmap.MADV_HUGEPAGE)  # kernels without huge pages refuse
    reserved: Array = np.frombuffer(pages, array.dtype)
    return reserved.reshape(num_rows, *array.shape[1:])


def empty_records(layout: TableLayout, num_rows: int) -> Records:
    """Return uninitialized records."""
    return Records(np.empty((num_rows, layout.width), layout.dtype), layout.dim)


def initial_records(layout: TableLayout, rows: NDArray[np.int64]) -> Records:
    """Return the records of rows that were never written: initial values and zero state."""
    records = empty_records(layout, len(rows))
    records.values[:] = layout.initial_values(rows)
    records.state[:] = 0
    return records


def concat_records(parts: Sequence[Records]) -> Records:
    """Concatenate the records of at least one part."""
    if len(parts) == 1:
        return parts[0]
    return Records(np.concatenate([part.block for part in parts]), parts[0].dim)


def merge_records(is_first: NDArray[np.bool_], first: Records, second: Records) -> Records:
    """Return the records of `first` in order where the mask is set, and of `second` elsewhere."""
    merged = Records(enlarge(first.block, len(is_first)), first.dim)
    merged.put(is_first, first)
    merged.put(~is_first, second)
    return merged


RowsAndRecords = tuple[NDArray[np.int64], Records]
"""Distinct rows and the record of each."""


def select(chunk: RowsAndRecords, chosen: slice | NDArray[Any]) -> RowsAndRecords:
    """Return some rows of a chunk and their records."""
    rows, records = chunk
    return rows[chosen], records.take(chosen)


def merge_newest(streams: Sequence[Iterator[RowsAndRecords]]) -> Iterator[RowsAndRecords]:
    """Merge ascending streams of rows; a row in several is taken from the first of them.

    One chunk of each stream is in memory.

    Example:
        >>> def chunk(*pairs):
        ...     rows, values = (np.array(each) for each in zip(*pairs))
        ...     return rows, Records(values[:, None], 1)
        >>> new = iter([chunk((1, 10), (4, 40))])
        >>> old = iter([chunk((1, -1), (2, 20)), chunk((4, -4), (9, 90))])
        >>> [(r.tolist(), v.values[:, 0].tolist()) for r, v in merge_newest([new, old])]
        [([1, 2], [10, 20]), ([4], [40]), ([9], [90])]
    """
    if len(streams) == 1:
        yield from streams[0]
        return
    heads = [(chunk, stream) for stream in streams if (chunk := _next(stream)) is not None]
    while heads:
        last_row = min(int(rows[-1]) for (rows, _), _ in heads)
        taken: list[RowsAndRecords] = []
        remaining: list[tuple[RowsAndRecords, Iterator[RowsAndRecords]]] = []
        for chunk, stream in heads:
            count = int(np.searchsorted(chunk[0], last_row, side="right"))
            taken.append(select(chunk, slice(0, count)))
            rest = select(chunk, slice(count, None)) if count < len(chunk[0]) else _next(stream)
            if rest is not None:
                remaining.append((rest, stream))
        heads = remaining
        # `np.unique` returns the first index of equal rows, which is in the first stream
        rows, first = np.unique(np.concatenate([r for r, _ in taken]), return_index=True)
        yield rows, concat_records([records for _, records in taken]).take(first)


def _next(stream: Iterator[RowsAndRecords]) -> RowsAndRecords | None:
    """Return the next chunk that is not empty, None at the end."""
    return next((chunk for chunk in stream if len(chunk[0])), None)


@dataclass(frozen=True, slots=True)
class GatheredRows:
    """A mutable view of rows of one table: changes are changes of the owner's rows.

    Attributes:
        records: arrays of the store or cache that owns the rows.
        positions: (n,) int32, position of each row in `records`; None if `records` holds just these
            rows, in order.
    """

    records: Records
    positions: NDArray[np.int32] | None = None

    def __len__(self) -> int:
        return len(self.records if self.positions is None else self.positions)

    def take(self, chosen: slice | NDArray[Any]) -> Records:
        """Return some of the rows, in order: views of `records` without positions."""
        at = chosen if self.positions is None else self.positions[chosen]
        return self.records.take(at)

    def copy(self) -> Records:
        """Return copies of the rows, in order."""
        if self.positions is not None:
            return self.records.take(self.positions)
        return Records(self.records.block.copy(), self.records.dim)

    def put(self, records: Records) -> None:
        """Overwrite the rows."""
        self.records.put(slice(None) if self.positions is None else self.positions, records)


RowsInPlace = tuple[NDArray[np.int64], GatheredRows]
"""Distinct rows, and a view of each."""


@dataclass(frozen=True, slots=True)
class WriteBack:
    """Rows of one table to be written to its store.

    Attributes:
        rows: (n,) distinct rows.
        records: their values and state.
        next_use: (n,) int64, step of each row's next use or `NEVER_AGAIN`; None if unknown or if
            the rows stay cached and will be written again.
    """

    rows: NDArray[np.int64]
    records: Records
    next_use: NDArray[np.int64] | None = None


class RowReader(Protocol):
    """Reads the rows of all tables of a run, each with its optimizer state."""

    @property
    def layouts(self) -> Mapping[str, TableLayout]:
        """Layouts of the rows, by table."""
        ...

    def fetch(self, train_step: int, rows: Mapping[str, NDArray[np.int64]]) -> dict[str, Records]:
        """Return copies of the rows that a step uses.

        A row that was never written has its initial values and zero state.

        Args:
            train_step: the step.
            rows: table to distinct rows.
        """
        ...

    def contents(self, table: str) -> Iterator[RowsAndRecords]:
        """Yield all rows of a table ever written, ascending, and their records, in chunks."""
        ...


class Store(RowReader, Protocol):
    """Holds the rows of all tables of a run; used by one thread at a time."""

    def write(self, train_step: int, leaving: Mapping[str, WriteBack]) -> None:
        """Write rows with their values after `train_step`.

        Args:
            train_step: the step that computed the values.
            leaving: table to rows.
        """
        ...

    def notify_checkpoint(self, train_step: int) -> None:
        """Drop versions of rows before `train_step`, whose checkpoint is durable."""
        ...

    def close(self) -> None:
        """Close connections and files, stop threads; rows that are only in memory are lost."""
        ...


T = TypeVar("T")


class StoreThread:
    """A thread that runs reads and writes in order, so that reads see all earlier writes."""

    def __init__(self, store: Store, name: str) -> None:
        self._store = store
        self._name = name
        self._pool: ThreadPoolExecutor | None = None
        self._writes: deque[Future[None]] = deque()

    def read(self, function: Callable[[int], T], train_step: int) -> Future[T]:
        """Call `function(train_step)` after all earlier calls."""
        return self._worker().submit(function, train_step)

    def write(self, train_step: int, leaving: Mapping[str, WriteBack]) -> None:
        """Write rows with their values after `train_step`."""
        self._writes.append(self._worker().submit(self._store.write, train_step, leaving))

    def call(self, function: Callable[[], None]) -> None:
        """Call a function after all earlier calls; `check` raises its errors."""
        self._writes.append(self._worker().submit(function))

    def check(self) -> None:
        """Raise the error of a completed write."""
        while self._writes and self._writes[0].done():
            self._writes.popleft().result()

    def finish_writes(self) -> None:
        """Wait until all rows are written."""
        while self._writes:
            self._writes.popleft().result()

    def close(self) -> None:
        """Stop the thread; calls that have not started are dropped."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def _worker(self) -> ThreadPoolExecutor:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix=self._name)
        return self._pool

"""Rows in stores that all replicas share, behind a cache with one plan for all."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from presage.schemas.arrays import Array
from presage.schemas.config.train import TrainConfig
from presage.schemas.oracle.cache_plan import Keyframe
from presage.schemas.storage.location import Location
from presage.trainer.checkpoint.load import load_rows, step_of, verify_checkpoint
from presage.trainer.elastic.peer_state import ROWS, rows_from_arrays, rows_to_arrays
from presage.trainer.embedding.cache import (
    CachedRows,
    DirectSource,
    PlannedCache,
    arrays_of_cached,
    cached_of,
)
from presage.trainer.embedding.changes import Changes, EvictedDirtyRows
from presage.trainer.embedding.module import Embedding
from presage.trainer.run_rows import RunRows
from presage.trainer.steps import Span, plan_of_span
from presage.trainer.stores.factory import STORE, open_store
from presage.trainer.stores.remote.client import RemoteStore
from presage.trainer.stores.remote.processes import TOKEN
from presage.trainer.stores.store import (
    BehindError,
    Records,
    RowsAndRecords,
    RowsLostError,
    TableLayout,
    WriteBack,
    merge_records,
)

BUFFER_BYTES = 16 << 20
"""Rows in the write buffer: replicas that are that far behind can still read theirs."""
_NO_ROWS = np.empty(0, np.int64)


class WriteBuffer:
    """Rows evicted from the caches of all replicas that are not all in the stores yet.

    All replicas evict the same rows, so only the writer sends them to the stores, a few megabytes
    at a time. The others keep theirs, and read from them, until all know that they are written.
    So a new writer has every row that is missing. Used by one thread at a time.
    """

    def __init__(self, store: RemoteStore, max_bytes: int) -> None:
        """Start empty, not as the writer.

        Args:
            store: shared by all replicas.
            max_bytes: size at which the writer sends the rows to the stores.
        """
        self.writes = False
        self._store = store
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._evicted = {table: EvictedDirtyRows(layout) for table, layout in store.layouts.items()}
        self.written = -1
        """The last step whose evicted rows are known to be in the stores."""
        self._last_step = -1
        self._buffering = True

    @property
    def layouts(self) -> Mapping[str, TableLayout]:
        """Layouts of the rows, by table."""
        return self._store.layouts

    def update_written(self, written: int, *, writes: bool) -> None:
        """Drop rows that are in the stores."""
        self.writes = writes
        if written > self.written:
            self._drop(written)

    def fetch(self, train_step: int, rows: Mapping[str, NDArray[np.int64]]) -> dict[str, Records]:
        """Return copies of the rows that a step uses.

        Raises:
            BehindError: the stores have rows of later steps.
        """
        with self._lock:
            buffered: dict[str, tuple[NDArray[np.bool_], Records]] = {}
            for table, table_rows in rows.items():
                is_buffered, view = self._evicted[table].find(table_rows)
                buffered[table] = is_buffered, view.copy()
        missing = {table: rows[table][~is_buffered] for table, (is_buffered, _) in buffered.items()}
        if not any(map(len, missing.values())):
            return {table: records for table, (_, records) in buffered.items()}
        fetched = self._store.fetch(train_step, missing, as_of=train_step - 1)
        return {
            table: merge_records(is_buffered, records, fetched[table])
            for table, (is_buffered, records) in buffered.items()
        }

    def write(self, train_step: int, leaving: Mapping[str, WriteBack]) -> None:
        """Buffer rows with the values that they have after a step."""
        if not self._buffering:
            self._store.write(train_step, leaving)
            return
        with self._lock:
            self._last_step = max(self._last_step, train_step)
            for table, back in leaving.items():
                last = np.full(len(back.rows), train_step, np.int32)
                self._evicted[table].put(back.rows, back.records, last)
            num_bytes = sum(evicted.num_bytes for evicted in self._evicted.values())
        if self.writes and num_bytes > self._max_bytes:
            self._send()

    @contextmanager
    def unbuffered(self) -> Iterator[None]:
        """Send all buffered rows to the stores; writes inside the context are not buffered."""
        self._send()
        self._buffering = False
        try:
            yield
        finally:
            self._buffering = True

    def evicted(self) -> dict[str, WriteBack]:
        """Return copies of all buffered rows, by table."""
        with self._lock:
            views = {table: rows.since(-1, _NO_ROWS) for table, rows in self._evicted.items()}
            return {table: WriteBack(rows, view.copy()) for table, (rows, view) in views.items()}

    def _send(self) -> None:
        evicted, last_step = self.evicted(), self._last_step
        try:
            self._store.write(last_step, evicted)
        except BehindError:
            return  # another replica has become the writer, which an agreement will say
        self._drop(last_step)

    def _drop(self, written: int) -> None:
        with self._lock:
            self.written = max(self.written, written)
            for evicted in self._evicted.values():
                evicted.drop_before(written + 1)

    def notify_checkpoint(self, train_step: int) -> None:
        """Inform the stores that a checkpoint before `train_step` is complete."""
        self._store.notify_checkpoint(train_step)

    def contents(self, table: str) -> Iterator[RowsAndRecords]:
        """Yield all rows of a table in the stores, ascending, and their records."""
        return self._store.contents(table)

    def close(self) -> None:
        """Close the connections."""
        self._store.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedStores:
    """How replicas reach their stores."""

    addresses: tuple[str, ...]
    """Addresses of the store processes."""
    session: str
    """Session of this attempt at the run; calls of an earlier one are refused."""
    token_file: str | None
    """File with the token of the stores; None: that of the job."""
    first: int
    """Step of the checkpoint that the stores hold at the start of this attempt."""


@contextmanager
def launch_shared_stores(
    run: Path,
    job: Path | Location,
    config: TrainConfig,
    layouts: Mapping[str, TableLayout],
    num_processes: int | None,
    checkpoint: Path | None,
) -> Iterator[SharedStores]:
    """Open or start stores with the rows of a checkpoint, for the replicas of a run.

    Raises:
        ValueError: there are no store processes.
        SchemaError: a store refuses or cannot be reached, or the checkpoint is damaged.
    """
    if not num_processes and not config.stores.addresses:
        raise ValueError(
            "replicas need store processes to share rows outside memory; use --stores, or "
            "--embedding plain"
        )
    opened = open_store(
        run, layouts, config, job=job, embedding="uncached", num_processes=num_processes
    )
    with opened as store:
        assert isinstance(store, RemoteStore), "there are store processes"
        if checkpoint is not None:
            load_rows(checkpoint, verify_checkpoint(checkpoint, with_rows=False), store)
        yield SharedStores(
            addresses=tuple(store.members.addresses),
            session=store.members.session,
            token_file=str((run / STORE / TOKEN).absolute()) if num_processes else None,
            first=step_of(checkpoint),
        )


_PLAN, _CACHE = "plan", "cache"


class SharedRows(RunRows):
    """Rows in stores that all replicas share, behind a cache with the same plan on all replicas."""

    def __init__(
        self,
        write_buffer: WriteBuffer,
        embedding: Embedding,
        planned: TrainConfig | None,
        first: int,
    ) -> None:
        """Open no source yet; see `start` and `load`. Without `planned` there is no cache."""
        self._first = first
        self._store = self._write_buffer = write_buffer
        self._embedding = embedding
        self._planned = planned
        self._is_open = False
        self._changes: Changes | None = None

    @property
    def written(self) -> int:
        """The last step whose evicted rows are known to be in the stores."""
        return self._write_buffer.written

    def track_changes(self, changes: Changes) -> None:
        """Record which rows change, from the first step on."""
        self._changes = changes

    def start(self, train_step: int, span: Span) -> None:
        """Start with a step and an empty cache.

        Raises:
            RowsLostError: the stores do not hold the checkpoint of that step.
        """
        if train_step != self._first:
            raise RowsLostError(
                f"rows of step {train_step} are lost: the stores started with step {self._first}, "
                "and no replica answers"
            )
        self._open(train_step, span, {})

    def state_before(self, train_step: int) -> Mapping[str, Array] | None:
        """Return cached rows, the plan, and rows that no store has; None: retry with a later step.

        Plans run ahead of training: the first call requests the state of a step in the future.
        """
        arrays: dict[str, Array] = {}
        if isinstance(self.source, PlannedCache):
            if self.source.requested_step < train_step:
                self.source.requested_step = self.source.next_read + 1
            cached = self.source.cached(train_step)
            if not cached:
                return None
            arrays |= {f"{_PLAN}/{name}": a for name, a in arrays_of_cached(cached).items()}
            rows: dict[str, WriteBack] = {}
            for table, each in cached.items():
                slots = each.keyframe.slots[each.is_cached].astype(np.int32)
                _, gathered = self.source.rows_at(table, slots)
                rows[table] = WriteBack(each.rows[each.is_cached], gathered.copy())
            arrays |= rows_to_arrays(_CACHE, rows)
            self.source.finish_writes()
        return arrays | rows_to_arrays(ROWS, self._write_buffer.evicted())

    def load(self, arrays: Mapping[str, Array], train_step: int, span: Span) -> None:
        """Start with a step, from another replica's `state_before` it."""
        layouts = self._write_buffer.layouts
        self._write_buffer.write(train_step - 1, rows_from_arrays(ROWS, arrays, layouts))
        plans = {
            name.removeprefix(f"{_PLAN}/"): array
            for name, array in arrays.items()
            if name.startswith(f"{_PLAN}/")
        }
        cached = cached_of(plans, layouts) if plans else dict[str, CachedRows]()
        self._open(train_step, span, {table: each.keyframe for table, each in cached.items()})
        for table, rows in rows_from_arrays(
            _CACHE, arrays, {table: layouts[table] for table in cached}
        ).items():
            assert isinstance(self.source, PlannedCache), "only a cache has plans"
            self.source.restore(table, cached[table], rows.records)

    def cached(self, train_step: int) -> Mapping[str, CachedRows]:
        """Return nothing: replicas that continue plan again."""
        return {}

    def update_written(self, written: int, *, writes: bool) -> None:
        """Update `written` to that of all replicas, and whether this one is the writer."""
        self._write_buffer.update_written(written, writes=writes)

    def flush(self) -> None:
        """Write all rows to the stores."""
        if isinstance(self.source, PlannedCache):
            self.source.finish_writes()
        with self._write_buffer.unbuffered():
            self.source.flush()

    def close(self) -> None:
        """Stop background work and close connections."""
        if self._is_open:
            self.source.close()
        self._write_buffer.close()

    def _open(self, train_step: int, span: Span, starts: Mapping[str, Keyframe]) -> None:
        if self._is_open:
            raise BehindError(
                f"replica has rows of a step before {train_step}, which cannot be replaced; "
                "restart it"
            )
        self.source = (
            DirectSource(self._write_buffer)
            if self._planned is None
            else PlannedCache(
                self._write_buffer,
                plan_of_span(span, self._write_buffer.layouts, self._planned, train_step, starts),
                first_step=train_step,
                last_step=span.horizon.end_step,
                prefetch_steps=self._planned.cache.prefetch_steps,
            )
        )
        self._is_open, self.tracked_since = True, train_step
        if self._changes is not None:
            self.source.track_changes(self._changes)
        self._embedding.set_source(self.source)

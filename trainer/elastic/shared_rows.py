"""Rows in stores that all replicas share, behind a cache with one plan for all."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from schemas.accesses import TableAccesses, decoded_cache_for
from schemas.arrays import Array
from schemas.cache_plan import Keyframe
from schemas.config.train import StoresConfig, TrainConfig
from schemas.dataset import Dataset
from schemas.order import Order
from trainer.checkpoint.incremental import Changes, EvictedDirtyRows
from trainer.checkpoint.load import load_rows, step_of, verified
from trainer.elastic.peer_state import ROWS, rows_from_arrays, rows_to_arrays
from trainer.embedding.cache import (
    CachedRows,
    DirectSource,
    PlannedCache,
    RowSource,
    arrays_of_cached,
    cached_of,
)
from trainer.embedding.module import Embedding
from trainer.follow import Span, extend, plans_of_span, settle
from trainer.setup import STORE, access_of, open_stores, owner_of
from trainer.stores.api import (
    BehindError,
    Records,
    RowsLostError,
    StepStore,
    Store,
    TableLayout,
    WriteBack,
    group_of,
)
from trainer.stores.remote.client import FlightGroup, FlightStore, open_group
from trainer.stores.remote.processes import TOKEN

KEPT_BYTES = 128 << 20
"""Decoded access lists of all tables together."""


class StepRows:
    """The rows of any step; not safe for several threads at once."""

    def __init__(self, dataset: Dataset, order: Order, tables: Iterable[str]) -> None:
        """Open the access lists.

        Args:
            dataset: open dataset, with its oracle.
            order: global order of the run.
            tables: table names.

        Raises:
            SchemaError: the dataset has no access lists.
        """
        kept = decoded_cache_for(order, KEPT_BYTES)
        self._accesses = {t: TableAccesses(dataset, t, order, kept) for t in tables}

    def of(self, train_step: int) -> dict[str, NDArray[np.int64]]:
        """Return by table the distinct ascending rows of a step."""
        return {t: np.sort(a.rows[a.numbers(train_step)]) for t, a in self._accesses.items()}


# Rows that have left the caches of all replicas and are not all in their stores yet.
#
# Replicas hold the same rows and drop the same ones, so one of them brings them to the stores:
# the writer, a few megabytes at a time. The others keep theirs until everybody knows that they
# are there, and read from them meanwhile. Whoever becomes the writer has all that is missing.

RETAINED_BYTES = 16 << 20
"""Rows that wait: replicas that are that far behind can still read what they need."""
_NO_ROWS = np.empty(0, np.int64)
EvictedRows = dict[str, tuple[NDArray[np.int64], Records]]
"""Table to rows and what they hold."""


class WriteBuffer:
    """The stores of a run as one replica has them: one thread fetches and writes."""

    def __init__(
        self, group: FlightGroup, layouts: Mapping[str, TableLayout], most_bytes: int
    ) -> None:
        """Keep the parts; this replica does not write before it is told to.

        Args:
            group: the stores.
            layouts: tables by name.
            most_bytes: of rows that the writer lets wait; that far may others be behind it.
        """
        self.writes = False
        self._group = group
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._left = {table: EvictedDirtyRows(layout) for table, layout in layouts.items()}
        self._written = self._last = -1
        self._waits = True

    @property
    def written(self) -> int:
        """The last step of which all rows that left are known to be in the stores."""
        return self._written

    def heed(self, written: int, *, writes: bool) -> None:
        """Take note of what all replicas know by now.

        Args:
            written: the largest `written` of any.
            writes: whether this replica is the writer.
        """
        self.writes = writes
        if written > self._written:
            self._forget(written)

    def fetch(self, train_step: int, rows: Mapping[str, NDArray[np.int64]]) -> dict[str, Records]:
        """Return copies of the rows that a step uses.

        Raises:
            BehindError: the other replicas are so far ahead that the stores have later rows.
        """
        with self._lock:
            held = {table: self._left[table].find(wanted) for table, wanted in rows.items()}
            kept = {table: (here, gathered.copy()) for table, (here, gathered) in held.items()}
        asked = {table: rows[table][~here] for table, (here, _) in kept.items()}
        if not any(map(len, asked.values())):
            return {table: records for table, (_, records) in kept.items()}
        found = self._group.fetch(train_step, asked, as_of=train_step - 1)
        return {
            table: _merged(here, records, found[table]) for table, (here, records) in kept.items()
        }

    def write(self, train_step: int, leaving: Mapping[str, WriteBack]) -> None:
        """Keep rows as they are after a step."""
        if not self._waits:
            self._group.write(train_step, leaving)
            return
        with self._lock:
            self._last = max(self._last, train_step)
            for table, back in leaving.items():
                last = np.full(len(back.rows), train_step, np.int32)
                self._left[table].put(back.rows, back.records, last)
            num_bytes = sum(left.num_bytes for left in self._left.values())
        if self.writes and num_bytes > self._most_bytes:
            self._send()

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Bring all that waits to the stores, and what is written inside without waiting."""
        self._send()
        self._waits = False
        try:
            yield
        finally:
            self._waits = True

    def left(self) -> EvictedRows:
        """Return what waits."""
        with self._lock:
            found = {table: left.since(-1, _NO_ROWS) for table, left in self._left.items()}
            return {table: (rows, gathered.copy()) for table, (rows, gathered) in found.items()}

    def take(self, left: EvictedRows, train_step: int) -> None:
        """Take what waits at another replica.

        Args:
            left: of the other.
            train_step: the last step that it is of.
        """
        self.write(train_step, _write_backs(left))

    def _send(self) -> None:
        left, last = self.left(), self._last
        self._group.write(last, _write_backs(left))
        self._forget(last)

    def _forget(self, written: int) -> None:
        with self._lock:
            self._written = max(self._written, written)
            for left in self._left.values():
                left.forget(written + 1)

    def notify_checkpoint(self, train_step: int) -> None:
        """Take note that a checkpoint holds all rows as they are before a step."""
        self._group.notify_checkpoint(train_step)

    def contents(self, table: str) -> Iterator[tuple[NDArray[np.int64], Records]]:
        """Yield all rows of a table that are in the stores, ascending, and their records."""
        return self._group.contents(table)

    def close(self) -> None:
        """Give the connections back."""
        self._group.close()


def _write_backs(left: EvictedRows) -> dict[str, WriteBack]:
    return {table: WriteBack(rows, records) for table, (rows, records) in left.items()}


def _merged(here: NDArray[np.bool_], kept: Records, fetched: Records) -> Records:
    """Return records of rows of which some are kept and the others fetched."""
    values = np.empty((len(here), *kept.values.shape[1:]), kept.values.dtype)
    state = np.empty((len(here), *kept.state.shape[1:]), kept.state.dtype)
    values[here], values[~here] = kept.values, fetched.values
    state[here], state[~here] = kept.state, fetched.state
    return Records(values, state)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedStores:
    """How replicas reach their stores."""

    addresses: tuple[str, ...]
    """Of the processes."""
    session: str
    """Names this attempt at the run: calls of an earlier one are refused."""
    token_file: str
    """What they ask for."""
    first: int
    """Step before which they had every row, when this attempt began."""


@contextmanager
def launch_shared_stores(
    run: Path,
    job: Path,
    config: StoresConfig,
    layouts: Mapping[str, TableLayout],
    num_processes: int | None,
    checkpoint: Path | None,
) -> Iterator[SharedStores]:
    """Have stores with the rows of a checkpoint, for the replicas of a run.

    Args:
        run: run folder.
        job: job file.
        config: store processes of the job.
        layouts: tables by name.
        num_processes: store processes to be started here, in the place of those of the job.
        checkpoint: to begin with; None for the beginning.

    Raises:
        ValueError: there are no store processes.
        SchemaError: a store refuses or cannot be reached, or the checkpoint is damaged.
    """
    if not num_processes and not config.addresses:
        raise ValueError(
            "replicas that keep their rows outside memory must share store processes, got none; "
            "use --stores, or --embedding plain"
        )
    opened = open_stores(run, layouts, config, job=job, kind="mmap", num_processes=num_processes)
    with opened as stores:
        group = group_of(stores)
        assert isinstance(group, FlightGroup), "there are store processes"
        if checkpoint is not None:
            load_rows(checkpoint, verified(checkpoint, None), stores)
        token = run / STORE / TOKEN if num_processes else job.parent / str(config.token_file)
        yield SharedStores(
            addresses=tuple(group.members.addresses),
            session=group.members.session,
            # as it is named: where it leads to may differ from node to node
            token_file=str(token.absolute()),
            first=step_of(checkpoint),
        )


def open_shared(
    shared: SharedStores,
    run: Path,
    job: Path,
    config: StoresConfig,
    layouts: Mapping[str, TableLayout],
) -> dict[str, FlightStore]:
    """Open the stores of a run in one of its replicas.

    Args:
        shared: how they are reached.
        run: run folder.
        job: job file.
        config: store processes of the job.
        layouts: tables by name.

    Raises:
        SchemaError: a store refuses or cannot be reached.
    """
    return open_group(
        shared.addresses,
        access_of(config, job.parent, Path(shared.token_file)),
        layouts,
        owner=owner_of(run),
        session=shared.session,
        reset=False,
        replicas=config.replicas,
        repairs=False,
    )


_PLAN, _CACHE = "plan", "cache"


class SharedRows:
    """Rows in stores that all replicas share, in front of them a cache that obeys the plan."""

    def __init__(
        self,
        stores: Mapping[str, Store],
        retained: WriteBuffer,
        embedding: Embedding,
        planned: TrainConfig | None,
        first: int,
    ) -> None:
        """Keep the parts; `begin` or `load` opens the source.

        Args:
            stores: by table, each of `retained`.
            retained: the stores as this replica has them.
            embedding: that borrows rows.
            planned: what the plan of a cache in front of `stores` obeys; None to go without.
            first: step before which the stores had every row.
        """
        self._stores = stores
        self._first = first
        self._retained = retained
        self._embedding = embedding
        self._planned = planned
        self._source: RowSource | None = None
        self._changes: Changes | None = None
        self._asked = -1
        self.known = 0

    @property
    def source(self) -> RowSource:
        """Where steps borrow them."""
        assert self._source is not None, "rows are begun with or loaded first"
        return self._source

    @property
    def written(self) -> int:
        """The last step of which all rows that left are known to be in the stores."""
        return self._retained.written

    def track_changes(self, changes: Changes) -> None:
        """Tell from the first step on which rows change."""
        self._changes = changes

    def begin(self, train_step: int, span: Span) -> None:
        """Begin with a step and an empty cache.

        Raises:
            StoreLostError: the stores lack rows as they are before that step.
        """
        if train_step != self._first:
            raise RowsLostError(
                f"rows of step {train_step} must be in the stores or with another replica, got "
                f"stores that began with step {self._first} and no replica that answers"
            )
        self._open(train_step, span, {})

    def arrays(self, train_step: int) -> Mapping[str, Array] | None:
        """Return the rows that the cache holds, its plan, and the rows that no store has yet.

        Plans are ahead of training: their state before a step is asked for before it is reached.
        """
        found: dict[str, Array] = {}
        if isinstance(self.source, PlannedCache):
            if self._asked < train_step:
                self._asked = self.source.next_read + 1
            cached = self.source.cached(train_step)
            if not cached:
                return None
            found |= {f"{_PLAN}/{name}": a for name, a in arrays_of_cached(cached).items()}
            for table, each in cached.items():
                slots = each.keyframe.slots[each.is_cached].astype(np.int32)
                _, records = self.source.rows_at(table, slots)
                held = Records(records.values[slots], records.state[slots])
                found |= rows_to_arrays(f"{_CACHE}/{table}", each.rows[each.is_cached], held)
            self.source.finish_writes()
        for table, (rows, records) in self._retained.left().items():
            found |= rows_to_arrays(f"{ROWS}/{table}", rows, records)
        return found

    def load(self, arrays: Mapping[str, Array], train_step: int, span: Span) -> None:
        """Begin with a step and what another replica has before it."""
        left = {table: rows_from_arrays(f"{ROWS}/{table}", arrays) for table in self._stores}
        self._retained.take(left, train_step - 1)
        plans = {
            name.removeprefix(f"{_PLAN}/"): array
            for name, array in arrays.items()
            if name.startswith(f"{_PLAN}/")
        }
        cached = cached_of(plans, self._stores) if plans else dict[str, CachedRows]()
        self._open(train_step, span, {table: each.keyframe for table, each in cached.items()})
        for table, each in cached.items():
            assert isinstance(self.source, PlannedCache), "only a cache has plans"
            self.source.restore(table, each, rows_from_arrays(f"{_CACHE}/{table}", arrays)[1])

    def settle(self, at: int | None = None) -> int:
        """Return the step that more may be known from, and fix it."""
        return settle(self.source, at)

    def extend(self, span: Span, train_step: int) -> None:
        """Let the plan know of more steps."""
        if self._planned is not None:
            extend(self.source, self._stores, span, self._planned, train_step)

    def heed(self, written: int, *, writes: bool) -> None:
        """Take note of what all replicas know, and whether this one writes."""
        self._retained.heed(written, writes=writes)

    def flush(self) -> None:
        """Bring all rows into the stores."""
        if isinstance(self.source, PlannedCache):
            self.source.finish_writes()
        with self._retained.at_once():
            self.source.flush()

    def close(self) -> None:
        """Stop background work and give the connections back."""
        if self._source is not None:
            self._source.close()
        self._retained.close()

    def _open(self, train_step: int, span: Span, starts: Mapping[str, Keyframe]) -> None:
        if self._source is not None:
            raise BehindError(
                f"replica must be at step {train_step}, got an earlier one; start it again"
            )
        self._source = (
            DirectSource(self._stores)
            if self._planned is None
            else PlannedCache(
                self._stores,
                plans_of_span(span, self._stores, self._planned, train_step, starts),
                first_step=train_step,
                last_step=span.horizon.until,
                prefetch_steps=self._planned.cache.prefetch_steps,
                saves_at=lambda step: step == self._asked,
            )
        )
        self.known = train_step
        if self._changes is not None:
            self._source.track_changes(self._changes)
        self._embedding.set_source(self._source)


def shared_rows(
    group: FlightGroup,
    layouts: Mapping[str, TableLayout],
    embedding: Embedding,
    planned: TrainConfig | None,
    retained_bytes: int,
    first: int,
) -> SharedRows:
    """Return the rows of a replica that shares the stores of a group.

    Args:
        group: the stores.
        layouts: tables by name.
        embedding: that borrows rows.
        planned: what the plan of a cache in front of the stores obeys; None to go without.
        retained_bytes: most bytes of rows that the writer lets wait before they go to the stores.
        first: step before which the stores had every row.
    """
    retained = WriteBuffer(group, layouts, retained_bytes)
    stores: dict[str, Store] = {t: StepStore(retained, layout) for t, layout in layouts.items()}
    return SharedRows(stores, retained, embedding, planned, first)

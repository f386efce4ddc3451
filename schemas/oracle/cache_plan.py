"""The cache plan: the rows to fetch, evict and write back at each step.

A plan is a pure streaming function of the index. Before step s runs, the fetches of step
s + `prefetch_steps` are issued: during step s, the cache holds the rows of the window s to
s + `prefetch_steps`, in flight or not, and rows that are kept for a later use. After step s, rows
are evicted and the changed ones written back, and then the next fetches are issued, so that a fetch
always follows the write-back that it depends on.

A row that is not used again is always evicted. For the others, there are two policies:

- `ttl` (BagPipe's): a row is evicted after its use if the next one is more than `lookahead` steps
  away. The size of the cache follows from this.
- `belady`: the cache has a given size, and if the next fetches do not fit, the rows with the
  farthest next use are evicted. No plan of that size and prefetch fetches fewer rows.

All tables share one cache: its size is that of their rows together, and the row that is evicted is
the one with the farthest next use of any table. A table has slots of its own.

Sources: BagPipe (SOSP 2023), the section on the oracle cacher; Belady, "A study of replacement
algorithms" (1966).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice

import numpy as np
from numpy.typing import NDArray

from presage.schemas.arrays import Array
from presage.schemas.config.train import CacheConfig
from presage.schemas.errors import PlanError
from presage.schemas.oracle.next_uses import NEVER
from presage.schemas.oracle.reuse import StepReuse, peak_cache_rows, sum_reuse

# A vectorized priority queue of cached rows by next use. Each batch is an ascending run of 64-bit
# keys (step of the next use, then slot), runs of similar length are merged, and the largest keys
# are taken from the ends of all runs at once. Keys of rows whose next use has come are below all
# keys that may still be taken, and are dropped when runs are merged. A key is sorted at most
# log2(rows of the cache / rows of a step) times.

_SLOT_BITS = 32
_SLOT_MASK = (1 << _SLOT_BITS) - 1


class NextUseQueue:
    """Priority queue of the slots of cached rows, farthest next use first."""

    def __init__(self) -> None:
        self._runs: list[NDArray[np.int64]] = []

    def add(self, next_steps: NDArray[np.int64], slots: NDArray[np.int64], now: int) -> None:
        """Add rows.

        Args:
            next_steps: (n,) step of each row's next use, after `now`.
            slots: (n,) their slots, below 2**32 and distinct in the queue.
            now: rows whose next use is at most this step will not be taken.
        """
        run = (next_steps << _SLOT_BITS) | slots
        run.sort()
        floor = (now + 1) << _SLOT_BITS
        while self._runs and len(self._runs[-1]) < 2 * len(run):
            previous = self._runs.pop()
            previous = previous[np.searchsorted(previous, floor) :]
            run = np.concatenate([previous, run])
            run.sort(kind="stable")  # two ascending halves: merged in one pass
        if len(run):
            self._runs.append(run)

    def take(self, count: int, after: int) -> NDArray[np.int64]:
        """Remove the rows with the farthest next use; ties go to the largest slot.

        Args:
            count: most rows to remove.
            after: rows whose next use is at most this step are kept.

        Returns:
            (at most count,) their slots, by ascending next use.
        """
        floor = (after + 1) << _SLOT_BITS
        ends = [run[-count:] for run in self._runs] if count else []
        keys = np.concatenate([*ends, np.empty(0, np.int64)])
        keys = np.sort(keys[keys >= floor])[-count:] if count else keys
        if len(keys):
            ends = [int(np.searchsorted(run, keys[0])) for run in self._runs]
            self._runs = [run[:end] for run, end in zip(self._runs, ends, strict=True) if end]
        return keys & _SLOT_MASK


ABSENT = -1
"""Slot of a row that is not cached."""
UNUSED = -1
"""Last use of a row that was fetched but not used yet."""
NEVER_AGAIN = -1
"""Next use of a row that is not used again."""


@dataclass(frozen=True, slots=True)
class Keyframe:
    """State of a plan before a step, from which it can be resumed.

    Attributes:
        train_step: the next step.
        numbers: (n,) int64, cached rows, rows in flight included.
        slots: (n,) int64, their slots.
        last_use: (n,) int64, step of each row's last use, -1 if it was fetched but not used yet.
        next_use: (n,) int64, step of each row's use after its last one, 0 without a last one.
        free: (m,) int64, released slots; the last one is reused first.
        num_slots: allocated slots, free ones included.
    """

    train_step: int
    numbers: NDArray[np.int64]
    slots: NDArray[np.int64]
    last_use: NDArray[np.int64]
    next_use: NDArray[np.int64]
    free: NDArray[np.int64]
    num_slots: int


@dataclass(frozen=True, slots=True)
class EvictedRows:
    """Rows that are evicted from the cache.

    Attributes:
        slots: (n,) int64, their slots.
        numbers: (n,) int64.
        last_use: (n,) int64, step of each row's last use.
        next_use: (n,) int64, step of its next one, or `NEVER_AGAIN`.
    """

    slots: NDArray[np.int64]
    numbers: NDArray[np.int64]
    last_use: NDArray[np.int64]
    next_use: NDArray[np.int64]

    def concat(self, other: EvictedRows) -> EvictedRows:
        """Return these rows followed by the others."""
        return EvictedRows(
            np.concatenate([self.slots, other.slots]),
            np.concatenate([self.numbers, other.numbers]),
            np.concatenate([self.last_use, other.last_use]),
            np.concatenate([self.next_use, other.next_use]),
        )


class CacheState:
    """Cached rows of a table. Memory: 4 bytes per number, 24 to 64 bytes per slot.

    Attributes:
        num_rows: cached rows, rows in flight included.
    """

    def __init__(self) -> None:
        self._slot_of = np.empty(0, np.int32)  # by number
        self._numbers = np.empty(0, np.int64)  # by slot
        self._last_use = np.empty(0, np.int64)  # by slot
        self._next_use = np.empty(0, np.int64)  # by slot
        self._free = np.empty(0, np.int64)  # a stack
        self._num_free = 0
        self._num_slots = 0
        self.num_rows = 0

    @classmethod
    def restored(cls, keyframe: Keyframe) -> CacheState:
        """Return the state of a keyframe."""
        state = cls()
        state._reserve_slots(keyframe.num_slots)
        state._num_slots = keyframe.num_slots
        state._put(keyframe.numbers, keyframe.slots)
        state._last_use[keyframe.slots] = keyframe.last_use
        state._next_use[keyframe.slots] = keyframe.next_use
        state._release(keyframe.free)
        state.num_rows = len(keyframe.numbers)
        return state

    def keyframe(self, train_step: int) -> Keyframe:
        """Return the state before a step."""
        slots = np.flatnonzero(self._resident_slots())
        return Keyframe(
            train_step=train_step,
            numbers=self._numbers[slots],
            slots=slots,
            last_use=self._last_use[slots],
            next_use=self._next_use[slots],
            free=self._free[: self._num_free].copy(),
            num_slots=self._num_slots,
        )

    def slots_of(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the slots of rows, `ABSENT` if not cached; `numbers` is ascending."""
        top = int(numbers[-1]) + 1 if len(numbers) else 0
        if top > len(self._slot_of):
            self._slot_of = _longer(self._slot_of, top, ABSENT)
        return self._slot_of[numbers].astype(np.int64)

    def insert(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Allocate slots for rows that are not cached: last released ones first, then new ones."""
        count = len(numbers)
        reused = self._free[max(0, self._num_free - count) : self._num_free]
        self._num_free -= len(reused)
        top = self._num_slots + count - len(reused)
        slots = np.concatenate([reused, np.arange(self._num_slots, top)])
        self._reserve_slots(top)
        self._num_slots = top
        self._put(numbers, slots)
        self._last_use[slots] = UNUSED
        self._next_use[slots] = 0
        self.num_rows += count
        return slots

    def record_use(
        self, slots: NDArray[np.int64], train_step: int, next_use: NDArray[np.int64]
    ) -> None:
        """Record the use of rows, and the step of their next use."""
        self._last_use[slots] = train_step
        self._next_use[slots] = next_use

    def next_use(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the step of the next use of rows, as `record_use` recorded it."""
        return self._next_use[slots]

    def unused(self) -> NDArray[np.bool_]:
        """Return for each slot whether its row was fetched but not used yet."""
        return self._resident_slots() & (self._last_use[: self._num_slots] == UNUSED)

    def evict(self, slots: NDArray[np.int64]) -> EvictedRows:
        """Release slots and return their rows."""
        evicted = EvictedRows(
            slots, self._numbers[slots], self._last_use[slots], self._next_use[slots]
        )
        self._slot_of[evicted.numbers] = ABSENT
        self._release(slots)
        self.num_rows -= len(slots)
        return evicted

    def _put(self, numbers: NDArray[np.int64], slots: NDArray[np.int64]) -> None:
        top = int(numbers.max(initial=-1)) + 1
        if top > len(self._slot_of):
            self._slot_of = _longer(self._slot_of, top, ABSENT)
        self._slot_of[numbers] = slots
        self._numbers[slots] = numbers

    def _release(self, slots: NDArray[np.int64]) -> None:
        top = self._num_free + len(slots)
        self._free[self._num_free : top] = slots
        self._num_free = top

    def _reserve_slots(self, count: int) -> None:
        if count > len(self._numbers):
            self._numbers = _longer(self._numbers, count, ABSENT)
            self._last_use = _longer(self._last_use, count, UNUSED)
            self._next_use = _longer(self._next_use, count, 0)
            self._free = _longer(self._free, count, ABSENT)

    def _resident_slots(self) -> NDArray[np.bool_]:
        resident = np.ones(self._num_slots, bool)
        resident[self._free[: self._num_free]] = False
        return resident


def _longer(values: Array, count: int, fill: int) -> Array:
    """Return a copy with room for `count` values, at least doubled."""
    longer = np.full(max(count, 2 * len(values)), fill, values.dtype)
    longer[: len(values)] = values
    return longer


IndexStep = tuple[NDArray[np.int64], NDArray[np.int32]]
"""A step's ascending numbers and their next-use distances."""


@dataclass(frozen=True, slots=True)
class PlanStep:
    """One step of one table's cache.

    Attributes:
        train_step: the step.
        numbers: (entries,) ascending dense numbers of the step's rows.
        slots: (entries,) int64, the cache slot of each row during the step.
        fetch: (entries,) bool, rows that are fetched for the step, `prefetch_steps` before it.
        evict: (n,) int64, numbers of the rows evicted after the step, before the next fetches.
        evict_slots: (n,) int64, their slots.
        next_use: (n,) int64, step of their next use, or `NEVER_AGAIN`.
        write_back: (n,) bool, evicted rows that changed since they were last written.
        resident_rows: cached rows during the step, rows fetched for later steps included.
    """

    train_step: int
    numbers: NDArray[np.int64]
    slots: NDArray[np.int64]
    fetch: NDArray[np.bool_]
    evict: NDArray[np.int64]
    evict_slots: NDArray[np.int64]
    next_use: NDArray[np.int64]
    write_back: NDArray[np.bool_]
    resident_rows: int


@dataclass(frozen=True, slots=True)
class _PrefetchedStep:
    """A step whose fetches are issued and that is not trained yet."""

    numbers: NDArray[np.int64]
    distances: NDArray[np.int32]
    slots: NDArray[np.int64]
    fetch: NDArray[np.bool_]


class _TablePlan:
    """The plan of one table; which rows leave to make room is decided for all tables."""

    def __init__(
        self, steps: Iterable[IndexStep], cache: CacheConfig, start: Keyframe | None
    ) -> None:
        self._steps = iter(steps)
        self._cache = cache
        self._start = start
        self.state = CacheState() if start is None else CacheState.restored(start)
        self.window: deque[_PrefetchedStep] = deque()  # steps whose fetches are issued

    def fill(self) -> None:
        """Issue the fetches of the first steps; after a keyframe, restore those in flight.

        The window of a keyframe may be shorter: the index may have been extended since.
        """
        if self.window:
            return
        unused = None if self._start is None else self.state.unused()
        self._start = None
        for step in islice(self._steps, self._cache.prefetch_steps + 1):
            slots = self.state.slots_of(step[0])
            if unused is not None and (slots == ABSENT).any():
                if self.window:
                    self._steps = chain([step], self._steps)  # fetched when there is space
                    return
                unused = None  # no row is in flight
            if unused is None:
                self.prefetch(step, slots)
            else:
                self.window.append(_PrefetchedStep(*step, slots, unused[slots]))
                unused[slots] = False

    def following(self) -> tuple[IndexStep, NDArray[np.int64]] | None:
        """Return the step after the window and the slots of its rows; None: the window is full."""
        if len(self.window) > self._cache.prefetch_steps:
            return None
        step = next(self._steps, None)
        return None if step is None else (step, self.state.slots_of(step[0]))

    def prefetch(self, step: IndexStep, slots: NDArray[np.int64]) -> None:
        """Issue the fetches of a step."""
        numbers, distances = step
        fetch = slots == ABSENT
        slots[fetch] = self.state.insert(numbers[fetch])
        self.window.append(_PrefetchedStep(numbers, distances, slots, fetch))

    def finish(self, train_step: int, trained: _PrefetchedStep) -> NDArray[np.int64]:
        """Record a trained step; return the slots of the rows that are evicted at once."""
        never = trained.distances == NEVER
        next_use = np.where(never, NEVER_AGAIN, train_step + trained.distances.astype(np.int64))
        self.state.record_use(trained.slots, train_step, next_use)
        if self._cache.policy == "ttl":
            return trained.slots[never | (trained.distances > self._cache.lookahead)]
        return trained.slots[never]


class CachePlan(Iterator[dict[str, PlanStep]]):
    """Iterator over the steps of all tables' plans; linear in entries."""

    def __init__(
        self,
        tables: Mapping[str, Iterable[IndexStep]],
        cache: CacheConfig,
        *,
        first_step: int = 0,
        flush_every: int | None = None,
        starts: Mapping[str, Keyframe] | None = None,
    ) -> None:
        """Create a plan; nothing is read yet.

        Args:
            tables: by name, the ascending numbers and next-use distances of each step, from the
                first one on.
            cache: policy and limits; `rows` includes rows in flight.
            first_step: first step of the plan; the cache of a table that `starts` lacks is empty.
            flush_every: interval of steps at which all cached rows are written to the store.
            starts: states before the first step, of a plan with the same settings.
        """
        starts = starts or {}
        assert all(start.train_step == first_step for start in starts.values())
        self._tables = {t: _TablePlan(steps, cache, starts.get(t)) for t, steps in tables.items()}
        self._cache = cache
        self._flush_every = flush_every
        self._next = first_step
        self._queue = NextUseQueue()  # of slots * tables + table, that may be evicted
        if self._has_queue:
            used = (
                (t, keyframe.slots, keyframe.next_use)
                for t, name in enumerate(self._tables)
                if (keyframe := starts.get(name)) is not None
            )
            self._add_evictable(used)

    def __next__(self) -> dict[str, PlanStep]:
        """Return the next step.

        Raises:
            PlanError: `cache.rows` is too small for a step from here on; has the size that works.
        """
        steps = self._advance()
        if steps is None:
            raise StopIteration
        limit, rows = self._cache.rows, _resident_rows(steps)
        if limit is not None and rows > limit:
            at = f" and {rows} at step {self._next - 1}"
            required = max([rows, *map(_resident_rows, iter(self._advance, None))])
            raise cache_too_small(self._cache, required, at=at)
        return steps

    def keyframes(self) -> dict[str, Keyframe]:
        """Return the state of each table before the next step."""
        for table in self._tables.values():
            table.fill()
        return {name: table.state.keyframe(self._next) for name, table in self._tables.items()}

    @property
    def _has_queue(self) -> bool:
        return self._cache.policy == "belady" and self._cache.rows is not None

    def _advance(self) -> dict[str, PlanStep] | None:
        tables = self._tables.values()
        for table in tables:
            table.fill()
        if not any(table.window for table in tables):
            return None
        step = self._next
        oldest = [table.window.popleft() for table in tables]
        resident_rows = [table.state.num_rows for table in tables]
        done = [t.finish(step, trained) for t, trained in zip(tables, oldest, strict=True)]
        if self._has_queue:
            used = enumerate(zip(tables, oldest, strict=True))
            self._add_evictable((i, o.slots, t.state.next_use(o.slots)) for i, (t, o) in used)
        evicted = [t.state.evict(slots) for t, slots in zip(tables, done, strict=True)]
        self._next += 1
        # usually one step; more if the index was extended since the window was filled
        while any(following := [table.following() for table in tables]):
            victims = self._select_victims([each[1] for each in following if each is not None])
            for i, (table, each) in enumerate(zip(tables, following, strict=True)):
                if len(slots := victims[i]):
                    evicted[i] = evicted[i].concat(table.state.evict(slots))
                if each is not None:
                    table.prefetch(*each)
        return {
            name: PlanStep(
                train_step=step,
                numbers=oldest[i].numbers,
                slots=oldest[i].slots,
                fetch=oldest[i].fetch,
                evict=evicted[i].numbers,
                evict_slots=evicted[i].slots,
                next_use=evicted[i].next_use,
                write_back=evicted[i].last_use >= self._last_flush(step),
                resident_rows=resident_rows[i],
            )
            for i, name in enumerate(self._tables)
        }

    def _add_evictable(
        self, used: Iterable[tuple[int, NDArray[np.int64], NDArray[np.int64]]]
    ) -> None:
        """Add the slots of tables that are used next after the window, not in it."""
        window_end = self._next + self._cache.prefetch_steps
        next_uses, slots = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for table, of_table, next_use in used:
            is_evictable = next_use > window_end
            next_uses.append(next_use[is_evictable])
            slots.append(of_table[is_evictable] * len(self._tables) + table)
        self._queue.add(np.concatenate(next_uses), np.concatenate(slots), window_end)

    def _select_victims(self, following: Sequence[NDArray[np.int64]]) -> list[NDArray[np.int64]]:
        """Return the slots of each table whose rows leave, so that rows of further steps fit."""
        num_tables, limit = len(self._tables), self._cache.rows
        if not self._has_queue or limit is None:
            return [np.empty(0, np.int64)] * num_tables
        cached = sum(table.state.num_rows for table in self._tables.values())
        excess = cached + sum(int((slots == ABSENT).sum()) for slots in following) - limit
        taken = self._queue.take(max(0, excess), self._next + self._cache.prefetch_steps)
        slots, tables = np.divmod(taken, num_tables)
        return [slots[tables == table] for table in range(num_tables)]

    def _last_flush(self, train_step: int) -> int:
        """Return the step of the last flush: rows used since then have unwritten changes."""
        every = self._flush_every
        return 0 if every is None else train_step // every * every


def _resident_rows(steps: Mapping[str, PlanStep]) -> int:
    return sum(step.resident_rows for step in steps.values())


_ONE = ""
"""Name of the table of a plan of one."""


def plan_table(
    steps: Iterable[IndexStep],
    cache: CacheConfig,
    *,
    first_step: int = 0,
    flush_every: int | None = None,
) -> Iterator[PlanStep]:
    """Return the plan of a single table, see `CachePlan`."""
    plan = CachePlan({_ONE: steps}, cache, first_step=first_step, flush_every=flush_every)
    return (step[_ONE] for step in plan)


def cache_too_small(
    cache: CacheConfig, required_rows: int, *, table: str | None = None, at: str = ""
) -> PlanError:
    """Return the error of a cache that is too small; `at` names the step that does not fit."""
    name = "cache" if table is None else f"cache of table {table!r}"
    content, settings = (
        (
            "rows kept for their next use and those of the prefetch window",
            "lookahead or prefetch_steps",
        )
        if cache.policy == "ttl"
        else ("the rows of the prefetch window", "prefetch_steps")
    )
    return PlanError(
        f"{name} is too small for {content}: cache_rows={cache.rows}{at}; use at least "
        f"{required_rows}, or a smaller {settings}",
        required_rows=required_rows,
    )


@dataclass(frozen=True, slots=True)
class PlanSummary:
    """Totals of a plan over all steps.

    Attributes:
        num_accesses: entries, summed over steps.
        fetched_rows: fetches from the store, first uses included.
        written_rows: rows written back when they are evicted.
        peak_cache_rows: most cached rows, rows fetched for later steps included.
    """

    num_accesses: int
    fetched_rows: int
    written_rows: int
    peak_cache_rows: int

    @property
    def hit_rate(self) -> float:
        """Fraction of accesses without a fetch."""
        return 1.0 - self.fetched_rows / self.num_accesses if self.num_accesses else 0.0


def summarize(plan: Iterable[PlanStep]) -> PlanSummary:
    """Return the totals of the plan of one table."""
    return summarize_tables({_ONE: step} for step in plan).get(_ONE, PlanSummary(0, 0, 0, 0))


def summarize_tables(plan: Iterable[Mapping[str, PlanStep]]) -> dict[str, PlanSummary]:
    """Return the totals of each table of a plan."""
    totals: dict[str, NDArray[np.int64]] = {}
    for steps in plan:
        for table, step in steps.items():
            total = totals.setdefault(table, np.zeros(4, np.int64))
            total[:3] += (len(step.numbers), step.fetch.sum(), step.write_back.sum())
            total[3] = max(total[3], step.resident_rows)
    return {table: PlanSummary(*total.tolist()) for table, total in totals.items()}


def required_rows(tables: Iterable[Iterable[NDArray[np.integer]]], cache: CacheConfig) -> int:
    """Return the smallest cache size of the plan of some tables, from next-use distances alone.

    `ttl` needs the rows kept for a later use and those of the window, prefetch_steps + 1 steps;
    `belady` only those of the window, which a time to live of `prefetch_steps` keeps.

    Example:
        >>> steps = [np.array([2, 0]), np.array([0]), np.array([0])]
        >>> required_rows([steps], CacheConfig(policy="belady", prefetch_steps=1))
        3
        >>> required_rows([steps, steps], CacheConfig(policy="ttl", lookahead=2, prefetch_steps=2))
        6
    """
    distance = reuse_distance(cache)
    reuse = sum_reuse([_count_reuse(distances, distance) for distances in tables])
    return peak_cache_rows(reuse, cache.prefetch_steps)


def _count_reuse(distances: Iterable[NDArray[np.integer]], within: int) -> StepReuse:
    entries: list[int] = []
    kept: list[int] = []  # by step, rows that are kept for their next use
    arriving = np.zeros(1024, np.int64)  # by step, rows that were kept for it
    for step, step_distances in enumerate(distances):
        is_kept = (step_distances != NEVER) & (step_distances <= within)
        counts = np.bincount(step_distances[is_kept])
        entries.append(len(step_distances))
        kept.append(int(counts.sum()))
        top = step + len(counts)
        if top > len(arriving):
            arriving = np.concatenate([arriving, np.zeros(top, np.int64)])
        arriving[step:top] += counts
    return StepReuse(
        np.array(entries, np.int64), np.array(kept, np.int64), arriving[: len(entries)]
    )


def reuse_distance(cache: CacheConfig) -> int:
    """Return the distance to its next use within which a row must stay in a cache."""
    return cache.prefetch_steps if cache.policy == "belady" else cache.lookahead


def check_cache_size(tables: Iterable[Iterable[NDArray[np.integer]]], cache: CacheConfig) -> None:
    """Raise PlanError if the cache is too small for the next-use distances of the tables' steps.

    Raises:
        PlanError: has the size that works.
    """
    if cache.rows is not None and (required := required_rows(tables, cache)) > cache.rows:
        raise cache_too_small(cache, required)

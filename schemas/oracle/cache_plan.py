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

Sources: BagPipe (SOSP 2023), the section on the oracle cacher; Belady, "A study of replacement
algorithms" (1966).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice

import numpy as np
from numpy.typing import NDArray

from presage.schemas.arrays import Array
from presage.schemas.config.train import CacheConfig
from presage.schemas.errors import PlanError
from presage.schemas.oracle.next_uses import NEVER
from presage.schemas.oracle.reuse import StepReuse, peak_cache_rows

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
    """Cached rows. Memory: 4 bytes per number, 24 to 64 bytes per slot.

    Attributes:
        queue: rows that may be evicted, until their next use comes near.
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
        self.queue = NextUseQueue()
        self.num_rows = 0

    @classmethod
    def restored(cls, keyframe: Keyframe, prefetch_steps: int) -> CacheState:
        """Return the state of a keyframe."""
        state = cls()
        state._reserve_slots(keyframe.num_slots)
        state._num_slots = keyframe.num_slots
        state._put(keyframe.numbers, keyframe.slots)
        state._last_use[keyframe.slots] = keyframe.last_use
        state._next_use[keyframe.slots] = keyframe.next_use
        state._release(keyframe.free)
        state.num_rows = len(keyframe.numbers)
        window_end = keyframe.train_step + prefetch_steps
        is_evictable = keyframe.next_use > window_end
        state.queue.add(keyframe.next_use[is_evictable], keyframe.slots[is_evictable], window_end)
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


class CachePlan(Iterator[PlanStep]):
    """Iterator over the plan of one table; linear in entries."""

    def __init__(
        self,
        steps: Iterable[IndexStep],
        cache: CacheConfig,
        *,
        first_step: int = 0,
        flush_every: int | None = None,
        start: Keyframe | None = None,
    ) -> None:
        """Create a plan; nothing is read yet.

        Args:
            steps: ascending numbers and next-use distances of each step, from the first one on.
            cache: policy and limits; `rows` includes rows in flight.
            first_step: first step of the plan, with an empty cache.
            flush_every: interval of steps at which all cached rows are written to the store.
            start: state of a plan with the same settings to resume from; replaces `first_step`.
        """
        self._steps = iter(steps)
        self._cache = cache
        self._flush_every = flush_every
        self._window: deque[_PrefetchedStep] = deque()  # steps whose fetches are issued
        self._next = first_step if start is None else start.train_step
        self._start = start
        self._state = (
            CacheState() if start is None else CacheState.restored(start, cache.prefetch_steps)
        )

    def __next__(self) -> PlanStep:
        """Return the next step.

        Raises:
            PlanError: `cache.rows` is too small for a step from here on; has the size that works.
        """
        step = self._advance()
        if step is None:
            raise StopIteration
        limit = self._cache.rows
        if limit is not None and step.resident_rows > limit:
            sizes = [step.resident_rows, *(s.resident_rows for s in iter(self._advance, None))]
            at = f" and {sizes[0]} at step {step.train_step}"
            raise cache_too_small(self._cache, max(sizes), at=at)
        return step

    def keyframe(self) -> Keyframe:
        """Return the state before the next step."""
        self._fill()
        return self._state.keyframe(self._next)

    def _advance(self) -> PlanStep | None:
        self._fill()
        if not self._window:
            return None
        step, oldest = self._next, self._window.popleft()
        resident_rows = self._state.num_rows
        evicted = self._state.evict(self._finish(step, oldest))
        # usually one step; more if the index was extended since the window was filled
        while len(self._window) <= self._cache.prefetch_steps:
            following = next(self._steps, None)
            if following is None:
                break
            slots = self._state.slots_of(following[0])
            victims = self._select_victims(slots, step + self._cache.prefetch_steps + 1)
            if len(victims):
                evicted = evicted.concat(self._state.evict(victims))
            self._window.append(self._prefetch(following, slots))
        self._next += 1
        return PlanStep(
            train_step=step,
            numbers=oldest.numbers,
            slots=oldest.slots,
            fetch=oldest.fetch,
            evict=evicted.numbers,
            evict_slots=evicted.slots,
            next_use=evicted.next_use,
            write_back=evicted.last_use >= self._last_flush(step),
            resident_rows=resident_rows,
        )

    def _fill(self) -> None:
        """Issue the fetches of the first steps; after a keyframe, restore those in flight.

        The window of a keyframe may be shorter: the index may have been extended since.
        """
        if self._window:
            return
        unused = None if self._start is None else self._state.unused()
        self._start = None
        for step in islice(self._steps, self._cache.prefetch_steps + 1):
            slots = self._state.slots_of(step[0])
            if unused is not None and (slots == ABSENT).any():
                if self._window:
                    self._steps = chain([step], self._steps)  # fetched when there is space
                    return
                unused = None  # no row is in flight
            if unused is None:
                self._window.append(self._prefetch(step, slots))
            else:
                self._window.append(_PrefetchedStep(*step, slots, unused[slots]))
                unused[slots] = False

    def _prefetch(self, step: IndexStep, slots: NDArray[np.int64]) -> _PrefetchedStep:
        numbers, distances = step
        fetch = slots == ABSENT
        slots[fetch] = self._state.insert(numbers[fetch])
        return _PrefetchedStep(numbers, distances, slots, fetch)

    def _finish(self, train_step: int, trained: _PrefetchedStep) -> NDArray[np.int64]:
        """Record a trained step; return the slots of the rows that are evicted at once."""
        never = trained.distances == NEVER
        next_use = np.where(never, NEVER_AGAIN, train_step + trained.distances.astype(np.int64))
        self._state.record_use(trained.slots, train_step, next_use)
        if self._cache.policy == "ttl":
            return trained.slots[never | (trained.distances > self._cache.lookahead)]
        if self._cache.rows is not None:
            window_end = train_step + self._cache.prefetch_steps
            is_evictable = next_use > window_end  # the others are used in the window
            self._state.queue.add(next_use[is_evictable], trained.slots[is_evictable], window_end)
        return trained.slots[never]

    def _select_victims(self, slots: NDArray[np.int64], train_step: int) -> NDArray[np.int64]:
        if self._cache.policy == "ttl" or self._cache.rows is None:
            return np.empty(0, np.int64)
        fetches = int((slots == ABSENT).sum())
        excess = self._state.num_rows + fetches - self._cache.rows
        return self._state.queue.take(max(0, excess), train_step)

    def _last_flush(self, train_step: int) -> int:
        """Return the step of the last flush: rows used since then have unwritten changes."""
        every = self._flush_every
        return 0 if every is None else train_step // every * every


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
    accesses = fetched = written = peak = 0
    for step in plan:
        accesses += len(step.numbers)
        fetched += int(step.fetch.sum())
        written += int(step.write_back.sum())
        peak = max(peak, step.resident_rows)
    return PlanSummary(accesses, fetched, written, peak)


def required_rows(distances: Iterable[NDArray[np.integer]], cache: CacheConfig) -> int:
    """Return the smallest cache size of a plan, from next-use distances alone.

    `ttl` needs the rows kept for a later use and those of the window, prefetch_steps + 1 steps;
    `belady` only those of the window, which a time to live of `prefetch_steps` keeps.

    Example:
        >>> steps = [np.array([2, 0]), np.array([0]), np.array([0])]
        >>> required_rows(steps, CacheConfig(policy="belady", prefetch_steps=1))
        3
        >>> required_rows(steps, CacheConfig(policy="ttl", lookahead=2, prefetch_steps=2))
        3
    """
    ttl = reuse_distance(cache)
    entries: list[int] = []
    kept: list[int] = []  # by step, rows that are kept for their next use
    arriving = np.zeros(1024, np.int64)  # by step, rows that were kept for it
    for step, step_distances in enumerate(distances):
        is_kept = (step_distances != NEVER) & (step_distances <= ttl)
        counts = np.bincount(step_distances[is_kept])
        entries.append(len(step_distances))
        kept.append(int(counts.sum()))
        top = step + len(counts)
        if top > len(arriving):
            arriving = np.concatenate([arriving, np.zeros(top, np.int64)])
        arriving[step:top] += counts
    num_rows, arrived = np.array(entries, np.int64), arriving[: len(entries)]
    reuse = StepReuse(num_rows, np.array(kept, np.int64), arrived)
    return peak_cache_rows(reuse, cache.prefetch_steps)


def reuse_distance(cache: CacheConfig) -> int:
    """Return the distance to its next use within which a row must stay in a cache."""
    return cache.prefetch_steps if cache.policy == "belady" else cache.lookahead


def check_cache_size(
    tables: Mapping[str, Iterable[NDArray[np.integer]]], cache: CacheConfig
) -> None:
    """Raise PlanError if the cache is too small for the next-use distances of each step of a table.

    Raises:
        PlanError: names the table that needs the most rows, and how many.
    """
    if cache.rows is None or not tables:
        return
    required = {table: required_rows(distances, cache) for table, distances in tables.items()}
    largest = max(required, key=lambda table: required[table])
    if required[largest] > cache.rows:
        raise cache_too_small(cache, required[largest], table=largest)

"""The cache plan.

A pure streaming function of the index that says what to fetch, evict and write back at each step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice

import numpy as np
from numpy.typing import NDArray

from schemas.arrays import Array, Jagged
from schemas.config.train import CacheConfig
from schemas.errors import PlanError
from schemas.oracle import NEVER

# A priority queue of cached rows by their next use, worked on by whole arrays.
#
# Batches come in as ascending runs of 64-bit keys (step of the next use, then slot), runs of
# similar length are merged, and the largest keys are cut from the ends of all runs at once. A row
# whose next use arrives needs no removal: its key is then below every key that may still be asked
# for, and goes when its run is merged. So a key is sorted log2(rows of the cache / rows of a
# step) times at most, and no Python object stands for a row.

_SLOT_BITS = 32
_SLOT_MASK = (1 << _SLOT_BITS) - 1


class NextUseQueue:
    """Slots of cached rows; gives out those whose next use is farthest."""

    def __init__(self) -> None:
        """Start empty."""
        self._runs: list[NDArray[np.int64]] = []

    def add(self, next_steps: NDArray[np.int64], slots: NDArray[np.int64], now: int) -> None:
        """Add rows.

        Args:
            next_steps: (n,) step of each row's next use, above `now`.
            slots: (n,) where each lies, below 2**32; distinct among the rows that still wait.
            now: rows whose next use is at most this step are no longer asked for.
        """
        run = (next_steps << _SLOT_BITS) | slots
        run.sort()
        floor = (now + 1) << _SLOT_BITS
        while self._runs and len(self._runs[-1]) < 2 * len(run):
            before = self._runs.pop()
            before = before[np.searchsorted(before, floor) :]
            run = np.concatenate([before, run])
            run.sort(kind="stable")  # two ascending halves: merged in one pass
        if len(run):
            self._runs.append(run)

    def take(self, count: int, after: int) -> NDArray[np.int64]:
        """Remove the rows whose next use is farthest; of equal ones those with the largest slot.

        Args:
            count: rows wanted.
            after: rows whose next use is at most this step stay.

        Returns:
            (at most count,) their slots, by ascending next use.
        """
        floor = (after + 1) << _SLOT_BITS
        ends = [run[-count:] for run in self._runs] if count else []
        found = np.concatenate([*ends, np.empty(0, np.int64)])
        found = np.sort(found[found >= floor])[-count:] if count else found
        if len(found):
            cuts = [int(np.searchsorted(run, found[0])) for run in self._runs]
            self._runs = [run[:cut] for run, cut in zip(self._runs, cuts, strict=True) if cut]
        return found & _SLOT_MASK


ABSENT = -1
"""Slot of a row that is not cached."""
UNUSED = -1
"""Last use of a row that was read and not used yet."""
NEVER_AGAIN = -1
"""Next use of a row that has none."""


@dataclass(frozen=True, slots=True)
class Keyframe:
    """What a plan needs to go on before a step, as if it had never stopped.

    Attributes:
        train_step: the step that comes next.
        numbers: (n,) int64, rows in the cache, those in flight included.
        slots: (n,) int64, where each lies.
        last_use: (n,) int64, step of each row's last use, -1 when it was read and not used yet.
        next_use: (n,) int64, step of each row's next use after its last, 0 without a last.
        free: (m,) int64, slots that were given back, the next one to be taken last.
        num_slots: slots handed out so far, free ones included.
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
    """Rows that leave the cache.

    Attributes:
        slots: (n,) int64, where they lay.
        numbers: (n,) int64.
        last_use: (n,) int64, step of each row's last use.
        next_use: (n,) int64, step of its next one, or `NEVER_AGAIN`.
    """

    slots: NDArray[np.int64]
    numbers: NDArray[np.int64]
    last_use: NDArray[np.int64]
    next_use: NDArray[np.int64]

    def joined(self, other: EvictedRows) -> EvictedRows:
        """Return these rows and then the others."""
        return EvictedRows(
            np.concatenate([self.slots, other.slots]),
            np.concatenate([self.numbers, other.numbers]),
            np.concatenate([self.last_use, other.last_use]),
            np.concatenate([self.next_use, other.next_use]),
        )


class CacheState:
    """Rows in the cache. Memory: 4 bytes for each number seen, 24 to 64 for each slot.

    Attributes:
        num_rows: rows in the cache, those in flight included.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._slot_of = np.empty(0, np.int32)  # by number
        self._numbers = np.empty(0, np.int64)  # by slot
        self._last_use = np.empty(0, np.int64)  # by slot
        self._next_use = np.empty(0, np.int64)  # by slot
        self._free = np.empty(0, np.int64)  # a stack
        self._num_free = 0
        self._num_slots = 0
        self._farthest = NextUseQueue()
        self.num_rows = 0

    @classmethod
    def restored(cls, keyframe: Keyframe, prefetch_steps: int) -> CacheState:
        """Return what a keyframe was made from."""
        found = cls()
        found._reserve_slots(keyframe.num_slots)
        found._num_slots = keyframe.num_slots
        found._put(keyframe.numbers, keyframe.slots)
        found._last_use[keyframe.slots] = keyframe.last_use
        found._next_use[keyframe.slots] = keyframe.next_use
        found._give_back(keyframe.free)
        found.num_rows = len(keyframe.numbers)
        window_end = keyframe.train_step + prefetch_steps
        waits = keyframe.next_use > window_end
        found.wait(keyframe.slots[waits], keyframe.next_use[waits], window_end)
        return found

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

    def find(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the slot of each row, `ABSENT` where it is not cached.

        Args:
            numbers: (n,) ascending.
        """
        top = int(numbers[-1]) + 1 if len(numbers) else 0
        if top > len(self._slot_of):
            self._slot_of = _longer(self._slot_of, top, ABSENT)
        return self._slot_of[numbers].astype(np.int64)

    def enter(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Give rows that `find` did not find a slot each: those given back last first, then new."""
        count = len(numbers)
        old = self._free[max(0, self._num_free - count) : self._num_free]
        self._num_free -= len(old)
        top = self._num_slots + count - len(old)
        slots = np.concatenate([old, np.arange(self._num_slots, top)])
        self._reserve_slots(top)
        self._num_slots = top
        self._put(numbers, slots)
        self._last_use[slots] = UNUSED
        self._next_use[slots] = 0
        self.num_rows += count
        return slots

    def use(self, slots: NDArray[np.int64], train_step: int, next_use: NDArray[np.int64]) -> None:
        """Remember when rows were used, and when they will be again."""
        self._last_use[slots] = train_step
        self._next_use[slots] = next_use

    def unused(self) -> NDArray[np.bool_]:
        """Return for each slot whether its row was read and not used yet."""
        return self._resident_slots() & (self._last_use[: self._num_slots] == UNUSED)

    def wait(self, slots: NDArray[np.int64], next_steps: NDArray[np.int64], now: int) -> None:
        """Let rows wait for their next use; they may be taken for others until it comes near."""
        self._farthest.add(next_steps, slots, now)

    def farthest(self, count: int, after: int) -> NDArray[np.int64]:
        """Return the slots of at most `count` waiting rows whose next use is farthest.

        Rows whose next use comes at step `after` or before are not among them.
        """
        return self._farthest.take(count, after)

    def leave(self, slots: NDArray[np.int64]) -> EvictedRows:
        """Free slots and return the rows that lay there."""
        found = EvictedRows(
            slots, self._numbers[slots], self._last_use[slots], self._next_use[slots]
        )
        self._slot_of[found.numbers] = ABSENT
        self._give_back(slots)
        self.num_rows -= len(slots)
        return found

    def _put(self, numbers: NDArray[np.int64], slots: NDArray[np.int64]) -> None:
        top = int(numbers.max(initial=-1)) + 1
        if top > len(self._slot_of):
            self._slot_of = _longer(self._slot_of, top, ABSENT)
        self._slot_of[numbers] = slots
        self._numbers[slots] = numbers

    def _give_back(self, slots: NDArray[np.int64]) -> None:
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


# Which rows of a step belong to one replica, and which several replicas share.
#
# A step's blocks are split into runs, one per replica, in order. A row that the blocks of one
# replica alone touch is local to it; the others are shared, and the replica of the first block
# that touches a row writes it back. Shared rows that the next step needs are on the critical
# path, the others may be synchronised beside it.
#
# Source: BagPipe (SOSP 2023), the section on delayed synchronisation.


@dataclass(frozen=True, slots=True)
class BlockSplit:
    """How the blocks of one step are dealt to replicas.

    Attributes:
        blocks: for each block of the step, in batch order, its distinct numbers.
        edges: (num_replicas + 1,) ascending; replica r has blocks edges[r] to edges[r + 1] - 1.
    """

    blocks: Jagged
    edges: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RowSharing:
    """Who needs the rows of one step.

    Attributes:
        touches: (num_replicas, entries) bool, rows that the blocks of each replica look up.
        owner: (entries,) int64, the replica of the first block: it writes the row back.
        local: (entries,) bool, rows of one replica.
        shared_next: (entries,) bool, rows of several replicas that the next step needs.
        shared_later: (entries,) bool, the other rows of several replicas.
    """

    touches: NDArray[np.bool_]
    owner: NDArray[np.int64]
    local: NDArray[np.bool_]
    shared_next: NDArray[np.bool_]
    shared_later: NDArray[np.bool_]


def classify_rows(
    numbers: NDArray[np.int64], distances: NDArray[np.integer], split: BlockSplit
) -> RowSharing:
    """Tell local rows from shared ones; linear in the rows of the blocks.

    Args:
        numbers: (entries,) ascending numbers of the step.
        distances: (entries,) steps until each is used again.
        split: how the step's blocks are dealt.

    Raises:
        ValueError: the edges do not cover the blocks in order, or blocks and step have other rows.

    Example:
        >>> blocks = Jagged(np.array([4, 7, 7, 9, 7, 9]), np.array([0, 2, 4, 6]))
        >>> split = BlockSplit(blocks, np.array([0, 1, 3]))
        >>> found = classify_rows(np.array([4, 7, 9]), np.array([1, 1, 3]), split)
        >>> found.owner.tolist(), found.local.tolist(), found.shared_next.tolist()
        ([0, 0, 1], [True, False, True], [False, True, False])
    """
    edges, blocks = split.edges, split.blocks
    if edges[0] != 0 or edges[-1] != blocks.num_rows or np.any(np.diff(edges) < 0):
        raise ValueError(
            f"edges must rise from 0 to the {blocks.num_rows} blocks of the step, got "
            f"{edges.tolist()}; split whole blocks"
        )
    num_replicas = len(edges) - 1
    replica_of_block = np.repeat(np.arange(num_replicas), np.diff(edges))
    replicas = np.repeat(replica_of_block, blocks.lengths)
    entries = np.searchsorted(numbers, blocks.values)
    touches = np.zeros((num_replicas, len(numbers)), bool)
    known = entries < len(numbers)
    known[known] = numbers[entries[known]] == blocks.values[known]
    touches[replicas[known], entries[known]] = True
    counts = touches.sum(axis=0)
    if not known.all() or (counts == 0).any():
        raise ValueError(
            f"blocks must hold the rows of their step, got others among {len(blocks.values)}; "
            "take the blocks of the same step"
        )
    local, soon = counts == 1, distances == 1
    return RowSharing(touches, touches.argmax(axis=0), local, ~local & soon, ~local & ~soon)


# What the cache does at each step: a pure streaming function of the index.
#
# Time is that of training. Before step s runs, the reads for step s + `prefetch_steps` are
# issued, so during step s the cache holds the rows of the window s .. s + prefetch_steps, those
# in flight included, and rows that wait for a later use. After step s some rows leave, those that
# changed are written back, and only then the next reads are issued: a read always stands behind
# the write-back that it depends on.
#
# Two policies say which rows leave. A row that is never used again always does.
#
# - `ttl` (BagPipe's): a row leaves after its use when the next one is more than
#   `lookahead` steps away. The cache has the size that this takes.
# - `belady`: the cache has a given size, and when the rows that are read next do
#   not fit, those leave whose next use is farthest. No plan of that size and
#   prefetch reads fewer rows.
#
# Sources: BagPipe (SOSP 2023), the section on the oracle cacher; Belady, "A study of replacement
# algorithms" (1966).

IndexStep = tuple[NDArray[np.int64], NDArray[np.int32]]
"""A step's ascending numbers and their next-use distances."""


@dataclass(frozen=True, slots=True)
class PlanStep:
    """What one step needs of one table's cache.

    Attributes:
        train_step: the step.
        numbers: (entries,) ascending dense numbers of the step's rows.
        slots: (entries,) int64, where each row lies in the cache during the step.
        fetch: (entries,) bool, rows that are read for the step, `prefetch_steps` before it.
        evict: (n,) int64, numbers of the rows that leave after the step, before the next reads.
        evict_slots: (n,) int64, where they lie.
        next_use: (n,) int64, step of their next use, `NEVER_AGAIN` where there is none.
        write_back: (n,) bool, those that changed since they were last written.
        resident_rows: rows in the cache during the step, those read for later steps included.
        sharing: which rows several replicas share; None without splits.
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
    sharing: RowSharing | None = None


@dataclass(frozen=True, slots=True)
class _PrefetchedStep:
    """A step whose reads are issued and that is not trained yet."""

    numbers: NDArray[np.int64]
    distances: NDArray[np.int32]
    slots: NDArray[np.int64]
    fetch: NDArray[np.bool_]


class Plan(Iterator[PlanStep]):
    """The plan of one table, step by step; the index is read as far ahead as it must be."""

    def __init__(
        self,
        steps: Iterable[IndexStep],
        cache: CacheConfig,
        *,
        first_step: int = 0,
        flush_every: int | None = None,
        splits: Iterable[BlockSplit] | None = None,
        start: Keyframe | None = None,
    ) -> None:
        """Keep the parts, see `plan`; nothing is read yet."""
        self._steps = iter(steps)
        self._cache = cache
        self._flush_every = flush_every
        self._splits = None if splits is None else iter(splits)
        self._window: deque[_PrefetchedStep] = deque()  # steps whose reads are issued
        self._next = first_step
        self._start = start
        self._residents = (
            CacheState() if start is None else CacheState.restored(start, cache.prefetch_steps)
        )

    def __next__(self) -> PlanStep:
        """Return the next step.

        Raises:
            PlanError: `cache.rows` is too small for a step from here on; names the size that works.
        """
        found = self._advance()
        if found is None:
            raise StopIteration
        limit = self._cache.rows
        if limit is not None and found.resident_rows > limit:
            sizes = [found.resident_rows, *(s.resident_rows for s in iter(self._advance, None))]
            at = f" and {sizes[0]} at step {found.train_step}"
            raise cache_too_small(self._cache, max(sizes), at=at)
        return found

    def keyframe(self) -> Keyframe:
        """Return what a plan needs to start before the step that comes next.

        At most `cache.rows` rows, and as many free slots.
        """
        self._fill()
        return self._residents.keyframe(self._next)

    def _advance(self) -> PlanStep | None:
        self._fill()
        if not self._window:
            return None
        step, oldest = self._next, self._window.popleft()
        resident_rows = self._residents.num_rows
        leaving = self._residents.leave(self._finish(step, oldest))
        # one step as a rule; more where the window ended with what was known before
        while len(self._window) <= self._cache.prefetch_steps:
            following = next(self._steps, None)
            if following is None:
                break
            found = self._residents.find(following[0])
            pushed = self._make_room(found, step + self._cache.prefetch_steps + 1)
            if len(pushed):
                leaving = leaving.joined(self._residents.leave(pushed))
            self._window.append(self._admit(following, found))
        self._next += 1
        return PlanStep(
            train_step=step,
            numbers=oldest.numbers,
            slots=oldest.slots,
            fetch=oldest.fetch,
            evict=leaving.numbers,
            evict_slots=leaving.slots,
            next_use=leaving.next_use,
            write_back=leaving.last_use >= self._flushed(step),
            resident_rows=resident_rows,
            sharing=self._sharing(oldest),
        )

    def _fill(self) -> None:
        """Issue the reads of the first steps; from a keyframe, find those that are in flight.

        The window of a keyframe may be short: more steps are known by now than when it was made.
        """
        if self._window:
            return
        unused = None if self._start is None else self._residents.unused()
        self._start = None
        for step in islice(self._steps, self._cache.prefetch_steps + 1):
            slots = self._residents.find(step[0])
            if unused is not None and (slots == ABSENT).any():
                if self._window:
                    self._steps = chain([step], self._steps)  # read when there is room
                    return
                unused = None  # nothing is in flight
            if unused is None:
                self._window.append(self._admit(step, slots))
            else:
                self._window.append(_PrefetchedStep(*step, slots, unused[slots]))
                unused[slots] = False

    def _admit(self, step: IndexStep, slots: NDArray[np.int64]) -> _PrefetchedStep:
        """Issue the reads of a step into free slots."""
        numbers, distances = step
        fetch = slots == ABSENT
        slots[fetch] = self._residents.enter(numbers[fetch])
        return _PrefetchedStep(numbers, distances, slots, fetch)

    def _finish(self, train_step: int, done: _PrefetchedStep) -> NDArray[np.int64]:
        """Let the rows of a trained step wait; return the slots of those that leave at once."""
        never = done.distances == NEVER
        next_use = np.where(never, NEVER_AGAIN, train_step + done.distances.astype(np.int64))
        self._residents.use(done.slots, train_step, next_use)
        if self._cache.policy == "ttl":
            return done.slots[never | (done.distances > self._cache.lookahead)]
        if self._cache.rows is not None:
            window_end = train_step + self._cache.prefetch_steps
            waits = next_use > window_end  # the others are held by a step of the window
            self._residents.wait(done.slots[waits], next_use[waits], window_end)
        return done.slots[never]

    def _make_room(self, found: NDArray[np.int64], train_step: int) -> NDArray[np.int64]:
        """Return the slots of the rows that make place for the reads of a step."""
        if self._cache.policy == "ttl" or self._cache.rows is None:
            return np.empty(0, np.int64)
        reads = int((found == ABSENT).sum())
        return self._residents.farthest(
            max(0, self._residents.num_rows + reads - self._cache.rows), train_step
        )

    def _flushed(self, train_step: int) -> int:
        """Return the step from which on rows changed that are not written; all when 0."""
        every = self._flush_every
        return 0 if every is None else train_step // every * every

    def _sharing(self, step: _PrefetchedStep) -> RowSharing | None:
        if self._splits is None:
            return None
        return classify_rows(step.numbers, step.distances, next(self._splits))


def plan(
    steps: Iterable[IndexStep],
    cache: CacheConfig,
    *,
    first_step: int = 0,
    flush_every: int | None = None,
    splits: Iterable[BlockSplit] | None = None,
    start: Keyframe | None = None,
) -> Plan:
    """Plan the cache of one table, linear in entries.

    Args:
        steps: for each step, from the first on, its ascending numbers and their next-use
            distances.
        cache: policy and limits; `rows` counts those in flight, too.
        first_step: step that the plan starts at, with an empty cache.
        flush_every: every so many steps all cached rows are written to their store, and stay.
        splits: for each step how its blocks are dealt to replicas, when there are several.
        start: state to go on from, of a plan with the same settings; `first_step` is then its own.

    Raises:
        PlanError: while the plan is read, a step does not fit `cache.rows`; it names the smallest
            size with which all steps from `first_step` on work.
    """
    return Plan(
        steps,
        cache,
        first_step=first_step if start is None else start.train_step,
        flush_every=flush_every,
        splits=splits,
        start=start,
    )


def cache_too_small(
    cache: CacheConfig, required_rows: int, *, table: str | None = None, at: str = ""
) -> PlanError:
    """Return the refusal of a cache that is too small.

    Args:
        cache: policy and limits.
        required_rows: smallest size that works.
        table: table name, when it is known.
        at: what was found where, after the size that was given.
    """
    name = "cache" if table is None else f"cache of table {table!r}"
    what, fewer = (
        ("the rows that wait and those of the window", "lookahead or prefetch_steps")
        if cache.policy == "ttl"
        else ("the rows of the window", "prefetch_steps")
    )
    return PlanError(
        f"{name} must hold {what}, got cache_rows={cache.rows}{at}; use at least {required_rows}, "
        f"or a smaller {fewer}",
        required_rows=required_rows,
    )


@dataclass(frozen=True, slots=True)
class PlanSummary:
    """Totals of a plan over all steps.

    Attributes:
        num_accesses: entries, summed over steps.
        fetched_rows: reads from the store, first uses included.
        written_rows: rows written back when they leave the cache.
        peak_cache_rows: most rows in the cache at once, with the rows read for later steps.
    """

    num_accesses: int
    fetched_rows: int
    written_rows: int
    peak_cache_rows: int

    @property
    def hit_rate(self) -> float:
        """Share of accesses that need no read."""
        return 1.0 - self.fetched_rows / self.num_accesses if self.num_accesses else 0.0


def summarize(plan: Iterable[PlanStep]) -> PlanSummary:
    """Add up a plan.

    Args:
        plan: the plan of one table.
    """
    accesses = fetched = written = peak = 0
    for step in plan:
        accesses += len(step.numbers)
        fetched += int(step.fetch.sum())
        written += int(step.write_back.sum())
        peak = max(peak, step.resident_rows)
    return PlanSummary(accesses, fetched, written, peak)


def required_rows(distances: Iterable[NDArray[np.integer]], cache: CacheConfig) -> int:
    """Return the smallest cache with which a plan works, from next-use distances alone.

    `ttl` needs the rows that wait and those of the window, prefetch_steps + 1 steps. `belady` needs
    those of the window, which are what a time to live of `prefetch_steps` keeps.

    Args:
        distances: for each step those of its entries.
        cache: policy and limits.

    Example:
        >>> steps = [np.array([2, 0]), np.array([0]), np.array([0])]
        >>> required_rows(steps, CacheConfig(policy="belady", prefetch_steps=1))
        3
        >>> required_rows(steps, CacheConfig(policy="ttl", lookahead=2, prefetch_steps=2))
        3
    """
    reach = cache.prefetch_steps if cache.policy == "belady" else cache.lookahead
    entries: list[int] = []
    kept: list[int] = []  # by step, rows that wait for their next use
    arriving = np.zeros(1024, np.int64)  # by step, rows that waited for it
    for step, found in enumerate(distances):
        counts = np.bincount(found[(found != NEVER) & (found <= reach)])
        entries.append(len(found))
        kept.append(int(counts.sum()))
        top = step + len(counts)
        if top > len(arriving):
            arriving = np.concatenate([arriving, np.zeros(top, np.int64)])
        arriving[step:top] += counts
    if not entries:
        return 0
    arrived = arriving[: len(entries)]
    waiting = np.cumsum(np.array(kept) - arrived) - kept + arrived  # before the step
    reads = np.cumsum(np.array(entries) - arrived)
    ends = np.minimum(np.arange(len(entries)) + cache.prefetch_steps, len(entries) - 1)
    in_window = reads[ends] - reads + entries - arrived
    return int((waiting + in_window).max())


def check_cache_size(
    tables: Mapping[str, Iterable[NDArray[np.integer]]], cache: CacheConfig
) -> None:
    """Refuse a cache that is too small, before anything is trained.

    Args:
        tables: by table, for each step the next-use distances of its entries.
        cache: policy and limits; the limit holds for each table.

    Raises:
        PlanError: `cache.rows` is below what some plan needs; names the table that needs the most,
            and how much: a size that works for all.
    """
    if cache.rows is None or not tables:
        return
    required = {table: required_rows(distances, cache) for table, distances in tables.items()}
    largest = max(required, key=lambda table: required[table])
    if required[largest] > cache.rows:
        raise cache_too_small(cache, required[largest], table=largest)

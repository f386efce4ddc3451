"""What the cache does at each step: a pure streaming function of the index.

Time is that of training. Before step s runs, the reads for step
s + `prefetch_steps` are issued, so during step s the cache holds the rows of the
window s .. s + prefetch_steps, those in flight included, and rows that wait for
a later use. After step s some rows leave, those that changed are written back,
and only then the next reads are issued: a read always stands behind the
write-back that it depends on.

Two policies say which rows leave. A row that is never used again always does.

- `ttl` (BagPipe's): a row leaves after its use when the next one is more than
  `lookahead` steps away. The cache has the size that this takes.
- `belady`: the cache has a given size, and when the rows that are read next do
  not fit, those leave whose next use is farthest. No plan of that size and
  prefetch reads fewer rows.

Sources: BagPipe (SOSP 2023), the section on the oracle cacher; Belady, "A study
of replacement algorithms" (1966).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice

import numpy as np
from numpy.typing import NDArray

from schemas.errors import PlanError
from schemas.job_train import CacheConfig
from schemas.oracle import NEVER
from schemas.plan_slots import ABSENT, NEVER_AGAIN, Keyframe, Residents
from schemas.plan_split import Sharing, Split, share

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
    sharing: Sharing | None = None


@dataclass(frozen=True, slots=True)
class _Admitted:
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
        splits: Iterable[Split] | None = None,
        start: Keyframe | None = None,
    ) -> None:
        """Keep the parts, see `plan`; nothing is read yet."""
        self._steps = iter(steps)
        self._cache = cache
        self._flush_every = flush_every
        self._splits = None if splits is None else iter(splits)
        self._window: deque[_Admitted] = deque()  # steps whose reads are issued
        self._next = first_step
        self._start = start
        self._residents = (
            Residents() if start is None else Residents.restored(start, cache.prefetch_steps)
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
            raise too_small(self._cache, max(sizes), at=at)
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
                self._window.append(_Admitted(*step, slots, unused[slots]))
                unused[slots] = False

    def _admit(self, step: IndexStep, slots: NDArray[np.int64]) -> _Admitted:
        """Issue the reads of a step into free slots."""
        numbers, distances = step
        fetch = slots == ABSENT
        slots[fetch] = self._residents.enter(numbers[fetch])
        return _Admitted(numbers, distances, slots, fetch)

    def _finish(self, train_step: int, done: _Admitted) -> NDArray[np.int64]:
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

    def _sharing(self, step: _Admitted) -> Sharing | None:
        if self._splits is None:
            return None
        return share(step.numbers, step.distances, next(self._splits))


def plan(
    steps: Iterable[IndexStep],
    cache: CacheConfig,
    *,
    first_step: int = 0,
    flush_every: int | None = None,
    splits: Iterable[Split] | None = None,
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


def too_small(
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

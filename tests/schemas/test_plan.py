"""Time-to-live plans against a brute-force cache, and what a cache that is too small is told."""

import re
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from schemas.errors import PlanError
from schemas.oracle import next_use
from schemas.plan import PlanStep, PlanSummary, plan_ttl, summarize

NUM_NUMBERS = 9
STEPS = st.lists(st.frozensets(st.integers(0, NUM_NUMBERS - 1), max_size=6), max_size=25)
LOOKAHEADS = st.integers(1, 8)


def indexed(steps: Sequence[frozenset[int]]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Each step's ascending numbers and their next-use distances."""
    ascending = [np.array(sorted(step), np.int64) for step in steps]
    return list(zip(ascending, next_use(ascending, NUM_NUMBERS), strict=True))


def next_step_of(steps: Sequence[frozenset[int]], number: int, now: int) -> int | None:
    """The first step after `now` that uses the number."""
    return next((s for s in range(now + 1, len(steps)) if number in steps[s]), None)


def residents(steps: Sequence[frozenset[int]], lookahead: int) -> list[set[int]]:
    """Rows in the cache during each step, by the rule alone.

    A row is in the cache during a step when the step uses it, or when it was used before and
    waits: its last use and its next one are at most `lookahead` steps apart.
    """
    found: list[set[int]] = []
    for now, used in enumerate(steps):
        waiting: set[int] = set()
        for number in range(NUM_NUMBERS):
            before = [s for s in range(now) if number in steps[s]]
            after = next_step_of(steps, number, now)
            if before and after is not None and after - before[-1] <= lookahead:
                waiting.add(number)
        found.append(set(used) | waiting)
    return found


def replay(plan: Sequence[PlanStep]) -> Iterator[dict[int, int]]:
    """Obey a plan literally and yield slot by resident number during each step."""
    slot_of: dict[int, int] = {}
    for step in plan:
        for number, slot, fetch in zip(step.numbers, step.slots, step.fetch, strict=True):
            if fetch:
                assert number not in slot_of, "a resident row is fetched"
                assert slot not in slot_of.values(), "a slot is taken twice"
                slot_of[int(number)] = int(slot)
            assert slot_of[int(number)] == slot, "a resident row moved"
        yield dict(slot_of)
        for number in step.numbers[step.evict]:
            del slot_of[int(number)]


@given(STEPS, LOOKAHEADS)
def test_plan_keeps_exactly_the_rows_of_the_rule(
    steps: list[frozenset[int]], lookahead: int
) -> None:
    plan = list(plan_ttl(indexed(steps), lookahead))
    caches = list(replay(plan))
    assert [set(cache) for cache in caches] == residents(steps, lookahead)
    assert [step.resident_rows for step in plan] == [len(cache) for cache in caches]
    for cache in caches:
        assert len(set(cache.values())) == len(cache)


@given(STEPS, LOOKAHEADS)
def test_plan_fetches_a_row_exactly_when_it_is_not_resident(
    steps: list[frozenset[int]], lookahead: int
) -> None:
    present: set[int] = set()
    for now, step in enumerate(plan_ttl(indexed(steps), lookahead)):
        assert step.numbers.tolist() == sorted(steps[now])
        assert step.fetch.tolist() == [n not in present for n in step.numbers.tolist()]
        present |= set(step.numbers.tolist())
        present -= set(step.numbers[step.evict].tolist())
    assert not present  # after the last step everything was written back


@given(STEPS, LOOKAHEADS)
def test_plan_evicts_exactly_what_waits_longer_than_the_lookahead(
    steps: list[frozenset[int]], lookahead: int
) -> None:
    for now, step in enumerate(plan_ttl(indexed(steps), lookahead)):
        for number, evict in zip(step.numbers.tolist(), step.evict.tolist(), strict=True):
            after = next_step_of(steps, number, now)
            assert evict == (after is None or after - now > lookahead)


@given(STEPS, LOOKAHEADS)
def test_write_back_of_a_row_precedes_its_next_fetch_even_when_prefetched(
    steps: list[frozenset[int]], lookahead: int
) -> None:
    """A fetch is issued up to `prefetch_steps` <= lookahead steps ahead of its step."""
    written: dict[int, int] = {}
    for now, step in enumerate(plan_ttl(indexed(steps), lookahead)):
        for number in step.numbers[step.fetch].tolist():
            earliest_issue = now - lookahead
            assert number not in written or written[number] < earliest_issue
        written |= dict.fromkeys(step.numbers[step.evict].tolist(), now)


@given(STEPS, LOOKAHEADS)
def test_slots_are_reused_so_that_no_more_than_the_peak_are_named(
    steps: list[frozenset[int]], lookahead: int
) -> None:
    plan = list(plan_ttl(indexed(steps), lookahead))
    named = {slot for step in plan for slot in step.slots.tolist()}
    peak = max((step.resident_rows for step in plan), default=0)
    assert named == set(range(peak))


@given(STEPS, LOOKAHEADS, st.integers(1, 9))
def test_cache_that_is_too_small_names_the_rows_of_the_first_step_that_does_not_fit(
    steps: list[frozenset[int]], lookahead: int, cache_rows: int
) -> None:
    index = indexed(steps)
    sizes = [len(rows) for rows in residents(steps, lookahead)]
    too_large = [step for step, size in enumerate(sizes) if size > cache_rows]
    assume(too_large)
    at = too_large[0]
    message = (
        "cache must hold the rows that wait and those of the step, got "
        f"cache_rows={cache_rows} and {sizes[at]} at step {at}; use at least {sizes[at]}, "
        "or a smaller lookahead"
    )
    with pytest.raises(PlanError, match=f"^{re.escape(message)}$") as caught:
        list(plan_ttl(index, lookahead, cache_rows))
    assert caught.value.required_rows == sizes[at]


def required_rows(
    index: list[tuple[np.ndarray, np.ndarray]], lookahead: int, cache_rows: int
) -> int | None:
    """What the refusal of a cache names, None when the cache works."""
    try:
        list(plan_ttl(index, lookahead, cache_rows))
    except PlanError as error:
        return error.required_rows
    return None


@given(STEPS, LOOKAHEADS)
def test_required_rows_lead_to_a_cache_that_works_and_no_smaller_one_does(
    steps: list[frozenset[int]], lookahead: int
) -> None:
    index = indexed(steps)
    unlimited = list(plan_ttl(index, lookahead))
    peak = max((step.resident_rows for step in unlimited), default=0)
    assume(peak > 1)
    tried = [1]
    while (needed := required_rows(index, lookahead, tried[-1])) is not None:
        assert needed > tried[-1]
        tried.append(needed)
    assert tried[-1] == peak
    limited = plan_ttl(index, lookahead, peak)
    for a, b in zip(limited, unlimited, strict=True):
        np.testing.assert_array_equal(a.slots, b.slots)


@given(STEPS, LOOKAHEADS, st.integers(0, 8))
def test_summarize_equals_a_count_of_rows_in_flight_and_in_cache(
    steps: list[frozenset[int]], lookahead: int, prefetch_steps: int
) -> None:
    plan = list(plan_ttl(indexed(steps), lookahead))
    caches = residents(steps, lookahead)
    fetched = [set(step.numbers[step.fetch].tolist()) for step in plan]
    present = [
        len(cache) + sum(len(rows) for rows in fetched[now + 1 : now + 1 + prefetch_steps])
        for now, cache in enumerate(caches)
    ]
    assert summarize(plan, prefetch_steps) == PlanSummary(
        num_accesses=sum(len(step) for step in steps),
        fetched_rows=sum(len(rows) for rows in fetched),
        peak_cache_rows=max(present, default=0),
    )


def test_hit_rate_is_the_share_of_accesses_that_need_no_read() -> None:
    steps = [frozenset({0, 1}), frozenset({0}), frozenset({1}), frozenset({0})]
    summary = summarize(plan_ttl(indexed(steps), 2), 1)
    assert summary.fetched_rows == 2  # both rows once, then within two steps each time
    assert summary.hit_rate == 1 - 2 / 5
    assert summarize(plan_ttl(indexed(steps), 1), 1).fetched_rows == 4
    assert summarize([], 1).hit_rate == 0.0

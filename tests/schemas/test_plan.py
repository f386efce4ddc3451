"""Plans against slow reference plans and exhaustive search."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from presage.schemas.config.train import CacheConfig
from presage.schemas.errors import PlanError
from presage.schemas.oracle.cache_plan import (
    CachePlan,
    PlanStep,
    check_cache_size,
    plan_table,
    required_rows,
    summarize,
    summarize_tables,
)
from presage.schemas.oracle.next_uses import next_use
from tests.schemas.reference import fewest_fetches, next_step, plan_ref

NUM_NUMBERS = 9
STEPS = st.lists(st.frozensets(st.integers(0, NUM_NUMBERS - 1), max_size=6), max_size=25)
Steps = list[frozenset[int]]


@st.composite
def configs(draw: st.DrawFn, *, limited: bool = False) -> CacheConfig:
    """Any policy with any limits; `limited` gives a cache that may be too small."""
    prefetch_steps = draw(st.integers(1, 4))
    policies: list[Literal["ttl", "belady"]] = ["ttl", "belady"]
    policy = draw(st.sampled_from(policies))
    rows = draw(st.integers(1, 10)) if limited or policy == "belady" else None
    lookahead = prefetch_steps + draw(st.integers(0, 5))
    return CacheConfig(policy=policy, lookahead=lookahead, prefetch_steps=prefetch_steps, rows=rows)


def indexed(steps: Sequence[frozenset[int]]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Each step's ascending numbers and their next-use distances."""
    ascending = [np.array(sorted(step), np.int64) for step in steps]
    return list(zip(ascending, next_use(ascending, NUM_NUMBERS), strict=True))


def fitting(steps: Steps, cache: CacheConfig) -> CacheConfig:
    """The same settings, with a cache large enough."""
    if cache.rows is None:
        return cache
    needed = required_rows([[d for _, d in indexed(steps)]], cache)
    return replace(cache, rows=max(1, needed, cache.rows))


def reference(steps: Steps, cache: CacheConfig) -> list:
    return plan_ref(
        steps,
        cache.policy,
        lookahead=cache.lookahead,
        prefetch_steps=cache.prefetch_steps,
        rows=cache.rows,
    )


def as_lists(step: PlanStep) -> tuple[object, ...]:
    """Everything a step says, to be compared."""
    arrays = (step.numbers, step.slots, step.fetch, step.evict, step.evict_slots, step.write_back)
    return (step.train_step, step.resident_rows, *(a.tolist() for a in arrays))


@given(STEPS, configs())
def test_plan_of_time_to_live_is_that_of_the_reference(steps: Steps, cache: CacheConfig) -> None:
    cache = replace(cache, policy="ttl", rows=None)
    found = list(plan_table(indexed(steps), cache))
    wanted = reference(steps, cache)
    assert len(found) == len(steps)
    for step, ref in zip(found, wanted, strict=True):
        assert set(step.numbers[step.fetch].tolist()) == ref.fetch
        assert set(step.evict.tolist()) == ref.evict
        assert step.resident_rows == len(ref.cache)


@given(STEPS, configs())
def test_belady_reads_as_often_as_the_reference(steps: Steps, cache: CacheConfig) -> None:
    """Rows with the same next use are equally good; which of them leaves is free."""
    cache = fitting(steps, replace(cache, policy="belady", rows=cache.rows or 4))
    found = list(plan_table(indexed(steps), cache))
    wanted = reference(steps, cache)
    assert sum(int(s.fetch.sum()) for s in found) == sum(len(s.fetch) for s in wanted)
    assert [s.resident_rows for s in found] == [len(s.cache) for s in wanted]


@given(
    st.lists(st.frozensets(st.integers(0, 6), max_size=3), max_size=14),
    st.integers(1, 3),
    st.integers(1, 7),
)
def test_belady_reads_as_few_rows_as_any_cache_could(
    steps: Steps, prefetch_steps: int, rows: int
) -> None:
    cache = CacheConfig(policy="belady", prefetch_steps=prefetch_steps, rows=rows)
    fewest = fewest_fetches(steps, prefetch_steps=prefetch_steps, rows=rows)
    fits = required_rows([[d for _, d in indexed(steps)]], cache) <= rows
    assert (fewest is not None) == fits
    if fits:
        assert summarize(plan_table(indexed(steps), cache)).fetched_rows == fewest


@given(STEPS, configs())
def test_plan_obeyed_literally_finds_every_row_in_its_slot(
    steps: Steps, cache: CacheConfig
) -> None:
    cache = fitting(steps, cache)
    issued: dict[int, int] = {}  # slot to number, from the issue of its read on
    planned = list(plan_table(indexed(steps), cache))
    written = dict.fromkeys(range(NUM_NUMBERS), -1)
    peak = max((s.resident_rows for s in planned), default=0)
    reads = 0
    for now, step in enumerate(planned):
        while reads < min(len(planned), now + cache.prefetch_steps + 1):
            coming = planned[reads]
            for slot, number in zip(
                coming.slots[coming.fetch].tolist(), coming.numbers[coming.fetch].tolist(),
                strict=True,
            ):  # fmt: skip
                assert slot not in issued, "a slot is taken twice"
                assert number not in issued.values(), "a row in the cache is read"
                assert written[number] < now, "a row is read before it is written"
                issued[slot] = number
            reads += 1
        assert len(issued) == step.resident_rows <= (cache.rows or NUM_NUMBERS)
        assert [issued[slot] for slot in step.slots.tolist()] == sorted(steps[now])
        assert set(step.slots.tolist()) | set(step.evict_slots.tolist()) <= set(range(peak))
        for slot, number in zip(step.evict_slots.tolist(), step.evict.tolist(), strict=True):
            assert issued.pop(slot) == number
            written[number] = now
    assert not issued  # after the last step everything was written back


@given(STEPS, configs(), st.integers(0, NUM_NUMBERS), st.data())
def test_tables_share_a_cache_as_if_their_rows_were_those_of_one(
    steps: Steps, cache: CacheConfig, first: int, data: st.DataObject
) -> None:
    """Rows with the same next use are equally good, so the sums are equal."""
    tables = {
        "few": [frozenset(n for n in step if n < first) for step in steps],
        "others": [frozenset(n - first for n in step if n >= first) for step in steps],
    }
    cache = fitting(steps, cache)
    of_tables = {table: indexed(own) for table, own in tables.items()}
    distances = [[d for _, d in own] for own in of_tables.values()]
    assert required_rows(distances, cache) == required_rows([[d for _, d in indexed(steps)]], cache)
    stop = data.draw(st.integers(0, len(steps)))
    plan = CachePlan(of_tables, cache)
    found = [next(plan) for _ in range(stop)]
    rest = {table: own[stop:] for table, own in of_tables.items()}
    found += CachePlan(rest, cache, first_step=stop, starts=plan.keyframes())
    wanted = list(plan_table(indexed(steps), cache))
    assert [sum(s.resident_rows for s in step.values()) for step in found] == [
        step.resident_rows for step in wanted
    ]
    sums = {table: summarize(step[table] for step in found) for table in tables}
    assert sum(s.fetched_rows for s in sums.values()) == summarize(wanted).fetched_rows
    assert summarize_tables(found) == (sums if steps else {})
    for table, own in tables.items():
        slots: dict[int, int] = {}
        for now, step in enumerate(each[table] for each in found):
            slots |= dict(
                zip(step.slots[step.fetch].tolist(), step.numbers[step.fetch].tolist(), strict=True)
            )
            assert [slots[slot] for slot in step.slots.tolist()] == sorted(own[now])
            for slot, number in zip(step.evict_slots.tolist(), step.evict.tolist(), strict=True):
                assert slots.pop(slot) == number


@given(STEPS, configs())
def test_no_row_leaves_before_its_last_planned_use_inside_the_window(
    steps: Steps, cache: CacheConfig
) -> None:
    cache = fitting(steps, cache)
    window = cache.lookahead if cache.policy == "ttl" else cache.prefetch_steps
    for step in plan_table(indexed(steps), cache):
        for number in step.evict.tolist():
            later = next_step(steps, number, step.train_step)
            assert later is None or later - step.train_step > window


@given(STEPS, configs(), st.data())
def test_plan_from_a_keyframe_is_the_rest_of_the_plan(
    steps: Steps, cache: CacheConfig, data: st.DataObject
) -> None:
    cache = fitting(steps, cache)
    every = data.draw(st.sampled_from([None, 1, 3]))
    start = data.draw(st.integers(0, len(steps)))
    whole = CachePlan({"items": indexed(steps)}, cache, flush_every=every)
    for _ in range(start):
        next(whole)
    keyframe = whole.keyframes()["items"]
    assert keyframe.train_step == start
    assert len(keyframe.numbers) <= (cache.rows or NUM_NUMBERS)
    assert keyframe.num_slots <= (cache.rows or NUM_NUMBERS)
    again = CachePlan(
        {"items": indexed(steps)[start:]},
        cache,
        first_step=start,
        flush_every=every,
        starts={"items": keyframe},
    )
    same = again.keyframes()["items"]
    for name in ("numbers", "slots", "last_use", "next_use", "free"):
        assert getattr(same, name).tolist() == getattr(keyframe, name).tolist(), name
    assert [as_lists(s["items"]) for s in again] == [as_lists(s["items"]) for s in whole]


@given(STEPS, configs(), st.integers(1, 4))
def test_only_rows_that_changed_since_the_last_flush_are_written_back(
    steps: Steps, cache: CacheConfig, every: int
) -> None:
    cache = fitting(steps, cache)
    for step in plan_table(indexed(steps), cache, flush_every=every):
        flushed = step.train_step // every * every  # all steps before it are in the store
        for number, write in zip(step.evict.tolist(), step.write_back.tolist(), strict=True):
            changed = any(number in steps[s] for s in range(flushed, step.train_step + 1))
            assert write == changed
    for step in plan_table(indexed(steps), cache):
        assert step.write_back.all()


@given(STEPS, configs(limited=True))
def test_cache_that_is_too_small_names_the_smallest_size_of_the_whole_run(
    steps: Steps, cache: CacheConfig
) -> None:
    distances = [d for _, d in indexed(steps)]
    sizes = [len(step.cache) for step in reference(steps, replace(cache, rows=1 << 30))]
    if cache.policy == "belady":  # rows that wait may leave; those of a window may not
        reach = cache.prefetch_steps + 1
        sizes = [len(frozenset().union(*steps[s : s + reach])) for s in range(len(steps))]
    needed = max(sizes, default=0)
    assert required_rows([distances], cache) == needed
    assert cache.rows is not None
    if needed <= cache.rows:
        check_cache_size([[d[:0] for d in distances], distances], cache)
        assert len(list(plan_table(indexed(steps), cache))) == len(steps)
        return
    with pytest.raises(PlanError) as early:
        check_cache_size([[d[:0] for d in distances], distances], cache)
    with pytest.raises(PlanError) as late:
        list(plan_table(indexed(steps), cache))
    assert early.value.required_rows == late.value.required_rows == needed
    works = replace(cache, rows=needed)
    assert len(list(plan_table(indexed(steps), works))) == len(steps)
    if needed > 1:
        with pytest.raises(PlanError):
            list(plan_table(indexed(steps), replace(cache, rows=needed - 1)))


REFUSALS = {
    "ttl": (
        "cache is too small for rows kept for their next use and those of the prefetch window: "
        "cache_rows=2 and 3 at step 0; use at least 4, or a smaller lookahead or prefetch_steps"
    ),
    "belady": (
        "cache is too small for the rows of the prefetch window: cache_rows=2 and 3 at step 0; "
        "use at least 4, or a smaller prefetch_steps"
    ),
}


@pytest.mark.parametrize("policy", REFUSALS)
def test_refusal_names_the_first_step_and_the_size_that_all_need(policy: str) -> None:
    steps = [frozenset({0}), frozenset({1, 2}), frozenset({3, 4}), frozenset({5})]
    cache = CacheConfig(policy=policy, lookahead=1, prefetch_steps=1, rows=2)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=f"^{re.escape(REFUSALS[policy])}$"):
        list(plan_table(indexed(steps), cache))
    named = REFUSALS[policy].replace(" and 3 at step 0", "")
    with pytest.raises(PlanError, match=f"^{re.escape(named)}$"):
        check_cache_size([[d for _, d in indexed(steps)]], cache)


@given(STEPS, st.integers(0, 20), configs())
def test_first_step_only_shifts_the_names_of_steps(
    steps: Steps, first_step: int, cache: CacheConfig
) -> None:
    cache = fitting(steps, cache)
    shifted = [as_lists(s) for s in plan_table(indexed(steps), cache, first_step=first_step)]
    plain = [as_lists(s) for s in plan_table(indexed(steps), cache)]
    assert shifted == [(step[0] + first_step, *step[1:]) for step in plain]  # type: ignore[operator]


@given(STEPS, configs())
def test_plan_reads_the_index_no_farther_than_a_window_ahead(
    steps: Steps, cache: CacheConfig
) -> None:
    cache = fitting(steps, cache)
    read = 0

    def counted() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        nonlocal read
        for step in indexed(steps):
            read += 1
            yield step

    for step in plan_table(counted(), cache):
        assert read <= step.train_step + cache.prefetch_steps + 2


@pytest.mark.nightly
@pytest.mark.parametrize("rows", [pytest.param(64, marks=pytest.mark.chaos), 4000])
def test_belady_over_a_published_trace_beats_lru_of_half_the_size(
    rows: int, published: tuple[list[tuple[np.ndarray, np.ndarray]], list[int]]
) -> None:
    steps, trace = published
    cache = CacheConfig(policy="belady", prefetch_steps=1, rows=rows)
    found = summarize(plan_table(steps, cache))
    hits = found.num_accesses - found.fetched_rows
    assert found.num_accesses == 113_872
    assert found.peak_cache_rows == rows
    assert hits >= sum(lru_hits_fast(trace, rows - 1))
    assert found.fetched_rows >= 48_974


def lru_hits_fast(trace: list[int], capacity: int) -> list[bool]:
    """The same as `lru_hits`, with a dictionary for the list."""
    cache: dict[int, None] = {}
    hits: list[bool] = []
    for row in trace:
        hits.append(row in cache)
        cache.pop(row, None)
        cache[row] = None
        if len(cache) > capacity:
            cache.pop(next(iter(cache)))
    return hits


@pytest.fixture(scope="module")
def published(shared_data: Path) -> tuple[list[tuple[np.ndarray, np.ndarray]], list[int]]:
    """Each request is one step with one row; next requests are those of the trace's authors."""
    record = np.dtype([("time", "<u4"), ("id", "<u8"), ("size", "<u4"), ("next", "<i8")])
    trace = np.fromfile(
        shared_data / "cache_oracle_ref" / "cloudPhysicsIO.oracleGeneral.bin", record
    )
    _, numbers = np.unique(trace["id"], return_inverse=True)
    position = np.arange(1, len(trace) + 1)
    distances = np.where(trace["next"] < 0, 0, trace["next"] - position).astype(np.int32)
    steps = list(zip(numbers.reshape(-1, 1), distances.reshape(-1, 1), strict=True))
    return steps, numbers.tolist()


def test_hit_rate_is_the_share_of_accesses_that_need_no_read() -> None:
    steps = [frozenset({0, 1}), frozenset({0}), frozenset({1}), frozenset({0})]
    ttl = CacheConfig(lookahead=2, prefetch_steps=1)
    found = summarize(plan_table(indexed(steps), ttl))
    assert found.fetched_rows == found.written_rows == 2  # both once, then within two steps
    assert found.hit_rate == 1 - 2 / 5
    short = replace(ttl, lookahead=1)
    assert summarize(plan_table(indexed(steps), short)).fetched_rows == 4
    assert summarize([]).hit_rate == 0.0


def test_belady_without_a_limit_reads_every_row_once() -> None:
    rng = np.random.default_rng(3)
    steps = [frozenset(rng.integers(0, NUM_NUMBERS, 3).tolist()) for _ in range(40)]
    found = summarize(plan_table(indexed(steps), CacheConfig(policy="belady")))
    assert found.fetched_rows == len(frozenset().union(*steps))


def test_belady_of_a_skewed_trace_over_many_merged_runs_is_that_of_the_reference() -> None:
    rng = np.random.default_rng(11)
    steps = [np.unique(rng.zipf(1.2, 200) % 2000) for _ in range(80)]
    index = list(zip(steps, next_use(steps, 2000), strict=True))
    cache = CacheConfig(policy="belady", prefetch_steps=2, rows=450)
    wanted = reference([frozenset(s.tolist()) for s in steps], cache)
    found = list(plan_table(index, cache))
    assert [int(s.fetch.sum()) for s in found] == [len(s.fetch) for s in wanted]
    assert 0 < sum(len(s.fetch) for s in wanted) < sum(map(len, steps))

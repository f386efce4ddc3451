"""The planned cache against a plain dictionary, with every thread schedule the queue allows."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from presage.schemas.arrays import Jagged, offsets_of
from presage.schemas.config.train import CacheConfig
from presage.schemas.errors import PlanError, SchemaError
from presage.schemas.oracle.cache_plan import CachePlan, required_rows
from presage.schemas.oracle.next_uses import next_use
from presage.trainer.embedding.cache import DirectSource, PlannedCache, RowSource, RowsPlan
from presage.trainer.embedding.unplanned import LruCache
from presage.trainer.stores.local import memory_store
from presage.trainer.stores.store import Records, TableLayout
from tests.schemas.parts import numbered
from tests.trainer.stores import as_records, whole

LAYOUT = TableLayout(table="items", dim=2, state_width=1, dtype="float64", seed=0)


def index_of(steps: Sequence[np.ndarray]) -> tuple[list, list, np.ndarray]:
    """Return numbers and distances of each step, and the rows, as the dataset's oracle has them."""
    accesses = Jagged(np.concatenate(steps), offsets_of(np.array([len(s) for s in steps])))
    numbers, rows, *_ = numbered(accesses)
    lists = [numbers.take(np.array([i])).values for i in range(len(steps))]
    return lists, next_use(lists, len(rows)), rows


def plan_of(
    steps: Sequence[np.ndarray], cache: CacheConfig, flush_every: int | None = None
) -> RowsPlan:
    """Plan a table from the rows of each step."""
    numbers, distances, rows = index_of(steps)
    indexed = {"items": zip(numbers, distances, strict=True)}
    return RowsPlan(CachePlan(indexed, cache, flush_every=flush_every), {"items": rows})


ReadAll = Callable[[int], dict[str, Records]]
"""Step to copies of rows, read outside of the steps' look-ups."""


def run_source(
    source: RowSource,
    steps: Sequence[np.ndarray],
    flush_every: int | None = None,
    read_all: ReadAll = lambda _: {},
) -> list[bytes]:
    """Return what each step was handed; each adds something that depends on the step."""
    handed: list[bytes] = []

    def read(step: int) -> None:
        handed.extend(r.values.tobytes() + r.state.tobytes() for r in read_all(step).values())

    for step, rows in enumerate(steps):
        gathered = source.gather(step, {"items": rows})["items"]
        records = gathered.copy()
        handed.append(records.values.tobytes() + records.state.tobytes())
        gathered.put(as_records(records.values * 1.25 + step, records.state + rows[:, None] + 1))
        read(step)
        source.release(step, {"items": rows})
        read(step + 1)
        if flush_every is not None and (step + 1) % flush_every == 0:
            source.flush()
    source.flush()
    source.close()
    return handed


@pytest.mark.slow
@given(
    steps=st.lists(st.sets(st.integers(0, 30), max_size=12), min_size=1, max_size=25),
    policy=st.sampled_from(["ttl", "belady"]),
    lookahead=st.integers(1, 8),
    flush_every=st.sampled_from([None, 1, 3]),
    data=st.data(),
)
@settings(max_examples=150)
def test_cache_hands_out_what_a_store_without_a_cache_does(
    steps: list[set[int]], policy: str, lookahead: int, flush_every: int | None, data: st.DataObject
) -> None:
    prefetch_steps = data.draw(st.integers(1, lookahead))
    rows = [np.array(sorted(step), np.int64) * 1_000_003 for step in steps]
    config = CacheConfig(policy=policy, lookahead=lookahead, prefetch_steps=prefetch_steps)  # type: ignore[arg-type]
    needed = required_rows([index_of(rows)[1]], config)
    config = replace(config, rows=max(1, needed + data.draw(st.integers(0, 4))))
    direct, cached = (memory_store({"items": LAYOUT}) for _ in range(2))
    cache = PlannedCache(
        cached,
        plan_of(rows, config, flush_every),
        first_step=0,
        last_step=len(rows),
        prefetch_steps=prefetch_steps,
    )
    some = {"items": np.arange(0, 33, data.draw(st.integers(1, 4))) * 1_000_003}
    handed = run_source(cache, rows, flush_every, lambda step: cache.read(step, some, cached.fetch))
    read_direct: ReadAll = lambda step: direct.fetch(step, some)  # noqa: E731
    assert run_source(DirectSource(direct), rows, None, read_direct) == handed
    (rows_found, found), (rows_wanted, wanted) = (
        whole(store.tables["items"]) for store in (cached, direct)
    )
    assert rows_found.tolist() == rows_wanted.tolist()
    assert found.values.tobytes() == wanted.values.tobytes()
    assert found.state.tobytes() == wanted.state.tobytes()
    assert cache.num_accesses == sum(len(r) for r in rows)
    assert cache.fetched_rows >= len(np.unique(np.concatenate(rows)))


@pytest.mark.slow
@given(
    steps=st.lists(st.sets(st.integers(0, 30), max_size=12), min_size=1, max_size=25),
    capacity=st.integers(12, 31),
    knows_next=st.booleans(),
    flush_every=st.sampled_from([None, 1, 3]),
)
@settings(max_examples=80)
def test_lru_hands_out_what_a_store_without_a_cache_does_and_counts_as_a_dictionary(
    steps: list[set[int]], capacity: int, knows_next: bool, flush_every: int | None
) -> None:
    rows = [np.array(sorted(step), np.int64) * 1_000_003 for step in steps]
    direct, cached = (memory_store({"items": LAYOUT}) for _ in range(2))
    if knows_next:
        following = [*rows[1:], np.empty(0, np.int64)]
        cache = LruCache(cached, capacity + 12, lambda step: {"items": following[step - 1]})
    else:
        cache = LruCache(cached, capacity)
    assert run_source(DirectSource(direct), rows) == run_source(cache, rows, flush_every)
    (rows_found, found), (rows_wanted, wanted) = (
        whole(store.tables["items"]) for store in (cached, direct)
    )
    assert rows_found.tolist() == rows_wanted.tolist()
    assert found.values.tobytes() == wanted.values.tobytes()
    assert found.state.tobytes() == wanted.state.tobytes()
    assert cache.num_accesses == sum(len(r) for r in rows)
    assert len(np.unique(np.concatenate(rows))) <= cache.fetched_rows <= cache.num_accesses


def slow_lru_misses(steps: Sequence[Sequence[int]], capacity: int) -> int:
    """Count the rows that an LRU cache of steps reads: used rows move to the end of a dictionary.

    Rows of one step have no order among each other, so traces here use one row a step.
    """
    cached: dict[int, None] = {}
    misses = 0
    for step in steps:
        for row in step:
            misses += row not in cached
            cached.pop(row, None)
            if len(cached) == capacity:
                del cached[next(iter(cached))]
            cached[row] = None
    return misses


@pytest.mark.slow
@given(trace=st.lists(st.integers(0, 9), min_size=1, max_size=60), capacity=st.integers(1, 10))
@settings(max_examples=80)
def test_lru_reads_as_often_as_a_dictionary_in_order_of_use(
    trace: list[int], capacity: int
) -> None:
    cache = LruCache(memory_store({"items": LAYOUT}), capacity)
    run_source(cache, [np.array([row], np.int64) for row in trace])
    assert cache.fetched_rows == slow_lru_misses([[row] for row in trace], capacity)


def test_lru_that_is_smaller_than_a_step_names_the_size_that_works() -> None:
    cache = LruCache(memory_store({"items": LAYOUT}), 2)
    with pytest.raises(PlanError, match=r"cache_rows=2 at step 1; use at least 3$") as error:
        run_source(cache, [np.array([1, 2]), np.array([1, 2, 3])])
    assert error.value.required_rows == 3
    cache.close()


def cache_over(
    steps: Sequence[np.ndarray], planned: Sequence[np.ndarray], cache_rows: int | None
) -> PlannedCache:
    return PlannedCache(
        memory_store({"items": LAYOUT}),
        plan_of(planned, CacheConfig(lookahead=2, prefetch_steps=1, rows=cache_rows)),
        first_step=0,
        last_step=len(steps),
        prefetch_steps=1,
    )


def test_cache_with_the_plan_of_other_rows_names_table_and_step() -> None:
    steps = [np.array([1, 2]), np.array([3])]
    cache = cache_over(steps, [np.array([1, 2]), np.array([3, 4])], None)
    message = (
        "index does not match the batch: it lists 2 rows of table 'items' at step 1, "
        "and the batch has 1; rebuild the dataset"
    )
    with pytest.raises(SchemaError, match=f"^{re.escape(message)}$"):
        run_source(cache, steps)
    cache.close()


def test_cache_that_is_too_small_names_the_size_that_works() -> None:
    steps = [np.array([1, 2]), np.array([1, 2, 3])]
    cache = cache_over(steps, steps, 2)
    with pytest.raises(PlanError, match=r"cache_rows=2 and 3 at step 0; use at least 3") as e:
        run_source(cache, steps)
    assert e.value.required_rows == 3
    cache.close()


def test_rows_leave_after_a_step_that_looks_nothing_up() -> None:
    """Two tables, one of them idle while its cache makes room for rows of a later step."""
    steps = [np.array([1, 2]), np.empty(0, np.int64), np.empty(0, np.int64), np.array([3, 4])]
    steps = [*steps, np.array([1]), np.array([2])]
    config = CacheConfig(policy="belady", prefetch_steps=1, rows=3)
    stores = [memory_store({"items": LAYOUT}) for _ in range(2)]
    cache = PlannedCache(
        stores[0],
        plan_of(steps, config),
        first_step=0,
        last_step=len(steps),
        prefetch_steps=1,
    )
    direct = DirectSource(stores[1])
    for step, rows in enumerate(steps):
        given = {"items": rows} if len(rows) else {}
        both = cache.gather(step, given), direct.gather(step, given)
        for table in given:
            found, wanted = (gathered[table].copy() for gathered in both)
            assert found.values.tobytes() == wanted.values.tobytes()
            for gathered in both:
                gathered[table].put(as_records(wanted.values * 1.25 + step, wanted.state + 1))
        cache.release(step, given)
        direct.release(step, given)
    cache.flush()
    cache.close()
    assert (
        whole(stores[0].tables["items"])[1].values.tobytes()
        == whole(stores[1].tables["items"])[1].values.tobytes()
    )

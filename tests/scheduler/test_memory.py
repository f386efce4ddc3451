"""Predicted memory: known sums, and monotone in what it is made of."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.model.memory import (
    STORE_BASE_BYTES,
    WORKER_BASE_BYTES,
    WORKER_COPIES,
    bytes_per_row,
    cache_rows,
    dense_parameters,
    store_bytes,
    stores_needed,
    tables_bytes,
    trainer_memory,
    worker_bytes,
)
from schemas.config.train import CacheConfig, ModelConfig, SparseOptimizerConfig, TrainConfig
from tests.scheduler.made import FACTS

TRAIN = TrainConfig(embedding_dim=16, batch_samples=1024)

ROW_BYTES = {
    "a row with one value of state": ("rowwise_adagrad", "float32", 17 * 4 + 8),
    "a row with as much state as values": ("adagrad", "float32", 32 * 4 + 8),
    "a row with twice as much": ("adam", "float32", 48 * 4 + 8),
    "a row without state": ("sgd", "float32", 16 * 4 + 8),
    "a row of wide values": ("sgd", "float64", 16 * 8 + 8),
}


@pytest.mark.parametrize(("name", "dtype", "wanted"), ROW_BYTES.values(), ids=ROW_BYTES.keys())
def test_bytes_per_row_counts_values_state_and_number(name: str, dtype: str, wanted: int) -> None:
    train = replace(TRAIN, dtype=dtype, sparse_optimizer=SparseOptimizerConfig(name=name))  # pyright: ignore[reportArgumentType]
    assert bytes_per_row(train) == wanted
    assert tables_bytes(FACTS, train) == 250_000 * wanted


def test_dense_parameters_of_a_tiny_dlrm_are_counted_by_hand() -> None:
    facts = replace(FACTS, num_dense=3, num_sparse=2)
    train = replace(TRAIN, embedding_dim=4, model=ModelConfig(bottom_layers=(5,), top_layers=(6,)))
    bottom = (3 + 1) * 5 + (5 + 1) * 4
    top = (4 + 3 + 1) * 6 + (6 + 1) * 1  # 4 dense and 3 pairs of 3 vectors
    assert dense_parameters(facts, train) == bottom + top


@given(st.integers(1, 10**9), st.integers(STORE_BASE_BYTES + 1, 1 << 36))
def test_stores_needed_is_the_fewest_that_fit(rows: int, memory: int) -> None:
    facts = replace(FACTS, table_rows={"items": rows})
    count = stores_needed(facts, TRAIN, memory)
    assert count is not None
    assert store_bytes(facts, TRAIN, count) <= memory
    assert count == 1 or store_bytes(facts, TRAIN, count - 1) > memory


def test_stores_needed_without_room_beside_the_base_is_none() -> None:
    assert stores_needed(FACTS, TRAIN, STORE_BASE_BYTES) is None


@given(st.integers(1, 15), st.integers(1, 8), st.integers(1, 10**7))
def test_trainer_memory_grows_with_rows_and_falls_with_replicas(
    replicas: int, stores: int, rows: int
) -> None:
    def total(count: int, num_replicas: int, num_stores: int) -> int:
        facts = replace(FACTS, table_rows={"items": count})
        return trainer_memory(facts, TRAIN, num_replicas, num_stores).total_bytes

    assert total(rows, replicas + 1, stores) <= total(rows, replicas, stores)
    assert total(rows + 1000, 1, 0) > total(rows, 1, 0)
    assert total(rows, 1, stores) <= total(rows, 1, 0)


def test_cache_rows_is_what_the_job_says_or_the_rows_of_all_steps_ahead() -> None:
    train = replace(TRAIN, cache=CacheConfig(lookahead=10, prefetch_steps=2))
    assert cache_rows(FACTS, train) == 12 * 5_000
    assert cache_rows(replace(FACTS, table_rows={"items": 7_000}), train) == 7_000
    assert cache_rows(FACTS, replace(TRAIN, cache=CacheConfig(rows=123))) == 2 * 123
    assert cache_rows(FACTS, replace(TRAIN, cache=CacheConfig(rows=60_000))) == 110_000
    known = replace(FACTS, window_rows=4_321)
    assert cache_rows(known, train) == 4_321
    best = replace(TRAIN, cache=CacheConfig(policy="belady", lookahead=10))
    assert cache_rows(known, best) == sum(FACTS.table_rows.values())


@pytest.mark.slow
@given(st.floats(1.0, 1e9), st.integers(1, 63))
def test_worker_bytes_fall_with_workers_and_grow_with_rows(rows: float, workers: int) -> None:
    assert worker_bytes(FACTS, rows, workers + 1) <= worker_bytes(FACTS, rows, workers)
    assert worker_bytes(FACTS, rows * 2, workers) >= worker_bytes(FACTS, rows, workers)
    assert worker_bytes(FACTS, rows * 2, 1) > worker_bytes(FACTS, rows, 1)


def test_worker_bytes_of_many_workers_is_that_of_one_part() -> None:
    one_part = worker_bytes(FACTS, FACTS.part_rows or 0.0, 1)
    assert worker_bytes(FACTS, 1e6, 1_000) == one_part
    assert worker_bytes(FACTS, 100.0, 1) < one_part


def test_worker_bytes_hold_the_largest_session_however_many_workers_there_are() -> None:
    heavy = replace(FACTS, session_rows=300_000)
    rows = (worker_bytes(heavy, 1e6, 1_000) - WORKER_BASE_BYTES) / (WORKER_COPIES * 800)
    assert rows == pytest.approx(300_000)
    assert worker_bytes(heavy, 1e3, 1_000) == worker_bytes(FACTS, 1e3, 1)

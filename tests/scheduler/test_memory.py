"""Memory of each process, predicted from its contents and forecast from its growth."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.signal import lfilter

from presage.scheduler.model.pools import (
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
from presage.scheduler.planner.correction import MemoryForecast, forecast
from presage.schemas.config.train import (
    CacheConfig,
    ModelConfig,
    SparseOptimizerConfig,
    TrainConfig,
)
from tests.scheduler.small_job import FACTS

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
    assert cache_rows(FACTS, replace(TRAIN, cache=CacheConfig(rows=123))) == 123
    assert cache_rows(FACTS, replace(TRAIN, cache=CacheConfig(rows=10**6))) == sum(
        FACTS.table_rows.values()
    )
    known = replace(FACTS, window_rows=4_321)
    assert cache_rows(known, train) == 4_321
    best = replace(TRAIN, cache=CacheConfig(policy="belady", lookahead=10))
    assert cache_rows(known, best) == sum(FACTS.table_rows.values())


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


MIB = 1 << 20


def noisy(line: np.ndarray, size: float, seed: int) -> np.ndarray:
    """Return readings below a line, as an allocator gives back now and then."""
    return line - size * np.abs(np.random.default_rng(seed).standard_normal(len(line)))


@given(st.floats(0.01, 5.0), st.integers(200, 2000), st.integers(0, 20))
def test_forecast_of_a_leak_meets_the_limit_where_the_line_does(
    slope: float, read: int, seed: int
) -> None:
    steps = np.arange(read)
    line = (500.0 + slope * steps) * MIB
    wanted = 3 * read
    found = forecast(
        steps,
        noisy(line, 0.05 * slope * read * MIB, seed),
        end_step=10 * read,
        limit_bytes=int((500 + slope * wanted) * MIB),
    )
    assert found.confident
    assert found.expected_step is not None
    assert found.earliest_step is not None
    assert found.expected_step == pytest.approx(wanted, rel=0.1)
    assert found.earliest_step <= found.expected_step
    assert found.needed_bytes >= found.end_bytes >= 0.9 * (500 + slope * 10 * read) * MIB


def test_forecast_of_flat_memory_never_meets_a_limit_above_its_peaks() -> None:
    for seed in range(50):
        readings = noisy(np.full(400, 800.0 * MIB), 10 * MIB, seed)
        found = forecast(np.arange(400), readings, end_step=4000, limit_bytes=1200 * MIB)
        assert found.expected_step is None
        assert found.earliest_step is None
        assert found.needed_bytes < 1000 * MIB


def test_forecast_of_tables_that_fill_uses_the_load_that_is_known_ahead() -> None:
    """A line through the start of a curve that flattens cries wolf, the oracle does not."""
    end = 5000
    touched = 1e6 * (1.0 - np.exp(-np.arange(end + 1) / 800.0))
    memory = 600 * MIB + 300.0 * touched
    steps = np.arange(600)
    readings = noisy(memory[:600], 2 * MIB, 1)
    limit = int(memory[-1] + 20 * MIB)
    blind = forecast(steps, readings, end_step=end, limit_bytes=limit)
    assert blind.expected_step is not None
    prediction = forecast(steps, readings, end_step=end, limit_bytes=limit, load=touched)
    assert prediction.expected_step is None
    assert prediction.end_bytes == pytest.approx(memory[-1], rel=0.02)
    tight = int(memory[2000])
    soon = forecast(steps, readings, end_step=end, limit_bytes=tight, load=touched)
    assert soon.expected_step == pytest.approx(2000, rel=0.15)


PROGRESS = (0.05, 0.1, 0.2, 0.4, 0.7)


def filling(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return memory of tables that fill within 1,000 steps, read 1 % off, and their load."""
    load = 0.5 + 0.5 * np.expm1(-3.0 * np.arange(1001) / 1000) / np.expm1(-3.0)
    noise = np.exp(0.01 * np.random.default_rng(seed).standard_normal(1001))
    return 8192 * MIB * load * noise, load


@pytest.mark.parametrize("progress", PROGRESS)
def test_forecast_of_tables_that_fill_needs_their_peak_at_any_progress(progress: float) -> None:
    now, needed = int(1000 * progress), []
    for seed in range(20):
        memory, load = filling(seed)
        found = forecast(np.arange(now), memory[:now], end_step=1000, limit_bytes=10**12, load=load)
        needed.append(found.needed_bytes / (8192 * MIB))
    assert min(needed) >= 0.98
    assert np.median(needed) <= 1.1


LEAKS = (2.0, 5.0, 10.0, 20.0, 40.0)


@pytest.mark.parametrize("mib_per_step", LEAKS)
def test_forecast_of_a_leak_beside_a_load_is_foreseen_in_time(mib_per_step: float) -> None:
    """Early on the leak is taken for the load; it alarms all the same, and then names enough."""
    for seed in range(10):
        memory, load = filling(seed)
        memory = memory + mib_per_step * MIB * np.arange(1001)
        limit = int(memory[600])
        prediction = forecast(
            np.arange(570), memory[:570], end_step=1000, limit_bytes=limit, load=load
        )
        assert prediction.earliest_step is not None
        assert prediction.earliest_step <= 640
        assert prediction.needed_bytes > limit


def test_forecast_alarms_by_the_line_where_the_load_explains_no_more() -> None:
    memory = (500 + 2.0 * np.arange(100)) * MIB
    load = 1.0 - np.exp(-np.arange(1001) / 400.0)
    noise = 4 * MIB * np.random.default_rng(0).standard_normal(100)
    limit = 1000 * MIB
    found = forecast(np.arange(100), memory + noise, end_step=1000, limit_bytes=limit, load=load)
    blind = forecast(np.arange(100), memory + noise, end_step=1000, limit_bytes=limit)
    assert found.earliest_step == blind.earliest_step


def test_forecast_of_many_seeds_is_late_as_seldom_as_it_says() -> None:
    early = []
    for seed in range(100):
        line = (500 + 0.5 * np.arange(300)) * MIB
        readings = line + 20 * MIB * np.random.default_rng(seed).standard_normal(300)
        limit = int((500 + 0.5 * 900) * MIB)
        found = forecast(np.arange(300), readings, end_step=3000, limit_bytes=limit)
        early.append(found.earliest_step is not None and found.earliest_step <= 900)
    assert np.mean(early) >= 0.9


def test_forecast_of_errors_that_follow_one_another_is_late_as_seldom() -> None:
    """Memory that wanders looks like a trend, so that its readings count for fewer."""
    early = []
    for seed in range(100):
        steps = np.random.default_rng(seed).standard_normal(400)
        wander = lfilter([1.0], [1.0, -0.98], steps)
        readings = (500 + 0.5 * np.arange(400) + 8 * wander) * MIB
        limit = int((500 + 0.5 * 1000) * MIB)
        found = forecast(np.arange(400), readings, end_step=3000, limit_bytes=limit)
        early.append(found.earliest_step is not None and found.earliest_step <= 1000)
    assert np.mean(early) >= 0.85


def test_forecast_of_a_few_readings_says_nothing_yet() -> None:
    found = forecast(np.arange(5), np.arange(5) * MIB, end_step=100, limit_bytes=6 * MIB)
    assert found == MemoryForecast(
        confident=False,
        expected_step=None,
        earliest_step=None,
        end_bytes=4 * MIB,
        needed_bytes=4 * MIB,
    )


def test_forecast_of_a_process_that_starts_up_does_not_take_the_start_for_a_leak() -> None:
    start = np.linspace(50, 900, 20)
    readings = np.concatenate([start, noisy(np.full(380, 900.0), 5, 3)]) * MIB
    found = forecast(np.arange(400), readings, end_step=4000, limit_bytes=1100 * MIB)
    assert found.earliest_step is None


@pytest.mark.parametrize(("steps", "end"), [([], 5), ([1, 7], 6)])
def test_forecast_without_a_reading_or_a_future_says_so(steps: list[int], end: int) -> None:
    with pytest.raises(ValueError, match="forecast needs a reading and a later end"):
        forecast(steps, [MIB] * len(steps), end_step=end, limit_bytes=MIB)


def test_forecast_of_a_process_that_grows_warns_before_its_limit_and_names_enough_memory() -> None:
    limit, notice_steps, readings = 100 * MIB, 30, 40 * MIB + 512 * 1024 * np.arange(200)
    killed_step = int(np.argmax(readings > limit))
    forecasts = {
        step: forecast(np.arange(step), readings[:step], end_step=200, limit_bytes=limit)
        for step in range(1, killed_step)
    }
    step = min(n for n, f in forecasts.items() if (f.earliest_step or 200) <= n + notice_steps)
    assert killed_step - step <= 2 * notice_steps
    assert forecasts[step].expected_step == pytest.approx(killed_step, abs=notice_steps / 2)
    assert forecasts[step].needed_bytes >= readings[-1]

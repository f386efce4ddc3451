"""The log ordered by the future against a store in memory, and what it reads and writes."""

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from presage.schemas.config.train import CacheConfig
from presage.schemas.errors import PlanError, SchemaError
from presage.schemas.oracle.cache_plan import NEVER_AGAIN, required_rows
from presage.schemas.rows import initial_rows
from presage.trainer.checkpoint.format import NpyFile
from presage.trainer.embedding.cache import DirectSource, PlannedCache, RowsOfTables
from presage.trainer.stores.bucket_files import BucketFiles, Entries, SortedRuns
from presage.trainer.stores.future_log import FutureLog
from presage.trainer.stores.local import memory_store, mmap_store
from presage.trainer.stores.store import GatheredRows, Store, TableLayout, WriteBack
from tests.trainer.stores import TableOf, as_records, largest_file, whole
from tests.trainer.test_cache import LAYOUT, index_of, plan_of, run_source


def log_in(folder: Path, bucket_steps: int, buffer_bytes: int, fan_out: int = 64) -> FutureLog:
    return FutureLog(
        {"items": LAYOUT},
        folder,
        bucket_steps=bucket_steps,
        fan_out=fan_out,
        buffer_bytes=buffer_bytes,
    )


def cache_over(store: Store, steps: list[np.ndarray], config: CacheConfig) -> PlannedCache:
    return PlannedCache(
        store,
        plan_of(steps, config),
        first_step=0,
        last_step=len(steps),
        prefetch_steps=config.prefetch_steps,
    )


class Checked:
    """A source whose store must hold, after each flush, what a reference store does."""

    def __init__(self, source: PlannedCache, store: Store, reference: DirectSource) -> None:
        self.source, self.store, self.reference = source, store, reference

    def __getattr__(self, name: str) -> object:
        return getattr(self.source, name)

    def gather(self, step: int, rows: RowsOfTables) -> dict[str, GatheredRows]:
        self.gathered = self.source.gather(step, rows)
        return self.gathered

    def release(self, step: int, rows: RowsOfTables) -> None:
        for table, gathered in self.reference.gather(step, rows).items():
            gathered.put(self.gathered[table].copy())
        self.reference.release(step, rows)
        self.source.release(step, rows)

    def flush(self) -> None:
        self.source.flush()
        (rows, found), (wanted_rows, wanted) = (
            whole(TableOf(self.store, LAYOUT)),
            whole(TableOf(self.reference._store, LAYOUT)),
        )
        assert rows.tolist() == wanted_rows.tolist()
        assert found.values.tobytes() == wanted.values.tobytes()
        assert found.state.tobytes() == wanted.state.tobytes()


@pytest.mark.slow
@given(
    steps=st.lists(st.sets(st.integers(0, 30), max_size=12), min_size=1, max_size=25),
    policy=st.sampled_from(["ttl", "belady"]),
    lookahead=st.integers(1, 8),
    bucket_steps=st.integers(1, 7),
    fan_out=st.integers(2, 4),
    buffer_bytes=st.sampled_from([0, 300, 1 << 20]),
    flush_every=st.sampled_from([None, 1, 4]),
    data=st.data(),
)
@settings(max_examples=150)
def test_log_hands_out_and_holds_what_a_store_in_memory_does(
    steps: list[set[int]],
    policy: str,
    lookahead: int,
    bucket_steps: int,
    fan_out: int,
    buffer_bytes: int,
    flush_every: int | None,
    data: st.DataObject,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    rows = [np.array(sorted(step), np.int64) * 1_000_003 for step in steps]
    prefetch_steps = data.draw(st.integers(1, lookahead))
    config = CacheConfig(policy=policy, lookahead=lookahead, prefetch_steps=prefetch_steps)  # type: ignore[arg-type]
    needed = required_rows([index_of(rows)[1]], config)
    config = replace(config, rows=max(1, needed + data.draw(st.integers(0, 4))))
    folder = tmp_path_factory.mktemp("log")
    log = log_in(folder, bucket_steps, buffer_bytes, fan_out)
    reference = DirectSource(memory_store({"items": LAYOUT}))
    checked = Checked(cache_over(log, rows, config), log, reference)
    handed = run_source(checked, rows, flush_every)  # type: ignore[arg-type]
    assert handed == run_source(DirectSource(memory_store({"items": LAYOUT})), rows)
    assert not list(folder.glob("bucket-*"))  # the space of buckets that are over is given back


def counted(monkeypatch: pytest.MonkeyPatch, name: str) -> list[int]:
    """Return a list that the bytes of each call of a function of `os` are added to."""
    sizes: list[int] = []
    function = getattr(os, name)

    def call(*arguments: Any) -> int:
        sizes.append(function(*arguments))
        return sizes[-1]

    monkeypatch.setattr(os, name, call)
    return sizes


def big_steps(num_steps: int, rows_per_step: int) -> list[np.ndarray]:
    rng = np.random.default_rng(5)
    return [np.unique(rng.integers(0, 20_000, rows_per_step)) for _ in range(num_steps)]


@pytest.mark.slow
def test_log_reads_each_bucket_once_and_in_long_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads, writes = counted(monkeypatch, "preadv"), counted(monkeypatch, "pwrite")
    steps = big_steps(200, 2000)
    config = CacheConfig(lookahead=2, prefetch_steps=1)
    log = log_in(tmp_path, 10, 400_000)
    cache = cache_over(log, steps, config)
    run_source(cache, steps)
    entry_bytes = 4 + 8 + 8 + 8 * 3
    refetched = cache.fetched_rows - len(np.unique(np.concatenate(steps)))
    assert refetched > 290_000
    # every fetched row that was ever written is read once, but for those that never left memory
    assert 0.5 * refetched * entry_bytes < sum(reads) <= 1.02 * refetched * entry_bytes
    assert sum(reads) / len(reads) > 100 * entry_bytes
    assert len(reads) < sum(reads) / 20_000
    assert sum(writes) < 1.3 * sum(reads)
    assert len(writes) < sum(writes) / 20_000


def test_log_makes_first_values_and_keeps_nothing_for_rows_that_are_read_only(
    tmp_path: Path,
) -> None:
    log = log_in(tmp_path, 4, 0)
    rows = np.random.default_rng(0).integers(0, 10_000_000_000, 1000)
    found = log.fetch(0, {"items": np.unique(rows)})["items"]
    first = initial_rows(np.unique(rows), table="items", seed=0, dim=2, dtype="float64")
    assert found.values.tobytes() == first.tobytes()
    assert not found.state.any()
    assert list(tmp_path.iterdir()) == []
    assert whole(TableOf(log, LAYOUT))[0].tolist() == []


def back_of(rows: list[int], next_use: list[int]) -> dict[str, WriteBack]:
    records = as_records(np.ones((len(rows), 2)), np.ones((len(rows), 1)))
    return {"items": WriteBack(np.array(rows), records, np.array(next_use))}


def test_log_refuses_a_plan_that_leaves_written_rows_out(tmp_path: Path) -> None:
    log = log_in(tmp_path, 4, 0)
    log.write(0, back_of([5, 7, 9], [6, 6, NEVER_AGAIN]))
    message = "plan fetches 1 of 2 rows stored for step 6; rebuild the dataset's index"
    with pytest.raises(PlanError, match=f"^{re.escape(message)}$"):
        log.fetch(6, {"items": np.array([5, 9])})


def test_log_on_a_full_disk_refuses_by_name_and_continues_when_there_is_room(
    tmp_path: Path,
) -> None:
    log = log_in(tmp_path, 4, 0)
    log.write(0, back_of(list(range(10)), [6] * 10))
    path = tmp_path / "bucket-0-00000001.bin"
    size = path.stat().st_size
    message = (
        f"no room on disk for rows evicted from the cache: File too large in {path}; "
        "free some and continue with --resume"
    )
    with largest_file(size), pytest.raises(SchemaError, match=f"^{re.escape(message)}$"):
        log.write(1, back_of(list(range(10, 20)), [7] * 10))
    assert path.stat().st_size == size
    log.write(2, {})
    for step, rows in ((6, range(10)), (7, range(10, 20))):
        assert (log.fetch(step, {"items": np.array(rows)})["items"].values == 1).all()


@pytest.mark.slow
@pytest.mark.parametrize("first_step", [0, 50_000])
def test_writes_stay_long_and_few_buckets_are_open_whatever_the_number_of_steps(
    first_step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes = counted(monkeypatch, "pwrite")
    rng, num_steps = np.random.default_rng(3), 100_000
    log, stored = log_in(tmp_path, 4, 1 << 20), dict[int, list[int]]()
    for step in range(first_step, first_step + 400):
        rows = np.sort(np.array(stored.pop(step, []), np.int64))
        assert (log.fetch(step, {"items": rows})["items"].state[:, 0] == rows).all()
        rows = np.arange(step * 1000, step * 1000 + 400)
        next_use = rng.integers(step + 1, num_steps, len(rows))
        next_use[:20] = step + rng.integers(1, 300, 20)
        for row, at in zip(rows.tolist(), next_use.tolist(), strict=True):
            stored.setdefault(at, []).append(row)
        state = rows[:, None].astype(float)
        log.write(
            step, {"items": WriteBack(rows, as_records(np.repeat(state, 2, 1), state), next_use)}
        )
    assert len(log._buffers) < 4 * 2 * 64  # pyright: ignore[reportPrivateUsage]
    assert len(list(tmp_path.iterdir())) < 4 * 2 * 64
    assert len(writes) < 2500
    assert sum(writes) / len(writes) > 8192  # with 32 MiB of buffers 32 times as long
    assert sum(len(rows) for rows in stored.values()) == len(whole(TableOf(log, LAYOUT))[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("buffer_bytes", "bucket_steps", "fan_out", "first_step"),
    [(0, 1, 2, 0), (2000, 2, 3, 101), (1 << 20, 1, 4, 0), (0, 1, 4, 101)],
)
def test_rows_of_far_steps_come_back_at_their_step(
    buffer_bytes: int, bucket_steps: int, fan_out: int, first_step: int, tmp_path: Path
) -> None:
    rng, end_step = np.random.default_rng(buffer_bytes + fan_out), first_step + 160
    log, stored = log_in(tmp_path, bucket_steps, buffer_bytes, fan_out), dict[int, list[int]]()
    for step in range(first_step, end_step):
        rows = np.sort(np.array(stored.pop(step, []), np.int64))
        found = log.fetch(step, {"items": rows})["items"]
        assert found.state[:, 0].tolist() == rows.tolist()
        assert found.values[:, 0].tolist() == rows.tolist()
        rows = np.arange(step * 10, step * 10 + rng.integers(6))
        next_use = np.minimum(step + 1 + rng.geometric(0.02, len(rows)), end_step - 1)
        rows, next_use = rows[next_use > step], next_use[next_use > step]
        for row, at in zip(rows.tolist(), next_use.tolist(), strict=True):
            stored.setdefault(at, []).append(row)
        state = rows[:, None].astype(float)
        records = as_records(np.repeat(state, 2, axis=1), state)
        log.write(step, {"items": WriteBack(rows, records, next_use)})
        if step % 20 == 0:
            held = sorted(row for each in stored.values() for row in each)
            assert whole(TableOf(log, LAYOUT))[0].tolist() == held
    assert list(tmp_path.iterdir()) == []


WIDE = TableLayout(table="items", dim=127, state_width=1, dtype="float32", seed=3)


def entries_of(tables: list[int], rows: list[int]) -> Entries:
    block = np.array([[t, r, 7.5] for t, r in zip(tables, rows, strict=True)], np.float64)
    count = np.zeros(len(rows), np.int64)
    return Entries(
        np.array(tables, np.int32), np.array(rows, np.int64), count, block.reshape(-1, 3)
    )


@pytest.mark.slow
@given(
    parts=st.lists(
        st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1 << 62)), max_size=30), max_size=12
    ),
    run_bytes=st.sampled_from([1, 300, 2000, 1 << 20]),
    chunk_bytes=st.sampled_from([1, 200, 1 << 20]),
)
@settings(max_examples=100)
def test_sorted_runs_give_each_table_ascending(
    parts: list[list[tuple[int, int]]],
    run_bytes: int,
    chunk_bytes: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("runs")
    runs = SortedRuns(
        BucketFiles(folder, replace(LAYOUT, dim=2, dtype="float64"), chunk_bytes=chunk_bytes),
        3,
        run_bytes=run_bytes,
    )
    seen: set[tuple[int, int]] = set()
    for part in parts:
        new = [key for key in dict.fromkeys(part) if key not in seen]
        seen.update(new)
        runs.add([entries_of([t for t, _ in new], [r for _, r in new])])
    for table in (0, 2, 1, 1):
        found = list(runs.table(table))
        assert all(len(rows) for rows, _ in found)
        rows = [row for rows, _ in found for row in rows.tolist()]
        assert rows == sorted(row for t, row in seen if t == table)
        blocks = [line for _, records in found for line in records.block.tolist()]
        assert blocks == [[table, float(row), 7.5] for row in rows]
    runs.remove()
    assert list(folder.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mmap", "log"])
def test_store_gives_more_than_one_run_in_parts_and_leaves_no_file(
    kind: str, tmp_path: Path
) -> None:
    rng = np.random.default_rng(4)
    rows = rng.permutation(200_000).astype(np.int64) << 40
    values = rng.random((len(rows), 127), np.float32)
    store: Store = mmap_store({"items": WIDE}, tmp_path)
    if kind == "log":
        store = FutureLog({"items": WIDE}, tmp_path, buffer_bytes=5 << 20)
    for start in range(0, len(rows), 20_000):
        part = slice(start, start + 20_000)
        records = as_records(values[part], values[part, :1])
        next_use = rng.integers(0, 100, 20_000)
        store.write(0, {"items": WriteBack(rows[part], records, next_use)})
    before = {path.name for path in tmp_path.rglob("*")}
    parts = store.contents("items")
    first = len(next(parts)[0])
    assert first < len(rows) / 5  # 100 MB are more than three runs, and not in memory at once
    assert {path.name for path in tmp_path.rglob("run-*")} != set()
    parts.close()  # type: ignore[attr-defined]
    found, records = whole(TableOf(store, WIDE))
    order = np.argsort(rows)
    assert np.array_equal(found, rows[order])
    assert np.array_equal(records.values, values[order])
    assert np.array_equal(records.state, values[order, :1])
    store.write(1, {})
    assert {path.name for path in tmp_path.rglob("*")} == before


@pytest.mark.parametrize("shape", [(), (4,), (0,)])
@pytest.mark.parametrize("counts", [[], [3], [0, 5, 1], [1000, 12_345_678 // 8]])
def test_npy_file_has_the_bytes_that_numpy_writes(
    shape: tuple[int, ...], counts: list[int], tmp_path: Path
) -> None:
    total = sum(counts)
    size = total * int(np.prod(shape))
    rows = np.arange(size).astype(np.float32).reshape(total, *shape)
    with NpyFile(tmp_path / "parts.npy", shape, np.float32) as file:
        for part in np.split(rows, np.cumsum(counts)):
            file.append(part)
    np.save(tmp_path / "whole.npy", rows)
    assert (tmp_path / "parts.npy").read_bytes() == (tmp_path / "whole.npy").read_bytes()

"""Tables in memory and in mapped files against dictionaries; large tables grow in place."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from presage.schemas.rows import initial_bound, initial_rows
from presage.trainer.embedding.cache import CacheSlots
from presage.trainer.stores import store as api
from presage.trainer.stores.local import (
    DENSE_MAP_ROWS,
    ArrayTable,
    RowMap,
    memory_store,
    mmap_store,
)
from presage.trainer.stores.store import Records, empty_records, grown
from tests.trainer.stores import LAYOUT, as_records, record_of, whole


def table_of(kind: str, folder: Path) -> ArrayTable:
    layouts = {"items": LAYOUT}
    store = memory_store(layouts) if kind == "memory" else mmap_store(layouts, folder)
    return store.tables["items"]


SIZES = {
    "small": lambda step: [0],
    "of all sizes": lambda step: [0, 20, 50],
    "small, then of all sizes": lambda step: [0, 3] if step < 30 else [0, 20, 50],
    "around the largest that is small": lambda step: [5, 8],
}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
def test_row_map_is_a_dict(sizes: Callable[[int], list[int]]) -> None:
    rng = np.random.default_rng(0)
    found, reference = RowMap(), {}
    for step in range(60):
        # few distinct upper bits and many collisions, over all 63 bits
        rows = np.unique(rng.integers(0, 5000, 300) << rng.choice(sizes(step), 300))
        positions = found.find(rows)
        assert positions.tolist() == [reference.get(row, -1) for row in rows.tolist()]
        fresh = rows[positions < 0]
        for row, position in zip(fresh.tolist(), found.add(fresh).tolist(), strict=True):
            reference[row] = position
    assert len(found) == len(reference) > 4000
    assert found.rows.tolist() == list(reference)
    assert found.find(np.empty(0, np.int64)).tolist() == []


@pytest.mark.parametrize("kind", ["memory", "mmap"])
def test_store_is_a_dict_of_rows_that_begin_with_their_first_values(
    kind: str, tmp_path: Path
) -> None:
    rng = np.random.default_rng(1)
    store, reference = table_of(kind, tmp_path), {}
    for _ in range(40):
        rows = np.unique(rng.integers(0, 1 << 62, 200) % rng.integers(1, 4000))
        fetched = store.fetch(rows)
        first = initial_rows(rows, table="items", seed=3, dim=4, dtype="float32")
        for i, row in enumerate(rows.tolist()):
            values, state = reference.get(row, (first[i], [0.0]))
            assert fetched.values[i].tolist() == list(values)
            assert fetched.state[i].tolist() == list(state)
        fetched.values[:] += 1
        fetched.state[:] += 2
        if rng.random() < 0.7:
            store.write(rows, fetched)
            pairs = zip(fetched.values.tolist(), fetched.state.tolist(), strict=True)
            reference.update(zip(rows.tolist(), pairs, strict=True))
    rows, records = whole(store)
    assert rows.tolist() == sorted(reference)
    assert records.values.tolist() == [list(reference[row][0]) for row in rows.tolist()]
    assert records.state.tolist() == [list(reference[row][1]) for row in rows.tolist()]


@pytest.mark.parametrize("kind", ["memory", "mmap"])
def test_store_hands_out_copies(kind: str, tmp_path: Path) -> None:
    store, rows = table_of(kind, tmp_path), np.array([5, 9])
    store.write(rows, as_records(np.ones((2, 4), np.float32), np.zeros((2, 1), np.float32)))
    store.fetch(rows).values[:] = 7
    assert store.fetch(rows).values.tolist() == [[1.0] * 4] * 2


def test_initial_rows_are_pinned_and_equal_in_both_precisions() -> None:
    rows = np.array([0, 1, 2**62])
    single, double = (
        initial_rows(rows, table="items", seed=3, dim=5, dtype=d) for d in ("float32", "float64")
    )
    assert single.dtype == np.float32
    assert (single == double).all()
    assert [round(float(x), 7) for x in single[:, 0]] == PINNED


PINNED = [-0.1310631, 0.0860225, -0.1031685]


def test_initial_rows_are_uniform_and_differ_by_table_seed_and_row() -> None:
    rows = np.arange(20_000)
    values = initial_rows(rows, table="items", seed=3, dim=8, dtype="float64")
    bound = initial_bound(8)
    assert np.abs(values).max() <= bound
    assert values.mean() == pytest.approx(0, abs=0.01 * bound)
    assert values.std() == pytest.approx(bound / 3**0.5, rel=0.01)
    assert np.abs(np.corrcoef(values.T) - np.eye(8)).max() < 0.04
    for table, seed in (("users", 3), ("items", 4)):
        other = initial_rows(rows, table=table, seed=seed, dim=8, dtype="float64")
        assert np.abs(np.corrcoef(values.ravel(), other.ravel())[0, 1]) < 0.02


CHUNK, NUM_ROWS = 100, 20_000
ROWS = np.random.default_rng(0).permutation(NUM_ROWS) * 1_000_003
Write = Callable[[np.ndarray, int], None]


def array_table() -> tuple[Write, Callable[[], list[np.ndarray]], Callable[[], np.ndarray]]:
    table = ArrayTable(LAYOUT)

    def arrays() -> list[np.ndarray]:
        return [table.gather(ROWS[:1]).records.values, table.gather(ROWS[:1]).records.state]

    def write(rows: np.ndarray, start: int) -> None:
        table.write(rows, records_from(start))

    return write, arrays, lambda: table.fetch(ROWS).state[:, 0]


def slots() -> tuple[Write, Callable[[], list[np.ndarray]], Callable[[], np.ndarray]]:
    cache = CacheSlots(empty_records(LAYOUT, 1024), 1024)

    def write(rows: np.ndarray, start: int) -> None:
        cache.put(np.arange(start, start + len(rows)), rows, records_from(start))

    def arrays() -> list[np.ndarray]:
        return [cache.records.values, cache.records.state]

    return write, arrays, lambda: cache.records.state[:NUM_ROWS, 0]


def records_from(start: int) -> Records:
    state = np.arange(start, start + CHUNK, dtype=np.float32)[:, None]
    records = record_of(0.0, CHUNK)
    records.values[:], records.state[:] = state, state
    return records


@pytest.mark.parametrize("make", [array_table, slots])
@pytest.mark.parametrize("has_addresses", [True, False])
def test_large_table_is_never_copied(
    make: Callable[[], tuple[Write, Callable[[], list[np.ndarray]], Callable[[], np.ndarray]]],
    has_addresses: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(api, "_COPIED_BYTES", 1 << 14)
    if not has_addresses:  # `ulimit -v`

        def refuse(*_: object, **__: object) -> None:
            raise OSError

        monkeypatch.setattr(mmap, "mmap", refuse)
    write, arrays, read = make()
    places: list[set[int]] = [set() for _ in arrays()]
    for start in range(0, NUM_ROWS, CHUNK):
        write(ROWS[start : start + CHUNK], start)
        for seen, array in zip(places, arrays(), strict=True):
            if start * array[:1].nbytes > 1 << 15:
                seen.add(array.ctypes.data)
    assert read().tolist() == list(range(NUM_ROWS))
    counts = [len(seen) for seen in places]
    assert set(counts) == {1} if has_addresses else max(counts) > 2


def test_addresses_for_all_memory_use_none_until_they_are_written() -> None:
    before, large = resident_bytes(), grown(np.ones((1 << 20, 16)), (1 << 20) + 1)
    assert large.nbytes > 4 << 30 or large.nbytes > api._MEMORY_BYTES // 2  # pyright: ignore[reportPrivateUsage]
    assert resident_bytes() - before < 160 << 20
    assert (large[: 1 << 20] == 1).all()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_each_insertion_into_a_row_map_moves_a_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    inserted, insert = list[int](), RowMap._insert  # pyright: ignore[reportPrivateUsage]

    def counted(row_map: RowMap, positions: range) -> None:
        inserted.append(len(positions))
        insert(row_map, positions)

    monkeypatch.setattr(RowMap, "_insert", counted)
    row_map = RowMap()
    for start in range(0, NUM_ROWS, CHUNK):
        rows = ROWS[start : start + CHUNK] + DENSE_MAP_ROWS
        assert (row_map.find(rows) == -1).all()
        inserted.clear()
        assert row_map.add(rows).tolist() == list(range(start, start + CHUNK))
        assert sum(inserted) <= 5 * CHUNK
        assert (row_map.find(ROWS[: start + CHUNK] + DENSE_MAP_ROWS) >= 0).all()
    assert row_map.find(row_map.rows).tolist() == list(range(NUM_ROWS))

"""Tables grow in place once they are large, so that no step waits and memory is used once."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.trainer.stores import LAYOUT, record_of
from trainer.embedding.cache import CacheSlots
from trainer.stores import api
from trainer.stores.api import Records, empty_records, grown
from trainer.stores.local import DENSE_MAP_ROWS, ArrayTable, RowMap

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

"""The external sort that checkpoints are written through, and files written as rows come."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer.stores import TableOf, whole
from trainer.checkpoint.format import NpyFile
from trainer.stores.api import Records, Store, TableLayout, WriteBack
from trainer.stores.bucket_files import BucketFiles, Entries, SortedRuns
from trainer.stores.future_log import FutureLog
from trainer.stores.local import mmap_store

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
        BucketFiles(folder, 3, "float64", chunk_bytes=chunk_bytes), 3, run_bytes=run_bytes
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
        blocks = [line for _, block in found for line in block.tolist()]
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
        records = Records(values[part], values[part, :1])
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

"""Rows of a checkpoint are read once, into any store, and every byte is verified."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from presage.schemas.errors import SchemaError
from presage.schemas.oracle.cache_plan import NEVER_AGAIN
from presage.trainer.checkpoint import read_rows
from presage.trainer.checkpoint.files import (
    FileChecksum,
    NewCheckpoint,
    folder_name,
    read_checkpoint_manifest,
)
from presage.trainer.checkpoint.format import ROW_FILES, RowsAndRecords
from presage.trainer.checkpoint.load import load_rows, verify_checkpoint
from presage.trainer.stores.future_log import log_store
from presage.trainer.stores.local import memory_store, mmap_store
from presage.trainer.stores.store import Records, Store, TableLayout
from tests.trainer.stores import as_records

LAYOUTS = {
    name: TableLayout(table=name, dim=3, state_width=width, dtype="float32", seed=0)
    for name, width in (("items", 1), ("users", 1), ("none", 1))
}
IDS = 1 << 40
"""Row ids are below."""


@dataclass
class Saved:
    """A checkpoint of several parts, and the rows that a load must give."""

    folder: Path
    rows: dict[str, dict[int, tuple[list[float], list[float]]]]


def drawn(rng: np.random.Generator, num_rows: int) -> RowsAndRecords:
    """Draw ascending rows, half of them of few ids, so that parts share some."""
    few, many = rng.integers(0, 60, num_rows // 2), rng.integers(0, IDS, num_rows - num_rows // 2)
    rows = np.unique(np.concatenate([few, many]))
    values, state = (rng.random((len(rows), width), np.float32) for width in (3, 1))
    return rows, as_records(values, state)


def save(run: Path, seed: int) -> Saved:
    """Write a base and two parts of changed rows; table `none` has a part without rows."""
    rng, checkpoints = np.random.default_rng(seed), run / "checkpoints"
    parts: dict[str, tuple[str, ...]] = dict.fromkeys(LAYOUTS, ())
    files: dict[str, FileChecksum] = {}
    rows: dict[str, dict[int, tuple[list[float], list[float]]]] = {t: {} for t in LAYOUTS}
    for step, size in ((5, 90), (6, 20), (7, 30)):
        with NewCheckpoint(checkpoints, step) as checkpoint:
            for table, layout in LAYOUTS.items():
                chunk = drawn(rng, 0 if table == "none" else size)
                checkpoint.write_rows(table, layout, [chunk])
                parts[table] = (f"{folder_name(step)}/{table}", *parts[table])
                values, state = chunk[1].values.tolist(), chunk[1].state.tolist()
                pairs = zip(values, state, strict=True)
                rows[table] |= zip(chunk[0].tolist(), pairs, strict=True)
            checkpoint.finish({}, parts, files, keep=1)
        files = dict(read_checkpoint_manifest(checkpoint.folder).files)
    return Saved(checkpoint.folder, rows)


def found(store: Store, table: str) -> dict[int, tuple[list[float], list[float]]]:
    """Return the rows of a store in the form of `Saved.rows`."""
    rows: dict[int, tuple[list[float], list[float]]] = {}
    for ids, records in store.contents(table):
        pairs = zip(records.values.tolist(), records.state.tolist(), strict=True)
        rows |= zip(ids.tolist(), pairs, strict=True)
    return rows


STORES: dict[str, Callable[[Path], Store]] = {
    "memory": lambda folder: memory_store(LAYOUTS),
    "mapped files": lambda folder: mmap_store(LAYOUTS, folder),
    "log": lambda folder: log_store(LAYOUTS, folder),
}


def load(saved: Saved, store: Store) -> None:
    """Load a checkpoint as a resumed run does."""
    is_log = not hasattr(store, "tables")
    load_rows(
        saved.folder,
        verify_checkpoint(saved.folder, with_rows=False),
        store,
        (lambda table, step, rows: np.full(len(rows), NEVER_AGAIN)) if is_log else None,
    )


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let small files have several blocks, and parts several chunks."""
    monkeypatch.setattr(read_rows, "_BLOCK_BYTES", 100)
    monkeypatch.setattr("presage.trainer.stores.store._CHUNK_ROWS", 16)


@pytest.mark.parametrize("kind", STORES)
def test_newest_rows_of_all_parts_are_loaded(kind: str, tmp_path: Path) -> None:
    for seed in range(3):
        saved = save(tmp_path / f"run{seed}", seed)
        store = STORES[kind](tmp_path / "store")
        load(saved, store)
        for table in LAYOUTS:
            assert found(store, table) == saved.rows[table]


def test_loaded_rows_are_found_and_new_ones_added(tmp_path: Path) -> None:
    saved, store = save(tmp_path, 1), memory_store(LAYOUTS)
    load(saved, store)
    rows = np.array([*saved.rows["items"], IDS + 1, IDS + 2])
    gathered = store.gather("items", rows)
    values = gathered.records.values[gathered.positions]
    assert values[:-2].tolist() == [values for values, _ in saved.rows["items"].values()]
    assert len(found(store, "items")) == len(rows)


def damages(path: Path) -> Iterator[Callable[[], object]]:
    """Yield ways to damage a file."""
    data = path.read_bytes()
    for place in (3, 70, len(data) - 1):  # magic, header, last number
        changed = bytearray(data)
        changed[place] ^= 1
        yield lambda changed=changed: path.write_bytes(changed)
    for old, new in ((b"<f4", b"<i4"), (b"(", b" "), (b", 3)", b", 1)")):
        yield lambda old=old, new=new: path.write_bytes(data.replace(old, new, 1))
    yield lambda: path.write_bytes(data[:-1])
    yield lambda: path.write_bytes(data + b"\0")
    yield path.unlink


def test_files_of_many_blocks_are_loaded_and_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_rows, "_BLOCK_BYTES", 4096)
    for num_rows in (4 * 4096 // 8 - 16, 30_001):  # files end with a block, and not
        folder = tmp_path / str(num_rows)
        rows = np.arange(num_rows) * 7
        block = np.random.default_rng(0).random((num_rows, 4), np.float32)
        with NewCheckpoint(folder / "checkpoints", 1) as checkpoint:
            chunk = rows, Records(block, 3)
            checkpoint.write_rows("items", LAYOUTS["items"], [chunk])
            checkpoint.finish({}, {"items": (f"{folder_name(1)}/items",)}, {}, keep=1)
        saved, store = Saved(checkpoint.folder, {}), memory_store(LAYOUTS)
        load(saved, store)
        loaded = store.fetch(1, {"items": rows})["items"]
        assert np.array_equal(np.hstack([loaded.values, loaded.state]), block)
        for name in ROW_FILES:
            path = saved.folder / "items" / f"{name}.npy"
            data = path.read_bytes()
            for place in (4097, len(data) - 1):
                path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
                with pytest.raises(SchemaError, match="file must have sha256") as raised:
                    load(saved, memory_store(LAYOUTS))
                assert raised.value.file == str(path)
            path.write_bytes(data)


@pytest.mark.slow
@pytest.mark.parametrize("kind", STORES)
def test_each_damage_is_found_by_loading(kind: str, tmp_path: Path) -> None:
    saved = save(tmp_path, 2)
    manifest = read_checkpoint_manifest(saved.folder)
    for part in (manifest.parts["items"][0], manifest.parts["users"][-1]):
        for name in ROW_FILES:
            path = saved.folder.parent / part / f"{name}.npy"
            data = path.read_bytes()
            for damage in damages(path):
                damage()
                if path.is_file() and path.read_bytes() == data:
                    continue
                with pytest.raises(SchemaError, match="file must have") as raised:
                    load(saved, STORES[kind](tmp_path / "store"))
                assert raised.value.file == str(path)
                path.write_bytes(data)


def test_store_is_loaded_again_after_a_load_that_failed(tmp_path: Path) -> None:
    saved, store = save(tmp_path, 3), memory_store(LAYOUTS)
    part = read_checkpoint_manifest(saved.folder).parts["items"][-1]
    path = saved.folder.parent / part / "records.npy"
    data = path.read_bytes()
    path.write_bytes(data[:-4] + bytes(4))
    with pytest.raises(SchemaError):
        load(saved, store)
    path.write_bytes(data)
    load(saved, store)
    for table in LAYOUTS:
        assert found(store, table) == saved.rows[table]


def test_checkpoint_of_wider_rows_is_refused(tmp_path: Path) -> None:
    saved = save(tmp_path, 4)
    wider = {
        table: TableLayout(table=table, dim=4, state_width=1, dtype="float32", seed=0)
        for table in LAYOUTS
    }
    with pytest.raises(SchemaError, match="array must be of the job's table"):
        load(saved, memory_store(wider))

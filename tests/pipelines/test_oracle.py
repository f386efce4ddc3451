"""Numbers of rows and next uses, in one range or in many, in bounded memory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from presage.pipelines.build import build
from presage.pipelines.cli import main
from presage.pipelines.clustering.part import LOOKUPS, lookups_table
from presage.pipelines.oracle import numbering
from presage.pipelines.oracle.numbering import number_table, row_ranges
from presage.pipelines.oracle.table_files import ArrayFile, IndexedLists
from presage.pipelines.table.verify import verify
from presage.schemas.arrays import Jagged, jagged_of, offsets_of
from presage.schemas.dataset.checked_files import CheckedFile
from presage.schemas.dataset.opened import open_dataset
from presage.schemas.errors import SchemaError
from presage.schemas.hashing import NUM_SLOTS
from presage.schemas.layout import FILE_SHIFT, part_path
from presage.schemas.oracle.next_uses import from_gaps
from presage.schemas.storage.location import Location
from tests.fork_server import without_forking
from tests.pipelines.appending import addition
from tests.pipelines.logs import built, bytes_of, copy_of, request, write_job, write_log
from tests.shared import json_of


def small_files(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("presage.pipelines.prepare.PART_INPUT_BYTES", 4_000)
    for module in ("table_files", "numbering", "index"):
        patch.setattr(f"presage.pipelines.oracle.{module}.ENTRIES_PER_FILE", 150)
    for lists in ("ACCESSES", "DISTANCES"):
        patch.setattr(f"presage.pipelines.oracle.table_files.{lists}_PER_ROW_GROUP", 60)


def small_ranges(patch: pytest.MonkeyPatch) -> None:
    """Number and link every table in many ranges."""
    patch.setattr("presage.pipelines.oracle.numbering.ARRAY_ROWS", 50)
    patch.setattr("presage.pipelines.oracle.numbering.HASHED_ROWS", 20)
    patch.setattr("presage.pipelines.oracle.numbering.SAMPLED_SLOTS", NUM_SLOTS)
    patch.setattr("presage.pipelines.oracle.index.RANGE_NUMBERS", 150)


@pytest.fixture(scope="module")
def at_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of two segments with many small files of the oracle, each table made at once."""
    directory = tmp_path_factory.mktemp("at-once")
    with pytest.MonkeyPatch.context() as patch:
        small_files(patch)
        built(directory)
        write_log(directory / "log-1", num_rows=200, seed=1)
        build(addition(directory / "job" / "job.yaml", directory / "log-1", directory / "dataset"))
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("runner", ["--runner=InProcess", "--runner=DirectRunner"])
def test_build_and_append_in_ranges_give_the_bytes_of_tables_made_at_once(
    at_once: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runner: str
) -> None:
    small_files(monkeypatch)
    small_ranges(monkeypatch)
    job = write_job(tmp_path / "job")
    for make, log in ((request, "log"), (addition, "log-1")):
        build(make(job, at_once / log, tmp_path / "dataset", beam_args=[runner]))
    found = bytes_of(tmp_path / "dataset")
    assert found == bytes_of(at_once / "dataset")
    assert sum("/access/items/" in path for path in found) > 4
    assert sum(path.startswith("index-") and "/items/" in path for path in found) > 2
    assert not verify(tmp_path / "dataset")["problems"]


@pytest.mark.slow
@pytest.mark.parametrize("shuffle", ["none", "blocks"])
def test_reindex_of_several_epochs_in_ranges_gives_the_bytes_of_one_made_at_once(
    at_once: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shuffle: str
) -> None:
    small_files(monkeypatch)
    first, second = (copy_of(at_once / "dataset", tmp_path / name) for name in "ab")
    words = [
        "--reindex",
        "--epochs",
        "3",
        "--batch-samples",
        "48",
        "--shuffle",
        shuffle,
        "--seed",
        "7",
    ]
    assert main(["oracle", str(first), *words, "--json"]) == 0
    small_ranges(monkeypatch)
    assert main(["oracle", str(second), *words, "--json"]) == 0
    assert bytes_of(first) == bytes_of(second)
    dataset = open_dataset(first)
    assert len(dataset.complete_indexes()) == 2
    (part, _) = dataset.open_index(dataset.manifest.indexes[1]).parts
    files = {e: sum(f"items/uses-{e:05d}/" in p for p in part.files) for e in range(3)}
    stored = 3 if shuffle == "blocks" else 1
    assert list(files.values()) == [2] * stored + [0] * (3 - stored)
    assert not verify(first)["problems"]


def write_lookups(root: Path, lists: list[list[int]], blocks_per_part: int) -> np.ndarray:
    """Write the look-ups of blocks, several row groups a part; return the blocks' ids."""
    ids: list[int] = []
    for part, start in enumerate(range(0, len(lists), blocks_per_part)):
        mine = lists[start : start + blocks_per_part]
        ids += [part << FILE_SHIFT | i for i in range(len(mine))]
        flat = np.array([row for rows in mine for row in rows], np.int64)
        table = lookups_table(Jagged(flat, offsets_of(np.array(list(map(len, mine))))))
        path = root / LOOKUPS / "items" / part_path(part)
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, path, row_group_size=2)
    return np.array(ids, np.int64)


RANGES = {"an array": (1 << 24, 1 << 20), "arrays": (9, 1 << 20), "hash tables": (1, 7)}
"""Name to possible rows of an array and rows of a hash table."""


@pytest.mark.parametrize("ranges", RANGES.values(), ids=RANGES)
@pytest.mark.parametrize("seed", range(2))
def test_rows_of_any_order_of_blocks_are_numbered_by_first_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, ranges: tuple[int, int]
) -> None:
    small_files(monkeypatch)
    for module in ("table_files", "numbering"):
        monkeypatch.setattr(f"presage.pipelines.oracle.{module}.ENTRIES_PER_FILE", 20)
    monkeypatch.setattr(numbering, "ARRAY_ROWS", ranges[0])
    monkeypatch.setattr(numbering, "HASHED_ROWS", ranges[1])
    monkeypatch.setattr(numbering, "SAMPLED_SLOTS", NUM_SLOTS)
    rng = np.random.default_rng(seed)
    universe = rng.integers(0, 1 << 62, 40) if ranges[0] == 1 else rng.permutation(300)[:40]
    lists = [sorted(set(rng.choice(universe, rng.integers(0, 15)).tolist())) for _ in range(23)]
    lists[5] = []
    blocks = rng.permutation(write_lookups(tmp_path, lists, 5))[:20]  # the others evaluate
    used = [lists[(b >> FILE_SHIFT) * 5 + (b & 0xFFFFF)] for b in blocks.tolist()]
    rows = list(dict.fromkeys(row for block in used for row in block))
    assert number_table(Location.parse(tmp_path), "items", blocks).num_rows == len(rows)
    access, stored = (
        pa.concat_tables(map(pq.read_table, sorted((tmp_path / name / "items").iterdir())))
        for name in ("access", "edges")
    )
    assert len(list((tmp_path / "access" / "items").iterdir())) > 3
    assert access["block"].to_pylist() == blocks.tolist()
    assert stored["row"].to_pylist() == rows
    numbers = from_gaps(jagged_of(access["gaps"]))
    for position, block in enumerate(used):
        mine = numbers.values[numbers.offsets[position] : numbers.offsets[position + 1]]
        assert mine.tolist() == sorted(rows.index(row) for row in block)


def test_a_table_without_training_blocks_has_empty_files(tmp_path: Path) -> None:
    write_lookups(tmp_path, [[], []], 1)
    empty = np.empty(0, np.int64)
    assert number_table(Location.parse(tmp_path), "items", empty).num_rows == 0
    assert pq.read_table(tmp_path / part_path(0, "access", "items")).num_rows == 0
    assert pq.read_table(tmp_path / part_path(0, "edges", "items")).num_rows == 0


def test_too_many_rows_of_a_segment_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numbering, "MAX_NUMBERS", 2)
    blocks = write_lookups(tmp_path, [[4, 5], [5, 6]], 1)
    message = "a segment must have at most 2 distinct rows of table 'items', got 3; build it as"
    with pytest.raises(SchemaError, match=message):
        number_table(Location.parse(tmp_path), "items", blocks)


def test_hash_tables_have_about_equal_numbers_of_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numbering, "ARRAY_ROWS", 1 << 10)
    monkeypatch.setattr(numbering, "HASHED_ROWS", 1 << 10)
    rng = np.random.default_rng(0)
    rows = np.unique(rng.lognormal(20, 2, 10_000).astype(np.int64))  # dense at its start
    with ArrayFile(tmp_path) as file:
        lookups = IndexedLists(file, 10, np.int64)
        parts = np.array_split(rows, 10)
        lookups.write(np.arange(10), Jagged(rows, offsets_of(np.array(list(map(len, parts))))))
        ranges = row_ranges(lookups, [np.arange(10, dtype=np.int32)], int(rows[-1]))
    assert (ranges[0].low, ranges[-1].end) == (0, rows[-1] + 1)
    counts, _ = np.histogram(rows, [*(r.low for r in ranges), ranges[-1].end])
    assert 8 <= len(counts) <= 12
    assert counts.max() < 2 * counts.mean()


@pytest.mark.slow
@pytest.mark.parametrize("num_rows", [pytest.param(1 << 25, marks=pytest.mark.nightly), 1 << 40])
def test_a_large_table_takes_less_than_512_mib_and_64_open_files(
    tmp_path: Path, repository: Path, num_rows: int
) -> None:
    """Imports count, too; the limit of open files is one of the process."""
    command = [sys.executable, "-m", "tests.pipelines.large_table", str(tmp_path), str(num_rows)]
    with without_forking():
        done = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["num_rows"] > 4_000_000
    assert found["num_entries"] > 14_000_000
    assert found["peak_bytes"] < 512 << 20


def test_row_groups_end_where_the_entries_in_their_file_reach_another_multiple(
    at_once: Path,
) -> None:
    dataset = open_dataset(at_once / "dataset")
    part = dataset.open_index(dataset.manifest.indexes[0]).parts[0]
    accesses = dataset.segments[0].access_files("items")[0]
    distances = CheckedFile(part.directory, part.files[part_path(0, "items")])
    for file, column in ((accesses, "gaps"), (distances, "distances")):
        lists = jagged_of(file.read([column])[column])
        cuts = (np.flatnonzero(np.diff(lists.offsets[:-1] // 60)) + 1).tolist()
        assert cuts
        assert file.rows_per_row_group == np.diff([0, *cuts, lists.num_rows]).tolist()


def test_oracle_prints_the_load_of_each_table(at_once: Path) -> None:
    for table in json_of(main, ["oracle", str(at_once / "dataset"), "--json"])["tables"].values():
        load = table["load"]
        assert sum(map(sum, load["slots"])) == table["num_accesses"]
        assert sum(load["reuse"]) + load["never"] == table["num_accesses"]
        assert load["never"] == table["num_unique_rows"]
        assert 0 < load["most_rows_per_step"] <= table["num_unique_rows"]


def test_array_that_one_call_does_not_read_is_read_in_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, into, at: read(file, [into[0][:1000]], at))
    with ArrayFile(tmp_path) as file:
        numbers = np.arange(5_000, dtype=np.int64)
        assert np.array_equal(file.read(file.write(numbers)), numbers)

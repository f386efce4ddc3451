"""Tables that do not fit a worker are processed in stages, to the same bytes in bounded memory."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.build import build
from pipelines.cli import main
from pipelines.clustering.part import lookups_table
from pipelines.oracle import files
from pipelines.oracle.files import run_stages
from pipelines.oracle.index import number_range_bounds
from pipelines.oracle.numbering import NUMBERING_STAGES, NumberingPlan, lookups_path, number_table
from pipelines.table.verify import verify
from schemas.arrays import Jagged, jagged_of, offsets_of
from schemas.dataset import open_dataset
from schemas.layout import FILE_SHIFT, access_path, edges_path
from schemas.oracle import from_gaps
from schemas.storage import Location
from tests.fork_server import without_forking
from tests.pipelines.appending import addition
from tests.pipelines.logs import built, bytes_of, copy_of, write_log

FEW_ENTRIES = 60
"""Entries that fit a worker: every table goes in rounds, each task in several pieces."""


def small_files(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("pipelines.prepare.PART_INPUT_BYTES", 4_000)
    patch.setattr("pipelines.oracle.files.ENTRIES_PER_FILE", 150)
    patch.setattr("pipelines.oracle.index.RANGE_ENTRIES", 100)  # cuts files, too


def in_rounds(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("pipelines.beam.build.WORKER_ENTRIES", FEW_ENTRIES)
    patch.setattr("pipelines.table.indexes.WORKER_ENTRIES", FEW_ENTRIES)
    patch.setattr("pipelines.table.indexes.WORKER_BYTES", 1 << 12)


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


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    small_files(monkeypatch)
    in_rounds(monkeypatch)


@pytest.mark.slow
@pytest.mark.usefixtures("rounds")
def test_build_and_append_in_rounds_give_the_bytes_of_tables_made_at_once(
    at_once: Path, tmp_path: Path
) -> None:
    built(tmp_path)
    build(addition(tmp_path / "job" / "job.yaml", at_once / "log-1", tmp_path / "dataset"))
    found = bytes_of(tmp_path / "dataset")
    assert found == bytes_of(at_once / "dataset")
    assert sum("/access/items/" in path for path in found) > 4
    assert sum(path.startswith("index-") and "/items/" in path for path in found) > 2
    assert not verify(tmp_path / "dataset")["problems"]


@pytest.mark.slow
def test_a_small_build_does_the_rounds_of_a_table_one_by_one(
    at_once: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_files(monkeypatch)
    in_rounds(monkeypatch)
    monkeypatch.setattr("pipelines.beam.build.SPREAD_PARTS", 1_000)
    monkeypatch.setattr("pipelines.table.indexes.WORKER_BYTES", 1 << 30)
    built(tmp_path)
    build(addition(tmp_path / "job" / "job.yaml", at_once / "log-1", tmp_path / "dataset"))
    assert bytes_of(tmp_path / "dataset") == bytes_of(at_once / "dataset")


@pytest.mark.slow
@pytest.mark.parametrize("shuffle", ["none", "blocks"])
def test_reindex_of_several_epochs_in_rounds_gives_the_bytes_of_one_made_at_once(
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
    in_rounds(monkeypatch)
    assert main(["oracle", str(second), *words, "--json"]) == 0
    assert bytes_of(first) == bytes_of(second)
    dataset = open_dataset(first)
    assert len(dataset.complete_indexes()) == 2
    (part, _) = dataset.open_index(dataset.manifest.indexes[1]).parts
    ranges = {e: sum(f"items/uses-{e:05d}/" in p for p in part.files) for e in range(3)}
    assert all((count > 4) == (shuffle == "blocks") for count in ranges.values())
    assert not verify(first)["problems"]


def write_lookups(root: Path, lists: list[list[int]], blocks_per_part: int) -> np.ndarray:
    """Write the look-ups of blocks, several row groups a part; return the blocks' ids."""
    ids: list[int] = []
    for part, start in enumerate(range(0, len(lists), blocks_per_part)):
        mine = lists[start : start + blocks_per_part]
        ids += [part << FILE_SHIFT | i for i in range(len(mine))]
        flat = np.array([row for rows in mine for row in rows], np.int64)
        table = lookups_table(Jagged(flat, offsets_of(np.array(list(map(len, mine))))))
        path = lookups_path(root, "items", part)
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, path, row_group_size=2)
    return np.array(ids, np.int64)


@pytest.mark.parametrize("seed", range(4))
def test_rounds_number_rows_of_any_order_of_blocks_by_first_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(files, "ENTRIES_PER_FILE", 20)
    rng = np.random.default_rng(seed)
    universe = rng.integers(0, 2**62, 40)
    lists = [sorted(set(rng.choice(universe, rng.integers(0, 15)).tolist())) for _ in range(23)]
    lists[5] = []
    blocks = rng.permutation(write_lookups(tmp_path, lists, 5))[:20]  # the others evaluate
    used = [lists[(b >> FILE_SHIFT) * 5 + (b & 0xFFFFF)] for b in blocks.tolist()]
    plan = number_table(Location.parse(tmp_path), "items", blocks, worker_entries=9)
    assert isinstance(plan, NumberingPlan)
    assert plan.num_ranges > 5
    assert plan.num_files > 3
    rows = list(dict.fromkeys(row for block in used for row in block))
    assert sum(run_stages(plan, NUMBERING_STAGES)) == len(rows)
    access = [pq.read_table(tmp_path / access_path("items", f)) for f in range(plan.num_files)]
    edges = [pq.read_table(tmp_path / edges_path("items", f)) for f in range(plan.num_files)]
    stored = pa.concat_tables(edges)
    assert stored["row"].to_pylist() == rows
    for name, places in (("first_position", 0), ("last_position", -1)):
        expected = [[p for p, block in enumerate(used) if r in block][places] for r in rows]
        assert stored[name].to_pylist() == expected
    numbers = from_gaps(jagged_of(pa.concat_tables(access)["gaps"]))
    for position, block in enumerate(used):
        mine = numbers.values[numbers.offsets[position] : numbers.offsets[position + 1]]
        assert mine.tolist() == sorted(rows.index(row) for row in block)


def test_ranges_of_numbers_hold_about_equal_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipelines.oracle.index.RANGE_ENTRIES", 1_000)
    counts = np.zeros(1024, np.int64)
    counts[:4] = 900
    counts[4:] = 10
    cuts = number_range_bounds(counts, 10_240)
    assert cuts[:5] == [0, 20, 30, 40, 440]
    assert cuts[-1] == 10_240
    assert number_range_bounds(counts, 3) == [0, 2, 3]


@pytest.mark.slow
def test_rounds_of_a_large_table_take_less_than_512_mib(tmp_path: Path, repository: Path) -> None:
    """A worker's imports count, too: the most that any round takes, all in one process."""
    command = [sys.executable, "-m", "tests.pipelines.large_table", str(tmp_path)]
    with without_forking():
        done = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["num_rows"] > 4_000_000
    assert found["num_entries"] > 14_000_000
    assert found["peak_bytes"] < 512 << 20


def test_oracle_prints_the_load_of_each_table(
    at_once: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["oracle", str(at_once / "dataset"), "--json"]) == 0
    for table in json.loads(capsys.readouterr().out)["tables"].values():
        load = table["load"]
        assert sum(map(sum, load["slots"])) == table["num_accesses"]
        assert sum(load["reuse"]) + load["never"] == table["num_accesses"]
        assert load["never"] == table["num_unique_rows"]
        assert 0 < load["most_rows_per_step"] <= table["num_unique_rows"]

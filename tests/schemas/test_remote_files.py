"""Files of a dataset at a store: equal to those on disk, verified, fetched ahead, given back."""

from __future__ import annotations

import pickle
import uuid
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from presage.pipelines.clustering.storage_layout import open_writer
from presage.schemas.dataset.accesses import TableAccesses
from presage.schemas.dataset.checked_files import CheckedFile
from presage.schemas.dataset.files import FileEntry, describe_file, find_damaged_files, sha256_of
from presage.schemas.dataset.opened import open_dataset
from presage.schemas.dataset.run_next_uses import NextUses
from presage.schemas.errors import SchemaError
from presage.schemas.storage.location import Location
from tests.fault_proxy import Faults
from tests.object_store import Store
from tests.schemas.tiny import write_dataset

NUM_GROUPS, GROUP_ROWS = 8, 20_000


def copied(folder: Path) -> Location:
    """Copy a folder to a new place in memory, as an object store."""
    target = Location.parse(f"memory://{uuid.uuid4().hex}/copy")
    for entry in Location.parse(folder).entries():
        (target / entry.path).upload(folder / entry.path)
    return target


@pytest.fixture
def written(tmp_path: Path) -> tuple[Path, FileEntry]:
    """A Parquet file of eight row groups that do not compress, and its entry."""
    numbers = np.random.default_rng(0).integers(0, 1 << 60, NUM_GROUPS * GROUP_ROWS)
    table = pa.table({"x": numbers, "y": numbers[::-1]})
    with open_writer(tmp_path / "a.parquet", table.schema, {}) as writer:
        writer.write_table(table, row_group_size=GROUP_ROWS)
    return tmp_path, describe_file(tmp_path / "a.parquet", "a.parquet")


def test_dataset_at_a_store_is_read_as_on_disk(tmp_path: Path) -> None:
    write_dataset(tmp_path / "tiny")
    here, there = open_dataset(tmp_path / "tiny"), open_dataset(copied(tmp_path / "tiny"))
    assert here.manifest == there.manifest
    for one, other in zip(here.segments, there.segments, strict=True):
        assert one.blocks == other.blocks
        assert one.files == other.files
        assert find_damaged_files(other.directory, other.files) == []
        for path in (p for p in one.files if p.endswith(".parquet")):
            assert one.file(path).read() == other.file(path).read()
    for entry in here.manifest.indexes:
        order = here.order(entry.batch_samples, entry.epochs, entry.shuffle, entry.seed)
        for table in here.job.data.tables:
            pairs = [
                (TableAccesses(d, table, order), NextUses(d, d.index_for(order), table))
                for d in (here, there)
            ]
            for step in range(order.num_steps):
                (numbers, uses), (others, other_uses) = pairs
                assert np.array_equal(numbers.numbers(step), others.numbers(step))
                assert np.array_equal(uses[step], other_uses[step])


class Requests(Faults):
    """No faults; the requests by the path of the file below `tiny`."""

    def draw(self, method: str, path: str) -> str | None:
        self.requests[path.partition("?")[0].partition("/tiny/")[2]] += 1
        return None


@pytest.mark.parametrize(("epochs", "whole_bytes"), [(1, 0), (2, 0), (1, 1 << 16)])
def test_files_of_accesses_are_requested_once_for_each_use(
    epochs: int, whole_bytes: int, tmp_path: Path, s3_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several files the footers are requested first, to count their rows; small ones whole."""
    monkeypatch.setattr("presage.schemas.dataset.checked_files._WHOLE_BYTES", whole_bytes)
    here = Location.parse(tmp_path / "tiny")
    write_dataset(tmp_path / "tiny")
    requests = Requests()
    with s3_store.behind_proxy(requests) as store:
        for name, value in store.environment.items():
            monkeypatch.setenv(name, value)
        there = Location.parse(f"{store.new_url()}/tiny")
        for entry in here.entries():
            (there / entry.path).upload(tmp_path / "tiny" / entry.path)
        dataset = open_dataset(there)
        order = dataset.order(32, 2, "none", 0)
        requests.requests.clear()
        accesses = TableAccesses(dataset, "items", order)
        next_uses = NextUses(dataset, dataset.index_for(order), "items", accesses.numbering)
        for step in range(order.num_steps // 2 * epochs):
            accesses.entries(step, next_uses[step])
    assert {len(segment.edge_files("items")) for segment in dataset.segments} == {2}
    for path, count in requests.requests.items():
        if whole_bytes:
            assert count == 1
        elif "/edges/" in path or "/uses-" in path:
            assert count == (2 if path.endswith("00001.parquet") else 1)
        elif "/access/" in path:
            assert count == 2  # decoded row groups are kept
        elif "/items/" in path:
            assert count == 1 + epochs
        else:
            assert count == 1


def test_entry_of_a_file_does_not_depend_on_its_place(written: tuple[Path, FileEntry]) -> None:
    folder, entry = written
    assert describe_file(copied(folder) / "a.parquet", "a.parquet") == entry


def test_row_groups_are_read_in_any_order(written: tuple[Path, FileEntry]) -> None:
    folder, entry = written
    here, there = CheckedFile(folder, entry), CheckedFile(copied(folder), entry)
    for row_group in (3, 0, 7, 3, 1, 0, 6, 6):
        there.prefetch((row_group + 1) % NUM_GROUPS)
        assert there.read_row_group(row_group) == here.read_row_group(row_group)
        assert there.read_row_group(row_group, ["y"]) == here.read_row_group(row_group, ["y"])
    assert there.read() == here.read()
    there.close()
    assert there.read(["x"]) == here.read(["x"])
    again = pickle.loads(pickle.dumps(there))
    assert again.read_row_group(2) == here.read_row_group(2)


def test_memory_of_row_groups_that_were_read_is_given_back(written: tuple[Path, FileEntry]) -> None:
    folder, entry = written
    file = CheckedFile(copied(folder), entry)
    for row_group in range(NUM_GROUPS):
        file.read_row_group(row_group)
    assert file._memory is not None
    starts = entry.region_offsets
    first = file._memory[starts[0] + 4096 : starts[1] - 4096]
    last = file._memory[starts[NUM_GROUPS - 1] : starts[NUM_GROUPS]]
    assert not any(first)
    assert any(last)


@pytest.mark.parametrize("ahead", [False, True], ids=["when it is read", "ahead"])
def test_changed_byte_is_refused(written: tuple[Path, FileEntry], ahead: bool) -> None:
    folder, entry = written
    place = copied(folder)
    data = bytearray((place / "a.parquet").read_bytes())
    data[entry.region_offsets[2] + 100] ^= 1
    (place / "a.parquet").write_bytes(bytes(data))
    file = CheckedFile(place, entry)
    if ahead:
        file.prefetch(2)
    file.read_row_group(1)
    with pytest.raises(SchemaError, match=r"must have crc32 .* in memory://.*/a\.parquet; restore"):
        file.read_row_group(2)
    with pytest.raises(SchemaError, match="must have crc32"):
        file.read()
    assert find_damaged_files(place, {"a.parquet": entry}) == ["a.parquet: content has changed"]


@pytest.mark.parametrize("ahead", [False, True], ids=["when it is read", "ahead"])
def test_missing_and_short_files_are_refused(written: tuple[Path, FileEntry], ahead: bool) -> None:
    folder, entry = written
    place = copied(folder)
    data = (place / "a.parquet").read_bytes()
    (place / "a.parquet").write_bytes(data[:-50])
    for message in ("restore", "file is missing"):
        file = CheckedFile(place, entry)
        if ahead:
            file.prefetch()
        with pytest.raises(SchemaError, match=message):
            file.read_row_group(0)
        place.remove(["a.parquet"])
    assert find_damaged_files(place, {"a.parquet": entry}) == ["a.parquet: missing"]


def test_hash_of_a_file_is_the_same_in_every_place(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"data")
    assert sha256_of(copied(tmp_path) / "a") == sha256_of(tmp_path / "a")
    for directory in (copied(tmp_path), tmp_path):
        with pytest.raises(FileNotFoundError):
            sha256_of(directory / "none")

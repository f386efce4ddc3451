"""Raw files at an object store: the rows of local ones, in few requests."""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from presage.pipelines.sources import parquet
from presage.pipelines.sources.formats import empty_rows, input_splits, read_split
from presage.pipelines.sources.raw_rows import Folder, InputSplit, folder_of
from presage.schemas.config.sources import SourceConfig
from presage.schemas.storage.location import Location
from tests.fault_proxy import Faults
from tests.object_store import Store
from tests.pipelines.private_workers import upload

SCALE = 256
"""Files and limits are smaller by this factor."""
COLUMNS = {"user": "int64", "a.b": "int64", "words": "list<string>"}


def write_parquet(path: Path, num_rows: int, rows_per_group: int) -> None:
    rng = np.random.default_rng(0)
    table = pa.table(
        {
            "user": rng.integers(0, 1 << 62, num_rows),
            "unread": rng.integers(0, 1 << 62, num_rows),
            "a.b": rng.integers(0, 1 << 62, num_rows),
            "words": [[str(i), "x"] for i in range(num_rows)],
        }
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, row_group_size=rows_per_group, write_page_checksum=True)


def read_all(folder: Folder, path: str, config: SourceConfig) -> tuple[list[Any], list[Any], int]:
    """Return rows with their origins and rejects, sorted, and the number of splits."""
    schema = empty_rows(folder, "log", config, [path]).schema
    splits, rejects = input_splits(folder, InputSplit("log", path, 0), config)
    rows: list[Any] = []
    for split in splits:
        for raw in read_split(folder, split, config, schema):
            rejects = [*rejects, *raw.rejects]
            rows += [] if raw.table is None else raw.table.to_pylist()
    return sorted(rows, key=str), sorted(rejects, key=str), len(splits)


def copy(folder: Path) -> Folder:
    """Copy files to a store in memory."""
    url = f"memory://bucket/{uuid.uuid4().hex}"
    upload(folder, url)
    return folder_of(url)


@pytest.mark.parametrize("footer_bytes", [64, 1 << 20])
def test_rows_and_rejects_of_a_parquet_file_at_a_store_are_those_of_a_local_one(
    footer_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "_FOOTER_BYTES", footer_bytes)
    monkeypatch.setattr(parquet, "_REQUEST_BYTES", 1_000)
    monkeypatch.setattr(parquet, "_GAP_BYTES", 100)
    monkeypatch.setattr("presage.pipelines.sources.formats.STORED_SPLIT_BYTES", 20_000)
    write_parquet(tmp_path / "log.parquet", num_rows=2_000, rows_per_group=100)
    column = pq.read_metadata(tmp_path / "log.parquet").row_group(3).column(2)
    content = bytearray((tmp_path / "log.parquet").read_bytes())
    content[column.data_page_offset + 400] ^= 255
    (tmp_path / "log.parquet").write_bytes(content)
    config = SourceConfig(files="*", format="parquet", columns=COLUMNS)
    local = read_all(folder_of(tmp_path), "log.parquet", config)
    stored = read_all(copy(tmp_path), "log.parquet", config)
    assert stored[:2] == local[:2]
    assert (len(local[0]), len(local[1])) == (1_900, 1)
    assert local[2] == 20
    assert 1 < stored[2] < 10


def test_parquet_files_that_are_none_are_rejected_alike_at_a_store(tmp_path: Path) -> None:
    write_parquet(tmp_path / "cut.parquet", num_rows=100, rows_per_group=50)
    (tmp_path / "whole.parquet").write_bytes((tmp_path / "cut.parquet").read_bytes())
    with (tmp_path / "cut.parquet").open("r+b") as file:
        file.truncate(1_000)
    (tmp_path / "short.parquet").write_bytes(b"PAR1")
    config = SourceConfig(files="*", format="parquet", columns=COLUMNS)
    stored = copy(tmp_path)
    for name in ("cut.parquet", "short.parquet"):
        local = read_all(folder_of(tmp_path), name, config)
        assert read_all(stored, name, config) == local
        assert len(local[1]) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    ["small row groups", "jsonl", pytest.param("large row groups", marks=pytest.mark.nightly)],
)
def test_a_gigabyte_takes_at_most_fifty_requests(
    kind: str, s3_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured on a file of some scaled gigabytes, whose footer is that of whole ones."""
    monkeypatch.setattr("presage.pipelines.sources.formats.STORED_SPLIT_BYTES", (64 << 20) // SCALE)
    monkeypatch.setattr(parquet, "_REQUEST_BYTES", (96 << 20) // SCALE)
    monkeypatch.setattr("presage.schemas.storage.location._READ_BYTES", (33 << 20) // SCALE)
    monkeypatch.setattr("presage.pipelines.sources.jsonl._BLOCK_BYTES", (8 << 20) // SCALE)
    faults, url = Faults(), s3_store.new_url()
    path = tmp_path / "log"
    if kind == "jsonl":
        columns, lines = {"user": "int64"}, (json.dumps({"user": i}) for i in range(500_000))
        path.write_text("\n".join(lines) + "\n")
    else:
        columns = COLUMNS
        write_parquet(path, 225_000, 500 if kind.startswith("small") else 15_000)
    config = SourceConfig(
        files="*", format="jsonl" if kind == "jsonl" else "parquet", columns=columns
    )
    with s3_store.behind_proxy(faults) as store:
        for name, value in store.environment.items():
            monkeypatch.setenv(name, value)
        upload(tmp_path, url)
        folder = folder_of(url)
        schema = empty_rows(folder, "log", config, ["log"]).schema
        faults.requests.clear()
        splits, _ = input_splits(folder, InputSplit("log", "log", 0), config)
        rows = sum(
            raw.table.num_rows
            for split in splits
            for raw in read_split(folder, split, config, schema)
            if raw.table is not None
        )
    assert rows == (500_000 if kind == "jsonl" else 225_000)
    passes = 2 if kind == "jsonl" else 1  # its lines are counted first
    gigabytes = passes * path.stat().st_size * SCALE / (1 << 30)
    assert gigabytes > 1.2
    assert sum(faults.requests.values()) / gigabytes <= 50, faults.requests
    assert Location.parse(url).exists()

"""Times with a zone are read as UTC in every format; no zone is ignored."""

from datetime import datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from presage.pipelines.samples.sql import Connection, run
from presage.pipelines.sources.formats import empty_rows, input_splits, read_split
from presage.pipelines.sources.raw_rows import InputSplit, folder_of
from presage.pipelines.sources.rejects import rejects_from_table
from presage.schemas.config.sources import SourceConfig

KINDS = ("timestamp", "timestamp_s", "timestamp_ms", "timestamp_ns")
ZONED = {
    "2026-01-01 10:00:00": "2026-01-01 10:00:00",
    "2026-01-01 10:00:00+01": "2026-01-01 09:00:00",
    "2026-01-01T10:00:00+01:00": "2026-01-01 09:00:00",
    "2026-01-01T10:00:00-0530": "2026-01-01 15:30:00",
    "2026-01-01T10:00:00Z": "2026-01-01 10:00:00",
}
CSV_ONLY = {
    "2026-01-01 10:00:00 +01:00": "2026-01-01 09:00:00",
    "2026-07-01 10:00:00 Europe/Berlin": "2026-07-01 08:00:00",
    "2026-01-01 00:30:00+01:00": "2025-12-31 23:30:00",
}


def read(directory: Path, name: str, config: SourceConfig) -> tuple[pa.Table, list[str]]:
    folder = folder_of(directory)
    schema = empty_rows(folder, "log", config, [name]).schema
    splits, _ = input_splits(folder, InputSplit("log", name, 0), config)
    result = [rows for split in splits for rows in read_split(folder, split, config, schema)]
    tables = [schema.empty_table(), *(rows.table for rows in result if rows.table is not None)]
    rejects = [r.reason for f in result for t in f.all_rejects() for r in rejects_from_table(t)]
    return pa.concat_tables(tables), rejects


def texts(table: pa.Table, name: str = "at") -> list[str]:
    return [str(value)[:19] for value in table[name].to_pylist()]


@pytest.mark.parametrize("kind", KINDS)
def test_csv_times_with_a_zone_are_utc(kind: str, tmp_path: Path) -> None:
    every = {**ZONED, **CSV_ONLY}
    (tmp_path / "log.csv").write_text("at\n" + "\n".join(every) + "\n2026-01-01 10:00:00 Nowhere\n")
    config = SourceConfig(files="*", format="csv", columns={"at": kind})
    table, rejects = read(tmp_path, "log.csv", config)
    assert texts(table) == list(every.values())
    assert rejects == [f"field 'at' must be {kind}, got '2026-01-01 10:00:00 Nowhere'"]


def test_csv_nanoseconds_and_dates_keep_what_they_have(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text(
        "at,day\n2026-01-01 10:00:00.123456789+01,2026-01-01T00:30:00+01:00\n"
    )
    columns = {"at": "timestamp_ns", "day": "date"}
    table, rejects = read(
        tmp_path, "log.csv", SourceConfig(files="*", format="csv", columns=columns)
    )
    assert str(table["at"][0]) == "2026-01-01 09:00:00.123456789"
    assert str(table["day"][0]) == "2025-12-31"
    assert not rejects


@pytest.mark.parametrize("kind", KINDS)
def test_json_times_with_a_zone_are_utc(kind: str, tmp_path: Path) -> None:
    lines = "".join(f'{{"at": "{text}"}}\n' for text in ZONED)
    (tmp_path / "log.jsonl").write_text(lines + '{"at": "2026-01-01 10:00:00 Europe/Berlin"}\n')
    config = SourceConfig(files="*", format="jsonl", columns={"at": kind})
    table, rejects = read(tmp_path, "log.jsonl", config)
    assert texts(table) == list(ZONED.values())
    assert rejects == [f"field 'at' must be {kind}, got '2026-01-01 10:00:00 Europe/Berlin'"]


@pytest.mark.parametrize("columns", [None, {"at": "timestamp"}])
def test_parquet_times_with_a_zone_are_utc(columns: dict[str, str] | None, tmp_path: Path) -> None:
    times = pa.array([datetime(2026, 1, 1, 9)], pa.timestamp("us"))
    pq.write_table(
        pa.table({"at": times.cast(pa.timestamp("us", "Europe/Berlin"))}), tmp_path / "log.parquet"
    )
    config = SourceConfig(files="*", format="parquet", columns=columns)
    table, rejects = read(tmp_path, "log.parquet", config)
    samples = run(Connection(), 'SELECT "at", hour("at") AS hour FROM log', {"log": table})
    assert samples.schema.field("at").type == pa.timestamp("us")
    assert texts(samples) == ["2026-01-01 09:00:00"]
    assert samples["hour"].to_pylist() == [9]
    assert not rejects

"""Values that a file may hold and a dataset may not: one row goes, the others stay."""

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.csv_source import read_csv
from pipelines.rejects import Reject
from pipelines.sources import FilePart, read_part
from pipelines.sql import carry_origin, connect, map_rows
from schemas.job import SourceConfig

ODD_VALUES: dict[str, tuple[str, pa.Array, str]] = {
    "a text that is no time": (
        "timestamp",
        pa.array(["2026-01-01 00:00:00", "yesterday", None]),
        "column 'x' must be timestamp, got 'yesterday'",
    ),
    "an id of 2**63": (
        "int64",
        pa.array([1, 2**63, None], pa.uint64()),
        "column 'x' must be int64, got 9223372036854775808",
    ),
    "half an id": ("int64", pa.array([1.0, 1.5, None]), "column 'x' must be int64, got 1.5"),
    "an id of 2**63 inside a list": (
        "list<int64>",
        pa.array([[1], [2, 2**63], None], pa.list_(pa.uint64())),
        "column 'x' must be list<int64>, got [2, 9223372036854775808]",
    ),
    "a time between two microseconds": (
        "timestamp",
        pa.array([1000, 1001, None], pa.timestamp("ns")),
        "column 'x' must be timestamp, got 1001",
    ),
}


@pytest.mark.parametrize(("kind", "values", "reason"), ODD_VALUES.values(), ids=ODD_VALUES)
def test_value_that_does_not_fit_its_declared_type_rejects_its_row_only(
    kind: str, values: pa.Array, reason: str, tmp_path: Path
) -> None:
    pq.write_table(pa.table({"x": values, "y": [0, 1, 2]}), tmp_path / "a.parquet")
    config = SourceConfig(files="*", format="parquet", columns={"x": kind, "y": "int64"})
    part = FilePart("log", "a.parquet", 0, row_group=0, first_row=100)
    found = list(read_part(tmp_path, part, config))
    (reject,) = [r for rows in found for r in rows.rejects]
    assert (reject.file, reject.position, reject.reason) == ("a.parquet", 101, reason)
    assert [t["y"].to_pylist() for t in (rows.table for rows in found) if t is not None] == [[0, 2]]


def test_sample_without_a_stored_form_is_found_by_bisection() -> None:
    rows = pa.table({"x": pa.array([1, 2**63, 3], pa.uint64()), "_origin": [7, 8, 9]})
    statement = carry_origin("SELECT [x] AS ids FROM log", "data.samples.map")
    result = map_rows(connect(), statement, "log", rows)
    assert result.samples is not None
    assert result.samples["ids"].to_pylist() == [[1], [3]]
    assert [b.origin for b in result.bad_rows] == [8]


def test_row_with_a_time_beyond_python_can_be_rejected() -> None:
    rows = pa.table({"x": pa.array([2**62], pa.timestamp("us")), "_origin": [7]})
    statement = carry_origin("SELECT CAST('no' AS BIGINT) AS y FROM log", "data.samples.map")
    (bad,) = map_rows(connect(), statement, "log", rows).bad_rows
    assert (bad.origin, bad.value) == (7, "{'x': 4611686018427387904}")


def read_lines(directory: Path, text: str, **config: object) -> tuple[list[object], list[Reject]]:
    (directory / "log.csv").write_bytes(text.encode())
    source = SourceConfig(
        files="*",
        format="csv",
        columns={"id": "int64", "name": "string"},
        **config,  # type: ignore[arg-type]
    )
    found = list(read_csv(directory, "log.csv", source))
    tables: Sequence[pa.Table] = [t for t, _ in found if t is not None]
    return [row["id"] for t in tables for row in t.to_pylist()], [r for _, rs in found for r in rs]


def test_open_quote_is_rejected_with_the_row_that_it_starts_in(tmp_path: Path) -> None:
    ids, rejects = read_lines(tmp_path, 'id,name\n1,a\n2,"b\n3,c\n4,d\n')
    assert ids == [1]
    reason = "quote '\"' must be closed, got none to the end of the file"
    assert rejects == [Reject("log.csv", 1, reason)]


def test_quote_open_in_the_first_field_is_rejected_too(tmp_path: Path) -> None:
    ids, rejects = read_lines(tmp_path, 'id,name\n1,a\nbad\n"2,b\n3,c\n')
    assert (ids, [r.position for r in rejects]) == ([1], [1, 2])


@pytest.mark.parametrize("end", ["\n", "", "\r\n", "\n\n"])
def test_last_line_arrives_whatever_ends_it(end: str, tmp_path: Path) -> None:
    assert read_lines(tmp_path, f'id,name\n1,a\n2,"b\nc"{end}') == ([1, 2], [])


def test_file_with_its_columns_in_another_order_is_rejected(tmp_path: Path) -> None:
    ids, rejects = read_lines(tmp_path, "name,id\n7,1\n8,2\n")
    assert ids == []
    reason = "header must be id, name, got name, id; declare its columns in order"
    assert rejects == [Reject("log.csv", None, reason)]


def test_header_with_a_byte_order_mark_quotes_and_blanks_is_accepted(tmp_path: Path) -> None:
    assert read_lines(tmp_path, '\ufeff"id", name\n1,a\n') == ([1], [])


@pytest.mark.parametrize("text", ["1.7", "-0.5", "17e-1", "nan", "2.50"])
def test_number_that_is_no_integer_is_not_rounded(text: str, tmp_path: Path) -> None:
    ids, rejects = read_lines(tmp_path, f"id,name\n1,a\n{text},b\n5.0,c\n")
    assert ids == [1, 5]
    assert rejects == [Reject("log.csv", 1, f"field 'id' must be int64, got {text!r}", text)]

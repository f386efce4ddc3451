# ruff: noqa: E501 - a table of faults, one a line
"""Faults of the input are reported with file and position, and all good rows are read."""

import re
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from presage.pipelines.build import build
from presage.schemas.dataset.opened import open_dataset
from presage.schemas.errors import SchemaError
from tests.pipelines.logs import COLUMNS, raw_rows, request, samples_of, stored_samples, write_job

Rows = list[dict[str, object]]


def good_rows() -> pa.Table:
    return raw_rows(120, seed=3)


def write_rows(log: Path, rows: Rows | pa.Table, name: str = "log-0.parquet") -> None:
    log.mkdir(parents=True, exist_ok=True)
    table = rows if isinstance(rows, pa.Table) else pa.Table.from_pylist(rows, good_rows().schema)
    pq.write_table(table, log / name, row_group_size=25)


def rejects_of(dataset: Path) -> Rows:
    segment = open_dataset(dataset).segments[0]
    if "rejects/00000-00000.parquet" not in segment.files:
        return []
    return segment.file("rejects/00000-00000.parquet").read().to_pylist()


ROW_FAULTS: dict[int, tuple[dict[str, object], str]] = {
    30: ({"session": None}, "session key 'session' must not be null"),
    7: ({"time": None}, "session time 'time' must not be null"),
    119: ({"clicked": 7}, "feature 'label' must be at most 1"),
    26: ({"items": [1000]}, "feature 'item' must be at most 999"),
    0: ({"items": [-1]}, "feature 'item' must be at least 0"),
    12: ({"history": [1, 2**62]}, "feature 'history' must be at most 999"),
    8: ({"clicked": None}, "feature 'label' must not be null"),
    40: ({"history": [1, None]}, "feature 'history' must hold no nulls"),
    41: ({"time": 2**62}, "session time 'time' must be in the years 1 to 9999"),
    3: ({"items": [None]}, "feature 'item' must not be null"),
}
"""Position of a bad row to its values and the reason."""


def write_bad_rows(log: Path, *positions: int) -> None:
    rows = good_rows().to_pylist()
    for position in positions:
        rows[position].update(ROW_FAULTS[position][0])
    write_rows(log, rows)


@pytest.mark.slow
def test_bad_rows_are_rejected_with_their_places_and_the_others_arrive(tmp_path: Path) -> None:
    write_bad_rows(tmp_path / "log", *ROW_FAULTS)
    build(request(write_job(tmp_path / "job"), tmp_path / "log", tmp_path / "dataset"))
    rejects = rejects_of(tmp_path / "dataset")
    places = {(r["file"], r["position"], r["reason"]) for r in rejects}
    assert places == {("log-0.parquet", p, reason) for p, (_, reason) in ROW_FAULTS.items()}
    kept = [row for i, row in enumerate(good_rows().to_pylist()) if i not in ROW_FAULTS]
    expected = samples_of(pa.Table.from_pylist(kept, good_rows().schema))
    assert stored_samples(tmp_path / "dataset") == expected


def test_bad_row_ends_the_build_when_the_job_says_so(tmp_path: Path) -> None:
    write_bad_rows(tmp_path / "log", 30)
    job = write_job(tmp_path / "job", on_error="fail")
    whole = f"{ROW_FAULTS[30][1]} in log-0.parquet:30; repair the row, or set data.on_error: reject"
    with pytest.raises(SchemaError, match="^" + re.escape(whole) + "$"):
        build(request(job, tmp_path / "log", tmp_path / "dataset"))
    assert not (tmp_path / "dataset" / "_manifests").exists()


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-200])


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 0xFF
    path.write_bytes(data)


def without_column(path: Path) -> None:
    pq.write_table(pq.read_table(path).drop_columns(["history"]), path)


def with_text_for_a_list(path: Path) -> None:
    table = pq.read_table(path)
    texts = pa.array(["1 2 3"] * table.num_rows)
    pq.write_table(table.set_column(3, "history", texts), path)


def emptied(path: Path) -> None:
    path.write_bytes(b"")


FILE_FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "a truncated file": (truncated, "file is not Parquet: "),
    "an empty file": (emptied, "file is not Parquet: "),
    "a missing column": (
        without_column,
        "column 'history' is missing; use one of clicked, items, session, time, user",
    ),
    "a list that is not a list": (
        with_text_for_a_list,
        "column 'history' must be list<int64>, got string; declare or repair it",
    ),
}


@pytest.mark.slow
def test_bad_files_are_rejected_where_the_job_allows_it_and_the_others_arrive(
    tmp_path: Path,
) -> None:
    write_rows(tmp_path / "log", good_rows())
    for name, (damage, _) in FILE_FAULTS.items():
        write_rows(tmp_path / "log", raw_rows(30, seed=9), f"{name}.parquet")
        damage(tmp_path / "log" / f"{name}.parquet")
    job = write_job(tmp_path / "job", on_error="reject_files")
    build(request(job, tmp_path / "log", tmp_path / "dataset"))
    rejects = {r["file"]: r for r in rejects_of(tmp_path / "dataset")}
    assert set(rejects) == {f"{name}.parquet" for name in FILE_FAULTS}
    for name, (_, reason) in FILE_FAULTS.items():
        reject = rejects[f"{name}.parquet"]
        assert reject["position"] is None
        assert str(reject["reason"]).startswith(reason)
    assert stored_samples(tmp_path / "dataset") == samples_of(good_rows())


@pytest.mark.slow
def test_file_with_one_byte_changed_ends_the_build_or_loses_a_row_group(tmp_path: Path) -> None:
    pq.write_table(
        good_rows(), (tmp_path / "a.parquet"), row_group_size=25, write_page_checksum=True
    )
    flipped(tmp_path / "a.parquet")
    write_rows(tmp_path / "log", raw_rows(30, seed=9), "log-1.parquet")
    (tmp_path / "a.parquet").rename(tmp_path / "log" / "log-0.parquet")
    message = (
        "^1 files or parts of files could not be read, first: row group [012] could not be read"
    )
    with pytest.raises(SchemaError, match=message):
        build(request(write_job(tmp_path / "job"), tmp_path / "log", tmp_path / "dataset"))
    assert not (tmp_path / "dataset" / "_manifests").exists()
    job = write_job(tmp_path / "job", on_error="reject_files")
    build(request(job, tmp_path / "log", tmp_path / "dataset"))
    rejects = rejects_of(tmp_path / "dataset")
    assert [r["file"] for r in rejects] == ["log-0.parquet"]
    assert "could not be read: " in str(rejects[0]["reason"])


def test_log_without_a_usable_file_is_refused_with_the_first_reason(tmp_path: Path) -> None:
    write_rows(tmp_path / "log", good_rows())
    emptied(tmp_path / "log" / "log-0.parquet")
    with pytest.raises(SchemaError, match=r"^the input yields no samples; first reject: "):
        build(request(write_job(tmp_path / "job"), tmp_path / "log", tmp_path / "dataset"))


TSV_COLUMNS = "{session: int64, time: string, user: int64, history: string, items: string, \
clicked: int8}"
TSV_SQL = """
      SELECT session, strptime(time, '%Y-%m-%d %H:%M:%S') AS time, user,
             list_transform(list_filter(string_split(history, ' '), lambda x: x <> ''),
                            lambda x: CAST(x AS BIGINT)) AS history,
             CAST(unnest(string_split(items, ' ')) AS BIGINT) AS item, clicked AS label
      FROM (SELECT * REPLACE (coalesce(history, '') AS history) FROM log)
"""
TSV_ROW = ["1", "2026-01-01 00:00:{:02d}", "7", "1 2 3", "4 5", "1"]


def tsv_job(directory: Path) -> Path:
    job = write_job(directory, TSV_COLUMNS)
    text = job.read_text().replace('"*.parquet", format: parquet', '"*.tsv", format: csv')
    text = text.replace("columns:", 'delimiter: "\\t", quote: null, header: false, columns:', 1)
    start, end = text.index("      SELECT"), text.index("  session:")
    job.write_text(text[:start] + TSV_SQL.lstrip("\n") + text[end:])
    return job


def tsv_lines() -> list[bytes]:
    return ["\t".join(TSV_ROW).format(i % 60).encode() for i in range(100)]


LINE_FAULTS: dict[int, tuple[bytes, str]] = {
    0: (
        b"1\t2026-13-45 00:00:00\t7\t1 2\t4\t1",
        "row fails in the job's SQL: Invalid Input Error: Could not parse string",
    ),
    7: (b"x\t2026-01-01 00:00:00\t7\t1\t4\t1", "field 'session' must be int64, got 'x'"),
    8: (
        b"1\t2026-01-01 00:00:00\t9223372036854775808\t1\t4\t1",
        "field 'user' must be int64, got '9223372036854775808'",
    ),
    20: (b"1\t2026-01-01 00:00:00\t7\t1\t4", "line must have 6 fields, got 5"),
    22: (b"1\t2026-01-01 00:00:00\t7\t1\t4\t1\t9", "line must have 6 fields, got 7"),
    30: (
        b"1\t2026-01-01 00:00:00\t7\t1,2\t4\t1",
        "row fails in the job's SQL: Conversion Error: Could not convert string '1,2'",
    ),
    41: (b"1\t2026-01-01 00:00:00\t7\t\xff\t4\t1", "field 'history' must be UTF-8"),
    99: (b"\t2026-01-01 00:00:00\t7\t1\t4\t1", "session key 'session' must not be null"),
}
"""Position of a bad line to the line and the reason."""


@pytest.mark.slow
def test_bad_lines_are_rejected_with_their_positions_and_the_others_arrive(tmp_path: Path) -> None:
    lines = tsv_lines()
    for position, (line, _) in LINE_FAULTS.items():
        lines[position] = line
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "log.tsv").write_bytes(b"\n".join(lines) + b"\n")
    result = build(request(tsv_job(tmp_path / "job"), tmp_path / "log", tmp_path / "dataset"))
    rejects = rejects_of(tmp_path / "dataset")
    assert [(r["file"], r["position"]) for r in rejects] == [("log.tsv", p) for p in LINE_FAULTS]
    for reject, (_, reason) in zip(rejects, LINE_FAULTS.values(), strict=True):
        assert str(reject["reason"]).startswith(reason)
    assert result["num_samples"] == 2 * (len(lines) - len(LINE_FAULTS))


JOB_FAULTS: dict[str, tuple[str, str, str]] = {
    "a key that is no key": ("session: {key", "sesion: {key", "unknown key: data.sesion in "),
    "a column that the log has not": ("user, history,", "usr AS user, history,", "data.samples.map cannot run on its sources: Binder Error"),
    "no SQL": ("SELECT session", "SELEC session", "data.samples.map is not valid SQL:"),
    "an aggregate": ("FROM log", "FROM log GROUP BY ALL", "data.samples.map must not aggregate at its top level"),
    "an undeclared column": ("clicked AS label", "clicked AS label, 1 AS extra", "column 'extra' must be declared in the schema in JOB; add it to schema.pbtxt: feature { name: \"extra\" type: INT annotation { tag: \"kept\" } }, where tag is one of "),
    "a declared column that SQL leaves out": ("user, history,", "user,", "samples have no column 'history' in JOB; let the job's SQL yield it, or remove it from schema.pbtxt"),
    "a wrong type": ("clicked AS label", "CAST(clicked AS DOUBLE) AS label", "feature 'label' must be INT, got double in "),
    "one value for a list": ("user, history,", "user, 1 AS history,", "feature 'history' must be a list, got int32"),
    "a time that is a number": ("session, time,", "session, epoch_us(time) AS time,", "session.time must be a timestamp, got int64"),
    "a group of an unknown column": ("[session, user, history]", "[session, usr, history]", "data.groups.user must name columns of schema.pbtxt, got 'usr' in "),
    "an unknown type": ("user: int64", "user: int46", "data.sources.log.columns.user: unknown type 'int46'"),
    "a table of an unknown feature": ("features: [user]", "features: [usr]", "data.tables.users.features must name columns of schema.pbtxt, got 'usr' in "),
    "a block size that is no power of two": ("block_samples: 16", "block_samples: 17", "data.block_samples must be a power of two"),
    "no file that matches": ('"*.parquet"', '"*.parq"', "no file of source 'log' matches '*.parq'"),
    "a wrong transform": ("ln(1 + len(history))", "CAST(unnest(history) AS DOUBLE)", "transforms must give one value per row"),
    "a transform of another group": ("ln(1 + len(history))", "ln(1 + item)", "transforms.user.num_history cannot run on the columns of its group: Binder Error"),
    "a transform that some rows break": ("ln(1 + len(history))", "CAST(error(CAST(user AS VARCHAR)) AS DOUBLE)", "transforms.user failed on a row: Invalid Input Error: "),
    "a transform to text": ("ln(1 + len(history))", "CAST(user AS VARCHAR)", "feature 'num_history' must be FLOAT, got string in "),
    "an undeclared transform": ("{num_history:", "{num_histories: len(history), num_history:", "feature is not declared: 'num_histories' in "),
    "a column of the format": ("clicked AS label", "clicked AS label, 1 AS block", "column 'block' must be declared in the schema"),
    "a star that hides where rows are from": ("session, time, user, history, unnest(items) AS item, clicked AS label FROM log", "* FROM (SELECT session, time, user, history, unnest(items) AS item, clicked AS label FROM log)", "the job's SQL loses the origin of each row"),
}  # fmt: skip


@pytest.mark.parametrize(("old", "new", "message"), JOB_FAULTS.values(), ids=JOB_FAULTS)
def test_wrong_job_is_refused_before_or_without_a_commit(
    old: str, new: str, message: str, tmp_path: Path
) -> None:
    write_rows(tmp_path / "log", good_rows())
    job = write_job(tmp_path / "job", COLUMNS)
    text = job.read_text()
    assert old in text
    job.write_text(text.replace(old, new, 1))
    message = message.replace("JOB", str(job))
    with pytest.raises(SchemaError, match=re.escape(message)):
        build(request(job, tmp_path / "log", tmp_path / "dataset"))
    assert not (tmp_path / "dataset" / "_manifests").exists()

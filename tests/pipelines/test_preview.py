"""`preview` reports what a build of the first rows would, and leaves no files."""

from __future__ import annotations

import gzip
import io
import json
import re
import tempfile
from pathlib import Path

import fastavro
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from presage.pipelines.build import build
from presage.pipelines.cli import main
from presage.pipelines.preview import preview
from presage.pipelines.preview_text import WIDTH
from presage.pipelines.sources.formats import MAX_FILES, copy_excerpt, input_splits, read_split
from presage.pipelines.sources.listing import find_files
from presage.pipelines.sources.raw_rows import ORIGIN, Folder, InputSplit, folder_of
from presage.schemas.config.sources import SourceConfig
from presage.schemas.errors import SchemaError
from tests.pipelines import logs, test_joins
from tests.pipelines.logs import request
from tests.shared import error_of, output_of

NUM_ROWS = 40_000


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files, empty."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.mark.slow
def test_preview_of_a_whole_log_has_the_figures_of_its_build(tmp_path: Path, scratch: Path) -> None:
    logs.write_log(tmp_path / "log")
    job = logs.write_job(tmp_path / "job")
    result = preview(job, tmp_path / "log")
    asked = request(job, tmp_path / "log", tmp_path / "d")
    built = build(asked)
    assert [result[k] for k in ("num_samples", "num_sessions")] == [
        built[k] for k in ("num_samples", "num_sessions")
    ]
    counts = {
        name: {k: group[k] for k in ("num_unique", "dedup_factor")}
        for name, group in result["groups"].items()
    }
    assert counts == built["groups"]
    assert result["sources"]["log"]["whole"]
    assert result["sources"]["log"]["columns"]["history"] == "list<int64>"
    assert not any("estimates" in note for note in result["notes"])
    assert sum(split["num_samples"] for split in result["splits"].values()) == built["num_samples"]
    assert len(result["samples"]) == 10
    for sample in result["samples"]:  # made by a transform
        assert sample["num_history"] == pytest.approx(np.log(1 + len(sample["history"])), rel=1e-6)
    assert list(scratch.iterdir()) == []


@pytest.mark.slow
def test_the_share_of_rejects_is_of_all_rows_that_were_read(tmp_path: Path) -> None:
    rows = logs.write_log(tmp_path / "log", num_rows=100, num_files=1)
    columns = rows.set_column(
        0, "session", pa.array([None] * 15 + rows["session"].to_pylist()[15:])
    )
    user = pa.array([f"u{i}" if i < 60 else str(i) for i in range(100)])
    columns = columns.set_column(columns.column_names.index("user"), "user", user)
    pq.write_table(columns, tmp_path / "log" / "log-0.parquet", row_group_size=40)
    job = logs.write_job(tmp_path / "job")
    result = preview(job, tmp_path / "log")
    assert result["rows"] == result["sources"]["log"]["rows_read"] == 100
    assert result["rejects"]["share"] == result["rejects"]["num"] / 100
    assert "60.0% of the rows that samples are made from are rejected" in result["notes"]


def test_preview_of_the_first_rows_says_that_they_are_estimates(tmp_path: Path) -> None:
    rows = logs.write_log(tmp_path / "log")
    job = logs.write_job(tmp_path / "job")
    result = preview(job, tmp_path / "log", rows=30)
    assert result["rows"] == 30
    items = rows.slice(0, 30)["items"].to_pylist()
    assert result["num_samples"] == sum(map(len, items))
    assert [sample["item"] for sample in result["samples"]] == [i for part in items for i in part][
        :10
    ]
    assert result["notes"][0].startswith("groups, tables, splits and joins are estimates from the ")
    assert any("no sample is for evaluation" in note for note in result["notes"])


@pytest.mark.slow
def test_preview_names_rejects_as_the_build_does(tmp_path: Path) -> None:
    rows = logs.write_log(tmp_path / "log")
    job = logs.write_job(tmp_path / "job", on_error="reject_files")
    text = job.read_text().replace("clicked AS label", "(clicked / (user - 52))::INT AS label")
    job.write_text(text)
    (tmp_path / "log" / "log-3.parquet").write_bytes(b"PAR1")
    bad = sum(user == 52 for user in rows["user"].to_pylist())
    result = preview(job, tmp_path / "log")["rejects"]
    build(request(job, tmp_path / "log", tmp_path / "d"))
    (path,) = (tmp_path / "d").rglob("rejects/*.parquet")
    assert result["first"] == pq.read_table(path).to_pylist()[: len(result["first"])]
    assert result["num"] == bad + 1
    assert sum(each["num"] for each in result["reasons"]) == bad + 1


@pytest.mark.slow
def test_preview_says_what_would_end_a_build(tmp_path: Path) -> None:
    logs.write_log(tmp_path / "log")
    (tmp_path / "log" / "log-3.parquet").write_bytes(b"PAR1")
    for on_error, words in (("reject", "on_error: reject_files"), ("fail", "on_error: reject")):
        job = logs.write_job(tmp_path / on_error, on_error=on_error)
        notes = preview(job, tmp_path / "log")["notes"]
        assert any(note.startswith("a build ends here: ") and words in note for note in notes)


@pytest.mark.slow
def test_value_that_fills_the_memory_ends_the_preview(tmp_path: Path) -> None:
    logs.write_log(tmp_path / "log")
    job = logs.write_job(tmp_path / "job")
    large = "clicked + 0 * length(range(1000000000)) AS label"
    job.write_text(job.read_text().replace("clicked AS label", large))
    with pytest.raises(SchemaError, match=r"data\.samples\.map needs more than 4096 MiB of memory"):
        preview(job, tmp_path / "log")


@pytest.mark.slow
def test_preview_says_that_the_gate_would_keep_a_segment_out(tmp_path: Path) -> None:
    logs.write_log(tmp_path / "log")
    job = logs.write_job(tmp_path / "job")
    text = job.read_text().replace("clicked AS label", "(1 / (user % 4))::INT AS label")
    job.write_text(text)
    notes = preview(job, tmp_path / "log")["notes"]
    (note,) = [note for note in notes if note.startswith("the gate keeps such a segment out")]
    assert "rejected rows must be at most 0.1 of the rows that samples are made from" in note


@pytest.mark.slow
def test_a_join_that_matches_nothing_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    test_joins.write_input(tmp_path / "input")
    job = test_joins.write_job(tmp_path / "job")
    path = tmp_path / "input" / "items.jsonl"
    path.write_text("\n".join(f'{{"item": {i}, "price": 1, "tags": [1]}}' for i in range(900, 950)))
    result = preview(job, tmp_path / "input")
    items, users = result["joins"]
    assert (items["table"], items["matched"], items["of"]) == ("items", 0, result["num_samples"])
    assert 0 < users["matched"] < users["of"]
    note = f"none of {items['of']} samples have their 'item' in all 50 rows of 'items'"
    assert note in result["notes"]
    assert "column 'price' is null in every sample" in result["notes"]
    monkeypatch.setattr("presage.pipelines.preview.OTHER_ROWS", 8)
    result = preview(job, tmp_path / "input", rows=8)
    _, users = result["joins"]
    note = f"only {users['matched']} of {users['of']} samples have their 'user' in the first 8 rows"
    assert f"{note} of 'users'; others may follow" in result["notes"]


def many_rows() -> pa.Table:
    numbers = np.arange(NUM_ROWS)
    return pa.table({"a": numbers, "text": [f'line {i}\n"x", and more' for i in numbers.tolist()]})


def csv_bytes(rows: pa.Table) -> bytes:
    lines = (f'{r["a"]},"{r["text"].replace(chr(34), chr(34) * 2)}"' for r in rows.to_pylist())
    return ("a,text\n" + "\n".join(lines) + "\n").encode()


def avro_bytes(rows: pa.Table) -> bytes:
    sink = io.BytesIO()
    fields = [{"name": "a", "type": "long"}, {"name": "text", "type": "string"}]
    schema = {"type": "record", "name": "row", "fields": fields}
    fastavro.writer(sink, schema, rows.to_pylist(), codec="deflate")
    return sink.getvalue()


def parquet_bytes(rows: pa.Table) -> bytes:
    sink = io.BytesIO()
    pq.write_table(rows, sink, row_group_size=NUM_ROWS)
    return sink.getvalue()


def jsonl_bytes(rows: pa.Table) -> bytes:
    return "\n".join(map(json.dumps, rows.to_pylist())).encode()


FORMATS = {
    "csv": ("x.csv", "csv", csv_bytes),
    "compressed csv": ("x.csv.zst", "csv", lambda t: pa.compress(csv_bytes(t), "zstd", True)),
    "json lines": ("x.jsonl", "jsonl", jsonl_bytes),
    "compressed json lines": ("x.jsonl.gz", "jsonl", lambda t: gzip.compress(jsonl_bytes(t), 1)),
    "avro": ("x.avro", "avro", avro_bytes),
    "parquet": ("x.parquet", "parquet", parquet_bytes),
}


@pytest.mark.parametrize(("name", "kind", "encode"), FORMATS.values(), ids=FORMATS.keys())
def test_an_excerpt_has_the_first_rows_of_a_file_and_no_others(
    name: str, kind: str, encode: object, tmp_path: Path
) -> None:
    rows = many_rows()
    (tmp_path / "log").mkdir()
    content = encode(rows)  # pyright: ignore[reportCallIssue]
    (tmp_path / "log" / name).write_bytes(content)
    config = SourceConfig(files="x.*", format=kind, columns={"a": "int64", "text": "string"})  # pyright: ignore[reportArgumentType]
    folder = folder_of(tmp_path / "log")
    (tmp_path / "copy").mkdir()
    files = find_files(folder, {"log": config})["log"]
    result = copy_excerpt(folder, config, files, 500, tmp_path / "copy")
    assert not result.is_whole
    (copied,) = result.listing
    assert copied.num_bytes < len(content) / 4
    table = read(folder_of(tmp_path / "copy"), copied.path, config)
    assert 240 <= table.num_rows <= 3_000
    assert table.drop_columns([ORIGIN]).equals(rows.slice(0, table.num_rows))
    assert table[ORIGIN].to_pylist() == list(range(table.num_rows))


def read(folder: Folder, path: str, config: SourceConfig) -> pa.Table:
    schema = pa.schema([("a", pa.int64()), ("text", pa.string()), (ORIGIN, pa.int64())])
    splits, rejects = input_splits(folder, InputSplit("log", path, 0), config)
    assert not rejects
    result = [rows for split in splits for rows in read_split(folder, split, config, schema)]
    assert not any(rows.rejects for rows in result)
    return pa.concat_tables(
        rows.table for rows in result if rows.table is not None
    ).combine_chunks()


def test_of_many_files_only_the_first_are_read(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    for i in range(MAX_FILES + 9):
        (tmp_path / "log" / f"{i:03d}.jsonl").write_text('{"a": 1}\n')
    config = SourceConfig(files="*.jsonl", format="jsonl", columns={"a": "int64"})
    folder = folder_of(tmp_path / "log")
    files = find_files(folder, {"log": config})["log"]
    result = copy_excerpt(folder, config, files, 500, tmp_path / "copy")
    assert len(result.files) == MAX_FILES + 9
    assert len(result.listing) == MAX_FILES
    assert not result.is_whole


@pytest.mark.slow
def test_preview_prints_one_object_or_a_hundred_columns(tmp_path: Path, scratch: Path) -> None:
    test_joins.write_input(tmp_path / "input")
    job = test_joins.write_job(tmp_path / "job")
    words = ["preview", str(job), "--input", str(tmp_path / "input"), "--rows", "100"]
    printed = output_of(main, [*words, "--json"])
    assert json.loads(printed)["num_samples"] > 100
    assert printed.count("\n") == 1
    lines = output_of(main, words).splitlines()
    assert max(map(len, lines[1:])) <= WIDTH
    text = "\n".join(lines)
    for word in ("Sources", "First 10 samples", "No rejects", "dedup factor", "look-ups", "Joins"):
        assert word in text
    assert re.search(r"\(x[2-9]\)", text), "values that repeat are shown once"
    assert "(x1)" not in text
    assert list(scratch.iterdir()) == []


WRONG = {
    "no such folder": ("FROM log", "FROM log", "nowhere"),
    "no such file": ('"*.parquet"', '"*.csv"', "log"),
    "no such column": ("time, user", "time, usr", "log"),
    "a column that is not declared": ("clicked AS label", "clicked AS label, 1 AS more", "log"),
    "no job": ("name: shop", "nam: shop", "log"),
}


@pytest.mark.parametrize(("before", "after", "folder"), WRONG.values(), ids=WRONG.keys())
def test_what_does_not_fit_is_said_in_the_words_of_a_build(
    before: str, after: str, folder: str, tmp_path: Path
) -> None:
    logs.write_log(tmp_path / "log", num_rows=30)
    job = logs.write_job(tmp_path / "job")
    job.write_text(job.read_text().replace(before, after))
    words = [str(job), "--input", str(tmp_path / folder)]
    messages = error_of(main, ["preview", *words])
    assert messages == error_of(
        main, ["build", *words, "--output", str(tmp_path / "d"), "--runner=InProcess"]
    )
    assert messages.count("\n") == 1

"""Columns from folder names: read as by DuckDB, refused where they are ambiguous."""

import re
from datetime import date, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from presage.pipelines.build import segment_hashes
from presage.pipelines.cli import main
from presage.pipelines.prepare import prepare
from presage.pipelines.preview import preview
from presage.pipelines.sources.formats import empty_rows, input_splits, read_split
from presage.pipelines.sources.listing import infer_partitions, list_inputs, undeclared_partitions
from presage.pipelines.sources.raw_rows import (
    ORIGIN,
    InputSplit,
    folder_of,
    partition_values,
    typed_partitions,
)
from presage.pipelines.sources.types import arrow_type
from presage.pipelines.stages import BuildContext
from presage.pipelines.table.target import load_job_files
from presage.schemas.config.job import load_job
from presage.schemas.config.sources import ROW_COLUMNS, SourceConfig
from presage.schemas.errors import SchemaError
from tests.pipelines.logs import request, stored_table

TYPES = {
    "int64": ["1", "-20", "0", "__HIVE_DEFAULT_PARTITION__"],
    "date": ["2026-03-01", "2024-02-29", "__HIVE_DEFAULT_PARTITION__"],
    "string": ["1", "01"],
}
TEXTS = (
    *(["1", "+1"], ["1", "-0"], ["1", "x"], ["1", ""], ["1", str(2**63)], ["NULL", "1"], ["1.5"]),
    *(["2026-02-30"], ["2026-03-01", "1"], ["2026-3-1"], ["__HIVE_DEFAULT_PARTITION__"]),
)


def test_values_of_a_path_are_decoded_and_null_is_hives() -> None:
    path = "a/day=2026-03-01/city=A%20B%2FC/x%3Dy=__HIVE_DEFAULT_PARTITION__/k=/e=a=b/z=1.parquet"
    assert partition_values(path) == {
        "day": "2026-03-01", "city": "A B/C", "x=y": None, "k": "", "e": "a=b",
    }  # fmt: skip
    assert partition_values("=1/plain.csv") == {}


@pytest.mark.parametrize("kind", TYPES)
def test_type_is_the_narrowest_that_keeps_all_values_apart(kind: str) -> None:
    assert infer_partitions([f"k={v}/a" for v in TYPES[kind]]) == {"k": kind}


@pytest.mark.parametrize("values", TEXTS)
def test_values_that_would_lose_something_stay_texts(values: list[str]) -> None:
    assert infer_partitions([f"k={v}/a" for v in values]) == {"k": "string"}


REFUSED = {
    "a file outside the folders": (
        ["k=1/a", "b"],
        "file lacks the folder k=... of k=1/a in b; move it, or process such files separately",
    ),
    "a file in one folder more": (
        ["k=1/a", "k=1/l=2/b"],
        "file lacks the folder l=... of k=1/l=2/b in k=1/a; "
        "move it, or process such files separately",
    ),
    "a name twice": (
        ["k=1/k=2/a"],
        "two folders of a path give column 'k' in k=1/k=2/a; rename one of them",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_folders_that_differ_are_refused_by_path(name: str) -> None:
    paths, message = REFUSED[name]
    with pytest.raises(SchemaError) as refused:
        infer_partitions(paths)
    assert str(refused.value) == message
    assert undeclared_partitions("log", paths, {}, []) is None


def test_declared_columns_have_the_declared_types_or_are_refused() -> None:
    typed = typed_partitions("hour=03/day=2026-03-01/a", {"hour": "int8", "day": "timestamp"})
    assert typed["hour"].as_py() == 3
    assert typed["hour"].type == pa.int8()
    assert typed["day"].type == pa.timestamp("us")
    with pytest.raises(SchemaError, match="folder hour=x is not of type int8, which `partitions`"):
        typed_partitions("hour=x/a", {"hour": "int8"})
    with pytest.raises(SchemaError, match=r"file is not in a folder day=\.\.\., which"):
        typed_partitions("hour=1/a", {"hour": "int8", "day": "date"})


@pytest.fixture
def log(tmp_path: Path) -> Path:
    for day in (1, 2):
        for kind in ("parquet", "csv", "jsonl"):
            folder = tmp_path / "log" / kind / f"day=2026-03-0{day}" / "city=%C3%85rhus"
            folder.mkdir(parents=True)
            table = pa.table({"x": [day, 10 * day]})
            if kind == "parquet":
                pq.write_table(table, folder / "a.parquet")
            elif kind == "csv":
                (folder / "a.csv").write_text(f"x\n{day}\n{10 * day}\nwrong\n")
            else:
                (folder / "a.jsonl").write_text(f'{{"x": {day}}}\n{{"x": {10 * day}}}\n')
    return tmp_path / "log"


@pytest.mark.parametrize("kind", ["parquet", "csv", "jsonl"])
def test_rows_of_every_format_carry_the_columns_of_their_folders(kind: str, log: Path) -> None:
    config = SourceConfig(
        files=f"{kind}/**/*",
        format=kind,  # type: ignore[arg-type]
        columns={"x": "int64"},
        partitions={"day": "date", "city": "string", **ROW_COLUMNS},
    )
    folder = folder_of(log)
    listing = list_inputs(folder, {"log": config})
    paths = [f.path for f in listing]
    with pytest.raises(SchemaError, match="column '_day' of source 'log' needs the day; use --day"):
        empty_rows(folder, "log", config, paths)
    empty = empty_rows(folder, "log", config, paths, day="2026-04-05")
    assert empty.column_names == ["x", "day", "city", *ROW_COLUMNS, ORIGIN]
    tables, rejects = [empty], 0
    for index, file in enumerate(listing):
        splits, _ = input_splits(folder, InputSplit("log", file.path, index), config)
        for split in splits:
            for rows in read_split(folder, split, config, empty.schema):
                tables += [rows.table] if rows.table is not None else []
                rejects += len(rows.rejects)
    table = pa.concat_tables(tables).drop_columns([ORIGIN])
    assert rejects == (2 if kind == "csv" else 0)
    assert table.to_pylist() == [
        {
            "x": x,
            "day": date(2026, 3, day),
            "city": "\u00c5rhus",
            "_file": f"{kind}/day=2026-03-0{day}/city=%C3%85rhus/a.{kind}",
            "_line": line,
            "_day": date(2026, 4, 5),
        }
        for day in (1, 2)
        for line, x in enumerate((day, 10 * day))
    ]


def test_listing_refuses_a_folder_that_lacks_a_declared_column(log: Path) -> None:
    config = SourceConfig(files="parquet/**/*", format="parquet", partitions={"hour": "int64"})
    with pytest.raises(SchemaError, match=r"file is not in a folder hour=\.\.\., which"):
        list_inputs(folder_of(log), {"log": config})


def test_column_of_files_and_of_folders_is_refused_in_a_job(log: Path) -> None:
    config = SourceConfig(files="parquet/**/*", format="parquet", partitions={"x": "int64"})
    with pytest.raises(SchemaError, match="column 'x' of source 'log' is in its files and in"):
        empty_rows(
            folder_of(log), "log", config, ["parquet/day=2026-03-01/city=%C3%85rhus/a.parquet"]
        )
    with pytest.raises(ValueError, match="columns and partitions both have 'x'"):
        SourceConfig(files="*", format="csv", columns={"x": "int64"}, partitions={"x": "int64"})


JOB = """
name: log
data:
  sources: {{log: {{files: "parquet/**/*.parquet", format: parquet{more}}}}}
  samples: {{map: SELECT * FROM log}}
  session: {{key: x, time: x}}
  tables: {{}}
"""
SCHEMA = 'feature {{ name: "{}" type: {} annotation {{ tag: "{}" }} }}\n'


def job_of(directory: Path, more: str, columns: dict[str, str]) -> Path:
    directory.mkdir()
    (directory / "job.yaml").write_text(JOB.format(more=more))
    text = "".join(SCHEMA.format(name, kind, "kept") for name, kind in columns.items())
    (directory / "schema.pbtxt").write_text(text)
    return directory / "job.yaml"


@pytest.mark.parametrize("more", ["", ", partitions: {_day: date}"])
def test_same_files_of_another_day_are_another_segment_if_the_job_reads_the_day(
    more: str, tmp_path: Path
) -> None:
    path = job_of(tmp_path / "a", more, {"x": "INT"})
    job = load_job_files(path)
    keys = {segment_hashes(job, (), f"2026-03-0{day}")[1] for day in (1, 2)}
    assert len(keys) == (2 if more else 1)


def prepared(job_path: Path, log: Path) -> tuple[BuildContext, list[str]]:
    messages: list[str] = []
    asked = request(job_path, log, job_path.parent / "out", progress=messages.append)
    return prepare(asked, load_job_files(job_path)), messages


@pytest.mark.slow
def test_undeclared_columns_of_folders_are_said_with_the_key_to_add(
    log: Path, tmp_path: Path
) -> None:
    messages = prepared(job_of(tmp_path / "a", "", {"x": "INT"}), log)[1]
    assert messages == [
        "source log: folder names such as parquet/day=2026-03-01/city=%C3%85rhus/ give columns "
        "that the SQL does not see; add `partitions: {day: date, city: string}` to read them"
    ]
    shown = preview(tmp_path / "a" / "job.yaml", log)
    assert shown["notes"][0] == messages[0]
    more = ", partitions: {day: timestamp, city: string}"
    job = job_of(tmp_path / "b", more, {"x": "INT", "day": "INT", "city": "BYTES"})
    assert prepared(job, log)[1] == []
    shown = preview(job, log)
    assert "partitions" not in str(shown["notes"])
    assert [row["city"] for row in shown["samples"]] == ["\u00c5rhus"] * 4


def test_types_in_the_examples_of_the_job_pages_are_known(tmp_path: Path) -> None:
    docs = Path(__file__).parents[2] / "docs"
    pages = "".join((docs / name).read_text() for name in ("job.md", "job_reference.md"))
    result = 0
    for example in re.findall(r"```yaml\n(.*?)```", pages, re.DOTALL):
        sources = (yaml.safe_load(example).get("data") or {}).get("sources") or {}
        for source in sources.values():
            for word in {**source.get("columns", {}), **source.get("partitions", {})}.values():
                arrow_type(word)
                result += 1
    assert result > 10


@pytest.mark.slow
def test_key_of_a_folder_name_is_found_without_reading_other_columns(
    log: Path, tmp_path: Path
) -> None:
    job = """
name: log
data:
  sources:
    log: {files: "parquet/**/*", format: parquet, columns: {x: int64}, partitions: {day: date}}
  samples: {per: {key: day, sql: "SELECT x, day::TIMESTAMP AS day FROM log"}}
  session: {key: x, time: day}
  groups: auto
  tables: {}
"""
    path = job_of(tmp_path / "job", "", {"x": "INT", "day": "INT"})
    path.write_text(job)
    command = ["build", str(path), "--input", str(log), "--output", str(tmp_path / "out")]
    assert main([*command, "--runner=InProcess"]) == 0
    rows = stored_table(tmp_path / "out").sort_by("x").to_pylist()
    assert [(row["x"], row["day"].day) for row in rows] == [(1, 1), (2, 2), (10, 1), (20, 2)]


@pytest.mark.slow
def test_first_job_of_a_folder_declares_the_columns_of_folder_names(tmp_path: Path) -> None:
    times = [datetime(2026, 3, 1, 0, i) for i in range(60)]
    rows = {"session_id": [i // 4 for i in range(60)], "time": times, "clicked": [0, 1] * 30}
    for day in (1, 2):
        folder = tmp_path / "log" / f"day=2026-03-0{day}" / "city=A%2FB"
        folder.mkdir(parents=True)
        pq.write_table(pa.table({**rows, "item": range(60)}), folder / "part-0.parquet")
    assert main(["init", str(tmp_path / "log"), "--output", str(tmp_path / "job")]) == 0
    data = load_job(tmp_path / "job" / "job.yaml").data
    (source,) = data.sources.values()
    assert source.partitions == {"day": "timestamp", "city": "string"}
    assert data.samples.map is not None
    assert re.findall("day|city", data.samples.map) == ["day", "city"]

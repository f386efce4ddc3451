"""Values that a file may have and a dataset may not: one row is rejected, the others stay."""

import bz2
import gzip
import lzma
import re
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from presage.pipelines.samples.sql import Connection, map_rows, run
from presage.pipelines.samples.statements import select_origin
from presage.pipelines.samples.tuples import separate_tuples, usable_samples, value_checks
from presage.pipelines.samples.validate import check_columns
from presage.pipelines.sources.csv_files import read_csv
from presage.pipelines.sources.formats import empty_rows, read_split
from presage.pipelines.sources.limits import MAX_ROW_BYTES
from presage.pipelines.sources.parquet import read_parquet
from presage.pipelines.sources.raw_rows import CHUNK_ROWS, ORIGIN, InputSplit, RawRows, folder_of
from presage.pipelines.sources.rejects import Reject, file_reject, rejects_from_table
from presage.schemas.config.job import DataConfig, SourceConfig, load_job
from presage.schemas.errors import SchemaError
from presage.schemas.features import FeatureSet, load_features
from tests.shared import in_pairs

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
        "column 'x[]' must be int64, got 9223372036854775808",
    ),
    "a field of a list of objects": (
        "struct<offers: list<struct<id: int64, price: float64>>>",
        pa.array(
            [
                {"offers": [{"id": i, "price": p} for i, p in enumerate(prices)]}
                for prices in (["1", "2.5"], ["1", "free", "none"], [None])
            ]
        ),
        "column 'x.offers[].price' must be float64, got 'free'",
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
    split = InputSplit("log", "a.parquet", 0, row_group=0, first_row=100)
    schema = empty_rows(folder_of(tmp_path), "log", config, ["a.parquet"]).schema
    result = list(read_split(folder_of(tmp_path), split, config, schema))
    (reject,) = [r for rows in result for t in rows.all_rejects() for r in rejects_from_table(t)]
    assert (reject.file, reject.position, reject.reason) == ("a.parquet", 101, reason)
    assert [t["y"].to_pylist() for t in (rows.table for rows in result) if t is not None] == [
        [0, 2]
    ]


def test_inner_field_of_a_reject_is_of_its_own_row(tmp_path: Path) -> None:
    kind = pa.struct([("tags", pa.list_(pa.uint64())), ("price", pa.string())])
    rows = [{"tags": [1], "price": "free"}, {"tags": [2**63], "price": "1"}]
    pq.write_table(pa.table({"x": pa.array(rows, kind)}), tmp_path / "a.parquet")
    config = SourceConfig(
        files="*", format="parquet", columns={"x": "struct<tags: list<int64>, price: float64>"}
    )
    split = InputSplit("log", "a.parquet", 0, row_group=0)
    schema = empty_rows(folder_of(tmp_path), "log", config, ["a.parquet"]).schema
    result = list(read_split(folder_of(tmp_path), split, config, schema))
    assert [
        r.reason for rows in result for t in rows.all_rejects() for r in rejects_from_table(t)
    ] == [
        "column 'x.price' must be float64, got 'free'",
        "column 'x.tags[]' must be int64, got 9223372036854775808",
    ]


def test_files_with_other_types_orders_and_columns_become_alike(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": pa.array([1], pa.int8()), "y": ["a"]}), tmp_path / "a.parquet")
    more = {"z": [0], "y": ["b"], "x": pa.array([2**40], pa.int64())}
    pq.write_table(pa.table(more), tmp_path / "b.parquet")
    pq.write_table(pa.table({"x": pa.array([3], pa.int64())}), tmp_path / "c.parquet")
    config = SourceConfig(files="*", format="parquet")
    names = ["a.parquet", "b.parquet", "c.parquet"]
    notes = list[str]()
    schema = empty_rows(folder_of(tmp_path), "log", config, names, notes).schema
    assert [note.partition(" without ")[::2] for note in notes] == [
        ("source log: 1 file, such as a.parquet,", f"'z': {NULLS}"),
        ("source log: 1 file, such as c.parquet,", f"'y', 'z': {NULLS}"),
    ]
    splits = [InputSplit("log", name, i, row_group=0) for i, name in enumerate(names)]
    result = [
        rows for split in splits for rows in read_split(folder_of(tmp_path), split, config, schema)
    ]
    tables = [rows.table.drop_columns(["_origin"]) for rows in result if rows.table is not None]
    assert pa.concat_tables(tables).to_pylist() == [
        {"x": 1, "y": "a", "z": None},
        {"x": 2**40, "y": "b", "z": 0},
        {"x": 3, "y": None, "z": None},
    ]
    assert not any(rows.rejects for rows in result)


NULLS = "nulls there; declare its columns in the job to reject such files"


def test_sample_without_a_stored_form_is_found_by_bisection() -> None:
    rows = pa.table({"x": pa.array([1, 2**63, 3], pa.uint64()), "_origin": [7, 8, 9]})
    statement = select_origin("SELECT [x] AS ids FROM log", "data.samples.map")
    result = map_rows(Connection(), statement, "log", rows)
    assert result.samples is not None
    assert result.samples["ids"].to_pylist() == [[1], [3]]
    assert result.bad_rows["origin"].to_pylist() == [8]


def test_lists_of_texts_have_one_stored_form() -> None:
    rows = pa.table({"x": pa.array(["a b", "", None]), "_origin": [7, 8, 9]})
    sql = "SELECT string_split(x, ' ') AS l, [x, 'c'] AS m, ['d']::VARCHAR[1] AS n FROM log"
    result = run(Connection(), select_origin(sql, "data.samples.map"), {"log": rows})
    assert {result.schema.field(c).type for c in "lmn"} == {pa.large_list(pa.string())}
    assert result["l"].to_pylist() == [["a", "b"], [""], None]
    with pytest.raises(SchemaError, match=r"lists must hold numbers or texts, got .*bool.*'l'"):
        run(Connection(), "SELECT [true] AS l FROM log", {"log": rows})


def test_row_with_a_time_beyond_python_can_be_rejected() -> None:
    rows = pa.table({"x": pa.array([2**62], pa.timestamp("us")), "_origin": [7]})
    statement = select_origin("SELECT CAST('no' AS BIGINT) AS y FROM log", "data.samples.map")
    (bad,) = map_rows(Connection(), statement, "log", rows).bad_rows.to_pylist()
    assert (bad["origin"], bad["value"]) == (7, "{'x': 4611686018427387904}")


def read_bytes(directory: Path, data: bytes, name: str = "log.csv", **config: Any) -> RawRows:
    """Read a CSV file of the columns `id` and `name` as one chunk."""
    (directory / name).write_bytes(data)
    source = SourceConfig(
        files="*", format="csv", columns={"id": "int64", "name": "string"}, **config
    )
    split = InputSplit("log", name, 0, num_bytes=len(data))
    result = list(read_csv(folder_of(directory), split, source, pa.schema([])))
    tables = [rows.table for rows in result if rows.table is not None]
    rejects = tuple(reject for rows in result for reject in rows.rejects)
    return RawRows(pa.concat_tables(tables) if tables else None, rejects)


def read_lines(directory: Path, text: str, **config: Any) -> tuple[list[object], list[Reject]]:
    result = read_bytes(directory, text.encode(), **config)
    return [] if result.table is None else result.table["id"].to_pylist(), list(result.rejects)


UNCLOSED = "quote '\"' is not closed before a delimiter or line end within 1024 KiB"


def test_open_quote_costs_its_line_only(tmp_path: Path) -> None:
    ids, rejects = read_lines(tmp_path, 'id,name\n1,a\n2,"b\n3,c\n4,d\n')
    assert ids == [1, 3, 4]
    assert rejects == [Reject("log.csv", 1, UNCLOSED, 'line 3: 2,"b')]


def test_open_quote_in_a_large_file_costs_its_line_only(tmp_path: Path) -> None:
    lines = [f"{i},name{i}\n" for i in range(300_000)]
    lines[1000] = '1000,"name\n'
    result = read_bytes(tmp_path, ("id,name\n" + "".join(lines)).encode())
    assert result.table is not None
    kept = np.delete(np.arange(300_000), 1000)
    assert (result.table[ORIGIN].to_numpy() == kept).all()
    assert (result.table["id"].to_numpy() == kept).all()
    assert result.rejects == (Reject("log.csv", 1000, UNCLOSED, 'line 1002: 1000,"name'),)


@pytest.mark.slow
def test_open_quotes_in_half_of_the_rows_are_named_by_their_lines(tmp_path: Path) -> None:
    lines = [f"{i},{'' if i % 2 else chr(34)}n\n" for i in range(50_000)]
    result = read_bytes(tmp_path, ("id,name\n" + "".join(lines)).encode())
    assert result.table is not None
    assert result.table["id"].to_pylist() == list(range(1, 50_000, 2))
    assert [(r.position, r.value) for r in result.rejects] == [
        (i, f'line {i + 2}: {i},"n') for i in range(0, 50_000, 2)
    ]


def test_field_over_several_lines_is_one_row(tmp_path: Path) -> None:
    result = read_bytes(tmp_path, b'id,name\r\n1,"a\r\n\r\n""b"", c"\r\n2,"d\ne"\r\n')
    assert result.table is not None
    assert result.table["name"].to_pylist() == ['a\r\n\r\n"b", c', "d\ne"]
    assert result.rejects == ()


def test_quote_that_a_later_one_seems_to_close_costs_its_line_only(tmp_path: Path) -> None:
    text = 'id,name\n1,"a\n2,b\n3,"c"\n4,d\n5,"e\n6,f",g\n7,h\n'
    ids, rejects = read_lines(tmp_path, text)
    assert ids == [2, 3, 4, 7]
    assert [(r.position, r.reason) for r in rejects] == [
        (0, UNCLOSED),
        (
            4,
            "row that spans lines must have 2 fields, got 3; "
            "check the quote '\"' in its first line",
        ),
        (5, "line must have 2 fields, got 3"),
    ]


def test_row_that_is_too_long_costs_itself_only(tmp_path: Path) -> None:
    long = b"1," + b"x" * MAX_ROW_BYTES
    result = read_bytes(tmp_path, b"id,name\n0,a\n" + long + b"\r\n2,c\n")
    assert result.table is not None
    assert result.table[ORIGIN].to_pylist() == [0, 2]
    (reject,) = result.rejects
    assert reject.position == 1
    assert reject.reason == f"row must be at most 16 MiB, got a line of {len(long)} bytes"
    assert reject.value.startswith("line 3: 1,xxx")
    assert len(reject.value) < 5000


def test_text_of_another_encoding_is_one_reject_of_its_file(tmp_path: Path) -> None:
    result = read_bytes(tmp_path, "id,name\n1,a\n".encode("utf-16"))
    reason = "file is UTF-16 by its byte order mark, not UTF-8; convert it: iconv -f UTF-16"
    assert (result.table, result.rejects) == (None, (file_reject("log.csv", reason),))


@pytest.mark.parametrize("data", [b"", b"\n\r\n", b"id,name", b"\xef\xbb\xbfid,name\n"])
def test_file_without_rows_is_no_fault(data: bytes, tmp_path: Path) -> None:
    assert read_bytes(tmp_path, data).rejects == ()


@pytest.mark.parametrize(
    ("bad", "place"),
    in_pairs([b"7,\xff\xfe", b"7,\xc3", b"7,a\xed\xa0\x80", b'7,"\xff\n"'], [0, 3, 9]),
)
def test_row_that_is_no_text_is_rejected_and_all_others_arrive(
    bad: bytes, place: int, tmp_path: Path
) -> None:
    lines = [f"{i},n\u00e9{i}".encode() for i in range(10)]
    lines[place] = bad
    result = read_bytes(tmp_path, b"\n".join(lines), header=False)
    kept = [i for i in range(10) if i != place]
    assert result.table is not None
    assert [(r["id"], r["name"], r[ORIGIN]) for r in result.table.to_pylist()] == [
        (i, f"n\u00e9{i}", i) for i in kept
    ]
    assert [(r.position, r.reason) for r in result.rejects] == [
        (place, "field 'name' must be UTF-8")
    ]
    assert "\\x" in result.rejects[0].value


def test_row_with_several_bad_fields_is_rejected_once(tmp_path: Path) -> None:
    source = SourceConfig(files="*", format="csv", columns={"a": "int8", "b": "date", "c": "bool"})
    (tmp_path / "a.csv").write_bytes(b"a,b,c\nx,y,z\n1,2026-01-01,true\n2,no,false\n")
    (rows,) = read_csv(folder_of(tmp_path), InputSplit("log", "a.csv", 0), source, pa.schema([]))
    assert rows.table is not None
    assert rows.table.drop_columns([ORIGIN]).to_pylist() == [
        {"a": 1, "b": date(2026, 1, 1), "c": True}
    ]
    assert [(r.position, r.reason) for r in rows.rejects] == [
        (0, "field 'a' must be int8, got 'x'"),
        (2, "field 'b' must be date, got 'no'"),
    ]


@pytest.mark.parametrize("end", ["\n", "", "\r\n", "\n\n"])
def test_last_line_arrives_whatever_ends_it(end: str, tmp_path: Path) -> None:
    assert read_lines(tmp_path, f'id,name\n1,a\n2,"b\nc"{end}') == ([1, 2], [])


def test_compressed_file_is_read_to_the_end_of_its_last_member(tmp_path: Path) -> None:
    data = gzip.compress(b"id,name\n1,a\n2,") + gzip.compress(b"b\n3,c\n")
    result = read_bytes(tmp_path, data, "log.csv.gz")
    assert result.table is not None
    assert (result.table["id"].to_pylist(), result.rejects) == ([1, 2, 3], ())


COMPRESSIONS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "gzip, padded": lambda data: gzip.compress(data) + bytes(512),
    "bzip2": bz2.compress,
    "xz": lzma.compress,
    "zstd": lambda data: pa.Codec("zstd").compress(data, asbytes=True),
    "none": bytes,
}


@pytest.mark.parametrize(
    ("compression", "name"), in_pairs(COMPRESSIONS, ["log.csv", "log.csv.gz", "log"])
)
def test_compression_is_known_by_the_content(compression: str, name: str, tmp_path: Path) -> None:
    data = COMPRESSIONS[compression](b"id,name\n1,a\n2,b\n")
    result = read_bytes(tmp_path, data, name)
    assert result.table is not None
    assert result.table["id"].to_pylist() == [1, 2]
    assert not result.rejects


def test_compressed_file_that_is_cut_short_says_from_where_it_is_lost(tmp_path: Path) -> None:
    data = gzip.compress(b"id,name\n" + b"".join(b"%d,n\n" % i for i in range(500_000)), 1)
    result = read_bytes(tmp_path, data[: len(data) * 3 // 4], "log.csv.gz")
    assert result.table is not None
    num_rows = result.table.num_rows
    assert (result.table[ORIGIN].to_numpy() == np.arange(num_rows)).all()
    assert num_rows > 100_000
    (reject,) = result.rejects
    assert reject.position is None
    assert reject.reason.startswith(f"file could not be read from row {num_rows} on: ")


def test_file_with_its_columns_in_another_order_is_rejected(tmp_path: Path) -> None:
    ids, rejects = read_lines(tmp_path, "name,id\n7,1\n8,2\n")
    assert ids == []
    reason = "header must be id, name, got name, id; declare its columns in order"
    assert rejects == [file_reject("log.csv", reason)]


def test_header_with_a_byte_order_mark_quotes_and_blanks_is_accepted(tmp_path: Path) -> None:
    assert read_lines(tmp_path, '\ufeff"id", name\n1,a\n') == ([1], [])


@pytest.mark.parametrize("text", ["1.7", "-0.5", "17e-1", "nan", "2.50"])
def test_number_that_is_no_integer_is_not_rounded(text: str, tmp_path: Path) -> None:
    ids, rejects = read_lines(tmp_path, f"id,name\n1,a\n{text},b\n5.0,c\n")
    assert ids == [1, 5]
    assert rejects == [Reject("log.csv", 1, f"field 'id' must be int64, got {text!r}", text)]


SHOP = """
data:
  sources: {log: {files: "*.parquet", format: parquet}}
  samples: {map: "SELECT * FROM log"}
  session: {key: session, time: time}
  tables: {users: {features: [user], rows: identity, num_rows: 9223372036854775808}}
  groups: {user: [user]}
"""
FEATURES = """
feature { name: "session" type: INT annotation { tag: "kept" } }
feature { name: "time" type: INT annotation { tag: "kept" } }
feature { name: "user" type: INT annotation { tag: "sparse" } }
feature { name: "price" type: FLOAT annotation { tag: "dense" } }
feature { name: "tags" type: BYTES value_count { min: 0 } annotation { tag: "kept" } }
feature { name: "label" type: INT annotation { tag: "label" } }
feature { name: "weight" type: FLOAT annotation { tag: "weight" } }
"""
WEIGHTED = """
feature { name: "seen" type: INT value_count { min: 0 } annotation { tag: "sparse" } }
feature { name: "seen_weights" type: FLOAT value_count { min: 0 } annotation { tag: "kept" } }
"""
SAMPLE = {
    "session": pa.array([1, 2], pa.int64()),
    "time": pa.array([0, 0], pa.timestamp("us")),
    "user": pa.array([2**63, 2**63 - 1], pa.uint64()),
    "price": pa.array([1.0, None], pa.float32()),
    "tags": pa.array([["a"], None]),
    "label": pa.array([1, 1], pa.int8()),
    "weight": pa.array([1.0, 0.0], pa.float32()),
    "_origin": pa.array([0, 1], pa.int64()),
}
ODD_SAMPLES: dict[str, tuple[dict[str, pa.Array], str]] = {
    "an id of 2**63": (
        {"user": SAMPLE["user"]},
        "feature 'user' must be at most 9223372036854775807",
    ),
    "a dense feature that is no number": (
        {"price": pa.array([float("nan"), None], pa.float32())},
        "feature 'price' must be finite in float32",
    ),
    "a dense feature beyond float32": (
        {"price": pa.array([1e39, 1e38])},
        "feature 'price' must be finite in float32",
    ),
    "a label of 2": ({"label": pa.array([2, 1])}, "feature 'label' must be at most 1"),
    "a label below 0": ({"label": pa.array([-1, 0])}, "feature 'label' must be at least 0"),
    "a weight of an entry that is no number": (
        {"seen": pa.array([[1], [2]]), "seen_weights": pa.array([[float("nan")], [1.0]])},
        "feature 'seen_weights' must be finite in float32",
    ),
    "an entry without a weight": (
        {"seen": pa.array([[1], None]), "seen_weights": pa.array([[], []], pa.list_(pa.float32()))},
        "lists 'seen_weights' and 'seen' must be equally long",
    ),
    "an infinite dense feature": (
        {"price": pa.array([float("-inf"), 0.0], pa.float32())},
        "feature 'price' must be finite in float32",
    ),
    "a weight below zero": (
        {"weight": pa.array([-1.0, 1.0], pa.float32())},
        "feature 'weight' must be at least 0",
    ),
    "a null in a list of texts": (
        {"tags": pa.array([["a", None], ["", "b"]])},
        "feature 'tags' must hold no nulls",
    ),
    "a weight that is missing": (
        {"weight": pa.array([None, 1.0], pa.float32())},
        "feature 'weight' must not be null",
    ),
}


def shop(directory: Path, features: str = FEATURES) -> tuple[DataConfig, FeatureSet]:
    (directory / "job.yaml").write_text(f"name: shop{SHOP}")
    (directory / "schema.pbtxt").write_text(features)
    return load_job(directory / "job.yaml").data, load_features(directory / "schema.pbtxt")


@pytest.mark.parametrize(("changes", "reason"), ODD_SAMPLES.values(), ids=ODD_SAMPLES)
def test_sample_that_no_model_can_use_is_rejected(
    changes: dict[str, pa.Array], reason: str, tmp_path: Path
) -> None:
    data, features = shop(tmp_path, FEATURES + WEIGHTED)
    rows = pa.table({**SAMPLE, "user": pa.array([1, 2]), **changes})
    samples = run(Connection(), "SELECT * FROM log", {"log": rows})
    good, bad = usable_samples(
        separate_tuples(samples, data.groups), features.names, value_checks(features, data)
    )
    assert [(b["origin"], b["reason"]) for b in bad.to_pylist()] == [(0, reason)]
    assert good.column("session").to_pylist() == [2]


WRONG_ROLES: dict[str, tuple[str, str, str]] = {
    "a sparse feature of fractions": (
        'name: "user" type: INT', 'name: "user" type: FLOAT',
        "sparse feature 'user' must be INT or BYTES, got FLOAT; number its values in SQL"),
    "texts as rows": (
        'name: "user" type: INT', 'name: "user" type: BYTES',
        "data.tables.users has rows: identity, got the texts of 'user'; use rows: hash, or number "
        "them with a vocabulary in data.transforms"),
    "a dense text": (
        'name: "price" type: FLOAT', 'name: "price" type: BYTES',
        "dense feature 'price' must be one number, got BYTES; convert it in SQL"),
    "a list of labels": (
        'name: "label" type: INT', 'name: "label" type: INT value_count { min: 0 }',
        "label feature 'label' must be one number, got a list; convert it in SQL"),
    "a name of the format": (
        'name: "price"', 'name: "user_inverse"',
        "column name 'user_inverse' is reserved by the format; rename the column"),
}  # fmt: skip


@pytest.mark.parametrize(("old", "new", "message"), WRONG_ROLES.values(), ids=WRONG_ROLES)
def test_column_that_no_model_can_use_is_refused_before_the_work(
    old: str, new: str, message: str, tmp_path: Path
) -> None:
    data, features = shop(tmp_path, FEATURES.replace(old, new))
    kinds = {"INT": pa.int64(), "FLOAT": pa.float32(), "BYTES": pa.string()}
    fields = [
        (f.name, pa.large_list(kinds[f.type]) if f.is_list else kinds[f.type])
        for f in features.features
    ]
    with pytest.raises(SchemaError, match="^" + re.escape(message) + "$"):
        check_columns(pa.schema([*fields, ("_origin", pa.int64())]), features, data)


def test_table_of_texts_and_numbers_is_refused(tmp_path: Path) -> None:
    _, features = shop(
        tmp_path, FEATURES.replace('0 } annotation { tag: "kept"', '0 } annotation { tag: "sparse"')
    )
    job = (tmp_path / "job.yaml").read_text().replace("[user], rows: identity", "[user, tags]")
    (tmp_path / "job.yaml").write_text(job)
    kinds = {n: c.type for n, c in SAMPLE.items()} | {"tags": pa.large_list(pa.string())}
    message = (
        "data.tables.users.features must have one type, got INT for 'user' and BYTES for 'tags', "
        "so that 7 and '7' have different rows; cast one in SQL"
    )
    with pytest.raises(SchemaError, match="^" + re.escape(message) + "$"):
        check_columns(pa.schema(kinds), features, load_job(tmp_path / "job.yaml").data)


@pytest.mark.slow
def test_a_large_row_group_is_read_in_pieces_with_the_same_places(tmp_path: Path) -> None:
    rows = pa.table({"id": np.arange(300_000), "seen": [[i, i + 1] for i in range(300_000)]})
    pq.write_table(rows, tmp_path / "large.parquet", row_group_size=300_000)
    schema = pa.schema([*rows.schema, pa.field(ORIGIN, pa.int64())])
    split = InputSplit("log", "large.parquet", 3, 0, 0)
    config = SourceConfig(files="*", format="parquet")
    result = list(read_parquet(folder_of(tmp_path), split, config, schema))
    assert not any(list(r.all_rejects()) for r in result)
    tables = [r.table for r in result if r.table is not None]
    assert max(t.num_rows for t in tables) == CHUNK_ROWS
    joined = pa.concat_tables(tables)
    assert joined.select(["id", "seen"]).equals(rows)
    assert joined[ORIGIN].to_numpy().tolist() == list(range(3 << 40, (3 << 40) + 300_000))

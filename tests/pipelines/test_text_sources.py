# ruff: noqa: E501 - a table of faults, one a line
"""JSON lines and Avro: good rows are read, each bad one is rejected with file and position."""

import gzip
import io
import json
import re
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast, get_args

import fastavro
import pyarrow as pa
import pytest

from presage.pipelines.sources.avro import split_avro
from presage.pipelines.sources.formats import FORMATS, empty_rows, input_splits, read_split
from presage.pipelines.sources.jsonl import split_jsonl
from presage.pipelines.sources.raw_rows import ORIGIN, InputSplit, folder_of
from presage.pipelines.sources.rejects import Reject, file_reject, rejects_from_table
from presage.schemas.config.sources import FormatName, SourceConfig
from presage.schemas.errors import SchemaError
from tests.shared import in_pairs

COLUMNS = {"id": "int64", "name": "string", "ids": "list<int64>", "at": "timestamp"}
RowsAndRejects = tuple[list[dict[str, Any]], list[Reject]]


def read(
    directory: Path, name: str, config: SourceConfig, splits: list[InputSplit]
) -> RowsAndRejects:
    folder = folder_of(directory)
    schema = empty_rows(folder, "log", config, [name]).schema
    result = [rows for split in splits for rows in read_split(folder, split, config, schema)]
    tables = [rows.table for rows in result if rows.table is not None]
    assert all(table.schema == schema for table in tables)
    rejects = [reject for f in result for t in f.all_rejects() for reject in rejects_from_table(t)]
    return [r for t in tables for r in t.to_pylist()], rejects


def jsonl(
    directory: Path, data: bytes, name: str = "log.jsonl", split_bytes: int = 1 << 20
) -> RowsAndRejects:
    (directory / name).write_bytes(data)
    config = SourceConfig(files="*", format="jsonl", columns=COLUMNS)
    splits, rejects = split_jsonl(folder_of(directory), InputSplit("log", name, 0), split_bytes)
    rows, more = read(directory, name, config, splits)
    return rows, rejects + more


def line(id_: int, **changes: object) -> bytes:
    at = f"2026-01-01T00:00:{id_ % 60:02d}Z"
    return json.dumps(
        {"id": id_, "name": f"n{id_}", "ids": [id_] * (id_ % 4), "at": at, **changes}
    ).encode()


BAD_LINES: dict[str, tuple[bytes, str]] = {
    "a text for a number": (line(1, id="1"), "field 'id' must be int64, got '1'"),
    "an id of 2**63": (line(1, id=2**63), "field 'id' must be int64, got 9223372036854775808"),
    "half an id": (line(1, id=1.5), "field 'id' must be int64, got 1.5"),
    "a number for a list": (line(1, ids=7), "field 'ids' must be list<int64>, got 7"),
    "a text in a list": (line(1, ids=[1, "x"]), "field 'ids[]' must be int64, got 'x'"),
    "a time that is none": (line(1, at="noon"), "field 'at' must be timestamp, got 'noon'"),
    "an object for a text": (line(1, name={"a": 1}), "field 'name' must be string, got {'a': 1}"),
    "a field twice": (b'{"id": 1, "id": 2}', "field 'id' appears twice"),
    "bytes that are no text": (b'{"name": "\xff"}', "line must be UTF-8"),
    "half a surrogate": (b'{"name": "\\ud800"}', "line is not one JSON object: The surrogate pair in string is invalid."),
    "a truncated object": (b'{"id": 1, "name": "x', "line must be one JSON object, from { to }"),
    "a missing comma": (b'{"id": 1 "name": "x"}', "line is not one JSON object: Expecting ',' delimiter: line 1 column 10 (char 9)"),
    "a list": (b"[1, 2]", "line must be one JSON object, from { to }"),
    "a null": (b"null", "line must be one JSON object, from { to }"),
    "a comma behind the object": (line(1) + b",", "line must be one JSON object, from { to }"),
    "a NUL byte": (b'{"name": "a\x00b"}', "line is not one JSON object: Invalid control character at: line 1 column 12 (char 11)"),
}  # fmt: skip


@pytest.mark.parametrize(("fault", "position"), in_pairs(BAD_LINES, [0, 17, 39]))
def test_bad_line_is_rejected_with_its_position_and_the_others_arrive(
    fault: str, position: int, tmp_path: Path
) -> None:
    bad, reason = BAD_LINES[fault]
    lines = [line(i) for i in range(40)]
    lines[position] = bad
    rows, rejects = jsonl(tmp_path, b"\n".join(lines), split_bytes=500)
    assert [(r.file, r.position, r.reason) for r in rejects] == [("log.jsonl", position, reason)]
    kept = [i for i in range(40) if i != position]
    assert [(r["id"], r[ORIGIN], r["ids"]) for r in rows] == [(i, i, [i] * (i % 4)) for i in kept]


NESTED = {
    "user": "struct<device: struct<version: string, year: int64>, tags: list<string>>",
    "shown": "list<struct<item: string, score: float32>>",
    "score": "string",
    "year": "int32",
}


def nested(directory: Path, rows: list[str], columns: dict[str, str]) -> RowsAndRejects:
    (directory / "log.jsonl").write_text("\n".join(rows))
    config = SourceConfig(files="*", format="jsonl", columns=columns)
    return read(directory, "log.jsonl", config, [InputSplit("log", "log.jsonl", 0)])


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ('{"user": {"device": {"year": "x"}}}', "field 'user.device.year' must be int64, got 'x'"),
        ('{"user": {"device": "phone"}}', "field 'user.device' must be struct<version: string, year: int64>, got 'phone'"),
        ('{"shown": [{"score": 1}, {"score": "high"}]}', "field 'shown[].score' must be float32, got 'high'"),
        ('{"shown": [{"item": {"id": 2}}]}', "field 'shown[].item' must be string, got {'id': 2}"),
        ('{"user": {"tags": ["a", true]}}', "field 'user.tags[]' must be string, got True"),
        ('{"user": {"device": {"year": 1e400}, "tags": 7}}', "field 'user.device.year' must be int64, got 1e400"),
    ],
)  # fmt: skip
def test_reasons_name_the_inner_field(row: str, reason: str, tmp_path: Path) -> None:
    rows, rejects = nested(tmp_path, ["{}", row, "{}"], NESTED)
    assert len(rows) == 2
    assert [(r.position, r.reason, r.value) for r in rejects] == [(1, reason, row)]


def test_numbers_in_fields_of_texts_are_read_as_they_are_written(tmp_path: Path) -> None:
    numbers = ["2", "1.50", "-0", "1e5", "12345678901234567890123", "0.1E-7"]
    rows = [
        f'{{"user": {{"device": {{"version" : {n}, "year": 3}}, "tags": ["a", {n}]}}, '
        f'"shown": [{{"item": {n}, "score": 0.5}}], "score": {n}, "year": 7, "other": {n}}}'
        for n in numbers
    ]
    text = rows[0].replace("2", '"say \\"version\\": 2, \\u00fc"').replace('"other"', '"year2"')
    result, rejects = nested(tmp_path, [rows[0], *rows[1:], text], NESTED)
    assert rejects == []
    assert [r["user"]["device"]["version"] for r in result[:-1]] == numbers
    assert [r["user"]["tags"] for r in result[:-1]] == [["a", n] for n in numbers]
    assert [r["shown"] for r in result[:-1]] == [[{"item": n, "score": 0.5}] for n in numbers]
    assert [r["score"] for r in result[:-1]] == numbers
    assert {r["user"]["device"]["year"] for r in result} == {3}
    assert result[-1]["score"] == result[-1]["user"]["tags"][1] == 'say "version": 2, \u00fc'


def test_many_numbers_among_texts_are_not_read_line_by_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("presage.pipelines.sources.jsonl._read_lines")
    rows = [f'{{"v": {i if i % 2 else json.dumps(str(i))}, "n": {i}}}' for i in range(2000)]
    result, rejects = nested(tmp_path, rows, {"v": "string", "n": "int64"})
    assert rejects == []
    assert [r["v"] for r in result] == [str(i) for i in range(2000)]


def test_object_over_two_lines_is_two_bad_lines(tmp_path: Path) -> None:
    rows, rejects = jsonl(tmp_path, b'{"id": 1,\n"name": "x"}\n{"id": 3}\n')
    assert [r["id"] for r in rows] == [3]
    assert [r.position for r in rejects] == [0, 1]


def test_absent_and_other_fields_and_empty_lines_are_no_fault(tmp_path: Path) -> None:
    data = b'\xef\xbb\xbf{"id": 1, "more": {"x": [null]}}\r\n\r\n  \n{"name": null}\n{}\n\n'
    rows, rejects = jsonl(tmp_path, data)
    assert [(r["id"], r["name"], r[ORIGIN]) for r in rows] == [
        (1, None, 0),
        (None, None, 3),
        (None, None, 4),
    ]
    assert rejects == []


@pytest.mark.parametrize(
    ("split_bytes", "end"), in_pairs([1, 64, 1000, 1 << 20], [b"", b"\n", b"\r\n", b"\n\n\n"])
)
def test_parts_hold_each_line_once_wherever_they_are_cut(
    split_bytes: int, end: bytes, tmp_path: Path
) -> None:
    data = b"\n".join(line(i) for i in range(60)) + end
    rows, rejects = jsonl(tmp_path, data, split_bytes=split_bytes)
    assert ([r["id"] for r in rows], rejects) == (list(range(60)), [])
    assert [r[ORIGIN] for r in rows] == list(range(60))


def test_file_that_ends_in_the_middle_of_a_line_loses_that_line(tmp_path: Path) -> None:
    rows, rejects = jsonl(tmp_path, b"\n".join(line(i) for i in range(9))[:-5])
    assert len(rows) == 8
    assert [r.position for r in rejects] == [8]


@pytest.mark.parametrize("name", ["log.jsonl.gz", "log.jsonl.zst"])
def test_compressed_lines_are_read_and_a_truncated_file_keeps_what_it_has(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("presage.pipelines.sources.jsonl._BLOCK_BYTES", 1 << 18)
    text = b"".join(line(i) + b"\n" for i in range(20_000))
    packed = (
        gzip.compress(text, 1)
        if name.endswith("gz")
        else pa.Codec("zstd").compress(text, asbytes=True)
    )
    rows, rejects = jsonl(tmp_path, packed, name)
    assert (len(rows), rejects) == (20_000, [])
    rows, rejects = jsonl(tmp_path, packed[: len(packed) * 3 // 4], name)
    assert [r["id"] for r in rows] == list(range(len(rows)))
    assert len(rows) > 1000
    assert rejects[-1].rows_unknown
    reason = f"file could not be read from row {len(rows)} on: "
    assert rejects[-1].reason.startswith(reason)


def test_line_without_end_costs_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("presage.pipelines.sources.limits.MAX_ROW_BYTES", 1 << 20)
    monkeypatch.setattr("presage.pipelines.sources.jsonl._BLOCK_BYTES", 1 << 18)
    data = line(0) + b"\n" + b"{" + b" " * (8 << 20) + b"}\n" + line(2)
    rows, rejects = jsonl(tmp_path, data, split_bytes=1 << 22)
    assert [(r["id"], r[ORIGIN]) for r in rows] == [(0, 0), (2, 2)]
    assert [(r.position, r.reason) for r in rejects] == [
        (1, f"row must be at most 1 MiB, got a line of {(8 << 20) + 2} bytes")
    ]


def test_lines_in_utf16_are_one_reject_of_their_file(tmp_path: Path) -> None:
    rows, rejects = jsonl(tmp_path, line(0).decode().encode("utf-16"), split_bytes=10)
    reason = "file is UTF-16 by its byte order mark, not UTF-8; convert it: iconv -f UTF-16"
    assert (rows, rejects) == ([], [file_reject("log.jsonl", reason)])


AVRO = {
    "type": "record",
    "name": "Row",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "name", "type": ["null", "string"]},
        {"name": "ids", "type": {"type": "array", "items": "long"}},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-micros"}},
    ],
}


def records(count: int) -> list[dict[str, Any]]:
    return [
        {"id": i, "name": f"n{i}", "ids": [i] * (i % 4), "at": i * 1_000_000} for i in range(count)
    ]


def avro_bytes(
    codec: str = "deflate", count: int = 1000, schema: Any = AVRO, rows: Any = None
) -> bytes:
    file = io.BytesIO()
    fastavro.writer(
        file, schema, records(count) if rows is None else rows, codec=codec, sync_interval=500
    )
    return file.getvalue()


def avro(
    directory: Path, data: bytes, split_bytes: int = 2000, columns: Any = None
) -> RowsAndRejects:
    (directory / "log.avro").write_bytes(data)
    config = SourceConfig(files="*", format="avro", columns=columns)
    splits, rejects = split_avro(
        folder_of(directory), InputSplit("log", "log.avro", 0), split_bytes
    )
    rows, more = read(directory, "log.avro", config, splits) if splits else ([], [])
    return rows, rejects + more


@pytest.mark.parametrize(
    ("codec", "split_bytes"), in_pairs(["null", "deflate", "bzip2", "xz"], [1, 2000, 1 << 30])
)
def test_avro_rows_arrive_once_with_their_positions(
    codec: str, split_bytes: int, tmp_path: Path
) -> None:
    rows, rejects = avro(tmp_path, avro_bytes(codec), split_bytes)
    assert [r["id"] for r in rows] == list(range(1000))
    assert [r[ORIGIN] for r in rows] == list(range(1000))
    assert [r["at"].second for r in rows] == [i % 60 for i in range(1000)]
    assert rejects == []


def recoded(data: bytes, codec: str, pack: Callable[[bytes], bytes]) -> bytes:
    """Return an uncompressed file with its blocks in another codec that fastavro cannot write."""
    head = fastavro.reader(io.BytesIO(data))
    assert head.writer_schema is not None
    marker = data[-16:]
    out = io.BytesIO()
    fastavro.writer(out, head.writer_schema, [], metadata={}, sync_marker=marker)
    text = out.getvalue().replace(b"\x08null", bytes([2 * len(codec)]) + codec.encode())
    for block in fastavro.block_reader(io.BytesIO(data)):
        body = pack(getattr(block, "bytes_").getvalue())  # noqa: B009
        for number in (block.num_records, len(body)):
            text += varint(number)
        text += body + marker
    return text


def varint(value: int) -> bytes:
    rest, data = value << 1, b""
    while rest > 0x7F:
        data, rest = data + bytes([rest & 0x7F | 0x80]), rest >> 7
    return data + bytes([rest])


def snappy(body: bytes) -> bytes:
    return pa.Codec("snappy").compress(body, asbytes=True) + zlib.crc32(body).to_bytes(4, "big")


@pytest.mark.parametrize(
    ("codec", "pack"),
    [("snappy", snappy), ("zstandard", lambda b: pa.Codec("zstd").compress(b, asbytes=True))],
)
def test_codecs_of_other_writers_are_read(
    codec: str, pack: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    data = recoded(avro_bytes("null"), codec, pack)
    rows, rejects = avro(tmp_path, data)
    assert ([r["id"] for r in rows], rejects) == (list(range(1000)), [])


def test_truncated_avro_file_keeps_its_whole_blocks(tmp_path: Path) -> None:
    rows, rejects = avro(tmp_path, avro_bytes("null")[:-100])
    assert [r["id"] for r in rows] == list(range(len(rows)))
    reason = f"block could not be read from row {len(rows)} on: no sync marker at its end"
    assert rejects == [file_reject("log.avro", reason)]
    assert len(rows) > 900


@pytest.mark.parametrize("codec", ["null", "deflate"])
def test_damaged_block_costs_itself_only(codec: str, tmp_path: Path) -> None:
    data = bytearray(avro_bytes(codec))
    middle = len(data) // 2
    marker = bytes(data[-16:])
    start = data.index(marker, middle) + 16  # a block begins here: spoil its sizes
    data[start : start + 4] = b"\xff\xff\xff\xff"
    rows, rejects = avro(tmp_path, bytes(data))
    ids = [r["id"] for r in rows]
    assert len(rejects) == 1
    assert ids == sorted(set(ids))
    assert 900 < len(ids) < 1000
    assert ids[-1] == 999


def blocks_of(data: bytes) -> tuple[bytes, list[tuple[int, bytes]]]:
    """Return the head of an uncompressed file, and the rows and bytes of its blocks."""
    blocks = fastavro.block_reader(io.BytesIO(data))
    result = [(b.num_records, getattr(b, "bytes_").getvalue()) for b in blocks]  # noqa: B009
    return data[: data.index(data[-16:]) + 16], result


def joined(head: bytes, blocks: list[tuple[int, bytes]]) -> bytes:
    parts = [varint(count) + varint(len(body)) + body + head[-16:] for count, body in blocks]
    return head + b"".join(parts)


def test_rows_of_a_block_that_cannot_be_decoded_are_rejected_one_by_one(tmp_path: Path) -> None:
    head, blocks = blocks_of(avro_bytes("null"))
    (count, body), first = blocks[1], blocks[0][0]
    blocks[1] = count, body[: len(body) // 2]
    rows, rejects = avro(tmp_path, joined(head, blocks))
    ids = [r["id"] for r in rows]
    assert [r[ORIGIN] for r in rows] == ids
    assert [r.position for r in rejects] == sorted(set(range(1000)) - set(ids))
    assert first < len(ids) < 1000


@pytest.mark.parametrize("counted", [-1, 1])
def test_block_whose_head_counts_other_rows_than_it_has_is_a_fault(
    counted: int, tmp_path: Path
) -> None:
    head, blocks = blocks_of(avro_bytes("null"))
    blocks[1] = blocks[1][0] + counted, blocks[1][1]
    rows, rejects = avro(tmp_path, joined(head, blocks))
    assert len(rows) == 1000 + min(0, counted)
    assert [r.rows_unknown for r in rejects] == [counted < 0]


def test_rows_that_compress_to_less_than_a_byte_have_places_of_their_own(tmp_path: Path) -> None:
    schema = {"type": "record", "name": "Row", "fields": [{"name": "id", "type": "long"}]}
    file = io.BytesIO()
    rows = [{"id": 1}] * 50_000
    fastavro.writer(file, schema, rows, codec="deflate", sync_interval=10_000)
    result, rejects = avro(tmp_path, file.getvalue(), split_bytes=30)
    assert ([r[ORIGIN] for r in result], rejects) == (list(range(50_000)), [])


def test_bytes_that_are_no_text_reject_their_record_only(tmp_path: Path) -> None:
    data = avro_bytes("null").replace(b"n500", b"\xff500")
    rows, rejects = avro(tmp_path, data)
    assert [r["id"] for r in rows] == [i for i in range(1000) if i != 500]
    assert [(r.position, r.reason) for r in rejects] == [
        (500, "field 'name' must be string, got '\\udcff500'")
    ]


SHOW = {"type": "record", "name": "Show", "fields": [{"name": "n", "type": "long"}]}
NOTE = {"type": "record", "name": "Note", "fields": [
    {"name": "who", "type": ["long", "string"]}, {"name": "raw", "type": "bytes"}]}  # fmt: skip
UNIONS: dict[str, Any] = {
    "wide": ["null", "int", "long"], "real": ["float", "long", "null"],
    "who": ["long", "string", "null"], "any": ["null", "boolean", "double", "string", "bytes"],
    "flag": ["boolean", "int"], "deep": ["null", SHOW, NOTE, {"type": "array", "items": "long"}],
    "one": ["null", "Show"], "list": {"type": "array", "items": ["null", "string", "int"]},
    "map": {"type": "map", "values": ["int", "string"]},
    "rec": {"type": "record", "name": "Rec", "fields": [{"name": "p", "type": ["int", "string"]}]},
}  # fmt: skip
VALUES: dict[str, list[Any]] = {
    "wide": [None, 1, 2**60], "real": [1.5, 2**53, None], "who": [7, "x", None],
    "any": [None, True, 2.0, "e\u0301", b"b"], "flag": [True, 3],
    "deep": [None, {"n": 1}, {"who": 7, "raw": b"\xc3\xa9"}, [1, 2]], "one": [None, {"n": 4}],
    "list": [[], [None, "a", 1]], "map": [{"a": 1, "b": "x"}], "rec": [{"p": 5}, {"p": "q"}],
}  # fmt: skip


def as_texts(name: str, value: Any) -> Any:
    """Return what a value of `UNIONS` is read as."""
    if value is None or isinstance(value, str):
        return value
    if name == "list":
        return [x if x is None else str(x) for x in value]
    if name == "map":
        return [(k, str(v)) for k, v in value.items()]
    if name == "rec":
        return {"p": str(value["p"])}
    if name in ("who", "any", "flag", "deep"):
        plain = (
            {**value, "raw": value["raw"].decode()}
            if isinstance(value, dict) and "raw" in value
            else value
        )
        return (
            "b" if value == b"b" else json.dumps(plain, separators=(",", ":"), ensure_ascii=False)
        )
    return value


def union_rows(count: int) -> list[dict[str, Any]]:
    return [{k: v[i % len(v)] for k, v in VALUES.items()} for i in range(count)]


def test_unions_are_read_as_numbers_where_all_types_are_and_else_as_texts(tmp_path: Path) -> None:
    fields = [{"name": name, "type": kind} for name, kind in UNIONS.items()]
    data = avro_bytes(
        schema={"type": "record", "name": "Row", "fields": fields}, rows=union_rows(200)
    )
    rows, rejects = avro(tmp_path, data)
    plainly = list(fastavro.reader(io.BytesIO(data)))
    assert rejects == []
    expected = [{k: as_texts(k, r[k]) for k in VALUES} for r in plainly]  # pyright: ignore
    assert [{k: v for k, v in r.items() if k != ORIGIN} for r in rows] == expected
    assert {type(r["real"]) for r in rows} == {float, type(None)}


def test_value_that_no_type_of_its_column_holds_rejects_its_record_only(tmp_path: Path) -> None:
    def read_unions(kinds: list[Any], values: list[Any], declared: str | None) -> RowsAndRejects:
        schema = {**AVRO, "fields": [{"name": "id", "type": kinds}]}
        data = avro_bytes(schema=schema, rows=[{"id": value} for value in values])
        return avro(tmp_path, data, columns={"id": declared} if declared else None)

    cases: list[tuple[list[Any], list[Any], str | None, list[Any], list[str]]] = [
        (["long", "double"], [1, 2**53 + 1, 1.5], None, [1.0, 1.5], ["double, got 9007199254740993"]),
        (["bytes", "string"], ["a", b"\xff"], None, ["a"], ["string, got b'\\xff'"]),
        (["long", "string"], [1, "seven", "8"], "int64", [1, 8], ["int64, got 'seven'"]),
        (["null", "boolean", "string"], [True, "no?", None], "bool", [True, None], ["bool, got 'no?'"]),
        (["string", {"type": "array", "items": "long"}], [[1], "none"], "list<int64>", [[1]],
         ["large_list<item: int64>, got 'none'"]),
        (["long", "string"], [3, "x"], "string", ["3", "x"], []),
    ]  # fmt: skip
    for kinds, values, declared, good, reasons in cases:
        rows, rejects = read_unions(kinds, values, declared)
        assert [r["id"] for r in rows] == good
        assert len(rows) + len(rejects) == len(values)
        assert [r.reason.partition("'id' must be ")[2] for r in rejects] == reasons


def test_declared_type_that_the_value_does_not_fit_rejects_its_record_only(tmp_path: Path) -> None:
    rows, rejects = avro(tmp_path, avro_bytes(), columns={"id": "int8"})
    assert [r["id"] for r in rows] == list(range(128))
    assert [r.position for r in rejects] == list(range(128, 1000))


def test_file_that_is_no_avro_or_lacks_a_column_is_rejected(tmp_path: Path) -> None:
    _, rejects = avro(tmp_path, b"Obj\x02", columns={"id": "int64"})
    assert [(r.position, r.reason) for r in rejects] == [
        (None, "file is not Avro: cannot read header - is it an avro file?")
    ]
    _, rejects = avro(tmp_path, avro_bytes(), columns={"idd": "int64"})
    assert {r.reason for r in rejects} == {"column 'idd' is missing; did you mean 'id'?"}


def test_file_that_goes_or_changes_after_the_listing_is_one_clear_reject(tmp_path: Path) -> None:
    config = SourceConfig(files="*", format="jsonl", columns=COLUMNS)
    (tmp_path / "log.jsonl").write_bytes(line(1))
    whole = InputSplit("log", "log.jsonl", 0, num_bytes=len(line(1)))
    folder = folder_of(tmp_path)
    (split,), _ = input_splits(folder, whole, config)
    _, (reject,) = input_splits(folder, replace(whole, num_bytes=7), config)
    reason = f"file changed after it was listed: {len(line(1))} bytes instead of 7"
    assert reject == file_reject("log.jsonl", reason)
    (tmp_path / "log.jsonl").unlink()
    gone = file_reject("log.jsonl", "file was removed after it was listed")
    assert input_splits(folder, whole, config) == ([], [gone])
    assert read(tmp_path, "log.jsonl", config, [split]) == ([], [gone])


def test_formats_are_those_of_a_job_and_an_unknown_one_is_refused(tmp_path: Path) -> None:
    assert set(FORMATS) == set(get_args(FormatName))
    config = SourceConfig(files="*.orc", format=cast(FormatName, "orc"))
    message = "unknown format 'orc' of '*.orc'; use one of avro, csv, jsonl, parquet"
    with pytest.raises(SchemaError, match=re.escape(message)):
        input_splits(folder_of(tmp_path), InputSplit("log", "a.orc", 0), config)
    with pytest.raises(SchemaError, match=re.escape(message)):
        empty_rows(folder_of(tmp_path), "log", config, ["a.orc"])

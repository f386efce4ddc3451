"""Readers with random faults in files: each row is accepted or rejected, with its position."""

import csv
import gzip
import io
import json
import random
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import fastavro
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from presage.pipelines.init.sample_sources import find_sources
from presage.pipelines.sources import csv_files as csv_source
from presage.pipelines.sources import jsonl as jsonl_source
from presage.pipelines.sources import limits, text_records
from presage.pipelines.sources.formats import empty_rows, input_splits, read_split
from presage.pipelines.sources.raw_rows import ORIGIN, SPLIT_BYTES, InputSplit, folder_of
from presage.pipelines.sources.rejects import Reject, rejects_from_table
from presage.schemas.config.sources import SourceConfig
from tests.pipelines.csv_reference import Reference
from tests.shared import in_pairs

NAMES = ["x", "y", "z"]


def read_all(
    directory: Path, name: str, config: SourceConfig, split_bytes: int = SPLIT_BYTES
) -> tuple[pa.Table, list[Reject]]:
    """Return what a file holds, and what had to be left out, in order."""
    folder = folder_of(directory)
    schema = empty_rows(folder, "log", config, [name]).schema
    whole = InputSplit("log", name, 0, num_bytes=(directory / name).stat().st_size)
    splits, rejects = input_splits(folder, whole, config, split_bytes)
    result = [rows for split in splits for rows in read_split(folder, split, config, schema)]
    tables = [rows.table for rows in result if rows.table is not None]
    assert all(table.schema == schema for table in tables)
    rejects += [
        reject for rows in result for t in rows.all_rejects() for reject in rejects_from_table(t)
    ]
    return pa.concat_tables([schema.empty_table(), *tables]), rejects


CSV_PIECES = [
    *(
        b"a",
        b"1",
        b",",
        b",",
        b'"',
        b'"',
        b'""',
        b'","',
        b"\n",
        b"\n",
        b'"\n',
        b'\n"',
        b"\r",
        b"\r\n",
    ),
    *(b"\0", " \u00e9".encode(), b"\xff", b"\xf0\x9f", b" ", b"a,b", b"long" * 5),
]
"""What random files are made of; half a character is no UTF-8."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("marks", "sizes"),
    in_pairs(
        [('"', None), (None, None), ("'", "^"), ('"', "\\"), ('"', '"')],
        [(8 << 20, 16 << 20, 1 << 20), (5, 40, 12), (64, 64, 64), (1, 23, 17)],
    ),
)
def test_csv_rows_are_those_of_a_reader_that_takes_one_byte_at_a_time(
    marks: tuple[str | None, str | None],
    sizes: tuple[int, int, int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (quote, escape), (block, max_row, max_quoted) = marks, sizes
    monkeypatch.setattr(csv_source, "_BLOCK_BYTES", block)
    monkeypatch.setattr(text_records, "_READ_BYTES", max(1, block // 2))
    monkeypatch.setattr(limits, "MAX_ROW_BYTES", max_row)
    monkeypatch.setattr(text_records, "MAX_QUOTED_BYTES", max_quoted)
    draw = random.Random(f"{quote} {escape} {sizes}")
    mark = (quote or '"').encode()
    for _ in range(120 if block > 1 else 50):
        names = NAMES[: draw.choice([1, 2, 2, 3])]
        columns = dict.fromkeys(names, "string")
        config = SourceConfig(
            files="*", format="csv", columns=columns, header=False, quote=quote, escape=escape,
            null_values=(),
        )  # fmt: skip
        pieces = list(CSV_PIECES)
        if escape not in (None, quote):
            pieces += [rb"\"", rb"\\", rb'"b\"', b'"b\\\n"']
        if draw.random() < 0.5:  # mostly good rows
            row = b",".join([b"a"] * len(names)) + b"\n"
            quoted = draw.choice([b'"b"', b'"b\n"', b'"b""\n\n,"', b'"' + b"x\n" * 8 + b'"'])
            pieces += 8 * [row] + 4 * [row.replace(b"a", quoted, 1)]
        data = b"".join(draw.choices(pieces, k=draw.randint(0, 40))).replace(b'"', mark)
        data = data.replace(b"\\", (escape or "\\").encode())
        (tmp_path / "a.csv").write_bytes(data)
        first, second = (mark.encode() if mark else None for mark in (quote, escape))
        reference = Reference(b",", first, second, len(names), max_row, max_quoted)
        expected = reference.rows(data)
        table, rejects = read_all(tmp_path, "a.csv", config)
        assert [r.position for r in rejects] == [i for i, r in enumerate(expected) if r is None], (
            data
        )
        accepted = [(i, *r) for i, r in enumerate(expected) if r is not None]
        result = [(r[ORIGIN], *(r[n].encode() for n in names)) for r in table.to_pylist()]
        assert result == accepted, data


def test_texts_of_a_writer_that_escapes_quotes_are_read_as_written(tmp_path: Path) -> None:
    texts = [
        "plain",
        'a "b" c',
        '19" rack',
        "C:\\new",
        "\\",
        '"',
        "a,b",
        "x\ny",
        '\\"',
        '"\\',
        "'",
    ] * 40
    with (tmp_path / "a.csv").open("w", newline="") as file:
        style = {"escapechar": "\\", "doublequote": False, "quoting": csv.QUOTE_ALL}
        csv.writer(file, **style).writerows([["row", "text"], *enumerate(texts)])
    (tmp_path / "scratch").mkdir()
    [source], _ = find_sources(folder_of(tmp_path), tmp_path / "scratch")
    config = source.config
    assert config.escape == "\\"
    table, rejects = read_all(tmp_path, "a.csv", config)
    assert (table["text"].to_pylist(), rejects) == (texts, [])
    table, rejects = read_all(tmp_path, "a.csv", replace(config, escape=None))
    assert "see the key escape" in rejects[0].reason
    assert not any('"' in text for text in table["text"].to_pylist())


LINES = [
    *(b'{"a": 1}', b'{"a": 2}\n', b'{"a": 3}\r\n', b'{"a": 4}\r', b'{"a": null}\n', b"{}\n"),
    *(b'{"a": 1', b"}", b'"', b"\n", b"\r", b"\r\n", b"null\n", b"\xff", b"\0", b" ", b"7\n"),
    *(b'{"a": "x"}\n', b'{"b": [1, "\xc3\xa9"]}\n', b'{"a": 1, "a": 2}\n', b'{"a": 1.5}\n'),
]


def integer_of(line: bytes) -> tuple[int | None] | None:
    """Return the field `a` of a JSON object, None for a line that is none or has another type."""
    try:
        pairs = json.loads(line.decode(), object_pairs_hook=list)
    except ValueError:
        return None
    values = [v for k, v in pairs if k == "a"] if isinstance(pairs, list) else [""]
    if not line.startswith(b"{") or len(values) > 1:
        return None
    value = values[0] if values else None
    return (value,) if value is None or type(value) is int else None


SEVERAL = re.compile(r"object \d+ of (\d+) of line (\d+);")


@pytest.mark.slow
@pytest.mark.parametrize("block", [1, 5, 64, 8 << 20])
def test_json_lines_are_accepted_or_rejected_one_by_one(
    block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jsonl_source, "_BLOCK_BYTES", block)
    monkeypatch.setattr(limits, "MAX_ROW_BYTES", 60 if block <= 60 else 16 << 20)
    draw = random.Random(block)
    config = SourceConfig(files="*", format="jsonl", columns={"a": "int64"})
    for _ in range(80 if block > 1 else 30):
        good = draw.choice([0, 30])
        data = b"".join(draw.choices(LINES + LINES[1:6] * good, k=draw.randint(0, 40)))
        (tmp_path / "a.jsonl").write_bytes(data)
        texts = [line.strip() for line in data.splitlines()]
        values = {i: integer_of(text) for i, text in enumerate(texts) if text}
        table, rejects = read_all(tmp_path, "a.jsonl", config, draw.randint(1, 100))
        result = dict(zip(table[ORIGIN].to_pylist(), table["a"].to_pylist(), strict=True))
        too_long = [r.position for r in rejects if r.reason.startswith("row must be at most")]
        assert all(len(data.splitlines()[p or 0]) > 57 for p in too_long)
        expected = {i: v[0] for i, v in values.items() if v and i not in too_long}
        assert result == expected, data
        of_objects = [m for r in rejects if (m := SEVERAL.search(r.reason))]
        several = Counter((int(m[2]) - 1, int(m[1])) for m in of_objects)
        assert all(count == number for (_, number), count in several.items())
        of_lines = [r.position or 0 for r in rejects if not SEVERAL.search(r.reason)]
        bad = values.keys() - result.keys()
        assert sorted([*of_lines, *(line for line, _ in several)]) == sorted(bad)
        assert not any(r.rows_unknown for r in rejects)


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_compressed_file_that_is_cut_or_changed_anywhere_is_never_read_as_whole(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_records, "_READ_BYTES", 64)
    draw = random.Random(kind)
    config = SourceConfig(files="*", format=kind, columns={"a": "int64"}, header=False)  # type: ignore[arg-type]
    texts = [b"%d\n" % i if kind == "csv" else b'{"a": %d}\n' % i for i in range(200)]
    at = draw.randint(1, 199)
    members = [gzip.compress(b"".join(part)) for part in (texts[:at], texts[at:])]
    data, name = b"".join(members), f"log.{kind}.gz"
    for size in draw.sample(range(len(data)), 60):
        (tmp_path / name).write_bytes(data[:size])
        table, rejects = read_all(tmp_path, name, config)
        assert table["a"].to_pylist() == list(range(table.num_rows))
        whole = size in (0, len(members[0]))  # nothing tells that more would follow
        assert [r.rows_unknown for r in rejects] == [True] * (not whole), size
    for _ in range(60):
        changed = bytearray(data)
        changed[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        (tmp_path / name).write_bytes(bytes(changed))
        table, rejects = read_all(tmp_path, name, config)
        assert rejects or table["a"].to_pylist() == list(range(200))


def damaged(data: bytes, draw: random.Random) -> bytes:
    """Return a file that was cut, or lost bytes, or has other ones."""
    place = draw.randrange(len(data))
    kind = draw.choice(["cut", "lost", "changed", "changed", "changed"])
    if kind == "cut":
        return data[:place]
    size = draw.choice([1, 4, 40])
    if kind == "lost":
        return data[:place] + data[place + size :]
    other = bytes(b ^ draw.randrange(256) for b in data[place : place + size])
    return data[:place] + other + data[place + size :]


def no_row_is_lost(result: tuple[pa.Table, list[Reject]], num_rows: int) -> bool:
    """Tell whether all rows arrived or were rejected, or a reject says that rows are unknown."""
    table, rejects = result
    places = table[ORIGIN].to_pylist() + [r.position for r in rejects if not r.rows_unknown]
    assert len(set(places)) == len(places)
    return any(r.rows_unknown for r in rejects) or len(places) >= num_rows


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["null", "deflate"])
def test_damaged_avro_file_loses_no_row_in_silence(codec: str, tmp_path: Path) -> None:
    schema = {"type": "record", "name": "Row", "fields": [
        {"name": "a", "type": "long"}, {"name": "b", "type": ["null", "string"]}]}  # fmt: skip
    file = io.BytesIO()
    rows = [{"a": i, "b": None if i % 3 else f"n{i}"} for i in range(300)]
    fastavro.writer(file, schema, rows, codec=codec, sync_interval=300)
    data, draw = file.getvalue(), random.Random(codec)
    marker = data[-16:]
    ends = {i + 16 for i in range(len(data)) if data.startswith(marker, i)}
    config = SourceConfig(files="*", format="avro", columns={"a": "int64", "b": "string"})
    for _ in range(150):
        bad = damaged(data, draw)
        if len(bad) in ends and data.startswith(bad):
            continue  # nothing tells that more blocks would follow
        (tmp_path / "a.avro").write_bytes(bad)
        result = read_all(tmp_path, "a.avro", config, draw.choice([100, 1000, 1 << 20]))
        assert no_row_is_lost(result, 300), bad


@pytest.mark.slow
def test_damaged_parquet_file_loses_no_row_in_silence(tmp_path: Path) -> None:
    table = pa.table({"a": list(range(300)), "b": [f"n{i}" for i in range(300)]})
    pq.write_table(table, tmp_path / "good", row_group_size=50, write_page_checksum=True)
    data, draw = (tmp_path / "good").read_bytes(), random.Random(0)
    config = SourceConfig(files="*", format="parquet", columns={"a": "int64", "b": "string"})
    for _ in range(200):
        (tmp_path / "a.parquet").write_bytes(damaged(data, draw))
        assert no_row_is_lost(read_all(tmp_path, "a.parquet", config), 300)

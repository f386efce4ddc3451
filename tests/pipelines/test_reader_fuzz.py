"""Readers against files of random faults: every row is accepted or rejected, at its place."""

import random
from pathlib import Path

import pyarrow as pa
import pytest

from pipelines.sources import csv_records, csv_source, lines
from pipelines.sources.folder import folder_of
from pipelines.sources.read import empty_rows, parts_of_file, read_part
from pipelines.sources.rejects import Reject
from pipelines.sources.rows import ORIGIN, FilePart
from schemas.job_sources import SourceConfig
from tests.pipelines.csv_reference import Reference

NAMES = ["x", "y", "z"]


def read_all(directory: Path, name: str, config: SourceConfig) -> tuple[pa.Table, list[Reject]]:
    folder = folder_of(directory)
    schema = empty_rows(folder, "log", config, [name]).schema
    whole = FilePart("log", name, 0, num_bytes=(directory / name).stat().st_size)
    parts, rejects = parts_of_file(folder, whole, config)
    found = [rows for part in parts for rows in read_part(folder, part, config, schema)]
    tables = [rows.table for rows in found if rows.table is not None]
    assert all(table.schema == schema for table in tables)
    rejects += [reject for rows in found for reject in rows.rejects]
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


@pytest.mark.parametrize("quote", ['"', None, "'"])
@pytest.mark.parametrize(
    "limits", [(8 << 20, 16 << 20, 1 << 20), (5, 40, 12), (64, 64, 64), (1, 23, 17)]
)
def test_csv_rows_are_those_of_a_reader_that_takes_one_byte_at_a_time(
    quote: str | None, limits: tuple[int, int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    block, max_row, max_quoted = limits
    monkeypatch.setattr(csv_source, "_BLOCK_BYTES", block)
    monkeypatch.setattr(lines, "_READ_BYTES", max(1, block // 2))
    monkeypatch.setattr(lines, "MAX_ROW_BYTES", max_row)
    monkeypatch.setattr(csv_records, "MAX_QUOTED_BYTES", max_quoted)
    draw = random.Random(f"{quote} {limits}")
    mark = (quote or '"').encode()
    for _ in range(300 if block > 1 else 100):
        names = NAMES[: draw.choice([1, 2, 2, 3])]
        columns = dict.fromkeys(names, "string")
        config = SourceConfig(
            files="*", format="csv", columns=columns, header=False, quote=quote, null_values=()
        )
        pieces = list(CSV_PIECES)
        if draw.random() < 0.5:  # mostly good rows
            row = b",".join([b"a"] * len(names)) + b"\n"
            quoted = draw.choice([b'"b"', b'"b\n"', b'"b""\n\n,"'])
            pieces += 8 * [row] + 4 * [row.replace(b"a", quoted, 1)]
        data = b"".join(draw.choices(pieces, k=draw.randint(0, 40))).replace(b'"', mark)
        (tmp_path / "a.csv").write_bytes(data)
        reference = Reference(
            b",", quote.encode() if quote else None, len(names), max_row, max_quoted
        )
        expected = reference.rows(data)
        table, rejects = read_all(tmp_path, "a.csv", config)
        assert [r.position for r in rejects] == [i for i, r in enumerate(expected) if r is None], (
            data
        )
        accepted = [(i, *r) for i, r in enumerate(expected) if r is not None]
        found = [(r[ORIGIN], *(r[n].encode() for n in names)) for r in table.to_pylist()]
        assert found == accepted, data

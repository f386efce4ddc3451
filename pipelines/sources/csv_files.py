"""Read CSV and tab-separated files: records are found first, then parsed, then converted."""

from __future__ import annotations

import codecs
import csv
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import BinaryIO

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pc_csv

from pipelines.sources import lines
from pipelines.sources.csv_records import Dialect, Fault, Records, walk, well_formed
from pipelines.sources.lines import (
    SHOWN_BYTES,
    TextStream,
    last_line_end,
    long_line_reason,
    num_line_ends,
    num_lines,
    utf16_reason,
)
from pipelines.sources.listing import Folder, codec_of, decompressed
from pipelines.sources.rejects import Reject, file_reject, rest_of_file_reject, sort_key
from pipelines.sources.rows import FilePart, RawRows, arrow_type, with_origins
from schemas.config.sources import SourceConfig

# Texts of CSV fields as values of the declared types; one that has no value rejects its row.
#
# DuckDB's casts decide what a text means. Where Arrow's parser reads a whole column, it reads the
# same values several times faster; it knows fewer spellings, so DuckDB gets the columns it
# refuses.

_FRACTION = r"\.[0-9]*[1-9]|[eE]-"
"""Texts that DuckDB would round to an integer."""

_ZONE = r":[0-9.]+ *[A-Za-z+-]"
"""Times that name their zone, which a cast to TIMESTAMP would leave out."""

_DUCKDB_TYPES = {
    "int8": "TINYINT", "int16": "SMALLINT", "int32": "INTEGER", "int64": "BIGINT",
    "uint8": "UTINYINT", "uint16": "USMALLINT", "uint32": "UINTEGER", "uint64": "UBIGINT",
    "float32": "FLOAT", "float64": "DOUBLE", "bool": "BOOLEAN", "timestamp": "TIMESTAMP",
    "timestamp_us": "TIMESTAMP", "timestamp_ms": "TIMESTAMP_MS", "timestamp_s": "TIMESTAMP_S",
    "timestamp_ns": "TIMESTAMP_NS", "date": "DATE",
}  # fmt: skip

Bad = dict[int, tuple[str, str]]
"""Row of a table to why it is rejected, and the text that is the reason."""


def converted(table: pa.Table, config: SourceConfig) -> tuple[pa.Table, Bad]:
    """Return rows as the declared types without the bad ones, and what is wrong with these.

    Args:
        table: texts, a column for each declared one.
        config: the declared types, and which texts are null.
    """
    assert config.columns, "csv sources declare their columns"
    columns: dict[str, pa.ChunkedArray] = {}
    bad: Bad = {}
    for name, kind in config.columns.items():
        if kind in ("string", "binary"):
            nulls = [""] if "" in config.null_values else []
            columns[name] = _without(table[name], nulls).cast(arrow_type(kind))
            continue
        texts = _without(table[name], config.null_values)
        columns[name], rows = _values(texts, kind)
        for row, value in zip(
            rows, texts.take(pa.array(rows, pa.int64())).to_pylist(), strict=True
        ):
            bad.setdefault(row, (f"field {name!r} must be {kind}, got {value!r}", value))
    result = pa.table(columns)
    if bad:
        keep = np.ones(result.num_rows, bool)
        keep[list(bad)] = False
        result = result.filter(pa.array(keep))
    return result, dict(sorted(bad.items()))


def _without(column: pa.ChunkedArray, nulls: list[str] | tuple[str, ...]) -> pa.ChunkedArray:
    """Return texts with nulls in the place of those that mean it."""
    for text in nulls:
        is_null = pc.equal(column, text)
        if pc.any(is_null).as_py():
            column = pc.if_else(is_null, pa.scalar(None, pa.string()), column)
    return column


def _values(texts: pa.ChunkedArray, kind: str) -> tuple[pa.ChunkedArray, list[int]]:
    """Return texts as values, and the rows that have none."""
    wanted = arrow_type(kind)
    if _arrow_reads_alike(texts, wanted):
        try:
            return texts.cast(wanted), []
        except pa.ArrowInvalid:
            pass
    connection = duckdb.connect(config={"threads": 1})
    connection.execute("SET TimeZone = 'UTC'")
    connection.register("texts", pa.table({"x": texts}))
    fraction = f"regexp_matches(x, '{_FRACTION}')" if pa.types.is_integer(wanted) else "false"
    cast = _cast(kind, wanted)
    is_bad = f"x IS NOT NULL AND ({cast} IS NULL OR {fraction})"
    result = connection.sql(f"SELECT {cast} AS value, {is_bad} AS bad FROM texts").to_arrow_table()
    rows = np.flatnonzero(result["bad"].to_numpy())
    return result["value"], rows.tolist()


def _cast(kind: str, wanted: pa.DataType) -> str:
    """Return the SQL of a text `x` as a value, null where it has none; times with a zone in UTC."""
    plain = f"TRY_CAST(x AS {_DUCKDB_TYPES[kind]})"
    if not (pa.types.is_timestamp(wanted) or pa.types.is_date(wanted)):
        return plain
    zoned = "TRY_CAST(regexp_replace(x, ' +([+-])', '\\1') AS TIMESTAMPTZ)"
    in_utc = f"CAST({zoned} AT TIME ZONE 'UTC' AS {_DUCKDB_TYPES[kind]})"
    if wanted == pa.timestamp("ns"):  # TIMESTAMPTZ has microseconds
        offset = f"epoch_us(TRY_CAST(x AS TIMESTAMP)) - epoch_us({zoned})"
        in_utc = f"make_timestamp_ns(epoch_ns({plain}) - 1000 * ({offset}))"
    return f"CASE WHEN regexp_matches(x, '{_ZONE}') THEN {in_utc} ELSE {plain} END"


def _arrow_reads_alike(texts: pa.ChunkedArray, wanted: pa.DataType) -> bool:
    """Tell whether Arrow gives DuckDB's values to all texts that it accepts."""
    if pa.types.is_integer(wanted):  # it wraps 0xFF around to -1 in an int8
        return not pc.any(pc.match_substring(texts, "x", ignore_case=True)).as_py()
    if wanted == pa.timestamp("us"):  # it accepts an hour without minutes
        return not pc.any(pc.equal(pc.binary_length(texts), len("2026-01-01 00"))).as_py()
    return pa.types.is_floating(wanted)


# CSV and tab-separated files: records are found first, then parsed, then converted.
#
# `csv_records.py` decides where records end, pyarrow parses them as texts, a block at a time, and
# each block must give as many rows as it has records, so that the position of every row is known.
# A reader that converts while parsing could not say which row a bad field was in.

_BLOCK_BYTES = 8 << 20

InvalidRow = tuple[int, int, str]
"""Number of a row in its block, its fields, its text."""


@dataclass(frozen=True, slots=True)
class _Parsed:
    """What pyarrow made of records with the sentinel behind them."""

    table: pa.Table
    invalid: list[InvalidRow]

    @property
    def num_records(self) -> int:
        """Records without the sentinel; too few when an open quote swallowed it."""
        return self.table.num_rows + len(self.invalid) - 1

    @property
    def rows(self) -> pa.Table:
        """The rows with the right number of fields, without the sentinel."""
        return self.table.slice(0, self.table.num_rows - 1)


def read_csv(folder: Folder, part: FilePart, config: SourceConfig) -> Iterator[RawRows]:
    """Yield the rows of a file in chunks, and what had to be left out.

    Args:
        folder: input directory.
        part: the whole file.
        config: how it is read; `columns` is given.
    """
    with folder.open(part.path) as stored, closing(decompressed(stored, part.path)) as file:
        yield from _CsvFile(file, part, config).rows()


class _CsvFile:
    """One file while it is read: what is left of the last block, and where that stands."""

    def __init__(self, file: BinaryIO, part: FilePart, config: SourceConfig) -> None:
        assert config.columns, "csv sources declare their columns"
        size = part.num_bytes if codec_of(part.path) is None else None
        self._stream = TextStream(file, size)
        self._part = part
        self._config = config
        self._names = list(config.columns)
        self._dialect = Dialect(config.delimiter, config.quote, len(self._names))
        self._data = b""
        self._row = 0
        self._line = 1
        self._spanning = False

    def rows(self) -> Iterator[RawRows]:
        """Yield all rows."""
        self._fill()
        wrong = self._begin()
        if wrong is not None:
            yield self._rejected([wrong])
            return
        stream = self._stream
        while self._data or not stream.final:
            size = len(self._data)
            if last_line_end(self._data, stream.final):
                yield self._block()
            elif size >= lines.MAX_ROW_BYTES:
                yield self._rejected([self._skip_line()])
            if stream.problem and len(self._data) == size:
                yield self._rejected(
                    [rest_of_file_reject(self._part.path, self._row, stream.problem)]
                )
                return
            self._fill()

    def _rejected(self, rejects: list[Reject]) -> RawRows:
        return RawRows(None, tuple(rejects))

    def _fill(self) -> None:
        """Read one more block, but never more than a row may have."""
        self._data += self._stream.read(min(_BLOCK_BYTES, lines.MAX_ROW_BYTES - len(self._data)))

    def _begin(self) -> Reject | None:
        """Pass over a byte order mark and the header; return why the file cannot be read."""
        reason = utf16_reason(self._data)
        if reason:
            return file_reject(self._part.path, reason)
        self._data = self._data.removeprefix(codecs.BOM_UTF8)
        if not self._config.header or not self._data.strip(b"\r\n"):
            return None
        start = len(self._data) - len(self._data.lstrip(b"\r\n"))
        match = self._dialect.record.match(self._data, start)
        end = match.end() if match else last_line_end(self._data, self._stream.final)
        names = self._fields(self._data[start:end].strip(b"\r\n").decode(errors="replace"))
        header, wanted = ", ".join(n.strip() for n in names), ", ".join(self._names)
        if header != wanted:
            reason = f"header must be {wanted}, got {header[:1000]}; declare its columns in order"
            return file_reject(self._part.path, reason)
        self._use(end)
        return None

    def _use(self, num_bytes: int) -> None:
        self._line += num_line_ends(self._data, 0, num_bytes)
        self._data = self._data[num_bytes:]

    def _block(self) -> RawRows:
        """Return the whole records that have been read, and what is wrong among them."""
        records, parsed = self._parsed()
        rows = np.delete(np.arange(records.num_rows), [f.row for f in records.faults])
        kept = np.delete(rows, [row for row, _, _ in parsed.invalid])
        rejects = list(self._faults(records.faults))
        rejects += [self._wrong_fields(int(rows[row]), n, t) for row, n, t in parsed.invalid]
        table, bad = converted(parsed.rows, self._config)
        for index, (reason, value) in bad.items():
            rejects.append(Reject(self._part.path, self._row + int(kept[index]), reason, value))
        positions = np.delete(kept, list(bad)) + self._row
        self._row += records.num_rows
        self._use(records.num_bytes)
        rows = with_origins(table, self._part.file_index, positions.astype(np.int64))
        return RawRows(rows, tuple(sorted(rejects, key=sort_key)))

    def _parsed(self) -> tuple[Records, _Parsed]:
        """Return the records of the data and their fields, in the fastest way that is exact.

        A block where each line gives one row has no quote that reaches over a line's end.
        """
        data, final, dialect = self._data, self._stream.final, self._dialect
        end = last_line_end(data, final)
        text = data[:end]
        if _is_utf8(text):
            if not self._spanning or dialect.quote is None or dialect.quote not in text:
                records = Records()
                records.add(0, end, num_lines(data, 0, end))
                parsed = self._parse(text)
                if parsed.num_records == records.num_good:
                    return records, parsed
            records = well_formed(data, final, dialect)
            self._spanning = records is not None
            if records is not None and records.num_bytes:
                parsed = self._parse(data[: records.num_bytes])
                if not any("\n" in t or "\r" in t for _, _, t in parsed.invalid):
                    return records, self._checked(parsed, records)
        records = walk(data, final, len(data) >= lines.MAX_ROW_BYTES, dialect)
        good = b"".join(_ended(data[start:end]) for start, end in records.pieces)
        return records, self._checked(self._parse(good), records)

    def _checked(self, parsed: _Parsed, records: Records) -> _Parsed:
        assert parsed.num_records == records.num_good, (
            f"parser must give {records.num_good} rows, got {parsed.num_records} in "
            f"{self._part.path} from row {self._row}"
        )
        return parsed

    def _parse(self, text: bytes) -> _Parsed:
        """Return records as texts; one that is left open swallows the sentinel behind the last."""
        invalid: list[InvalidRow] = []

        def skip(row: pc_csv.InvalidRow) -> str:
            invalid.append(((row.number or 1) - 1, row.actual_columns, row.text or ""))
            return "skip"

        data = _ended(text) + self._dialect.sentinel
        table = pc_csv.read_csv(
            pa.BufferReader(data),
            read_options=pc_csv.ReadOptions(
                use_threads=False, block_size=len(data) + 1, column_names=self._names
            ),
            parse_options=pc_csv.ParseOptions(
                delimiter=self._config.delimiter,
                quote_char=self._config.quote or False,
                newlines_in_values=self._config.quote is not None,
                invalid_row_handler=skip,
            ),
            convert_options=pc_csv.ConvertOptions(
                column_types=dict.fromkeys(self._names, pa.string()),
                strings_can_be_null=False,
                check_utf8=False,  # it is, and half a pass is saved
            ),
        )
        return _Parsed(table, invalid)

    def _faults(self, faults: list[Fault]) -> Iterator[Reject]:
        """Yield the rejects of faults, which are in order, each with the number of its line."""
        line, counted = self._line, 0
        for fault in faults:
            line += num_line_ends(self._data, counted, fault.start)
            counted = fault.start
            text = self._data[fault.start : min(fault.end, fault.start + SHOWN_BYTES)]
            shown = f"line {line}: {text.decode(errors='backslashreplace').rstrip()}"
            reason = fault.reason or self._not_utf8(self._data[fault.start : fault.end])
            yield Reject(self._part.path, self._row + fault.row, reason, shown)

    def _not_utf8(self, text: bytes) -> str:
        fields = self._fields(text.strip(b"\r\n").decode(errors="surrogateescape"))
        if len(fields) != len(self._names):
            return f"line must have {len(self._names)} fields, got {len(fields)}"
        for name, value in zip(self._names, fields, strict=True):
            if any("\udc80" <= c <= "\udcff" for c in value):
                return f"field {name!r} must be UTF-8"
        return "line must be UTF-8"

    def _fields(self, text: str) -> list[str]:
        """Return the fields of a header or of a row that is explained."""
        quote = self._config.quote
        try:
            quoting = csv.QUOTE_NONE if quote is None else csv.QUOTE_MINIMAL
            lines = text.splitlines(keepends=True)
            delimiter = self._config.delimiter
            return next(csv.reader(lines, delimiter=delimiter, quotechar=quote, quoting=quoting))
        except (csv.Error, StopIteration):
            return text.split(self._config.delimiter)

    def _wrong_fields(self, row: int, count: int, text: str) -> Reject:
        reason = f"line must have {len(self._names)} fields, got {count}"
        return Reject(self._part.path, self._row + row, reason, text[:SHOWN_BYTES])

    def _skip_line(self) -> Reject:
        """Skip a line that is too long."""
        shown = self._data[:SHOWN_BYTES].decode(errors="backslashreplace")
        size, self._data = self._stream.skip_line(self._data)
        value = f"line {self._line}: {shown}"
        reject = Reject(self._part.path, self._row, long_line_reason(size), value)
        self._row += 1
        self._line += 1
        return reject


def _ended(text: bytes) -> bytes:
    return text if text.endswith((b"\n", b"\r")) or not text else text + b"\n"


def _is_utf8(text: bytes) -> bool:
    if text.isascii():
        return True
    try:
        codecs.utf_8_decode(text, "strict", True)
    except UnicodeDecodeError:
        return False
    return True

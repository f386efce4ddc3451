"""Read CSV and tab-separated files in blocks.

`text_records.py` finds the ends of records, pyarrow parses their fields as texts, and the texts are
converted to the declared types. Each block must yield as many rows as it has records, so that the
position of every row is known; a reader that converts while it parses does not report the rows of
bad fields.
"""

from __future__ import annotations

import codecs
import csv
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pc_csv

from presage.pipelines.sources import limits
from presage.pipelines.sources.raw_rows import Folder, InputSplit, RawRows, with_origins
from presage.pipelines.sources.rejects import Reject, file_reject, rest_of_file_reject, sort_key
from presage.pipelines.sources.text_records import (
    SHOWN_BYTES,
    Dialect,
    Fault,
    TextRecords,
    TextStream,
    decompressed,
    last_line_end,
    lines_not_utf8,
    long_line_reason,
    num_line_ends,
    num_lines,
    scan,
    scan_well_formed,
    utf16_reason,
)
from presage.pipelines.sources.types import arrow_type, sql_type
from presage.schemas.config.sources import SourceConfig
from presage.schemas.dataset.files import owned_buffer

# Reading.

_BLOCK_BYTES = 8 << 20

InvalidRow = tuple[int, int, str]
"""Index of a row in its block, its number of fields, its text."""


@dataclass(frozen=True, slots=True)
class _Parsed:
    """Result of pyarrow for records that are followed by a sentinel record."""

    table: pa.Table
    invalid: list[InvalidRow]

    @property
    def num_records(self) -> int:
        """Records without the sentinel; too few if an unclosed quote swallowed it."""
        return self.table.num_rows + len(self.invalid) - 1

    @property
    def rows(self) -> pa.Table:
        """The rows with the right number of fields, without the sentinel."""
        return self.table.slice(0, self.table.num_rows - 1)


def read_csv(
    folder: Folder, split: InputSplit, config: SourceConfig, _: pa.Schema
) -> Iterator[RawRows]:
    """Yield the rows of a file in chunks, with rejects."""
    with folder.open(split.path) as stored, closing(decompressed(stored)) as file:
        size = split.num_bytes if file is stored else None
        yield from _CsvReader(TextStream(file, size), split, config).rows()


class _CsvReader:
    """State while a file is read: data of an incomplete record, and its row and line."""

    def __init__(self, stream: TextStream, split: InputSplit, config: SourceConfig) -> None:
        assert config.columns, "csv sources declare their columns"
        self._stream = stream
        self._split = split
        self._config = config
        self._names = list(config.columns)
        self._dialect = Dialect(config, len(self._names))
        self._data = b""
        self._row = 0
        self._line = 1

    def rows(self) -> Iterator[RawRows]:
        self._fill()
        header_reject = self._skip_header()
        if header_reject is not None:
            yield RawRows(None, (header_reject,))
            return
        stream = self._stream
        while self._data or not stream.final:
            size, end = len(self._data), last_line_end(self._data, stream.final)
            if end and not self._data[:end].strip(b"\r\n"):
                self._consume(end)
            elif end:
                yield self._read_block()
                stream.found_rows()
            elif size >= limits.MAX_ROW_BYTES:
                yield RawRows(None, (self._skip_line(),))
            if stream.problem and len(self._data) == size:
                reject = rest_of_file_reject(self._split.path, self._row, stream.problem)
                yield RawRows(None, (reject,))
                return
            self._fill()

    def _fill(self) -> None:
        """Read one more block, up to the maximum size of a row."""
        self._data += self._stream.read(min(_BLOCK_BYTES, limits.MAX_ROW_BYTES - len(self._data)))

    def _skip_header(self) -> Reject | None:
        """Skip a byte order mark and the header; return a reject if they are wrong."""
        reason = utf16_reason(self._data)
        if reason:
            return file_reject(self._split.path, reason)
        self._data = self._data.removeprefix(codecs.BOM_UTF8)
        if not self._config.header:
            return None
        while not self._data.strip(b"\r\n"):
            self._consume(last_line_end(self._data, self._stream.final))
            if self._stream.final or self._stream.problem:
                return None
            self._fill()
        start = len(self._data) - len(self._data.lstrip(b"\r\n"))
        match = self._dialect.record.match(self._data, start)
        end = match.end() if match else last_line_end(self._data, self._stream.final)
        names = self._fields(self._data[start:end].strip(b"\r\n").decode(errors="replace"))
        header, expected = ", ".join(n.strip() for n in names), ", ".join(self._names)
        if header != expected:
            reason = f"header must be {expected}, got {header[:1000]}; declare its columns in order"
            return file_reject(self._split.path, reason)
        self._consume(end)
        return None

    def _consume(self, num_bytes: int) -> None:
        self._line += num_line_ends(self._data, 0, num_bytes)
        self._data = self._data[num_bytes:]

    def _read_block(self) -> RawRows:
        """Return the complete records of the data, with rejects."""
        records, parsed = self._parse_block()
        rows = np.delete(np.arange(records.num_rows), [f.row for f in records.faults])
        kept = np.delete(rows, [row for row, _, _ in parsed.invalid])
        rejects = list(self._fault_rejects(records.faults))
        rejects += [
            Reject(
                self._split.path,
                self._row + int(rows[row]),
                f"line must have {len(self._names)} fields, got {num_fields}",
                text[:SHOWN_BYTES],
            )
            for row, num_fields, text in parsed.invalid
        ]
        table, bad = convert(parsed.rows, self._config)
        for index, (reason, value) in bad.items():
            rejects.append(Reject(self._split.path, self._row + int(kept[index]), reason, value))
        positions = np.delete(kept, list(bad)) + self._row
        self._row += records.num_rows
        self._consume(records.num_bytes)
        rows = with_origins(table, self._split.file_index, positions.astype(np.int64))
        return RawRows(rows, tuple(sorted(rejects, key=sort_key)))

    def _parse_block(self) -> tuple[TextRecords, _Parsed]:
        """Return the records of the data and their fields, by the fastest method that is exact.

        If each line yields one row, no quoted field contains a line end.
        """
        data, final, dialect = self._data, self._stream.final, self._dialect
        end = last_line_end(data, final)
        text = data[:end]
        if not lines_not_utf8(text, final=True):
            if not dialect.has_quoted(text):
                records = TextRecords()
                records.add(0, end, num_lines(data, 0, end))
                return records, self._checked(self._parse(text), records)
            records = scan_well_formed(data, final, dialect)
            if records is not None and records.num_bytes:
                parsed = self._parse(data[: records.num_bytes])
                if not any("\n" in t or "\r" in t for _, _, t in parsed.invalid):
                    return records, self._checked(parsed, records)
        records = scan(data, final, len(data) >= limits.MAX_ROW_BYTES, dialect)
        good = b"".join(_with_line_end(data[start:end]) for start, end in records.good_ranges)
        return records, self._checked(self._parse(dialect.without_escapes(good)), records)

    def _checked(self, parsed: _Parsed, records: TextRecords) -> _Parsed:
        assert parsed.num_records == records.num_good, (
            f"parser must give {records.num_good} rows, got {parsed.num_records} in "
            f"{self._split.path} from row {self._row}"
        )
        return parsed

    def _parse(self, text: bytes) -> _Parsed:
        """Return the fields of records as texts; an unclosed quote swallows the sentinel."""
        invalid: list[InvalidRow] = []

        def skip(row: pc_csv.InvalidRow) -> str:
            invalid.append(((row.number or 1) - 1, row.actual_columns, row.text or ""))
            return "skip"

        data = _with_line_end(text) + self._dialect.sentinel
        table = pc_csv.read_csv(
            pa.BufferReader(owned_buffer(data)),
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
                check_utf8=False,  # checked before
            ),
        )
        return _Parsed(table, invalid)

    def _fault_rejects(self, faults: list[Fault]) -> Iterator[Reject]:
        """Yield the rejects of faults, each with its line number."""
        line, position = self._line, 0
        for fault in faults:
            line += num_line_ends(self._data, position, fault.start)
            position = fault.start
            text = self._data[fault.start : min(fault.end, fault.start + SHOWN_BYTES)]
            value = f"line {line}: {text.decode(errors='backslashreplace').rstrip()}"
            reason = fault.reason or self._not_utf8_reason(self._data[fault.start : fault.end])
            yield Reject(self._split.path, self._row + fault.row, reason, value)

    def _not_utf8_reason(self, text: bytes) -> str:
        fields = self._fields(text.strip(b"\r\n").decode(errors="surrogateescape"))
        if len(fields) != len(self._names):
            return f"line must have {len(self._names)} fields, got {len(fields)}"
        for name, value in zip(self._names, fields, strict=True):
            if any("\udc80" <= c <= "\udcff" for c in value):
                return f"field {name!r} must be UTF-8"
        return "line must be UTF-8"

    def _fields(self, text: str) -> list[str]:
        """Return the fields of a header or of a rejected row."""
        quote = self._config.quote
        try:
            quoting = csv.QUOTE_NONE if quote is None else csv.QUOTE_MINIMAL
            lines = text.splitlines(keepends=True)
            delimiter = self._config.delimiter
            return next(csv.reader(lines, delimiter=delimiter, quotechar=quote, quoting=quoting))
        except (csv.Error, StopIteration):
            return text.split(self._config.delimiter)

    def _skip_line(self) -> Reject:
        """Skip a line that is too long."""
        text = self._data[:SHOWN_BYTES].decode(errors="backslashreplace")
        size, self._data = self._stream.skip_line(self._data)
        value = f"line {self._line}: {text}"
        reject = Reject(self._split.path, self._row, long_line_reason(size), value)
        self._row += 1
        self._line += 1
        return reject


def _with_line_end(text: bytes) -> bytes:
    return text if text.endswith((b"\n", b"\r")) or not text else text + b"\n"


# Conversion of texts to the declared types. DuckDB's casts define the values. Arrow's parser gives
# the same values several times faster but accepts fewer spellings: DuckDB converts the columns that
# it refuses.

_FRACTION = r"\.[0-9]*[1-9]|[eE]-"
"""Texts that DuckDB would round to an integer."""
_ZONE = r":[0-9.]+ *[A-Za-z+-]"
"""Times with a time zone, which a cast to TIMESTAMP would ignore."""

BadValues = dict[int, tuple[str, str]]
"""Row of a table to the reason of its reject, and the text that cannot be converted."""


def convert(table: pa.Table, config: SourceConfig) -> tuple[pa.Table, BadValues]:
    """Return the rows that can be converted to the declared types, and the bad values of others."""
    assert config.columns, "csv sources declare their columns"
    columns: dict[str, pa.ChunkedArray] = {}
    bad: BadValues = {}
    for name, kind in config.columns.items():
        if kind in ("string", "binary"):
            nulls = [""] if "" in config.null_values else []
            columns[name] = _with_nulls(table[name], nulls).cast(arrow_type(kind))
            continue
        texts = _with_nulls(table[name], config.null_values)
        columns[name], rows = _convert_column(texts, arrow_type(kind))
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


def _with_nulls(column: pa.ChunkedArray, nulls: list[str] | tuple[str, ...]) -> pa.ChunkedArray:
    for text in nulls:
        is_null = pc.equal(column, text)
        if pc.any(is_null).as_py():
            column = pc.if_else(is_null, pa.scalar(None, pa.string()), column)
    return column


def _convert_column(
    texts: pa.ChunkedArray, target: pa.DataType
) -> tuple[pa.ChunkedArray, list[int]]:
    """Return the values of texts, and the rows that cannot be converted."""
    if _arrow_agrees(texts, target):
        try:
            return texts.cast(target), []
        except pa.ArrowInvalid:
            pass
    with duckdb.connect(config={"threads": 1}) as connection:
        connection.execute("SET TimeZone = 'UTC'")
        connection.register("texts", pa.table({"x": texts}))
        fraction = f"regexp_matches(x, '{_FRACTION}')" if pa.types.is_integer(target) else "false"
        cast = _cast_sql(target)
        is_bad = f"x IS NOT NULL AND ({cast} IS NULL OR {fraction})"
        result = connection.sql(
            f"SELECT {cast} AS value, {is_bad} AS bad FROM texts"
        ).to_arrow_table()
    rows = np.flatnonzero(result["bad"].to_numpy())
    return result["value"], rows.tolist()


def _cast_sql(target: pa.DataType) -> str:
    """Return the SQL that casts a text `x`, null if it cannot; times with a zone become UTC."""
    sql = sql_type(target)
    plain = f"TRY_CAST(x AS {sql})"
    if not (pa.types.is_timestamp(target) or pa.types.is_date(target)):
        return plain
    zoned = "TRY_CAST(regexp_replace(x, ' +([+-])', '\\1') AS TIMESTAMPTZ)"
    in_utc = f"CAST({zoned} AT TIME ZONE 'UTC' AS {sql})"
    if target == pa.timestamp("ns"):  # TIMESTAMPTZ has microseconds
        offset = f"epoch_us(TRY_CAST(x AS TIMESTAMP)) - epoch_us({zoned})"
        in_utc = f"make_timestamp_ns(epoch_ns({plain}) - 1000 * ({offset}))"
    return f"CASE WHEN regexp_matches(x, '{_ZONE}') THEN {in_utc} ELSE {plain} END"


def _arrow_agrees(texts: pa.ChunkedArray, target: pa.DataType) -> bool:
    """Return whether Arrow and DuckDB give equal values to all texts that Arrow accepts."""
    if pa.types.is_integer(target):  # Arrow reads 0xFF as -1 in an int8
        return not pc.any(pc.match_substring(texts, "x", ignore_case=True)).as_py()
    if target == pa.timestamp("us"):  # Arrow accepts an hour without minutes
        return not pc.any(pc.equal(pc.binary_length(texts), len("2026-01-01 00"))).as_py()
    return pa.types.is_floating(target)

"""CSV and tab-separated files: fields are read as bytes, then converted, row by row if need be.

A reader that converts while parsing stops at the first bad field and cannot
say which row it was in. Reading bytes first keeps all good rows and gives each
bad one its position.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from contextlib import closing

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pc_csv

from pipelines.sources.csv_bytes import END, MARK, ValidText, bytes_meant
from pipelines.sources.folder import Folder, decompressed, first_line, is_transient
from pipelines.sources.rejects import Reject
from schemas.job_sources import SourceConfig

_BLOCK_BYTES = 8 << 20

_FRACTION = r"\.[0-9]*[1-9]|[eE]-"
"""Texts that DuckDB would round to an integer."""

_DUCKDB_TYPES = {
    "int8": "TINYINT", "int16": "SMALLINT", "int32": "INTEGER", "int64": "BIGINT",
    "uint8": "UTINYINT", "uint16": "USMALLINT", "uint32": "UINTEGER", "uint64": "UBIGINT",
    "float32": "FLOAT", "float64": "DOUBLE", "bool": "BOOLEAN", "timestamp": "TIMESTAMP",
    "timestamp_us": "TIMESTAMP", "timestamp_ms": "TIMESTAMP_MS", "timestamp_s": "TIMESTAMP_S",
    "timestamp_ns": "TIMESTAMP_NS", "date": "DATE",
}  # fmt: skip


class _BadLines:
    """Collects lines with a wrong number of fields while the parser runs."""

    def __init__(self, path: str, header: bool) -> None:
        self.path = path
        self.first_line = 2 if header else 1
        self.positions: list[int] = []
        self.rejects: list[Reject] = []

    def __call__(self, row: pc_csv.InvalidRow) -> str:
        if END.decode() in (row.text or ""):
            return "skip"  # told as the open quote that it is
        position = (row.number or self.first_line) - self.first_line
        self.positions.append(position)
        reason = f"line must have {row.expected_columns} fields, got {row.actual_columns}"
        text = bytes_meant((row.text or "").encode()).decode(errors="backslashreplace")
        self.rejects.append(Reject(self.path, position, reason, text))
        return "skip"


def read_csv(
    folder: Folder, path: str, config: SourceConfig
) -> Iterator[tuple[pa.Table | None, list[Reject]]]:
    """Yield chunks of a file with a `_position` column, and the rows that had to be left out.

    Args:
        folder: input directory.
        path: the file, relative to it.
        config: how it is read; `columns` is given.
    """
    assert config.columns, "csv sources declare their columns"
    names = list(config.columns)
    bad = _BadLines(path, config.header)
    wrong = _wrong_header(folder, path, config)
    if wrong is not None:
        yield None, [wrong]
        return
    try:
        with folder.open(path) as stored, closing(decompressed(stored, path)) as file:
            reader = pc_csv.open_csv(
                pa.PythonFile(ValidText(file, config), mode="r"),
                read_options=pc_csv.ReadOptions(
                    use_threads=False,
                    block_size=_BLOCK_BYTES,
                    column_names=names,
                    skip_rows=1 if config.header else 0,
                ),
                parse_options=pc_csv.ParseOptions(
                    delimiter=config.delimiter,
                    quote_char=config.quote or False,
                    newlines_in_values=config.quote is not None,
                    invalid_row_handler=bad,
                ),
                convert_options=pc_csv.ConvertOptions(
                    column_types=dict.fromkeys(names, pa.binary()), strings_can_be_null=False
                ),
            )
            yield from _chunks(reader, bad, path, config)
    except FileNotFoundError:
        raise
    except (OSError, pa.ArrowException) as error:
        if is_transient(error):
            raise
        reason = f"file must be CSV, got {first_line(error)}"
        yield None, [Reject(path, None, reason)]


def _wrong_header(folder: Folder, path: str, config: SourceConfig) -> Reject | None:
    """Return why the first line does not name the declared columns, None when it does."""
    assert config.columns, "csv sources declare their columns"
    if not config.header:
        return None
    quoting = csv.QUOTE_NONE if config.quote is None else csv.QUOTE_MINIMAL
    try:
        with folder.open(path) as stored, closing(decompressed(stored, path)) as file:
            text = io.TextIOWrapper(file, encoding="utf-8-sig", errors="replace", newline="")
            lines = csv.reader(
                text, delimiter=config.delimiter, quotechar=config.quote, quoting=quoting
            )
            found = ", ".join(name.strip() for name in next(lines, config.columns))
    except FileNotFoundError:
        raise
    except (OSError, pa.ArrowException, csv.Error) as error:
        if is_transient(error):
            raise
        return Reject(path, None, f"file must be CSV, got {first_line(error)}")
    wanted = ", ".join(config.columns)
    if found == wanted:
        return None
    return Reject(path, None, f"header must be {wanted}, got {found}; declare its columns in order")


def _chunks(
    reader: pc_csv.CSVStreamingReader, bad: _BadLines, path: str, config: SourceConfig
) -> Iterator[tuple[pa.Table | None, list[Reject]]]:
    next_position = 0
    ended = False
    for batch in reader:
        positions = _positions(batch.num_rows, next_position, bad.positions)
        table = pa.Table.from_batches([batch]).append_column("_position", pa.array(positions))
        last = [column[-1].as_py() for column in batch.columns] if batch.num_rows else []
        if any(END in value for value in last):
            ended = last[0] == END
            table, positions = table.slice(0, table.num_rows - 1), positions[:-1]
        next_position = int(positions[-1]) + 1 if len(positions) else next_position
        converted, rejects = _convert(table, path, config)
        rejects.extend(bad.rejects)
        bad.rejects.clear()
        yield converted, rejects
    if bad.rejects:
        yield None, list(bad.rejects)
    if not ended:
        next_position += sum(p >= next_position for p in bad.positions)
        reason = f"quote {config.quote!r} must be closed, got none to the end of the file"
        yield None, [Reject(path, next_position, reason)]


def _positions(count: int, first: int, skipped: list[int]) -> np.ndarray:
    """Return the positions of `count` rows from `first` on, with the skipped ones left out."""
    gaps = np.array(sorted(p for p in skipped if p >= first), np.int64)
    candidates = np.arange(first, first + count + len(gaps), dtype=np.int64)
    return candidates[~np.isin(candidates, gaps)][:count]


def _convert(table: pa.Table, path: str, config: SourceConfig) -> tuple[pa.Table, list[Reject]]:
    assert config.columns, "csv sources declare their columns"
    rejects: list[Reject] = []
    table, not_text = _as_text(table, path)
    rejects.extend(not_text)
    connection = duckdb.connect(config={"threads": 1})
    connection.register("rows", table)
    for name, kind in config.columns.items():
        if kind not in ("string", "binary"):
            rejects.extend(_bad_fields(connection, table, path, name, kind, config))
    bad = pa.array(sorted({r.position for r in rejects if r.position is not None}), pa.int64())
    connection.register("bad", pa.table({"position": bad}))
    selected = ", ".join(_expression(n, k, config) for n, k in config.columns.items())
    result = connection.sql(
        f"SELECT {selected}, _position FROM rows WHERE _position NOT IN (SELECT position FROM bad)"
    ).to_arrow_table()
    return result, rejects


def _as_text(table: pa.Table, path: str) -> tuple[pa.Table, list[Reject]]:
    names = [n for n in table.column_names if n != "_position"]
    rejects: list[Reject] = []
    for name in names:
        marked = pc.match_substring(table[name], MARK).to_numpy(zero_copy_only=False)
        for row in np.flatnonzero(marked).tolist():
            position, found = table["_position"][row].as_py(), table[name][row].as_py()
            reason = f"field {name!r} must be UTF-8"
            rejects.append(Reject(path, position, reason, repr(bytes_meant(found))))
    if rejects:
        bad = pa.array([r.position for r in rejects], pa.int64())
        table = table.filter(pc.invert(pc.is_in(table["_position"], value_set=bad)))
    return _cast_text(table, names), rejects


def _cast_text(table: pa.Table, names: list[str]) -> pa.Table:
    columns = {n: table[n].cast(pa.string()) for n in names}
    return pa.table({**columns, "_position": table["_position"]})


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _field(name: str, config: SourceConfig) -> str:
    nulls = ", ".join(_literal(t) for t in config.null_values) or "NULL"
    return f"(CASE WHEN {_quoted(name)} IN ({nulls}) THEN NULL ELSE {_quoted(name)} END)"


def _expression(name: str, kind: str, config: SourceConfig) -> str:
    if kind in ("string", "binary"):
        empty = f"NULLIF({_quoted(name)}, '')" if "" in config.null_values else _quoted(name)
        return f"{empty} AS {_quoted(name)}"
    return f"TRY_CAST({_field(name, config)} AS {_DUCKDB_TYPES[kind]}) AS {_quoted(name)}"


def _bad_fields(
    connection: duckdb.DuckDBPyConnection,
    table: pa.Table,
    path: str,
    name: str,
    kind: str,
    config: SourceConfig,
) -> list[Reject]:
    field = _field(name, config)
    wrong = f"TRY_CAST({field} AS {_DUCKDB_TYPES[kind]}) IS NULL"
    if kind.startswith(("int", "uint")):
        wrong = f"({wrong} OR regexp_matches({field}, {_literal(_FRACTION)}))"
    rows = connection.execute(
        f"SELECT _position, {_quoted(name)} FROM rows WHERE {field} IS NOT NULL AND {wrong}"
    ).fetchall()
    return [
        Reject(path, position, f"field {name!r} must be {kind}, got {value!r}", str(value))
        for position, value in rows
    ]

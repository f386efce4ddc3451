"""What the first rows of a log cannot tell, asked of whole files by DuckDB, within a bound."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.init.files import Kind
from pipelines.samples.connection import quoted_name
from pipelines.sources.avro_source import cut_avro
from pipelines.sources.folder import Folder, codec_of, decompressed, folder_of
from pipelines.sources.read import empty_rows, read_part
from pipelines.sources.rejects import Reject
from pipelines.sources.rows import FilePart
from schemas.columns import one_chunk

MAX_BYTES = 2 << 30
"""Bytes of files of one kind that are read for one figure at most."""
_WINDOWS = 100
"""Places in the files of a kind at which rows are looked at to choose the split."""
_WINDOW_BYTES = 32 << 10
_COMPRESSION = 8
"""About how many times compressed texts are smaller."""
_TYPES = {"int64": "BIGINT", "float64": "DOUBLE", "timestamp": "TIMESTAMP", "uint64": "UBIGINT"}


def _query(folder: Folder, kind: Kind, expr: str) -> list[tuple[object, ...]]:
    """Return what an expression over all rows gives; nothing when they are not to be asked."""
    if not folder.is_local or kind.config.format == "avro" or kind.num_bytes > MAX_BYTES:
        return []
    config, paths = kind.config, [str(Path(folder.root, file.path)) for file in kind.files]
    types = {k: _TYPES.get(v, "VARCHAR") for k, v in (config.columns or {}).items()}
    columns = "{" + ", ".join(f"{_text(k)}: {_text(v)}" for k, v in types.items()) + "}"
    if config.format == "parquet":
        source = f"read_parquet({paths}, union_by_name = true)"
    elif config.format == "jsonl":
        options = "format = 'newline_delimited', ignore_errors = true"
        source = f"read_json({paths}, {options}, columns = {columns})"
    else:
        quote = _text(config.quote or "")
        source = (
            f"read_csv({paths}, auto_detect = false, delim = {_text(config.delimiter)}, "
            f"quote = {quote}, escape = {quote}, header = {config.header}, columns = {columns}, "
            "ignore_errors = true, null_padding = true)"
        )
    try:
        return duckdb.connect().sql(f"SELECT {expr} FROM {source} AS {kind.name}").fetchall()
    except duckdb.Error:
        return []


def _text(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"


def is_unique(folder: Folder, kind: Kind, column: str) -> bool:
    """Tell whether no value of a column stands in two rows, as far as can be asked."""
    values = one_chunk(kind.rows[column]).drop_null()
    if len(pc.unique(values)) < len(values):
        return False
    if kind.is_whole:
        return True
    name = quoted_name(column)
    found = _query(folder, kind, f"count({name}), count(DISTINCT {name})")
    return not found or found[0][0] == found[0][1]


def evaluation_from(
    folder: Folder, kind: Kind, expr: str, scratch: Path, say: Callable[[str], None]
) -> datetime | None:
    """Return a time that leaves about a tenth of the rows behind it; None when it is not known.

    Rows are looked at in windows all over the files, so that a part that is not like the rest
    counts for as much as it is.

    Args:
        folder: input directory.
        kind: files that samples are made of.
        expr: SQL of the time.
        scratch: a directory for copies of the windows.
        say: told of files that cannot be read to their end.
    """
    figures = f"quantile_disc(TRY({expr}), 0.9), min(TRY({expr})), max(TRY({expr}))"
    if kind.config.format == "parquet" and not kind.is_whole:
        found = _query(folder, kind, figures)
    else:
        rows = kind.rows if kind.is_whole else _rows_all_over(folder, kind, scratch, say)
        connection = duckdb.connect()
        connection.register(kind.name, rows)
        try:
            found = connection.sql(f"SELECT {figures} FROM {quoted_name(kind.name)}").fetchall()
        except duckdb.Error:  # of a list's entries, which only the job takes apart
            found = []
    if not found or found[0][0] is None:
        return None
    return _rounded(*(_moment(value) for value in found[0]))


def _rows_all_over(
    folder: Folder, kind: Kind, scratch: Path, say: Callable[[str], None]
) -> pa.Table:
    """Return rows from windows at equal distances in all files of a kind."""
    config = replace(kind.config, header=False) if kind.config.format == "csv" else kind.config
    tables: list[pa.Table] = []
    step = kind.num_bytes // _WINDOWS + 1
    for file in kind.files[:: len(kind.files) // _WINDOWS + 1]:
        place, rejects = (folder if config.format == "avro" else folder_of(scratch)), list[Reject]()
        if config.format == "avro":
            parts, rejects = cut_avro(folder, FilePart(kind.name, file.path, 0), step)
        else:
            parts = _windows(folder, file.path, kind, scratch, step)
        for part in parts:
            schema = empty_rows(place, kind.name, config, [part.path]).schema
            for rows in read_part(place, part, config, schema):
                rejects.extend(rows.rejects)
                if rows.table is not None:
                    tables.append(rows.table)
                    break
        for lost in (reject for reject in rejects if reject.rows_unknown):
            say(f"WARNING: {lost.file}: {lost.reason}; a build would end there")
    return pa.concat_tables(tables, promote_options="permissive") if tables else kind.rows


def _windows(folder: Folder, path: str, kind: Kind, scratch: Path, step: int) -> Iterator[FilePart]:
    """Copy whole lines from places of a text at equal distances, each to a file of its own."""
    is_plain = codec_of(path) is None
    step = max(step, _WINDOW_BYTES) * (1 if is_plain else _COMPRESSION)
    with folder.open(path) as stored, closing(decompressed(stored, path)) as file:
        for number in range(_WINDOWS * _COMPRESSION):
            if is_plain:
                file.seek(number * step)
            block = file.read(_WINDOW_BYTES)
            begins_with_row = not number and not (
                kind.config.format == "csv" and kind.config.header
            )
            start = 0 if begins_with_row else block.find(b"\n") + 1
            lines = block[start : block.rfind(b"\n") + 1]
            copy = Path(scratch, path).with_name(f"window-{number}")
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(lines)
            if lines:
                yield FilePart(kind.name, str(copy.relative_to(scratch)), 0)
            if len(block) < _WINDOW_BYTES:
                return
            if not is_plain:
                file.read(step - _WINDOW_BYTES)


def _moment(value: object) -> datetime:
    if isinstance(value, datetime):
        return value.replace(tzinfo=None)
    return datetime.fromisoformat(str(value))  # a date


def _rounded(middle: datetime, low: datetime, high: datetime) -> datetime | None:
    """Return a round time near the middle that has samples before and behind it."""
    steps: Sequence[timedelta] = (timedelta(days=1), timedelta(hours=1), timedelta(minutes=1))
    begin = datetime(1970, 1, 1)
    for step in steps:
        found = begin + (middle - begin) // step * step
        if high - low >= 20 * step and low < found <= high:
            return found
    return middle if low < middle <= high else None

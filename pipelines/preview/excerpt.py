"""The first rows of each source of a log, copied to a folder that a build can read.

A copy has the name, the format and the compression of its file, so that the readers of builds
read it and say of a row what they would say of it in its file: positions are the same. How much
is read follows from the rows that are asked for, not from the size of the log.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import fastavro
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.sources.folder import Folder, codec_of, decompressed, is_transient
from pipelines.sources.listing import FoundFile
from schemas.job_sources import SourceConfig
from schemas.manifest import InputFile

MAX_FILES = 32
"""Files of a source that are begun at most."""
MAX_BYTES = 8 << 20
"""Bytes of text, decompressed, that are read of a file at most."""
_BLOCK_BYTES = 256 << 10
_BATCH_ROWS = 1000
_TRIES = 1000
"""Ends of lines that are tried for one outside quotes."""


@dataclass(frozen=True, slots=True)
class Excerpt:
    """What was copied of one source.

    Attributes:
        files: all of its files.
        listing: the copies, as a listing of the folder they are in.
        is_whole: whether nothing was left out.
    """

    files: tuple[FoundFile, ...]
    listing: tuple[InputFile, ...]
    is_whole: bool

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all files."""
        return sum(file.num_bytes for file in self.files)


def excerpts(
    folder: Folder,
    sources: Mapping[str, SourceConfig],
    files: Mapping[str, Iterable[FoundFile]],
    rows: Mapping[str, int],
    target: Path,
) -> dict[str, Excerpt]:
    """Copy the first rows of each source.

    Args:
        folder: input directory.
        sources: sources and side tables.
        files: of each, in order.
        rows: of each, how many.
        target: directory to write to.
    """
    found: dict[str, Excerpt] = {}
    for name, config in sources.items():
        left, listing, whole = rows[name], list[InputFile](), True
        every = tuple(files[name])
        for file in every[:MAX_FILES]:
            if left <= 0:
                break
            copy = target / file.path
            copy.parent.mkdir(parents=True, exist_ok=True)
            copied, all_of_it = _copy(folder, file.path, config, copy, left)
            left, whole = left - copied, whole and all_of_it
            size = copy.stat().st_size
            listing.append(InputFile(source=name, path=file.path, num_bytes=size, sha256=""))
        found[name] = Excerpt(every, tuple(listing), whole and len(listing) == len(every))
    return found


def _copy(
    folder: Folder, path: str, config: SourceConfig, copy: Path, rows: int
) -> tuple[int, bool]:
    """Copy the first rows of a file; return about how many, and whether that is all."""
    try:
        if config.format == "parquet":
            return _copy_parquet(folder, path, copy, rows)
        if config.format == "avro":
            return _copy_avro(folder, path, copy, rows)
        return _copy_text(folder, path, config, copy, rows)
    except Exception as error:  # fastavro's parser has no error of its own
        if is_transient(error) or isinstance(error, FileNotFoundError):
            raise
        return _copy_bytes(folder, path, copy)  # what is wrong with it, its reader will say


def _copy_bytes(folder: Folder, path: str, copy: Path) -> tuple[int, bool]:
    with folder.open(path) as file:
        content = file.read(MAX_BYTES)
        whole = not file.read(1)
    copy.write_bytes(content)
    return 0, whole


def _copy_parquet(folder: Folder, path: str, copy: Path, rows: int) -> tuple[int, bool]:
    with folder.arrow_file(path) as source:
        file = pq.ParquetFile(source)
        batches: list[pa.RecordBatch] = []
        copied = 0
        for batch in file.iter_batches(min(rows, _BATCH_ROWS), use_threads=False):
            batches.append(batch.slice(0, rows - copied))
            copied += batches[-1].num_rows
            if copied >= rows:
                break
        schema = file.schema_arrow
        pq.write_table(pa.Table.from_batches(batches, schema), copy, compression="none")
        return copied, copied == file.metadata.num_rows


def _copy_avro(folder: Folder, path: str, copy: Path, rows: int) -> tuple[int, bool]:
    with folder.open(path) as file:
        copied, end, whole = 0, 0, True
        for block in fastavro.block_reader(file):
            if copied >= rows:
                whole = False
                break
            copied, end = copied + block.num_records, block.offset + block.size
        file.seek(0)
        copy.write_bytes(file.read(end) if end else file.read(MAX_BYTES))
    return copied, whole


def _copy_text(
    folder: Folder, path: str, config: SourceConfig, copy: Path, rows: int
) -> tuple[int, bool]:
    lines = rows + (config.format == "csv" and config.header)
    text, blocks, found, whole = b"", list[bytes](), 0, False
    with folder.open(path) as stored:
        file = decompressed(stored, path)
        while found <= lines and sum(map(len, blocks)) < MAX_BYTES:
            block = file.read(_BLOCK_BYTES)
            if not block:
                whole = True
                break
            blocks.append(block)
            found += block.count(b"\n")
    text = b"".join(blocks)
    if not whole:
        quote = config.quote if config.format == "csv" else None
        text = text[: _end_of_lines(text, lines, quote)]
    copy.write_bytes(_compressed(text, path))
    return max(0, min(found, lines) - (lines - rows)), whole


def _end_of_lines(text: bytes, lines: int, quote: str | None) -> int:
    r"""Return where the first lines of a text end: at the last end of a line outside quotes.

    Example:
        >>> [_end_of_lines(b'a\n"b\nc"\nd\n', lines, '"') for lines in (2, 3)]
        [2, 8]
    """
    content = np.frombuffer(text, np.uint8)
    ends = np.flatnonzero(content == ord("\n"))[:lines]
    if not len(ends):
        return len(text)
    if quote is not None and quote.isascii():
        inside = np.cumsum(content == ord(quote))[ends[-_TRIES:]] % 2
        outside = ends[-_TRIES:][inside == 0]
        ends = outside if len(outside) else ends
    return int(ends[-1]) + 1


def _compressed(text: bytes, path: str) -> bytes:
    codec = codec_of(path)
    if codec is None:
        return text
    if codec == "gzip":
        return gzip.compress(text, 1, mtime=0)
    return pa.Codec(codec).compress(text, asbytes=True)

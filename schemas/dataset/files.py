"""Files that are replaced atomically, and data files with checksums, verified when read.

A Parquet file is divided into regions, one per row group and one for the footer. Each region has a
checksum, which is verified before anything in the region is used.
"""

from __future__ import annotations

import errno
import hashlib
import os
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from presage.schemas.errors import SchemaError
from presage.schemas.layout import FILES_SCHEMA
from presage.schemas.paths import is_below
from presage.schemas.storage.location import Location


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One row of `files.parquet`.

    Attributes:
        path: relative to the directory of `files.parquet`.
        num_bytes: size of the file.
        sha256: of the whole file, hex.
        region_offsets: (regions + 1,) bytes, from 0 to num_bytes; the first region includes the
            magic bytes at the start of the file.
        region_crc32: (regions,).
    """

    path: str
    num_bytes: int
    sha256: str
    region_offsets: tuple[int, ...]
    region_crc32: tuple[int, ...]


def replace_bytes(path: Path | Location, data: bytes) -> None:
    """Replace a file atomically and durably: readers see the old bytes or the new ones."""
    Location.parse(path).write_bytes(data)


def encode_parquet(table: pa.Table, **options: Any) -> bytes:
    """Return a small table as the bytes of a Parquet file; options are those of `write_table`."""
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", write_page_checksum=True, **options)
    return sink.getvalue().to_pybytes()


def decode_parquet(data: bytes) -> pa.Table:
    """Return the table of a small Parquet file."""
    return parquet_file(pa.BufferReader(data)).read(use_threads=False)


def parquet_file(source: Any, **options: Any) -> pq.ParquetFile:
    """Open a Parquet file that is read by the calling thread alone.

    A thread of Arrow that reads ahead may be the last to release a buffer of Python, and aborts
    the process if that ends meanwhile. So does `pq.read_table`.
    """
    return pq.ParquetFile(source, pre_buffer=False, **options)


def owned_buffer(data: bytes) -> pa.Buffer:
    """Return a copy that Arrow's threads can release, for its readers of texts, which have some."""
    buffer = pa.allocate_buffer(len(data))
    memoryview(buffer).cast("B")[:] = data
    return buffer


def sync_file(path: Path) -> None:
    """Flush a finished file to disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def describe_file(file: Location | Path, path: str) -> FileEntry:
    """Flush a finished file to disk and return its entry.

    Args:
        file: may have a temporary name.
        path: its later path, relative to the directory of `files.parquet`.
    """
    data = _whole_file(Location.parse(file))
    offsets = _region_offsets(data) if path.endswith(".parquet") else (0, data.size)
    crcs = tuple(zlib.crc32(data[a:b]) for a, b in pairwise(offsets))
    return FileEntry(path, data.size, hashlib.sha256(data).hexdigest(), offsets, crcs)


def _whole_file(location: Location) -> pa.Buffer:
    """Return a finished file, mapped and flushed to disk if it is local."""
    if location.local is None:
        return pa.py_buffer(location.read_bytes())
    sync_file(location.local)
    with pa.memory_map(location.url) as source:
        return source.read_buffer()


def _region_offsets(data: pa.Buffer) -> tuple[int, ...]:
    metadata = pq.read_metadata(pa.BufferReader(data))
    ends: list[int] = []
    for group in range(metadata.num_row_groups):
        chunks = [metadata.row_group(group).column(c) for c in range(metadata.num_columns)]
        ends.append(max(chunk_range(chunk)[1] for chunk in chunks))
    return (0, *ends, data.size)


def write_files(path: Location | Path, entries: Iterable[FileEntry]) -> str:
    """Write `files.parquet`, sorted by path; return its sha256."""
    ordered = sorted(entries, key=lambda e: e.path)
    columns = {name: [getattr(e, name) for e in ordered] for name in FILES_SCHEMA.names}
    table = pa.table(
        {k: [list(x) if isinstance(x, tuple) else x for x in v] for k, v in columns.items()},
        FILES_SCHEMA,
    )
    data = encode_parquet(table, use_dictionary=False, write_statistics=False)  # all are distinct
    Location.parse(path).write_bytes(data)
    return hashlib.sha256(data).hexdigest()


def parse_files(data: bytes, path: Location | Path) -> dict[str, FileEntry]:
    """Return the entries of `files.parquet` by path, from its verified content.

    Raises:
        SchemaError: a path leads out of the directory.
    """
    rows = decode_parquet(data).to_pylist()
    for row in rows:
        if not is_below(row["path"]):
            raise SchemaError(
                f"path leads out of the folder: {row['path']!r}; rebuild the dataset",
                file=str(path),
            )
    return {
        row["path"]: FileEntry(
            row["path"],
            row["num_bytes"],
            row["sha256"],
            tuple(row["region_offsets"]),
            tuple(row["region_crc32"]),
        )
        for row in rows
    }


def chunk_range(chunk: pq.ColumnChunkMetaData) -> tuple[int, int]:
    """Return the first byte of a column chunk, and the one after its last."""
    # A file begins with four bytes of magic: 0 is no offset, but what writers give for a page that
    # is absent (the dictionary of plain values, the data of no rows).
    pages = chunk.dictionary_page_offset, chunk.data_page_offset
    start = min((offset for offset in pages if offset), default=0)
    return start, start + chunk.total_compressed_size


def find_damaged_files(root: Location | Path, entries: Mapping[str, FileEntry]) -> list[str]:
    """Return one line per file that is missing, truncated or changed."""
    root = Location.parse(root)
    sizes = {entry.path: entry.num_bytes for entry in root.entries()}
    problems: list[str] = []
    for entry in entries.values():
        num_bytes = sizes.get(entry.path)
        if num_bytes is None:
            problems.append(f"{entry.path}: missing")
        elif num_bytes != entry.num_bytes:
            problems.append(f"{entry.path}: {num_bytes} bytes instead of {entry.num_bytes}")
        elif sha256_of(root / entry.path, num_bytes) != entry.sha256:
            problems.append(f"{entry.path}: content has changed")
    return problems


def read_verified(path: Location | Path, sha256: str) -> bytes:
    """Read a file and compare it with its hash.

    Raises:
        SchemaError: the file is missing or has changed.
    """
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise SchemaError(
            "file is missing; restore it or rebuild the dataset", file=str(path)
        ) from error
    digest = hashlib.sha256(data).hexdigest()
    if digest != sha256:
        raise SchemaError(
            f"file must have sha256 {sha256[:12]}, got {digest[:12]}; "
            "restore it or rebuild the dataset",
            file=str(path),
        )
    return data


def sha256_of(path: Location | Path, num_bytes: int | None = None) -> str:
    """Return the sha256 of a file, hex; raise FileNotFoundError if it does not exist.

    Without its size, that is requested first.
    """
    location = Location.parse(path)
    if location.local is not None:
        with location.local.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    digest, num_bytes = hashlib.sha256(), num_bytes or location.num_bytes()
    if num_bytes is None:
        raise FileNotFoundError(errno.ENOENT, "no such object", str(location))
    for data in location.chunks(num_bytes):
        digest.update(data)
    return digest.hexdigest()

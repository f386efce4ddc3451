"""Files that are replaced atomically, and data files with checksums, verified when read.

A Parquet file is divided into regions, one per row group and one for the footer. Each region has a
checksum, which is verified before anything in the region is used.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from schemas.arrays import Array, Jagged, offsets_of
from schemas.errors import SchemaError
from schemas.layout import FILES_SCHEMA
from schemas.paths import is_below


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


def replace_bytes(path: Path, data: bytes) -> None:
    """Replace a file atomically: readers see the old bytes or the new ones."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    with partial.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def sync_directory(directory: Path) -> None:
    """Flush the names in a folder to disk, such as renamed files."""
    file = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def encode_parquet(table: pa.Table) -> bytes:
    """Return a small table as the bytes of a Parquet file."""
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", write_page_checksum=True)
    return sink.getvalue().to_pybytes()


def sync_file(path: Path) -> None:
    """Flush a finished file to disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def describe_file(root: Path, path: str) -> FileEntry:
    """Flush a finished file to disk and return its entry; `path` is relative to `root`."""
    sync_file(root / path)
    with pa.memory_map(str(root / path)) as source:
        data = source.read_buffer()
    offsets = _region_offsets(data) if path.endswith(".parquet") else (0, data.size)
    crcs = tuple(zlib.crc32(data[a:b]) for a, b in pairwise(offsets))
    return FileEntry(path, data.size, hashlib.sha256(data).hexdigest(), offsets, crcs)


def _region_offsets(data: pa.Buffer) -> tuple[int, ...]:
    metadata = pq.ParquetFile(pa.BufferReader(data)).metadata
    ends: list[int] = []
    for group in range(metadata.num_row_groups):
        chunks = [metadata.row_group(group).column(c) for c in range(metadata.num_columns)]
        starts = [
            c.dictionary_page_offset if c.dictionary_page_offset is not None else c.data_page_offset
            for c in chunks
        ]
        ends.append(max(s + c.total_compressed_size for s, c in zip(starts, chunks, strict=True)))
    return (0, *ends, data.size)


def write_files(path: Path, entries: Iterable[FileEntry]) -> None:
    """Write `files.parquet`, sorted by path."""
    ordered = sorted(entries, key=lambda e: e.path)
    columns = {name: [getattr(e, name) for e in ordered] for name in FILES_SCHEMA.names}
    table = pa.table(
        {k: [list(x) if isinstance(x, tuple) else x for x in v] for k, v in columns.items()},
        FILES_SCHEMA,
    )
    pq.write_table(
        table,
        path,
        compression="zstd",
        use_dictionary=False,  # all values are distinct
        write_statistics=False,
        write_page_checksum=True,
    )
    sync_file(path)


def read_files(path: Path) -> dict[str, FileEntry]:
    """Return the entries of `files.parquet` by path; the caller must have verified the file."""
    rows = pq.read_table(path, memory_map=True).to_pylist()
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


class CheckedFile:
    """One Parquet file, opened at its first read; each region is verified before its first use.

    Not thread-safe.
    """

    def __init__(self, root: Path, entry: FileEntry, texts_as_codes: bool = False) -> None:
        """Store the arguments; nothing is opened yet.

        Args:
            root: directory that the entry's path is relative to.
            entry: the file.
            texts_as_codes: read texts as Arrow dictionaries if their encoding allows it, so that
                a reader hashes each distinct text once.
        """
        self._root = root
        self._texts_as_codes = texts_as_codes
        self._path = root / entry.path
        self._entry = entry
        self._data: pa.Buffer | None = None
        self._parquet: pq.ParquetFile | None = None
        self._verified: set[int] = set()

    def __reduce__(self) -> tuple[type[CheckedFile], tuple[Path, FileEntry, bool]]:
        """Pickle the path and entry: each process opens and verifies the file itself."""
        return CheckedFile, (self._root, self._entry, self._texts_as_codes)

    def _open(self) -> pq.ParquetFile:
        if self._parquet is None:
            self._data = self._map()
            footer = len(self._entry.region_crc32) - 1
            self._verify(footer)
            self._parquet = pq.ParquetFile(pa.BufferReader(self._data))
            if self._texts_as_codes and (paths := _dictionary_paths(self._parquet.metadata)):
                self._parquet = pq.ParquetFile(
                    pa.BufferReader(self._data),
                    metadata=self._parquet.metadata,
                    read_dictionary=paths,
                )
        return self._parquet

    def _map(self) -> pa.Buffer:
        try:
            with pa.memory_map(str(self._path)) as source:
                data = source.read_buffer()
        except OSError as error:
            raise SchemaError(
                "file is missing; restore it or rebuild the dataset", file=str(self._path)
            ) from error
        if data.size != self._entry.num_bytes:
            raise SchemaError(
                f"file must have {self._entry.num_bytes} bytes, got {data.size}; "
                "restore it or rebuild the dataset",
                file=str(self._path),
            )
        return data

    def _verify(self, region: int) -> None:
        if region in self._verified:
            return
        assert self._data is not None, "the file is not mapped"
        start, end = self._entry.region_offsets[region : region + 2]
        crc32 = zlib.crc32(self._data[start:end])
        if crc32 != self._entry.region_crc32[region]:
            raise SchemaError(
                f"bytes {start} to {end} must have crc32 {self._entry.region_crc32[region]}, "
                f"got {crc32}; restore the file or rebuild the dataset",
                file=str(self._path),
            )
        self._verified.add(region)

    def close(self) -> None:
        """Release the mapped memory; the next read opens and verifies the file again."""
        self._data = self._parquet = None
        self._verified.clear()

    @property
    def schema(self) -> pa.Schema:
        """Arrow columns of the file."""
        return self._open().schema_arrow

    @property
    def num_row_groups(self) -> int:
        """Row groups of the file."""
        return self._open().metadata.num_row_groups

    @property
    def num_rows(self) -> int:
        """Rows of the file."""
        return self._open().metadata.num_rows

    def num_values(self, column: str) -> int:
        """Return the number of entries of a list column; an empty list counts as one."""
        metadata = self._open().metadata
        groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
        chunks = [group.column(i) for group in groups for i in range(group.num_columns)]
        return sum(c.num_values for c in chunks if c.path_in_schema.split(".")[0] == column)

    def read_row_group(self, row_group: int, columns: Sequence[str] | None = None) -> pa.Table:
        """Read one row group, all columns or some.

        Raises:
            SchemaError: the file is missing, truncated or changed.
        """
        parquet = self._open()
        self._verify(row_group)
        return parquet.read_row_group(row_group, columns=columns, use_threads=False)

    def read(self, columns: Sequence[str] | None = None) -> pa.Table:
        """Read the whole file.

        Raises:
            SchemaError: the file is missing, truncated or changed.
        """
        parquet = self._open()
        for region in range(len(self._entry.region_crc32)):
            self._verify(region)
        return parquet.read(columns=columns, use_threads=False)


def _dictionary_paths(metadata: pq.FileMetaData) -> list[str]:
    """Return the text columns that Arrow can read as dictionaries: those not delta-encoded."""
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    chunks = [[group.column(i) for group in groups] for i in range(metadata.num_columns)]
    return [
        column[0].path_in_schema
        for column in chunks
        if column and column[0].physical_type == "BYTE_ARRAY"
        if not any(e.startswith("DELTA") for chunk in column for e in chunk.encodings)
    ]


def find_damaged_files(root: Path, entries: Mapping[str, FileEntry]) -> list[str]:
    """Return one line per file that is missing, truncated or changed."""
    problems: list[str] = []
    for entry in entries.values():
        path = root / entry.path
        if not path.is_file():
            problems.append(f"{entry.path}: missing")
        elif path.stat().st_size != entry.num_bytes:
            problems.append(
                f"{entry.path}: {path.stat().st_size} bytes instead of {entry.num_bytes}"
            )
        elif sha256_of(path) != entry.sha256:
            problems.append(f"{entry.path}: content has changed")
    return problems


def read_verified(path: Path, sha256: str) -> bytes:
    """Read a file and compare it with its hash.

    Raises:
        SchemaError: the file is missing or has changed.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
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


def verify_file(path: Path, sha256: str) -> Path:
    """Return the path of a file after comparing it with its hash; raises as `read_verified`."""
    read_verified(path, sha256)
    return path


def sha256_of(path: Path) -> str:
    """Return the sha256 of a file, hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# List columns over consecutive Parquet files, such as access lists, decoded file by file on demand.
# Sequential access in either direction needs one decoded file; for random access, a cache of
# limited size keeps several.


class DecodedFileCache:
    """LRU cache of decoded files, shared by several `ListFiles`."""

    def __init__(self, max_bytes: int) -> None:
        """Create an empty cache of at most `max_bytes` bytes of decoded values."""
        self._max_bytes = max_bytes
        self._files: OrderedDict[tuple[int, int], Jagged] = OrderedDict()
        self._bytes = self._num_owners = 0

    def add_owner(self) -> int:
        """Return a new id for a user of the cache."""
        self._num_owners += 1
        return self._num_owners

    def get(self, owner: int, file_index: int) -> Jagged | None:
        """Return a file if it is cached."""
        lists = self._files.get((owner, file_index))
        if lists is not None:
            self._files.move_to_end((owner, file_index))
        return lists

    def put(self, owner: int, file_index: int, lists: Jagged) -> None:
        """Add a file and evict the least recently used ones."""
        self._files[owner, file_index] = lists
        self._bytes += lists.values.nbytes
        while self._bytes > self._max_bytes:
            _, oldest = self._files.popitem(last=False)
            self._bytes -= oldest.values.nbytes


class ListFiles:
    """The lists of one table over all its files. Not thread-safe."""

    def __init__(
        self,
        files: Sequence[CheckedFile],
        decode: Callable[[CheckedFile], Jagged],
        cache: DecodedFileCache | None = None,
    ) -> None:
        """Count the lists of each file; none is decoded yet.

        Args:
            files: in order.
            decode: returns the lists of a file.
            cache: keeps files besides the last used one.
        """
        self._files = files
        self._decode = decode
        self._cache = DecodedFileCache(0) if cache is None else cache
        self._owner = self._cache.add_owner()
        self._first = offsets_of(np.array(list(map(_num_rows, files)), np.int64))
        self._open = (-1, Jagged(np.empty(0, np.int64), np.zeros(1, np.int64)))

    def __len__(self) -> int:
        """Return the number of lists."""
        return int(self._first[-1])

    def __getitem__(self, index: int) -> Array:
        """Return a list, as a view of its file's values."""
        file_index = int(np.searchsorted(self._first, index, side="right")) - 1
        lists = self._file(file_index)
        row = index - int(self._first[file_index])
        return lists.values[lists.offsets[row] : lists.offsets[row + 1]]

    def lengths(self) -> Array:
        """Return the length of each list; decodes every file."""
        lengths = [self._file(file_index).lengths for file_index in range(len(self._files))]
        return np.concatenate([np.empty(0, np.int64), *lengths])

    def _file(self, file_index: int) -> Jagged:
        if self._open[0] != file_index:
            lists = self._cache.get(self._owner, file_index)
            if lists is None:
                lists = self._decode(self._files[file_index])
                self._files[file_index].close()
                self._cache.put(self._owner, file_index, lists)
            self._open = file_index, lists
        return self._open[1]


def _num_rows(file: CheckedFile) -> int:
    num_rows = file.num_rows
    file.close()
    return num_rows

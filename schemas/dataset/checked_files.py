"""Data files with checksums, verified when they are read."""

from __future__ import annotations

import mmap
import os
import zlib
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from itertools import accumulate, zip_longest
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from presage.schemas.arrays import Array, Jagged, join_times, offsets_of
from presage.schemas.dataset.files import FileEntry, chunk_range, parquet_file
from presage.schemas.errors import SchemaError
from presage.schemas.layout import SPLIT_TIME
from presage.schemas.storage.location import Location

_PREFETCH_THREADS = 4
_REQUEST_BYTES = 8 << 20
"""Regions that are fetched ahead are requested together up to this size."""
_WHOLE_BYTES = 64 << 10
"""A file that is no larger is requested with its footer."""
_MAGIC = b"PAR1"
_KEPT_REGIONS = 2
"""Regions of a remote file in memory, besides its footer and those that are being fetched."""


@cache
def _prefetch_pool(process_id: int) -> ThreadPoolExecutor:
    """Return the threads that fetch ahead; threads do not survive a fork, hence one pool each."""
    return ThreadPoolExecutor(_PREFETCH_THREADS, thread_name_prefix=f"prefetch-{process_id}")


class CheckedFile:
    """One Parquet file, opened at its first read; each region is verified before its first use.

    A local file is mapped. Of a file at a store, regions are fetched when they are read, or ahead
    by `prefetch`. Not thread-safe.
    """

    def __init__(
        self,
        root: Location | Path,
        entry: FileEntry,
        texts_as_codes: bool = False,
        by_column: bool = False,
    ) -> None:
        """Store the arguments; nothing is opened yet.

        Args:
            root: directory that the entry's path is relative to.
            entry: the file.
            texts_as_codes: read texts as Arrow dictionaries if their encoding allows it, so that
                a reader hashes each distinct text once.
            by_column: read only the bytes of the columns that are asked for, verified by the
                checksum of each page, unless they are all columns of the file.
        """
        self._root = Location.parse(root)
        self._texts_as_codes = texts_as_codes
        self._by_column = by_column
        self._path = self._root / entry.path
        self._entry = entry
        self._data: pa.Buffer | None = None
        self._memory: mmap.mmap | None = None  # that `_data` views, of a remote file
        self._parquet: pq.ParquetFile | None = None
        self._verified: dict[int, None] = {}  # regions in the order of their verification
        self._footer_bytes: memoryview | None = None  # of a remote file, also after `close`
        self._fetching: dict[int, Future[dict[int, memoryview]]] = {}

    def __reduce__(self) -> tuple[type[CheckedFile], tuple[Location, FileEntry, bool, bool]]:
        """Pickle the location and entry: each process opens and verifies the file itself."""
        return CheckedFile, (self._root, self._entry, self._texts_as_codes, self._by_column)

    def prefetch(self, row_group: int | None = None) -> None:
        """Fetch a row group of a remote file, or the whole file, in the background."""
        self._fetch_ahead(range(self._footer) if row_group is None else (row_group,))

    def prefetch_footer(self) -> None:
        """Fetch the footer of a remote file in the background."""
        self._fetch_ahead(())

    def _fetch_ahead(self, row_groups: Iterable[int]) -> None:
        if self._path.local is not None:
            return
        regions = [r for r in row_groups if r not in self._verified and r not in self._fetching]
        if self._footer_bytes is None and self._footer not in self._fetching:
            if self._entry.num_bytes <= _WHOLE_BYTES:  # one request in place of several
                regions = [r for r in range(self._footer) if r not in self._fetching]
            regions.append(self._footer)
        offsets = self._entry.region_offsets
        while regions:
            within = [offsets[r + 1] - offsets[regions[0]] <= _REQUEST_BYTES for r in regions]
            count = max(1, sum(within))
            future = _prefetch_pool(os.getpid()).submit(self._fetch, regions[:count])
            self._fetching |= dict.fromkeys(regions[:count], future)
            del regions[:count]

    @property
    def _footer(self) -> int:
        return len(self._entry.region_crc32) - 1

    def _open(self) -> pq.ParquetFile:
        if self._parquet is None:
            self._data = self._map() if self._path.local is not None else self._reserve()
            self._verify(self._footer)
            self._parquet = parquet_file(
                pa.BufferReader(self._data), page_checksum_verification=self._by_column
            )
            if self._texts_as_codes and (paths := _dictionary_paths(self._parquet.metadata)):
                self._parquet = parquet_file(
                    pa.BufferReader(self._data),
                    metadata=self._parquet.metadata,
                    read_dictionary=paths,
                    page_checksum_verification=self._by_column,
                )
        return self._parquet

    def _map(self) -> pa.Buffer:
        try:
            with pa.memory_map(self._path.url) as source:
                data = source.read_buffer()
        except OSError as error:
            raise self._missing_error() from error
        if data.size != self._entry.num_bytes:
            raise SchemaError(
                f"file must have {self._entry.num_bytes} bytes, got {data.size}; "
                "restore it or rebuild the dataset",
                file=str(self._path),
            )
        return data

    def _reserve(self) -> pa.Buffer:
        """Reserve addresses for a remote file; memory is used for what is fetched."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._memory = mmap.mmap(-1, self._entry.num_bytes, flags)
        return pa.py_buffer(self._memory)

    def _missing_error(self) -> SchemaError:
        return SchemaError(
            "file is missing; restore it or rebuild the dataset", file=str(self._path)
        )

    def _fetch(self, regions: Sequence[int]) -> dict[int, memoryview]:
        offsets = self._entry.region_offsets
        parts = self._fetch_ranges([(offsets[r], offsets[r + 1]) for r in regions])
        return dict(zip(regions, parts, strict=True))

    def _fetch_ranges(self, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        try:
            return self._path.read_ranges(ranges)
        except FileNotFoundError as error:
            raise self._missing_error() from error

    def _fetched(self, region: int) -> memoryview:
        if region == self._footer and self._footer_bytes is not None:
            return self._footer_bytes
        if region not in self._fetching:
            self._fetch_ahead([region] if region != self._footer else [])
        data = self._fetching.pop(region).result()[region]
        if region == self._footer:
            self._footer_bytes = data
        return data

    def _verify(self, region: int) -> None:
        if region in self._verified:
            return
        assert self._data is not None, "the file is not mapped"
        start, end = self._entry.region_offsets[region : region + 2]
        if self._memory is not None:
            self._memory[start:end] = self._fetched(region)
        crc32 = zlib.crc32(self._data[start:end])
        if crc32 != self._entry.region_crc32[region]:
            raise SchemaError(
                f"bytes {start} to {end} must have crc32 {self._entry.region_crc32[region]}, "
                f"got {crc32}; restore the file or rebuild the dataset",
                file=str(self._path),
            )
        self._verified[region] = None

    def _release_regions(self) -> None:
        """Release the memory of all but the last fetched regions."""
        if self._memory is None:
            return
        data_regions = [region for region in self._verified if region != self._footer]
        for region in data_regions[:-_KEPT_REGIONS]:
            self._release(region)
            del self._verified[region]

    def _release(self, region: int) -> None:
        if self._memory is None:
            return
        start, end = self._entry.region_offsets[region : region + 2]
        start, end = -(-start // mmap.PAGESIZE), end // mmap.PAGESIZE
        if end > start:
            size = (end - start) * mmap.PAGESIZE
            self._memory.madvise(mmap.MADV_DONTNEED, start * mmap.PAGESIZE, size)

    def close(self) -> None:
        """Release the memory; the next read opens and verifies the file again."""
        self._data = self._parquet = self._memory = None
        self._verified.clear()

    @property
    def schema(self) -> pa.Schema:
        """Arrow columns of the file; times in two parts count as times."""
        schema = self._open().schema_arrow
        return join_times(schema.empty_table()).schema if SPLIT_TIME in schema.types else schema

    @property
    def metadata(self) -> pq.FileMetaData:
        """Footer of the file."""
        return self._open().metadata

    @property
    def num_rows(self) -> int:
        """Rows of the file."""
        return self._open().metadata.num_rows

    @property
    def rows_per_row_group(self) -> list[int]:
        """Rows of each row group."""
        metadata = self._open().metadata
        return [metadata.row_group(index).num_rows for index in range(metadata.num_row_groups)]

    def read_row_group(self, row_group: int, columns: Sequence[str] | None = None) -> pa.Table:
        """Read one row group, all columns or some.

        Raises:
            SchemaError: the file is missing, truncated or changed.
        """
        parquet = self._open()
        if self._by_column and columns is not None and row_group not in self._verified:
            chunks = column_ranges(parquet.metadata, [row_group], columns)
            if sum(end - start for start, end in chunks) < self._region_bytes(row_group):
                return self._read_chunks(row_group, columns, chunks)
        self._verify(row_group)
        self._release_regions()
        return join_times(parquet.read_row_group(row_group, columns=columns, use_threads=False))

    def _region_bytes(self, row_group: int) -> int:
        start, end = self._entry.region_offsets[row_group : row_group + 2]
        return end - max(start, len(_MAGIC))

    def _read_chunks(
        self, row_group: int, columns: Sequence[str], chunks: Sequence[tuple[int, int]]
    ) -> pa.Table:
        if self._memory is not None:
            for (start, end), data in zip(chunks, self._fetch_ranges(chunks), strict=True):
                self._memory[start:end] = data
        try:
            rows = self._open().read_row_group(row_group, columns=columns, use_threads=False)
            return join_times(rows)
        except (OSError, pa.ArrowException) as error:
            raise SchemaError(
                f"a page of {', '.join(columns)} in row group {row_group} has changed: {error}; "
                "restore the file or rebuild the dataset",
                file=str(self._path),
            ) from error
        finally:
            self._release(row_group)

    def read(self, columns: Sequence[str] | None = None) -> pa.Table:
        """Read the whole file.

        Raises:
            SchemaError: the file is missing, truncated or changed.
        """
        self.prefetch()
        parquet = self._open()
        for region in range(len(self._entry.region_crc32)):
            self._verify(region)
        return join_times(parquet.read(columns=columns, use_threads=False))


OPEN_FILES = 512
"""Files that stay mapped, some 40 kB each beside their pages; opening one takes 0.2 ms."""


class OpenFiles:
    """Files by key, of which those used last stay open."""

    def __init__(self, most: int) -> None:
        """Keep at most so many files open."""
        self._most = most
        self._files: dict[Hashable, CheckedFile] = {}
        self._open: OrderedDict[Hashable, None] = OrderedDict()  # last used at the end

    def get(self, key: Hashable, make: Callable[[], CheckedFile]) -> CheckedFile:
        """Return the file of a key; it is made at its first use."""
        if key not in self._files:
            self._files[key] = make()
        self._open[key] = None
        self._open.move_to_end(key)
        if len(self._open) > self._most:
            self._files[self._open.popitem(last=False)[0]].close()
        return self._files[key]


def column_ranges(
    metadata: pq.FileMetaData, row_groups: Iterable[int], columns: Sequence[str], gap_bytes: int = 0
) -> list[tuple[int, int]]:
    """Return the byte ranges of some columns of row groups; those at most a gap apart as one."""
    groups = map(metadata.row_group, row_groups)
    chunks = [group.column(i) for group in groups for i in range(group.num_columns)]
    names = set(columns)
    ranges = [chunk_range(c) for c in chunks if not names.isdisjoint(_prefixes(c.path_in_schema))]
    joined: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if joined and start - joined[-1][1] <= gap_bytes:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((start, end))
    return joined


def _prefixes(path: str) -> Iterable[str]:
    """Return the columns that a column of the file, such as `ids.list.element`, can be part of."""
    return accumulate(path.split("."), "{}.{}".format)


def rows_before(files: Sequence[CheckedFile]) -> NDArray[np.int64]:
    """Return the rows before each of some files, and those of all; footers are fetched at once."""
    for file in files:
        file.prefetch_footer()
    return offsets_of(np.array([file.num_rows for file in files], np.int64))


def in_turn(files: Sequence[CheckedFile]) -> Iterator[CheckedFile]:
    """Yield files; the next one is fetched meanwhile, and each is closed after its use."""
    for file, following in zip_longest(files, files[1:]):
        if following is not None:
            following.prefetch()
        yield file
        file.close()


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


# List columns over consecutive Parquet files, such as access lists, decoded by row group on demand.
# Sequential access in either direction needs one decoded row group; for other orders, a cache of
# limited size keeps several.


class DecodedListCache:
    """LRU cache of decoded row groups, shared by several `ListFiles`."""

    def __init__(self, max_bytes: int) -> None:
        """Create an empty cache of at most `max_bytes` bytes of decoded values."""
        self._max_bytes = max_bytes
        self._lists: OrderedDict[tuple[object, int], Jagged] = OrderedDict()
        self._bytes = 0

    def get(self, owner: object, row_group: int) -> Jagged | None:
        """Return a row group, counted over all files of its owner, if it is cached."""
        lists = self._lists.get((owner, row_group))
        if lists is not None:
            self._lists.move_to_end((owner, row_group))
        return lists

    def put(self, owner: object, row_group: int, lists: Jagged) -> None:
        """Add a row group and evict the least recently used ones."""
        self._lists[owner, row_group] = lists
        self._bytes += lists.values.nbytes
        while self._bytes > self._max_bytes:
            _, oldest = self._lists.popitem(last=False)
            self._bytes -= oldest.values.nbytes


_NO_ROW_GROUP = (-1, Jagged(np.empty(0, np.int64), np.zeros(1, np.int64)))


class ListFiles:
    """The lists of one table over all its files. Not thread-safe."""

    def __init__(
        self,
        files: Sequence[CheckedFile],
        decode: Callable[[CheckedFile, int], Jagged],
        cache: DecodedListCache | None = None,
    ) -> None:
        """Count the lists of each row group.

        Args:
            files: files of the table.
            decode: returns the lists of a row group of a file.
            cache: keeps decoded row groups besides the last one.
        """
        self._files = files
        self._decode = decode
        self._cache = DecodedListCache(0) if cache is None else cache
        self._owner = object()  # of row groups in the cache: a cycle would keep files mapped
        for file in files:
            file.prefetch_footer()
        rows = [file.rows_per_row_group for file in files]
        self._row_groups = [(f, r) for f, counts in enumerate(rows) for r in range(len(counts))]
        self._first = offsets_of(np.array([count for counts in rows for count in counts], np.int64))
        for file in files[1:]:  # the first one is read next
            file.close()
        self._open = _NO_ROW_GROUP

    def release(self) -> None:
        """Close the files and drop the row group that was used last; the cache keeps its own."""
        for file in self._files:
            file.close()
        self._open = _NO_ROW_GROUP

    def __len__(self) -> int:
        return int(self._first[-1])

    def __getitem__(self, index: int) -> Array:
        """Return a list, as a view of its row group's values."""
        number = int(np.searchsorted(self._first, index, side="right")) - 1
        lists = self._row_group(number)
        row = index - int(self._first[number])
        return lists.values[lists.offsets[row] : lists.offsets[row + 1]]

    def between(self, start: int, end: int) -> Iterator[Jagged]:
        """Yield the lists from one up to another, those of a row group at a time."""
        for number in range(len(self._row_groups)):
            first = int(self._first[number])
            lower, upper = max(start - first, 0), min(end, int(self._first[number + 1])) - first
            if lower < upper:
                lists = self._row_group(number)
                offsets = lists.offsets[lower : upper + 1]
                yield Jagged(lists.values[offsets[0] : offsets[-1]], offsets - offsets[0])

    def _row_group(self, number: int) -> Jagged:
        if self._open[0] != number:
            lists = self._cache.get(self._owner, number)
            if lists is None:
                if number + 1 < len(self._row_groups):
                    file_index, row_group = self._row_groups[number + 1]
                    self._files[file_index].prefetch(row_group)
                file_index, row_group = self._row_groups[number]
                lists = self._decode(self._files[file_index], row_group)
                self._cache.put(self._owner, number, lists)
            self._open = number, lists
        return self._open[1]

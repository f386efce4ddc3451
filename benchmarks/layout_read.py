"""Read each layout back to the tensors of a batch, and count the reads."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from benchmarks.layout_files import Blocks

KEYS = frozenset({"block", "unique_index"})
Column = np.ndarray | tuple[np.ndarray, np.ndarray]
Opener = Callable[[Path], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """One row group, flat."""

    samples: dict[str, Column]
    groups: dict[str, dict[str, Column]]
    inverse: dict[str, np.ndarray]
    within_block: bool
    """Whether inverse indices count from the first tuple of the block, not of the row group."""


class CountingFile:
    """A file that counts its reads; a loaded region is read once and served from memory."""

    def __init__(self, path: Path) -> None:
        """Open the file at its first read."""
        self.path = path
        self.num_reads = 0
        self.num_bytes = 0
        self.closed = False
        self._position = 0
        self._region = (0, b"")

    def load(self, start: int, stop: int) -> None:
        """Read one byte range with one call."""
        self.seek(start)
        data = self._fetch(stop - start)
        self._region = (start, data)

    def _fetch(self, size: int) -> bytes:
        self.num_reads += 1
        with self.path.open("rb", buffering=0) as file:
            file.seek(self._position)
            data = file.read(size)
        self.num_bytes += len(data)
        return data

    def read(self, size: int = -1) -> bytes:
        """Read size bytes at the position."""
        start, region = self._region
        offset = self._position - start
        if offset >= 0 and offset + size <= len(region):
            data = region[offset : offset + size]
        else:
            data = self._fetch(size)
        self._position += len(data)
        return data

    def seek(self, offset: int, whence: int = 0) -> int:
        """Move the position."""
        base = (0, self._position, self.path.stat().st_size)[whence]
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        """Return the position."""
        return self._position

    def close(self) -> None:
        """Mark as closed."""
        self.closed = True


def region(metadata: pq.FileMetaData, row_group: int) -> tuple[int, int]:
    """Return the byte range of a row group."""
    group = metadata.row_group(row_group)
    leaves = [group.column(i) for i in range(group.num_columns)]
    starts = [
        leaf.dictionary_page_offset if leaf.has_dictionary_page else leaf.data_page_offset
        for leaf in leaves
    ]
    stops = [s + leaf.total_compressed_size for s, leaf in zip(starts, leaves, strict=True)]
    return min(starts), max(stops)


def _array(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _flat(array: pa.Array) -> Column:
    if pa.types.is_large_list(array.type):
        return array.offsets.to_numpy(), array.values.to_numpy(zero_copy_only=True)
    if pa.types.is_timestamp(array.type):
        array = array.view(pa.int64())
    return array.to_numpy(zero_copy_only=True)


def _fields(array: pa.Array) -> dict[str, pa.Array]:
    return {array.type.field(i).name: array.field(i) for i in range(array.type.num_fields)}


def _split(columns: dict[str, Column]) -> tuple[dict[str, Column], dict[str, Any]]:
    inverse = {n.removesuffix("_inverse"): c for n, c in columns.items() if n.endswith("_inverse")}
    return {n: c for n, c in columns.items() if not n.endswith("_inverse")}, inverse


def decode_star(tables: Mapping[str, pa.Table], names: list[str]) -> Decoded:
    """Flatten one row group of every table."""
    flat = {
        name: {n: _flat(_array(t.column(n))) for n in t.column_names} for name, t in tables.items()
    }
    samples, inverse = _split(flat.pop("samples"))
    groups = {name: flat[name] for name in names}
    return Decoded(samples=samples, groups=groups, inverse=inverse, within_block=True)


def decode_block_rows(tables: Mapping[str, pa.Table], names: list[str]) -> Decoded:
    """Flatten one row group whose rows are blocks."""
    rows = tables["nested"]
    flat = {
        name: {n: _flat(a) for n, a in _fields(_array(rows.column(name)).values).items()}
        for name in [*names, "samples"]
    }
    samples, inverse = _split(flat.pop("samples"))
    return Decoded(samples=samples, groups=flat, inverse=inverse, within_block=True)


def decode_tuple_rows(tables: Mapping[str, pa.Table], names: list[str]) -> Decoded:
    """Flatten one row group whose rows are tuples; the nesting gives the inverse indices."""
    rows = tables["nested"]
    arrays = {n: _array(rows.column(n)) for n in rows.column_names}
    groups: dict[str, dict[str, Column]] = {}
    offsets: list[np.ndarray] = []
    for name, child in zip(names, [*names[1:], "samples"], strict=True):
        nested = arrays.pop(child)
        groups[name] = {n: _flat(a) for n, a in arrays.items()}
        offsets.append(nested.offsets.to_numpy())
        arrays = _fields(nested.values)
    samples = {n: _flat(a) for n, a in arrays.items()}
    inverse, starts = {}, None
    for name, own in zip(reversed(names), reversed(offsets), strict=True):
        starts = own if starts is None else starts[own]
        inverse[name] = np.repeat(np.arange(len(starts) - 1, dtype=np.int32), np.diff(starts))
    return Decoded(samples=samples, groups=groups, inverse=inverse, within_block=False)


DECODERS = {
    "star": decode_star,
    "block_rows": decode_block_rows,
    "tuple_rows": decode_tuple_rows,
}


def _cut(columns: dict[str, Column], start: int, stop: int) -> dict[str, torch.Tensor]:
    tensors, dense = {}, []
    for name, column in columns.items():
        if isinstance(column, tuple):
            offsets, values = column
            tensors[f"{name}.values"] = torch.from_numpy(values[offsets[start] : offsets[stop]])
            tensors[f"{name}.offsets"] = torch.from_numpy(
                offsets[start : stop + 1] - offsets[start]
            )
        elif column.dtype == np.float32:
            dense.append(column[start:stop])
        else:
            tensors[name] = torch.from_numpy(column[start:stop])
    if dense:
        tensors["dense"] = torch.from_numpy(np.stack(dense, 1))
    return tensors


def _batch(rows: Decoded, blocks: Blocks, base: int, first: int, last: int):
    """Cut blocks [first, last) of a row group that starts at block base."""
    at = blocks.sample_offsets
    start, stop = at[first] - at[base], at[last] - at[base]
    batch = {"samples": _cut(rows.samples, start, stop)}
    for name, columns in rows.groups.items():
        of = blocks.tuple_offsets[name]
        batch[name] = _cut(columns, of[first] - of[base], of[last] - of[base])
        inverse = rows.inverse[name][start:stop]
        if rows.within_block:
            shift = (of[first:last] - of[first]).astype(np.int32)
            inverse = inverse + np.repeat(shift, np.diff(at[first : last + 1]))
        else:
            inverse = inverse - np.int32(of[first] - of[base])
        batch[name]["inverse_indices"] = torch.from_numpy(inverse)
    return batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """Paths, footers and block offsets of one layout."""

    layout: str
    paths: Mapping[str, Path]
    metadata: Mapping[str, pq.FileMetaData]
    blocks: Blocks
    blocks_per_row_group: int

    def batches(
        self,
        *,
        blocks_per_batch: int = 4,
        source: Opener = str,
        before: Callable[[str, object, int], None] | None = None,
        pre_buffer: bool = True,
        checksum: bool = True,
        use_threads: bool = True,
    ) -> Iterator[dict[str, dict[str, torch.Tensor]]]:
        """Yield the tensors of each batch in file order; a batch does not cross row groups."""
        sources = {name: source(path) for name, path in self.paths.items()}
        files, columns = {}, {}
        for name, opened in sources.items():
            files[name] = pq.ParquetFile(
                pa.PythonFile(opened, "r") if isinstance(opened, CountingFile) else opened,
                metadata=self.metadata[name],
                pre_buffer=pre_buffer,
                page_checksum_verification=checksum,
            )
            columns[name] = [n for n in files[name].schema_arrow.names if n not in KEYS]
        names, step = list(self.blocks.groups), self.blocks_per_row_group
        for row_group, base in enumerate(range(0, self.blocks.num_blocks, step)):
            tables = {}
            for name, file in files.items():
                if before is not None:
                    before(name, sources[name], row_group)
                tables[name] = file.read_row_group(
                    row_group, columns=columns[name], use_threads=use_threads
                )
            rows = DECODERS[self.layout](tables, names)
            end = min(base + step, self.blocks.num_blocks)
            for first in range(base, end, blocks_per_batch):
                yield _batch(rows, self.blocks, base, first, min(first + blocks_per_batch, end))


def open_reader(layout: str, paths: Mapping[str, Path], blocks: Blocks, step: int) -> Reader:
    """Return a reader with the footers loaded."""
    metadata = {name: pq.read_metadata(path) for name, path in paths.items()}
    return Reader(
        layout=layout, paths=paths, metadata=metadata, blocks=blocks, blocks_per_row_group=step
    )

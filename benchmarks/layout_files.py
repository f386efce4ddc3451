"""Write the same blocks as a star schema and as one nested file, each with its best encodings."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.layout_log import Blocks, large_list, table

ENCODINGS = ("DICTIONARY", "PLAIN", "DELTA_BINARY_PACKED", "BYTE_STREAM_SPLIT")
LAYOUTS = ("star", "block_rows", "tuple_rows")
ROW_GROUP_BYTES = 64 << 20
PAGE_BYTES = (128 << 10, 1 << 20, 8 << 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class Writing:
    """How one file is encoded."""

    encodings: Mapping[str, str]
    """Leaf column -> one of ENCODINGS."""
    level: int
    """Of zstd."""
    page_bytes: int
    """Target size of a data page before compression."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One Parquet file to write."""

    table: pa.Table
    block_offsets: np.ndarray
    """(num_blocks + 1,) first row of each block."""


def parts(layout: str, blocks: Blocks) -> dict[str, Part]:
    """Return the files of a layout: `star` has one per table, the nested ones have one."""
    build = {"star": _star, "block_rows": _block_rows, "tuple_rows": _tuple_rows}
    return build[layout](blocks)


def _star(blocks: Blocks) -> dict[str, Part]:
    number = np.arange(blocks.num_blocks, dtype=np.int64)
    files = {}
    for name, rows in blocks.groups.items():
        offsets = blocks.tuple_offsets[name]
        counts = np.diff(offsets)
        keys = {
            "block": np.repeat(number, counts),
            "unique_index": (np.arange(offsets[-1]) - np.repeat(offsets[:-1], counts)).astype("i4"),
        }
        files[name] = Part(table=table(keys | _columns(rows)), block_offsets=offsets)
    keys = {"block": np.repeat(number, np.diff(blocks.sample_offsets))}
    samples = table(keys | _columns(blocks.samples) | _inverses(blocks))
    return {"samples": Part(table=samples, block_offsets=blocks.sample_offsets)} | files


def _block_rows(blocks: Blocks) -> dict[str, Part]:
    """One row per block: a list of structs for the samples and one for each group."""
    number = np.arange(blocks.num_blocks, dtype=np.int64)
    columns = {"block": number}
    for name, rows in blocks.groups.items():
        columns[name] = large_list(blocks.tuple_offsets[name], _struct(_columns(rows)))
    samples = _struct(_columns(blocks.samples) | _inverses(blocks))
    columns["samples"] = large_list(blocks.sample_offsets, samples)
    return {"nested": Part(table=table(columns), block_offsets=np.append(number, len(number)))}


def _tuple_rows(blocks: Blocks) -> dict[str, Part]:
    """One row per tuple of the coarsest group, the finer ones and the samples nested in it.

    No inverse indices are stored: nesting says it. Needs groups that refine one another.
    """
    names, columns = list(blocks.groups), {}
    child_name, child = "samples", _struct(_columns(blocks.samples))
    child_starts = np.arange(blocks.samples.num_rows)
    for name in reversed(names):
        starts = blocks.tuple_samples[name]
        offsets = np.append(np.searchsorted(child_starts, starts[:-1]), len(child_starts))
        columns = _columns(blocks.groups[name]) | {child_name: large_list(offsets, child)}
        if name != names[0]:
            child_name, child, child_starts = name, _struct(columns), starts[:-1]
    offsets = blocks.tuple_offsets[names[0]]
    block = np.repeat(np.arange(blocks.num_blocks, dtype=np.int64), np.diff(offsets))
    return {"nested": Part(table=table({"block": block} | columns), block_offsets=offsets)}


def _columns(rows: pa.Table) -> dict[str, pa.Array]:
    return {name: rows.column(name).combine_chunks() for name in rows.column_names}


def _inverses(blocks: Blocks) -> dict[str, np.ndarray]:
    return {f"{name}_inverse": inverse for name, inverse in blocks.inverse.items()}


def _struct(columns: Mapping[str, pa.Array | np.ndarray]) -> pa.Array:
    rows = table(columns)
    arrays = [rows.column(name).combine_chunks() for name in rows.column_names]
    return pa.StructArray.from_arrays(arrays, fields=list(rows.schema))


def blocks_per_row_group(blocks: Blocks) -> int:
    """Return how many blocks make about 64 MiB uncompressed, all tables together."""
    num_bytes = sum(part.table.nbytes for part in _star(blocks).values())
    return max(1, round(ROW_GROUP_BYTES / (num_bytes / blocks.num_blocks)))


def _write(part: Part, path: Path, writing: Writing, step: int) -> None:
    chosen = writing.encodings.items()
    dictionary = [leaf for leaf, name in chosen if name == "DICTIONARY"]
    other = {leaf: name for leaf, name in chosen if name != "DICTIONARY"}
    with pq.ParquetWriter(
        path,
        part.table.schema,
        compression="zstd",
        compression_level=writing.level,
        use_dictionary=dictionary,  # pyright: ignore[reportArgumentType]: a list of leaves works
        column_encoding=other or None,
        write_page_checksum=True,
        data_page_size=writing.page_bytes,
        max_rows_per_page=1 << 30,
    ) as writer:
        cuts = [*range(0, len(part.block_offsets) - 1, step), len(part.block_offsets) - 1]
        for first, last in itertools.pairwise(cuts):
            start, stop = int(part.block_offsets[first]), int(part.block_offsets[last])
            writer.write_table(part.table.slice(start, stop - start), row_group_size=stop - start)


def _leaf_bytes(path: Path) -> dict[str, int]:
    group = pq.read_metadata(path).row_group(0)
    leaves = [group.column(i) for i in range(group.num_columns)]
    return {leaf.path_in_schema: leaf.total_compressed_size for leaf in leaves}


def best_writing(part: Part, folder: Path, level: int, step: int) -> Writing:
    """Write the first row group in every encoding and page size and keep the smallest.

    The encoding is chosen for each leaf column, the page size for the whole file.
    """
    rows = int(part.block_offsets[min(step, len(part.block_offsets) - 1)])
    head = Part(table=part.table.slice(0, rows), block_offsets=np.array([0, rows]))
    path = folder / "trial.parquet"
    _write(head, path, Writing(encodings={}, level=level, page_bytes=PAGE_BYTES[0]), 1)
    schema = pq.ParquetFile(path).schema
    types = {c.path: c.physical_type for c in (schema.column(i) for i in range(len(schema)))}
    found = {}
    for page_bytes in PAGE_BYTES:
        sizes: dict[str, dict[str, int]] = {leaf: {} for leaf in types}
        for encoding in ENCODINGS:
            usable = {
                leaf: encoding
                for leaf, kind in types.items()
                if encoding != "DELTA_BINARY_PACKED" or kind.startswith("INT")
            }
            tried = Writing(encodings=usable, level=level, page_bytes=page_bytes)
            _write(head, path, tried, 1)
            num_bytes = _leaf_bytes(path)
            for leaf in usable:
                sizes[leaf][encoding] = num_bytes[leaf]
        best = {leaf: min(tried, key=tried.__getitem__) for leaf, tried in sizes.items()}
        total = sum(min(tried.values()) for tried in sizes.values())
        found[total] = Writing(encodings=best, level=level, page_bytes=page_bytes)
    return found[min(found)]


def write_layout(
    layout: str, blocks: Blocks, folder: Path, level: int
) -> tuple[dict[str, Path], dict[str, Writing]]:
    """Write a layout with the best encoding of each leaf; return path and choice per file."""
    step, paths, chosen = blocks_per_row_group(blocks), {}, {}
    for name, part in parts(layout, blocks).items():
        chosen[name] = best_writing(part, folder, level, step)
        paths[name] = folder / f"{layout}-{name}-{level}.parquet"
        _write(part, paths[name], chosen[name], step)
    return paths, chosen

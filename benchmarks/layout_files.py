"""Logs of the layout benchmark, cut into blocks and written as star schema and as nested files."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.demo_log.generate import GeneratorConfig, generate


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Features that change together, with one row per run of equal samples."""

    rows: pa.Table
    """num_runs rows."""
    run: np.ndarray
    """(num_samples,) int64, non-decreasing: the row of each sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """Samples in training order and their groups."""

    name: str
    samples: pa.Table
    groups: Mapping[str, Group]
    """Coarse to fine: each run is inside one run of the previous group."""
    item_lists: Mapping[str, str]
    """Features that look up the items table -> their groups, for the access lists."""
    group_by: str
    """Sample column that the SQL query groups by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """A log cut into blocks, with the unique tuples of each block."""

    samples: pa.Table
    sample_offsets: np.ndarray
    """(num_blocks + 1,) first sample of each block."""
    groups: Mapping[str, pa.Table]
    tuple_offsets: Mapping[str, np.ndarray]
    """Per group (num_blocks + 1,) first tuple of each block."""
    tuple_samples: Mapping[str, np.ndarray]
    """Per group (num_tuples + 1,) first sample of each tuple."""
    inverse: Mapping[str, np.ndarray]
    """Per group (num_samples,) int32, the tuple of each sample within its block."""

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return len(self.sample_offsets) - 1


def large_list(offsets: np.ndarray, values: np.ndarray | pa.Array) -> pa.Array:
    """Build a list column with 64-bit offsets and no nulls."""
    array = pa.array(values) if isinstance(values, np.ndarray) else values
    element = pa.field("element", array.type, nullable=False)
    return pa.LargeListArray.from_arrays(
        pa.array(offsets, pa.int64()), array, type=pa.large_list(element)
    )


def table(columns: Mapping[str, np.ndarray | pa.Array]) -> pa.Table:
    """Build a table whose columns are all required."""
    arrays = [pa.array(c) if isinstance(c, np.ndarray) else c for c in columns.values()]
    fields = [pa.field(n, a.type, nullable=False) for n, a in zip(columns, arrays, strict=True)]
    return pa.table(arrays, schema=pa.schema(fields))


def cut_blocks(log: Log, block_samples: int) -> Blocks:
    """Split the log into blocks; a tuple that spans two blocks is stored in both."""
    num_samples = log.samples.num_rows
    sample_offsets = np.append(np.arange(0, num_samples, block_samples), num_samples)
    block = np.arange(num_samples) // block_samples
    rows, tuple_offsets, tuple_samples, inverse = {}, {}, {}, {}
    for name, group in log.groups.items():
        starts = np.diff(group.run, prepend=-1) != 0
        starts[sample_offsets[:-1]] = True
        first = np.flatnonzero(starts)
        rows[name] = group.rows.take(pa.array(group.run[first])).combine_chunks()
        tuple_offsets[name] = np.searchsorted(first, sample_offsets)
        tuple_samples[name] = np.append(first, num_samples)
        inverse[name] = (np.cumsum(starts) - 1 - tuple_offsets[name][block]).astype(np.int32)
    return Blocks(
        samples=log.samples,
        sample_offsets=sample_offsets,
        groups=rows,
        tuple_offsets=tuple_offsets,
        tuple_samples=tuple_samples,
        inverse=inverse,
    )


def mind_log(folder: Path) -> Log:
    """Read MIND: one sample per shown article, one group per impression, in time order."""
    numbers = pl.element().str.slice(1).cast(pl.Int64)
    frame = (
        pl.read_csv(
            folder / "behaviors.tsv",
            separator="\t",
            has_header=False,
            new_columns=["impression_id", "user", "time", "history", "shown"],
            quote_char=None,
        )
        .with_columns(
            pl.col("user").str.slice(1).cast(pl.Int64).alias("user_id"),
            pl.col("time").str.to_datetime("%m/%d/%Y %I:%M:%S %p", time_unit="us"),
            pl.col("history").fill_null("").str.extract_all(r"N\d+").list.eval(numbers),
            pl.col("shown").str.extract_all(r"N\d+").list.eval(numbers).alias("item_id"),
            pl.col("shown").str.extract_all(r"-\d").list.eval(numbers).alias("label"),
        )
        .sort("time", "impression_id")
    )
    history = frame["history"]
    offsets = np.concatenate([[0], np.cumsum(history.list.len().to_numpy(), dtype=np.int64)])
    impressions = table(
        {
            "impression_id": frame["impression_id"].to_numpy(),
            "user_id": frame["user_id"].to_numpy(),
            "time": frame["time"].to_arrow(),
            "history": large_list(offsets, history.explode().drop_nulls().to_numpy()),
        }
    )
    samples = table(
        {
            "label": frame["label"].explode().to_numpy().astype(np.int8),
            "item_id": frame["item_id"].explode().to_numpy(),
        }
    )
    run = np.repeat(np.arange(len(frame)), frame["item_id"].list.len().to_numpy())
    return Log(
        name="mind",
        samples=samples,
        groups={"impression": Group(rows=impressions, run=run)},
        item_lists={"history": "impression"},
        group_by="item_id",
    )


DEMO_GROUPS = {
    "user": ("session_id", "user_id", "user_country", "user_region", "user_city", "user_language",
             "user_device", "user_os", "user_segment", "user_interest", "user_tier", "user_age",
             "user_tenure_days", "user_sessions_7d"),
    "clicked": ("user_clicks_7d", "user_ctr_7d", "clicked_items", "clicked_brands"),
    "request": ("request_id", "page", "hour", "query", "time_since_last_sec", "page_depth",
                "viewed_items"),
}  # fmt: skip


def demo_log(num_samples: int) -> Log:
    """Generate the demo log and group its features, sessions in order of their number.

    A finer tuple also ends where a coarser one ends, so that groups can be nested. The star schema
    does not require that and stores about 1 % more `clicked` tuples because of it.
    """
    rows = pa.Table.from_batches(list(generate(GeneratorConfig(num_samples=num_samples))))
    rows = rows.rename_columns(["label" if n == "clicked" else n for n in rows.column_names])
    # Stable: samples of a session stay in time order.
    order = np.argsort(rows.column("session_id").to_numpy(), kind="stable")
    rows = rows.take(pa.array(order)).combine_chunks()
    starts = np.zeros(num_samples, dtype=bool)
    groups = {}
    for name, columns in DEMO_GROUPS.items():
        starts = starts | _changes(rows.select(columns))
        first = pa.array(np.flatnonzero(starts))
        group = table({n: _required(rows.column(n).take(first)) for n in columns})
        groups[name] = Group(rows=group, run=np.cumsum(starts) - 1)
    grouped = {name for columns in DEMO_GROUPS.values() for name in columns}
    rest = [n for n in rows.column_names if n not in grouped]
    return Log(
        name="demo",
        samples=table({n: _required(rows.column(n)) for n in rest}),
        groups=groups,
        item_lists={"clicked_items": "clicked", "viewed_items": "request"},
        group_by="item_category",
    )


def _required(column: pa.ChunkedArray) -> pa.Array:
    array = column.combine_chunks()
    if not pa.types.is_list(array.type):
        return array
    return large_list(array.offsets.to_numpy().astype(np.int64), array.values)


def _changes(rows: pa.Table) -> np.ndarray:
    """Return (num_rows,) bool: whether the row differs from the previous one."""
    changed = np.zeros(rows.num_rows, dtype=bool)
    changed[0] = True
    for name in rows.column_names:
        array = rows.column(name).combine_chunks()
        if pa.types.is_list(array.type):
            ends, values = array.offsets.to_numpy(), array.values.to_numpy()
            lists = [values[a:b].tobytes() for a, b in itertools.pairwise(ends)]
            changed[1:] |= [a != b for a, b in itertools.pairwise(lists)]
        else:
            changed |= np.diff(array.to_numpy(), prepend=np.nan) != 0
    return changed


ENCODINGS = ("DICTIONARY", "PLAIN", "DELTA_BINARY_PACKED", "BYTE_STREAM_SPLIT")
LAYOUTS = ("star", "block_rows", "tuple_rows")
ROW_GROUP_BYTES = 64 << 20
PAGE_BYTES = (128 << 10, 1 << 20, 8 << 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoding:
    """Encoding of one file."""

    encodings: Mapping[str, str]
    """Leaf column -> one of ENCODINGS."""
    level: int
    """zstd level."""
    page_bytes: int
    """Target size of a data page before compression."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One Parquet file to write."""

    table: pa.Table
    block_offsets: np.ndarray
    """(num_blocks + 1,) first row of each block."""


def parts(layout: str, blocks: Blocks) -> dict[str, Part]:
    """Return the files of a layout: one per table for `star`, one for the nested layouts."""
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
    """Return one row per block: a list of structs for the samples and for each group."""
    number = np.arange(blocks.num_blocks, dtype=np.int64)
    columns = {"block": number}
    for name, rows in blocks.groups.items():
        columns[name] = large_list(blocks.tuple_offsets[name], _struct(_columns(rows)))
    samples = _struct(_columns(blocks.samples) | _inverses(blocks))
    columns["samples"] = large_list(blocks.sample_offsets, samples)
    return {"nested": Part(table=table(columns), block_offsets=np.append(number, len(number)))}


def _tuple_rows(blocks: Blocks) -> dict[str, Part]:
    """Return one row per tuple of the coarsest group, with finer groups and samples nested in it.

    Inverse indices follow from the nesting. Requires groups that refine one another.
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
    """Return the number of blocks of about 64 MiB uncompressed, over all tables."""
    num_bytes = sum(part.table.nbytes for part in _star(blocks).values())
    return max(1, round(ROW_GROUP_BYTES / (num_bytes / blocks.num_blocks)))


def _write(part: Part, path: Path, encoding: Encoding, step: int) -> None:
    chosen = encoding.encodings.items()
    dictionary = [leaf for leaf, name in chosen if name == "DICTIONARY"]
    other = {leaf: name for leaf, name in chosen if name != "DICTIONARY"}
    with pq.ParquetWriter(
        path,
        part.table.schema,
        compression="zstd",
        compression_level=encoding.level,
        use_dictionary=dictionary,  # pyright: ignore[reportArgumentType]: a list of leaves works
        column_encoding=other or None,
        write_page_checksum=True,
        data_page_size=encoding.page_bytes,
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


def best_encoding(part: Part, folder: Path, level: int, step: int) -> Encoding:
    """Write the first row group in every encoding and page size and return the smallest.

    The encoding is chosen for each leaf column, the page size for the whole file.
    """
    rows = int(part.block_offsets[min(step, len(part.block_offsets) - 1)])
    head = Part(table=part.table.slice(0, rows), block_offsets=np.array([0, rows]))
    path = folder / "trial.parquet"
    _write(head, path, Encoding(encodings={}, level=level, page_bytes=PAGE_BYTES[0]), 1)
    schema = pq.ParquetFile(path).schema
    types = {c.path: c.physical_type for c in (schema.column(i) for i in range(len(schema)))}
    by_size = {}
    for page_bytes in PAGE_BYTES:
        sizes: dict[str, dict[str, int]] = {leaf: {} for leaf in types}
        for encoding in ENCODINGS:
            usable = {
                leaf: encoding
                for leaf, kind in types.items()
                if encoding != "DELTA_BINARY_PACKED" or kind.startswith("INT")
            }
            tried = Encoding(encodings=usable, level=level, page_bytes=page_bytes)
            _write(head, path, tried, 1)
            num_bytes = _leaf_bytes(path)
            for leaf in usable:
                sizes[leaf][encoding] = num_bytes[leaf]
        best = {leaf: min(tried, key=tried.__getitem__) for leaf, tried in sizes.items()}
        total = sum(min(tried.values()) for tried in sizes.values())
        by_size[total] = Encoding(encodings=best, level=level, page_bytes=page_bytes)
    return by_size[min(by_size)]


def write_layout(
    layout: str, blocks: Blocks, folder: Path, level: int
) -> tuple[dict[str, Path], dict[str, Encoding]]:
    """Write a layout with the best encoding of each leaf; return path and choice per file."""
    step, paths, chosen = blocks_per_row_group(blocks), {}, {}
    for name, part in parts(layout, blocks).items():
        chosen[name] = best_encoding(part, folder, level, step)
        paths[name] = folder / f"{layout}-{name}-{level}.parquet"
        _write(part, paths[name], chosen[name], step)
    return paths, chosen

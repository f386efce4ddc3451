"""The two logs that the layout benchmark writes: MIND as it is, and the demo log."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa

from pipelines.demo_log.log import GeneratorConfig, generate


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Features that change together, one row per run of samples that share them."""

    rows: pa.Table
    """num_runs rows."""
    run: np.ndarray
    """(num_samples,) int64, never decreasing: the row of each sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """Samples in training order with their groups."""

    name: str
    samples: pa.Table
    groups: Mapping[str, Group]
    """Coarse to fine: each run lies inside one run of the group before it."""
    item_lists: Mapping[str, str]
    """Feature of the items table -> its group, for the access lists."""
    group_by: str
    """The sample column that the SQL query groups by."""


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
    """Cut the log every block_samples samples; a tuple that spans a cut is stored in both."""
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
    """Generate the demo log and group what changes together, sessions in order of number.

    A finer tuple also ends where a coarser one does, so that the groups can be nested; the star
    schema does not need that and stores about 1 % more `clicked` tuples for it here.
    """
    rows = pa.Table.from_batches(list(generate(GeneratorConfig(num_samples=num_samples))))
    rows = rows.rename_columns(["label" if n == "clicked" else n for n in rows.column_names])
    # Stable: within a session the order of time stays.
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
    """Return (num_rows,) bool: the row differs from the one before it."""
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

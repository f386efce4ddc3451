"""Histories of a user, stored once and read as of any moment, against lists in each sample.

The log has the published statistics of Yambda-5b (`common/listens.py`): listens are samples, and
all events the history. It is built in a segment for each day.

`bytes`: of an event and of a count, against one Parquet file of all events in the best encodings;
and of a sample, against samples that store their lists of the newest events, clustered by user, a
file for each day in the best encodings.

`oracle`: bytes and processor time of an index with the rows of events, against samples alone.

`reading`: samples of the last day with their newest events, from Parquet, by one thread: as the
reader hands them out, each event once, against the way of MLPerf's DLRMv4 reference, restated from
its description: per sample, masks over the 20,000 events before it for three kinds, the newest
third of each, one sort, six columns to lists and tensors; its events are in memory. Samples have at
least as many events before them as are read, or 4,086.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from benchmarks.common.harness import Options, alternate, compared, report, short
from benchmarks.common.listens import draw_events, write_days
from benchmarks.common.logs import build_job, write_yaml
from presage import DataLoader
from presage.pipelines.clustering.storage_layout import PAGE_BYTES as LARGE_PAGE_BYTES
from presage.pipelines.clustering.storage_layout import choose_encodings, open_writer
from presage.pipelines.histories.event_files import PAGE_BYTES
from presage.pipelines.table.indexes import PartBuilder, add_index, default_order
from presage.schemas.arrays import ranges
from presage.schemas.dataset.opened import (
    OpenDataset,
    open_dataset,
    reading_histories,
    select_segments,
)
from presage.schemas.layout import count_column

NAME, BATCH = "plays", 1024
SCHEMA = """
feature { name: "uid" type: INT annotation { tag: "kept" } }
feature { name: "time" type: INT annotation { tag: "kept" } }
feature { name: "item_id" type: INT presence { min_fraction: 1 } annotation { tag: "sparse" } }
feature { name: "label" type: INT int_domain { min: 0 max: 1 } annotation { tag: "label" } }
"""
KIND = (
    "CAST(CASE WHEN event_type > 0 THEN event_type + 1 WHEN played_ratio_pct >= 50 THEN 0 ELSE 1 "
    "END AS TINYINT)"
)
"""Played, skipped, liked, disliked."""
JOB = {
    "name": "listens",
    "data": {
        "sources": {"log": {"files": "*.parquet", "format": "parquet"}},
        "samples": {
            "map": "SELECT uid, timestamp AS time, item_id, "
            "CAST(played_ratio_pct >= 50 AS TINYINT) AS label FROM log WHERE event_type = 0"
        },
        "histories": {
            NAME: {
                "available": "timestamp",
                "columns": {"item": "item_id", "kind": KIND},
                "tables": {"item": "items"},
                "tick": "5s",
            }
        },
        "session": {"key": "uid", "time": "time"},
        "groups": {"user": ["uid"]},
        "tables": {"items": {"features": ["item_id"], "rows": "hash", "num_rows": 1 << 24}},
        "block_samples": BATCH,
        "oracle": {"batch_samples": BATCH},
    },
    "train": {"batch_samples": BATCH},
}
THIRDS, SCANNED, MINIMUM = 3, 20_000, 4_086


def prepare(options: argparse.Namespace, scratch: Path) -> tuple[pa.Table, Path]:
    """Return the events, and the dataset of their days; what a kept folder has is used again."""
    folder = options.scratch or scratch
    folder.mkdir(parents=True, exist_ok=True)
    events = draw_events(options.events, options.days, scale=options.scale)
    dataset, job = folder / "dataset", folder / "job.yaml"
    if not dataset.exists():
        (folder / "schema.pbtxt").write_text(SCHEMA)
        write_yaml(job, JOB)
        start = time.process_time()
        for day, log in write_days(events, folder / "log"):
            build_job(job, log, dataset, day)
        report("built", {"us_per_event": (time.process_time() - start) / events.num_rows * 1e6})
    return events, dataset


def kinds_of(events: pa.Table) -> NDArray[np.int64]:
    """Return the kind of each event, as the job computes it."""
    kind = events["event_type"].to_numpy().astype(np.int64)
    return np.where(kind > 0, kind + 1, np.where(events["played_ratio_pct"].to_numpy() >= 50, 0, 1))


def written_bytes(table: pa.Table, path: Path) -> int:
    """Return the bytes of a Parquet file in the best encodings of its columns, and page size."""
    sizes: list[int] = []
    for page_bytes in (PAGE_BYTES, LARGE_PAGE_BYTES):
        with open_writer(path, table.schema, choose_encodings(table), page_bytes) as writer:
            writer.write_table(table, row_group_size=1 << 20)
        sizes.append(path.stat().st_size)
    return min(sizes)


# Bytes.


def measure_bytes(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Compare the bytes of events, counts and samples."""
    events, path = prepare(options, scratch)
    dataset = open_dataset(path)
    stored = sum(s.manifest.histories[NAME].num_bytes for s in dataset.segments)
    counts, num_samples = (
        count_bytes(dataset),
        sum(s.manifest.num_samples for s in dataset.segments),
    )
    seconds = events["timestamp"].cast(pa.int64()).to_numpy() // 1_000_000
    plain = pa.table(
        {
            "uid": events["uid"].cast(pa.int32()),
            "item": events["item_id"].cast(pa.int32()),
            "kind": pa.array(kinds_of(events).astype(np.int8)),
            "tick": pa.array((seconds // 5).astype(np.int32)),
        }
    )
    single = written_bytes(plain, scratch / "single.parquet")
    comparisons = {
        "events": compared(
            [(stored + counts) / events.num_rows],
            [single / events.num_rows],
            "bytes of an event, with keys and counts, against one file of all events",
            count_bytes=short(counts / num_samples),
            num_events=events.num_rows,
            num_segments=len(dataset.segments),
        )
    }
    report("events", comparisons["events"])
    per_sample = (stored + counts) / num_samples
    for length in options.lengths:
        fat = fat_bytes(events, length, options.fat_days, scratch)
        comparisons[f"samples of {length}"] = compared(
            [per_sample], [fat], "bytes of a sample's history, against a list in each sample"
        )
        report(f"samples of {length}", comparisons[f"samples of {length}"])
    return comparisons


def count_bytes(dataset: OpenDataset) -> int:
    """Return the bytes of the counts of all samples."""
    total = 0
    for segment in dataset.segments:
        for path in segment.files:
            if path.startswith("samples/"):
                metadata = segment.file(path).metadata
                for group in range(metadata.num_row_groups):
                    columns = metadata.row_group(group)
                    for index in range(columns.num_columns):
                        column = columns.column(index)
                        if column.path_in_schema == count_column(NAME):
                            total += column.total_compressed_size
    return total


def windows(events: pa.Table, rows: NDArray[np.int64], length: int) -> tuple[Any, Any]:
    """Return the first event, and one after the last, that samples at some events see."""
    user = events["uid"].to_numpy()
    second = events["timestamp"].cast(pa.int64()).to_numpy()
    changes = np.concatenate([[True], np.diff(user) != 0])
    first = np.maximum.accumulate(np.where(changes, np.arange(len(user)), 0))
    changes[1:] |= np.diff(second) != 0
    ends = np.maximum.accumulate(np.where(changes, np.arange(len(user)), 0))[rows]
    return np.maximum(first[rows], ends - length), ends


def fat_bytes(events: pa.Table, length: int, num_days: int, scratch: Path) -> float:
    """Return the bytes of a list of each sample, of samples clustered by user in files of days."""
    day = events["timestamp"].cast(pa.int64()).to_numpy() // 86_400_000_000
    is_sample = events["event_type"].to_numpy() == 0
    columns = {
        "item": events["item_id"].to_numpy().astype(np.int32),
        "kind": kinds_of(events).astype(np.int8),
        "tick": (events["timestamp"].cast(pa.int64()).to_numpy() // 5_000_000).astype(np.int32),
    }
    num_bytes = num_samples = 0
    for chosen in np.unique(day)[-num_days:]:
        rows = np.flatnonzero(is_sample & (day == chosen))
        starts, ends = windows(events, rows, length)
        offsets = np.concatenate([[0], np.cumsum(ends - starts)])
        taken = ranges(starts, ends - starts)
        lists = {
            name: pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(values[taken]))
            for name, values in columns.items()
        }
        num_bytes += written_bytes(pa.table(lists), scratch / "fat.parquet")
        num_samples += len(rows)
    return num_bytes / num_samples


# Reading.


def measure_reading(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Compare the samples a second of one thread."""
    events, path = prepare(options, scratch)
    dataset = open_dataset(path)
    last = select_segments(dataset, [dataset.segments[-1].id])
    comparisons: dict[str, Any] = {}
    for length in options.lengths:
        sides = {
            "ours": lambda n=length: read_windows(last, n),
            "reference": lambda n=length: read_reference(events, n, options.anchors),
        }
        rates = alternate(sides, options.rounds)
        comparisons[f"newest {length}"] = compared(
            rates["ours"],
            rates["reference"],
            "samples a second of processor time, against the reference's way",
            higher=True,
        )
        report(f"newest {length}", comparisons[f"newest {length}"])
    return comparisons


# The oracle.


def measure_oracle(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Measure an index with the rows of events, against the one of samples alone."""
    _, path = prepare(options, scratch)
    dataset = open_dataset(path)
    order = default_order(dataset)
    num_samples = sum(s.manifest.num_samples for s in dataset.segments)
    alone = sum(s.manifest.oracle_bytes for s in dataset.segments)
    alone += dataset.index_for(order).oracle_bytes
    comparisons: dict[str, Any] = {}
    for length in options.lengths:
        wanted = reading_histories(dataset, {NAME: (length, 1)})
        start = time.process_time()
        built = add_index(wanted, order, PartBuilder(dataset.directory, ["--runner=InProcess"]))
        seconds, index = time.process_time() - start, built.index_for(order)
        comparisons[f"newest {length}"] = compared(
            [index.oracle_bytes / num_samples],
            [alone / num_samples],
            "bytes of a sample in an index with the rows of its events, against samples alone",
            processor_sec=seconds,
            entries_per_sample=index.num_accesses("items") / num_samples,
        )
        report(f"newest {length}", comparisons[f"newest {length}"])
    return comparisons


def read_windows(dataset: OpenDataset, length: int) -> float:
    """Return the samples a second of the loader with histories."""
    loader = DataLoader(dataset, batch_samples=BATCH, keep=[], histories={NAME: length})
    start, count = time.process_time(), 0
    for batch in loader:
        count += batch.num_samples
    return count / (time.process_time() - start)


def read_reference(events: pa.Table, length: int, num_anchors: int) -> float:
    """Return the samples a second of the reference's way, from events in memory."""
    rows = np.flatnonzero(events["event_type"].to_numpy() == 0)
    starts, ends = windows(events, rows, SCANNED)
    rows = rows[ends - starts >= min(length, MINIMUM)]
    chosen = rows[:: max(1, len(rows) // num_anchors)]
    starts, ends = windows(events, chosen, SCANNED)
    item, kind = events["item_id"].to_numpy(), kinds_of(events)
    second = events["timestamp"].cast(pa.int64()).to_numpy() // 1_000_000
    artist, album, flags = item % 1_293_394, item % 3_367_691, 1 << kind
    start = time.process_time()
    for low, high in zip(starts.tolist(), ends.tolist(), strict=True):
        near, index = kind[low:high], np.arange(high - low)
        pools = [index[near == each][-(length // THIRDS) :] for each in (0, 1, 2)]
        merged = np.concatenate(pools)
        merged = merged[np.argsort(merged, kind="stable")] + low
        values: list[int] = []
        for column in (item, artist, album, flags, second, kind):
            values.extend(column[merged].tolist())
        torch.tensor(values, dtype=torch.long)
    return len(chosen) / (time.process_time() - start)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit status."""
    options = Options("histories", __doc__, rounds=3)
    parts = {"bytes": measure_bytes, "reading": measure_reading, "oracle": measure_oracle}
    options.add_parts(parts)
    options.add("--events", 10_000_000, "of the log, about", small=30_000)
    options.add("--days", 30, "of the log", small=3)
    options.add("--scale", 0.1, "of the published number of events of a user")
    options.add("--lengths", (50, 512, 2048), "newest events of a sample", small=(20,))
    options.add("--fat-days", 3, "whose lists are written", small=1)
    options.add("--anchors", 2000, "samples of the reference's way", small=20)
    options.add("--scratch", None, "folder to keep and reuse the dataset in")
    return options.run_parts(argv)


if __name__ == "__main__":
    sys.exit(main())

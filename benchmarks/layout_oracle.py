"""Bytes per entry of the oracle's access lists and next-use distances, per encoding."""

import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from benchmarks.layout_files import ENCODINGS
from benchmarks.layout_log import Blocks, Log, table

DECODE_CALLS = 9
LEVELS = (3, 9, 1)


def accesses(log: Log, blocks: Blocks, blocks_per_step: int) -> list[np.ndarray]:
    """Return the sorted unique dense rows of the items table in each step.

    Rows are numbered by first use: by step of one block first, then by raw id, so that the
    numbering does not depend on blocks_per_step.
    """
    raw = list(_raw(log, blocks, 1))
    ids, first = np.unique(np.concatenate(raw), return_index=True)
    dense = np.empty(len(ids), np.int64)
    dense[np.argsort(first)] = np.arange(len(ids))
    return [
        np.sort(dense[np.searchsorted(ids, rows)]) for rows in _raw(log, blocks, blocks_per_step)
    ]


def _raw(log: Log, blocks: Blocks, blocks_per_step: int) -> Iterator[np.ndarray]:
    item = blocks.samples.column("item_id").to_numpy()
    lists = [
        (blocks.tuple_offsets[group], blocks.groups[group].column(name).combine_chunks())
        for name, group in log.item_lists.items()
    ]
    for first in range(0, blocks.num_blocks, blocks_per_step):
        last = min(first + blocks_per_step, blocks.num_blocks)
        used = [item[blocks.sample_offsets[first] : blocks.sample_offsets[last]]]
        for of, column in lists:
            offsets, values = column.offsets.to_numpy(), column.values.to_numpy()
            used.append(values[offsets[of[first]] : offsets[of[last]]])
        yield np.unique(np.concatenate(used))


def gaps(rows_of_step: list[np.ndarray]) -> np.ndarray:
    """Return the first row of each step and then the differences."""
    return np.concatenate([np.diff(rows, prepend=0) for rows in rows_of_step])


def from_gaps(stored: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Undo `gaps`; offsets is (num_steps + 1,), and no step is empty."""
    total = np.cumsum(stored)
    base = np.concatenate([[0], total[offsets[1:-1] - 1]])
    return total - np.repeat(base, np.diff(offsets))


def next_use(rows_of_step: list[np.ndarray]) -> np.ndarray:
    """Return for each (step, row) entry the number of steps to its next use, 0 for never."""
    step = np.repeat(np.arange(len(rows_of_step)), [len(rows) for rows in rows_of_step])
    rows = np.concatenate(rows_of_step)
    order = np.lexsort((step, rows))
    again = rows[order][1:] == rows[order][:-1]
    distance = np.zeros(len(rows), np.int64)
    distance[order[:-1][again]] = (step[order[1:]] - step[order[:-1]])[again]
    return distance


def write_column(values: np.ndarray, path: Path, encoding: str, level: int) -> int:
    """Write one int32 column as one row group; return its compressed bytes."""
    dictionary = encoding == "DICTIONARY"
    pq.write_table(
        table({"value": values.astype(np.int32)}),
        path,
        compression="zstd",
        compression_level=level,
        use_dictionary=dictionary,
        column_encoding=None if dictionary else {"value": encoding},
        row_group_size=len(values),
        max_rows_per_page=1 << 30,
        write_page_checksum=True,
    )
    return pq.read_metadata(path).row_group(0).column(0).total_compressed_size


def bytes_per_entry(values: np.ndarray, path: Path) -> Mapping[str, float]:
    """Write a column in every encoding at each level of zstd."""
    return {
        f"{encoding} zstd{level}": round(
            write_column(values, path, encoding, level) / len(values), 3
        )
        for encoding in ENCODINGS
        for level in LEVELS
    }


def decode_times(rows_of_step: list[np.ndarray], path: Path) -> dict[str, float]:
    """Return nanoseconds per entry, file to row numbers, best of DECODE_CALLS, one thread."""
    offsets = np.concatenate([[0], np.cumsum([len(rows) for rows in rows_of_step])])
    expected = np.concatenate(rows_of_step)
    result = {}
    for label, stored in (("values", expected), ("gaps", gaps(rows_of_step))):
        for encoding in ("DELTA_BINARY_PACKED", "BYTE_STREAM_SPLIT"):
            write_column(stored, path, encoding, 3)
            taken, rows = [], expected
            for _ in range(DECODE_CALLS):
                start = time.perf_counter()
                rows = pq.read_table(path, use_threads=False)["value"].to_numpy()
                rows = from_gaps(rows, offsets) if label == "gaps" else rows
                taken.append(time.perf_counter() - start)
            assert np.array_equal(rows, expected), "access lists must survive storage"
            result[f"{label} {encoding}"] = round(min(taken) / len(expected) * 1e9, 2)
    return result


def oracle_table(log: Log, blocks: Blocks, folder: Path) -> dict[str, object]:
    """Measure access lists at one block, next-use distances at 2 and 8 blocks a step."""
    path = folder / "oracle.parquet"
    per_block = accesses(log, blocks, 1)
    result: dict[str, object] = {
        "num_entries": sum(map(len, per_block)),
        "num_rows": int(max(map(np.max, per_block))) + 1,
        "access_values": bytes_per_entry(np.concatenate(per_block), path),
        "access_gaps": bytes_per_entry(gaps(per_block), path),
        "decode_ns_per_entry": decode_times(per_block, path),
    }
    for blocks_per_step in (2, 8):
        distance = next_use(accesses(log, blocks, blocks_per_step))
        result[f"next_use_{blocks_per_step}_blocks"] = {
            "num_entries": len(distance),
            "never_share": round(float(np.mean(distance == 0)), 3),
            **bytes_per_entry(distance, path),
        }
    return result

"""Layout of a segment: the star schema against one Parquet file with nested columns.

`python -m benchmarks.layout [--json] [--rows N] [--rounds N] [--shared-data DIR]`

Measures bytes, reading to tensors, read calls, checksums and SQL of each layout, and the encodings
of the oracle's access lists and next-use distances. `ours` and `peer` are samples per second from
files to tensors with one thread, for the star schema and the faster nested layout.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from benchmarks.layout_files import (
    ENCODINGS,
    LAYOUTS,
    Blocks,
    Log,
    blocks_per_row_group,
    cut_blocks,
    demo_log,
    mind_log,
    table,
    write_layout,
)
from benchmarks.layout_read import CountingFile, Reader, open_reader, region
from benchmarks.logs import SHARED_DATA, write_result

GROUP_COLUMN = {"mind": "user_id", "demo": "user_country"}


def samples_query(layout: str, paths: Mapping[str, Path], groups: list[str], key: str) -> str:
    """Return a query of the mean label by a sample column."""
    if layout == "star":
        return f"select {key} k, avg(label) from read_parquet('{paths['samples']}') group by 1"
    return f"select s.{key} k, avg(s.label) from ({_nested(layout, paths, groups)}) group by 1"


def _nested(layout: str, paths: Mapping[str, Path], groups: list[str], kept: str = "") -> str:
    relation = f"read_parquet('{paths['nested']}')"
    if layout == "block_rows":
        return f"select block, unnest(samples) s from {relation}"
    kept = kept and kept + ", "
    parent = ""
    for child in [*groups[1:], "samples"]:
        relation = f"(select {kept}unnest({parent}{child}) s from {relation})"
        parent = "s."
    return f"select * from {relation}"


def join_query(layout: str, paths: Mapping[str, Path], groups: list[str], key: str) -> str:
    """Return a query of the mean label by a column of the coarsest group."""
    group = groups[0]
    if layout == "star":
        return (
            f"select g.{key} k, avg(s.label) from read_parquet('{paths['samples']}') s "
            f"join read_parquet('{paths[group]}') g "
            f"on s.block = g.block and s.{group}_inverse = g.unique_index group by 1"
        )
    if layout == "block_rows":
        return (
            f"select g.{key} k, avg(s.label) from ({_nested(layout, paths, groups)}) n "
            f'join (select block, unnest("{group}") g, generate_subscripts("{group}", 1) - 1 i '
            f"from read_parquet('{paths['nested']}')) u "
            f"on n.block = u.block and n.s.{group}_inverse = u.i group by 1"
        )
    return f"select {key} k, avg(s.label) from ({_nested(layout, paths, groups, key)}) group by 1"


def run_duckdb(query: str) -> tuple[dict[int, float], int]:
    """Run a query on two threads; return its groups and the bytes read by system calls."""
    with duckdb.connect(config={"threads": 2, "enable_external_file_cache": False}) as connection:
        before = _bytes_read()
        rows = connection.execute(query).fetchall()
        return {int(k): round(v, 9) for k, v in rows}, _bytes_read() - before


def _bytes_read() -> int:
    line = Path("/proc/self/io").read_text(encoding="ascii").splitlines()[0]
    return int(line.removeprefix("rchar:"))


def run_polars(layout: str, paths: Mapping[str, Path], groups: list[str], key: str):
    """Run the query by the sample column in Polars; return its groups."""
    if layout == "star":
        frame = pl.scan_parquet(paths["samples"])
    else:
        frame = pl.scan_parquet(paths["nested"])
        for name in ["samples"] if layout == "block_rows" else [*groups[1:], "samples"]:
            frame = frame.select(name).explode(name).unnest(name)
    rows = frame.group_by(key).agg(pl.col("label").mean()).collect()
    return dict(zip(rows[key].to_list(), rows["label"].round(9).to_list(), strict=True))


DECODE_CALLS = 9


def accesses(log: Log, blocks: Blocks, blocks_per_step: int) -> list[np.ndarray]:
    """Return the sorted unique dense rows of the items table in each step.

    Rows are numbered by first use: by block, then by raw id, so that the numbering does not depend
    on blocks_per_step.
    """
    raw = list(_item_ids(log, blocks, 1))
    ids, first = np.unique(np.concatenate(raw), return_index=True)
    dense = np.empty(len(ids), np.int64)
    dense[np.argsort(first)] = np.arange(len(ids))
    return [
        np.sort(dense[np.searchsorted(ids, rows)])
        for rows in _item_ids(log, blocks, blocks_per_step)
    ]


def _item_ids(log: Log, blocks: Blocks, blocks_per_step: int) -> Iterator[np.ndarray]:
    item = blocks.samples.column("item_id").to_numpy()
    lists = [
        (blocks.tuple_offsets[group], blocks.groups[group].column(name).combine_chunks())
        for name, group in log.item_lists.items()
    ]
    for first in range(0, blocks.num_blocks, blocks_per_step):
        last = min(first + blocks_per_step, blocks.num_blocks)
        used = [item[blocks.sample_offsets[first] : blocks.sample_offsets[last]]]
        for tuple_offsets, column in lists:
            offsets, values = column.offsets.to_numpy(), column.values.to_numpy()
            used.append(values[offsets[tuple_offsets[first]] : offsets[tuple_offsets[last]]])
        yield np.unique(np.concatenate(used))


def gaps(rows_of_step: list[np.ndarray]) -> np.ndarray:
    """Return the first row of each step followed by the differences."""
    return np.concatenate([np.diff(rows, prepend=0) for rows in rows_of_step])


def from_gaps(stored: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Undo `gaps`; offsets is (num_steps + 1,), and no step is empty."""
    total = np.cumsum(stored)
    base = np.concatenate([[0], total[offsets[1:-1] - 1]])
    return total - np.repeat(base, np.diff(offsets))


def next_use(rows_of_step: list[np.ndarray]) -> np.ndarray:
    """Return the number of steps to the next use of each (step, row) entry, 0 for never."""
    step = np.repeat(np.arange(len(rows_of_step)), [len(rows) for rows in rows_of_step])
    rows = np.concatenate(rows_of_step)
    order = np.lexsort((step, rows))
    has_next = rows[order][1:] == rows[order][:-1]
    distance = np.zeros(len(rows), np.int64)
    distance[order[:-1][has_next]] = (step[order[1:]] - step[order[:-1]])[has_next]
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
    """Return the bytes per entry of a column in every encoding and at each zstd level."""
    return {
        f"{encoding} zstd{level}": round(
            write_column(values, path, encoding, level) / len(values), 3
        )
        for encoding in ENCODINGS
        for level in LEVELS
    }


def decode_times(rows_of_step: list[np.ndarray], path: Path) -> dict[str, float]:
    """Return nanoseconds per entry from file to row numbers, best of DECODE_CALLS, one thread."""
    offsets = np.concatenate([[0], np.cumsum([len(rows) for rows in rows_of_step])])
    expected = np.concatenate(rows_of_step)
    result = {}
    for label, stored in (("values", expected), ("gaps", gaps(rows_of_step))):
        for encoding in ("DELTA_BINARY_PACKED", "BYTE_STREAM_SPLIT"):
            write_column(stored, path, encoding, 3)
            seconds_of_calls, rows = [], expected
            for _ in range(DECODE_CALLS):
                start = time.perf_counter()
                rows = pq.read_table(path, use_threads=False)["value"].to_numpy()
                rows = from_gaps(rows, offsets) if label == "gaps" else rows
                seconds_of_calls.append(time.perf_counter() - start)
            assert np.array_equal(rows, expected), "access lists must survive storage"
            result[f"{label} {encoding}"] = round(min(seconds_of_calls) / len(expected) * 1e9, 2)
    return result


def measure_oracle(log: Log, blocks: Blocks, folder: Path) -> dict[str, object]:
    """Measure access lists of single blocks, and next-use distances of 2 and 8 blocks a step."""
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


BLOCK_SAMPLES = 1_024
LEVELS = (3, 9, 1)
MIN_SEC = 0.2


def seconds_per_call(call: Callable[[], object]) -> float:
    """Return the mean wall seconds of a call, repeated for at least MIN_SEC."""
    calls, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < MIN_SEC:
        call()
        calls += 1
    return elapsed / calls


def alternate(sides: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Time all sides in each round, in an order that is rotated by one each round."""
    names = list(sides)
    times: dict[str, list[float]] = {name: [] for name in names}
    for call in sides.values():
        call()
    for number in range(rounds):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            times[name].append(seconds_per_call(sides[name]))
    return times


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return median, smallest and largest."""
    return {
        "median": round(statistics.median(values), 4),
        "min": round(min(values), 4),
        "max": round(max(values), 4),
    }


def ratios(times: Mapping[str, list[float]], ours: str, peer: str) -> list[float]:
    """Return peer seconds over our seconds in each round."""
    return [round(p / o, 3) for o, p in zip(times[ours], times[peer], strict=True)]


def check_equal(readers: Mapping[str, Reader]) -> None:
    """Assert that all layouts give the same tensors."""
    for batches in zip(*(reader.batches() for reader in readers.values()), strict=True):
        first = batches[0]
        for other in batches[1:]:
            for part, tensors in first.items():
                assert tensors.keys() == other[part].keys(), "layouts must have the same columns"
                for name, tensor in tensors.items():
                    assert torch.equal(tensor, other[part][name]), f"{part}.{name} differs"


def drain(reader: Reader, **options: Any) -> None:
    """Read every batch once."""
    for _ in reader.batches(**options):
        pass


def read_times(readers: Mapping[str, Reader], rounds: int) -> dict[str, dict[str, Any]]:
    """Time whole passes with one thread and with all, star against each nested layout."""
    result = {}
    for label, threads in (("one_thread", False), ("all_threads", True)):
        sides = {
            name: lambda r=reader, t=threads: drain(r, use_threads=t)
            for name, reader in readers.items()
        }
        times = alternate(sides, rounds)
        result[label] = {"sec": times} | {
            f"ratio_{peer}": spread(ratios(times, "star", peer)) for peer in LAYOUTS[1:]
        }
    return result


def read_counts(reader: Reader, num_samples: int) -> dict[str, dict[str, float]]:
    """Count read calls and bytes per million samples, without the reads of footers."""
    result = {}
    for label in ("plain", "pre_buffer", "row_group"):
        files: list[CountingFile] = []

        def source(path: Path, files: list[CountingFile] = files) -> CountingFile:
            files.append(CountingFile(path))
            return files[-1]

        def load(name: str, file: CountingFile, row_group: int) -> None:
            file.load(*region(reader.metadata[name], row_group))

        drain(
            reader,
            source=source,
            before=load if label == "row_group" else None,
            pre_buffer=label == "pre_buffer",
        )
        scale = 1e6 / num_samples
        result[label] = {
            "reads_per_million": round(sum(f.num_reads for f in files) * scale, 1),
            "bytes_per_million": round(sum(f.num_bytes for f in files) * scale),
        }
    return result


def checksum_times(reader: Reader, rounds: int) -> dict[str, Any]:
    """Time reads without checksums, with page checksums, with a crc32 per row group, and both."""

    def check(name: str, file: pa.MemoryMappedFile, row_group: int) -> None:
        start, stop = region(reader.metadata[name], row_group)
        file.seek(start)
        zlib.crc32(file.read_buffer(stop - start))

    modes = {"none": (False, None), "page": (True, None), "crc32": (False, check)}
    modes["both"] = (True, check)
    sides = {
        mode: lambda page=page, before=before: drain(
            reader,
            source=lambda path: pa.memory_map(str(path)),
            checksum=page,
            before=before,
            use_threads=False,
        )
        for mode, (page, before) in modes.items()
    }
    times = alternate(sides, rounds)
    return {"sec": {mode: spread(of_mode) for mode, of_mode in times.items()}} | {
        f"cost_{mode}": spread(ratios(times, "none", mode)) for mode in modes if mode != "none"
    }


def sql_times(readers: Mapping[str, Reader], log: Log, rounds: int) -> dict[str, Any]:
    """Time SQL on sample columns and on a group column; all layouts must give the same answer."""
    groups, paths = list(log.groups), {name: reader.paths for name, reader in readers.items()}
    result: dict[str, Any] = {}
    for label, query, key in (
        ("duckdb_samples", samples_query, log.group_by),
        ("duckdb_group_column", join_query, GROUP_COLUMN[log.name]),
    ):
        queries = {name: query(name, paths[name], groups, key) for name in LAYOUTS}
        answers = {name: run_duckdb(sql) for name, sql in queries.items()}
        assert all(answer == answers["star"][0] for answer, _ in answers.values()), label
        times = alternate({n: lambda q=sql: run_duckdb(q) for n, sql in queries.items()}, rounds)
        result[label] = {
            name: {
                "bytes_read": answers[name][1],
                "ms": spread([1e3 * t for t in times[name]]),
                "ratio": spread(ratios(times, "star", name)),
            }
            for name in LAYOUTS
        }
    sides = {n: lambda n=n: run_polars(n, paths[n], groups, log.group_by) for n in LAYOUTS}
    answers = {name: side() for name, side in sides.items()}
    assert all(answer == answers["star"] for answer in answers.values()), "polars"
    times = alternate(sides, rounds)
    result["polars_samples"] = {
        name: {"ms": spread([1e3 * t for t in times[name]])} for name in LAYOUTS
    }
    return result


def measure(log: Log, folder: Path, rounds: int) -> dict[str, Any]:
    """Measure all layouts of one log."""
    blocks: Blocks = cut_blocks(log, BLOCK_SAMPLES)
    step = blocks_per_row_group(blocks)
    num_samples = log.samples.num_rows
    sizes, encodings, readers = {}, {}, {}
    for layout in LAYOUTS:
        for level in LEVELS:
            paths, chosen = write_layout(layout, blocks, folder, level)
            total = sum(path.stat().st_size for path in paths.values())
            sizes.setdefault(layout, {})[f"zstd{level}"] = total
            if level == LEVELS[0]:
                readers[layout] = open_reader(layout, paths, blocks, step)
                encodings[layout] = {
                    name: {"page_bytes": encoding.page_bytes} | dict(encoding.encodings)
                    for name, encoding in chosen.items()
                }
    check_equal(readers)
    return {
        "num_samples": num_samples,
        "num_tuples": {name: rows.num_rows for name, rows in blocks.groups.items()},
        "num_row_groups": -(-blocks.num_blocks // step),
        "bytes": sizes,
        "encodings": encodings,
        "read": read_times(readers, rounds),
        "reads": {name: read_counts(reader, num_samples) for name, reader in readers.items()},
        "checksums": checksum_times(readers["star"], rounds),
        "sql": sql_times(readers, log, rounds),
        "oracle": measure_oracle(log, blocks, folder),
    }


def headline(details: Mapping[str, dict]) -> dict[str, Any]:
    """Return star against the faster nested layout, one thread, on the last log."""
    name = list(details)[-1]
    times = details[name]["read"]["one_thread"]["sec"]
    peer = min(LAYOUTS[1:], key=lambda layout: statistics.median(times[layout]))
    rounds = ratios(times, "star", peer)
    num_samples = details[name]["num_samples"]
    return {
        "ours": round(num_samples / statistics.median(times["star"])),
        "peer": round(num_samples / statistics.median(times[peer])),
        "ratio": round(statistics.median(rounds), 3),
        "unit": f"samples/s, files to tensors, {name}, star against {peer}, one thread",
        "rounds": rounds,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print the result."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.layout", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object on one line")
    parser.add_argument("--rows", type=int, default=200_000, help="samples of the generated log")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--shared-data", type=Path, default=SHARED_DATA)
    options = parser.parse_args(argv)
    # Tensors over Arrow buffers are read-only; the benchmark does not write to them.
    warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
    details: dict[str, dict] = {}
    with tempfile.TemporaryDirectory() as folder:
        if (options.shared_data / "mind" / "behaviors.tsv").exists():
            log = mind_log(options.shared_data / "mind")
            details["mind"] = measure(log, Path(folder), options.rounds)
        else:
            sys.stderr.write(f"skipped mind, no behaviors.tsv in {options.shared_data}/mind\n")
        log = demo_log(options.rows)
        details["demo"] = measure(log, Path(folder), options.rounds)
    write_result(headline(details) | {"details": details}, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Measure the star schema against one Parquet file with nested columns.

`python -m benchmarks.layout [--json] [--rows N] [--rounds N] [--shared-data DIR]`
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch

from benchmarks.layout_files import LAYOUTS, blocks_per_row_group, write_layout
from benchmarks.layout_log import Blocks, Log, cut_blocks, demo_log, mind_log
from benchmarks.layout_oracle import oracle_table
from benchmarks.layout_read import CountingFile, Reader, open_reader, region
from benchmarks.layout_sql import GROUP_COLUMN, join_query, run_duckdb, run_polars, samples_query

BLOCK_SAMPLES = 1_024
LEVELS = (3, 9, 1)
MIN_SEC = 0.2
SHARED_DATA = Path(__file__).parents[2] / "shared" / "data"


def seconds(work: Callable[[], object]) -> float:
    """Return the mean wall seconds of a call, repeated for at least MIN_SEC."""
    calls, start = 0, time.perf_counter()
    while (spent := time.perf_counter() - start) < MIN_SEC:
        work()
        calls += 1
    return spent / calls


def alternate(sides: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Time all sides in each round, in an order that turns by one each round."""
    names = list(sides)
    taken: dict[str, list[float]] = {name: [] for name in names}
    for work in sides.values():
        work()
    for number in range(rounds):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            taken[name].append(seconds(sides[name]))
    return taken


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return median, smallest and largest."""
    return {
        "median": round(statistics.median(values), 4),
        "min": round(min(values), 4),
        "max": round(max(values), 4),
    }


def ratios(taken: Mapping[str, list[float]], ours: str, peer: str) -> list[float]:
    """Return peer seconds over our seconds in each round."""
    return [round(p / o, 3) for o, p in zip(taken[ours], taken[peer], strict=True)]


def check_equal(readers: Mapping[str, Reader]) -> None:
    """Refuse to time layouts that do not give the same tensors."""
    for batches in zip(*(reader.batches() for reader in readers.values()), strict=True):
        first = batches[0]
        for other in batches[1:]:
            for part, tensors in first.items():
                assert tensors.keys() == other[part].keys(), "layouts must give the same columns"
                for name, tensor in tensors.items():
                    assert torch.equal(tensor, other[part][name]), f"{part}.{name} differs"


def drain(reader: Reader, **options: Any) -> None:
    """Read every batch once."""
    for _ in reader.batches(**options):
        pass


def read_times(readers: Mapping[str, Reader], rounds: int) -> dict[str, dict[str, Any]]:
    """Time whole passes, by one thread and by all, star against each nested layout."""
    result = {}
    for label, threads in (("one_thread", False), ("all_threads", True)):
        sides = {
            name: lambda r=reader, t=threads: drain(r, use_threads=t)
            for name, reader in readers.items()
        }
        taken = alternate(sides, rounds)
        result[label] = {"sec": taken} | {
            f"ratio_{peer}": spread(ratios(taken, "star", peer)) for peer in LAYOUTS[1:]
        }
    return result


def read_counts(reader: Reader, num_samples: int) -> dict[str, dict[str, float]]:
    """Count read calls and bytes per million samples, footers known."""
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
    """Time no check, page checksums, one crc32 per row group, and both."""

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
    taken = alternate(sides, rounds)
    return {"sec": {mode: spread(times) for mode, times in taken.items()}} | {
        f"cost_{mode}": spread(ratios(taken, "none", mode)) for mode in modes if mode != "none"
    }


def sql_times(readers: Mapping[str, Reader], log: Log, rounds: int) -> dict[str, Any]:
    """Time SQL on sample columns and on a group column, and check the answers agree."""
    groups, paths = list(log.groups), {name: reader.paths for name, reader in readers.items()}
    result: dict[str, Any] = {}
    for label, query, key in (
        ("duckdb_samples", samples_query, log.group_by),
        ("duckdb_group_column", join_query, GROUP_COLUMN[log.name]),
    ):
        queries = {name: query(name, paths[name], groups, key) for name in LAYOUTS}
        answers = {name: run_duckdb(sql) for name, sql in queries.items()}
        assert all(answer == answers["star"][0] for answer, _ in answers.values()), label
        taken = alternate({n: lambda q=sql: run_duckdb(q) for n, sql in queries.items()}, rounds)
        result[label] = {
            name: {
                "bytes_read": answers[name][1],
                "ms": spread([1e3 * t for t in taken[name]]),
                "ratio": spread(ratios(taken, "star", name)),
            }
            for name in LAYOUTS
        }
    sides = {n: lambda n=n: run_polars(n, paths[n], groups, log.group_by) for n in LAYOUTS}
    answers = {name: side() for name, side in sides.items()}
    assert all(answer == answers["star"] for answer in answers.values()), "polars"
    taken = alternate(sides, rounds)
    result["polars_samples"] = {
        name: {"ms": spread([1e3 * t for t in taken[name]])} for name in LAYOUTS
    }
    return result


def measure(log: Log, folder: Path, rounds: int) -> dict[str, Any]:
    """Measure everything on one log."""
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
                    name: {"page_bytes": writing.page_bytes} | dict(writing.encodings)
                    for name, writing in chosen.items()
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
        "oracle": oracle_table(log, blocks, folder),
    }


def headline(details: Mapping[str, dict]) -> dict[str, Any]:
    """Return star against the faster nested layout, one thread, on the last log."""
    name = list(details)[-1]
    taken = details[name]["read"]["one_thread"]["sec"]
    peer = min(LAYOUTS[1:], key=lambda layout: statistics.median(taken[layout]))
    rounds = ratios(taken, "star", peer)
    num_samples = details[name]["num_samples"]
    return {
        "ours": round(num_samples / statistics.median(taken["star"])),
        "peer": round(num_samples / statistics.median(taken[peer])),
        "ratio": round(statistics.median(rounds), 3),
        "unit": f"samples/s, files to tensors, {name}, star against {peer}, one thread",
        "rounds": rounds,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print it."""
    parser = argparse.ArgumentParser(prog="benchmarks.layout", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object on one line")
    parser.add_argument("--rows", type=int, default=200_000, help="samples of the generated log")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--shared-data", type=Path, default=SHARED_DATA)
    options = parser.parse_args(argv)
    # Tensors over Arrow buffers are read-only, and nothing here writes to them.
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
    result = headline(details) | {"details": details}
    sys.stdout.write(json.dumps(result, indent=None if options.json else 2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Transforms per unique tuple, against the same transforms per sample.

`python -m benchmarks.preprocess [--json] [--datasets NAME,NAME] [--rounds N] [--shared-data DIR]`

Each log is built by its shipped job. Both sides then run the same code on Arrow tables in memory,
part by part as in a build: ours on the unique tuples of each group, the peer on the same columns
with one row per sample. Columns outside of groups are transformed per sample on both sides. The
expansion of the peer's input is not measured.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from benchmarks.logs import LOGS, build_dataset, each_log, job_path, log_parser, write_result
from pipelines.transforms.apply import apply_transforms
from schemas.config.job import SAMPLES, DataConfig
from schemas.dataset.fitted import FittedValues, load_fitted
from schemas.dataset.group_files import read_group
from schemas.dataset.opened import Dataset, open_dataset
from schemas.dataset.samples import read_joined_row_group, row_groups

HEADLINE = "mind"
ROUND_SEC = 0.5
"""Minimum time of a side in a round, since a pass over a small log takes milliseconds."""

Tables = Mapping[str, Sequence[pa.Table]]
"""Group (or `samples`) -> one table of its original columns per part."""


def sides(dataset: Dataset) -> tuple[Tables, Tables]:
    """Return the inputs of the transforms as unique tuples, and as one row per sample."""
    data = dataset.job.data
    ours: dict[str, list[pa.Table]] = {name: [] for name in data.transforms}
    peer: dict[str, list[pa.Table]] = {name: [] for name in data.transforms}
    for segment in dataset.segments:
        for file_index in sorted(set(segment.column("file").tolist())):
            groups = [group for group in row_groups(segment) if group[0] == file_index]
            expanded = pa.concat_tables([read_joined_row_group(segment, *g, data) for g in groups])
            for name in data.transforms:
                columns = inputs_of(name, expanded, data)
                rows = expanded.select(columns).combine_chunks()
                peer[name].append(rows)
                if name == SAMPLES:
                    ours[name].append(rows)
                    continue
                stored = [read_group(segment.file, name, *group) for group in groups]
                ours[name].append(pa.concat_tables(stored).select(columns).combine_chunks())
    return ours, peer


def inputs_of(group: str, expanded: pa.Table, data: DataConfig) -> list[str]:
    """Return the original columns that a group's transforms may read."""
    if group != SAMPLES:
        return list(data.groups[group])
    excluded = data.derived_columns | data.group_of_column.keys()
    return [c for c in expanded.column_names if c not in excluded]


def apply_all(tables: Tables, data: DataConfig, fitted: FittedValues) -> dict[str, float]:
    """Apply the transforms to every part; return the seconds of each group."""
    seconds: dict[str, float] = {}
    for name, parts in tables.items():
        start = time.perf_counter()
        for table in parts:
            apply_transforms(table, name, data.transforms[name], fitted)
        seconds[name] = time.perf_counter() - start
    return seconds


def run_round(tables: Tables, data: DataConfig, fitted: FittedValues) -> dict[str, float]:
    """Apply the transforms repeatedly for `ROUND_SEC`; return each group's seconds per pass."""
    passes: list[dict[str, float]] = []
    start = time.perf_counter()
    while time.perf_counter() - start < ROUND_SEC:
        passes.append(apply_all(tables, data, fitted))
    return {name: statistics.mean(p[name] for p in passes) for name in tables}


def ratio_of_long_parts(
    tuples: Tables, samples: Tables, data: DataConfig, fitted: FittedValues
) -> float:
    """Return the ratio with parts four times as long, which reduces the fixed cost of calls."""
    seconds = [
        sum(
            run_round(
                {n: [pa.concat_tables([*p] * 4)] for n, p in side.items()}, data, fitted
            ).values()
        )
        for side in (tuples, samples)
    ]
    return seconds[1] / seconds[0]


def measure(dataset: Dataset, rounds: int) -> dict[str, Any]:
    """Measure both sides in alternating order.

    Args:
        dataset: built by its job.
        rounds: runs of each side after one warm-up run.
    """
    data = dataset.job.data
    fitted = load_fitted(dataset.directory, dataset.segments[-1].manifest.fitted, data)
    tuples, samples = sides(dataset)
    tables = {"ours": tuples, "peer": samples}
    seconds: dict[str, list[dict[str, float]]] = {"ours": [], "peer": []}
    for number in range(rounds + 1):
        for side in ("ours", "peer") if number % 2 else ("peer", "ours"):
            by_group = run_round(tables[side], data, fitted)
            if number:
                seconds[side].append(by_group)
    totals = {side: [sum(s.values()) for s in of_side] for side, of_side in seconds.items()}
    num_samples = sum(s.manifest.num_samples for s in dataset.segments)
    ratios = [b / a for a, b in zip(totals["ours"], totals["peer"], strict=True)]
    return {
        "num_samples": num_samples,
        "ours": round(num_samples / statistics.median(totals["ours"]), 1),
        "peer": round(num_samples / statistics.median(totals["peer"]), 1),
        "ratio": round(statistics.median(ratios), 3),
        "rounds": [round(r, 3) for r in ratios],
        "ratio_of_four_times_the_rows": round(
            ratio_of_long_parts(tuples, samples, data, fitted), 3
        ),
        "groups": {
            name: {
                "transforms": len(data.transforms[name]),
                "rows": sum(t.num_rows for t in tuples[name]),
                "dedup_factor": round(num_samples / sum(t.num_rows for t in tuples[name]), 3),
                **{
                    f"{side}_sec": round(statistics.median(s[name] for s in of_side), 5)
                    for side, of_side in seconds.items()
                },
            }
            for name in data.transforms
        },
    }


def details(name: str, log: Path, rounds: int, scratch: Path) -> dict[str, Any]:
    """Build one log and measure its transforms."""
    dataset = build_dataset(job_path(name), log, scratch / "dataset")
    return measure(open_dataset(dataset), rounds)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print the result."""
    parser = log_parser("preprocess", __doc__, LOGS)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(argv)
    by_log: dict[str, dict[str, Any]] = {}
    for name, log, scratch in each_log(options):
        by_log[name] = details(name, log, options.rounds, scratch)
        sys.stderr.write(f"{name}: {by_log[name]['ratio']}\n")
    first = HEADLINE if HEADLINE in by_log else next(iter(by_log))
    head = {key: by_log[first][key] for key in ("ours", "peer", "ratio", "rounds")}
    result = {
        **head,
        "unit": f"samples/s, {first}, transforms per unique tuple against per sample",
        "details": by_log,
    }
    write_result(result, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())

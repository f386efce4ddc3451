"""Transforms per unique tuple, against the same transforms per sample.

Each log is built by its shipped job. Both sides then run the same code on Arrow tables in memory,
part by part as in a build: ours on the unique tuples of each group, the peer on the same columns
with one row per sample. Columns outside of groups are transformed per sample on both sides. The
expansion of the peer's input is not measured.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from benchmarks.common.harness import Options, alternate, compared, headline, medians, report
from benchmarks.common.logs import LOGS, build_dataset, each_log, job_path
from presage.pipelines.transforms.apply import apply_transforms
from presage.schemas.config.job import SAMPLES, DataConfig
from presage.schemas.dataset.fitted import FittedValues, load_fitted
from presage.schemas.dataset.group_files import read_group
from presage.schemas.dataset.opened import OpenDataset, open_dataset
from presage.schemas.dataset.samples import read_joined_row_group, row_groups

ROUND_SEC = 0.5
"""Minimum time of a side in a round, since a pass over a small log takes milliseconds."""

Tables = Mapping[str, Sequence[pa.Table]]
"""Group (or `samples`) -> one table of its original columns per part."""


def sides(dataset: OpenDataset) -> tuple[Tables, Tables]:
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


def measure_dataset(dataset: OpenDataset, rounds: int) -> dict[str, Any]:
    """Measure both sides, after one warm-up round."""
    data = dataset.job.data
    fitted = load_fitted(dataset.directory, dataset.segments[-1].manifest.fitted, data)
    tuples, samples = sides(dataset)
    seconds = alternate(
        {
            "ours": lambda: run_round(tuples, data, fitted),
            "peer": lambda: run_round(samples, data, fitted),
        },
        rounds,
        warm_up=1,
    )
    num_samples = sum(s.manifest.num_samples for s in dataset.segments)
    rates = {
        side: [num_samples / sum(by_group.values()) for by_group in of_side]
        for side, of_side in seconds.items()
    }
    rows = {name: sum(t.num_rows for t in tuples[name]) for name in data.transforms}
    return compared(
        rates["ours"],
        rates["peer"],
        "samples/s, transforms per unique tuple against per sample",
        higher=True,
        num_samples=num_samples,
        groups={
            name: {
                "transforms": len(data.transforms[name]),
                "rows": rows[name],
                "dedup_factor": round(num_samples / rows[name], 3),
                **{f"{side}_sec": medians(of_side)[name] for side, of_side in seconds.items()},
            }
            for name in data.transforms
        },
    )


def measure(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Build each log and measure its transforms; the result is the first."""
    by_log: dict[str, Any] = {}
    for name, log, folder in each_log(options, scratch):
        dataset = open_dataset(build_dataset(job_path(name), log, folder / "dataset"))
        by_log[name] = measure_dataset(dataset, options.rounds)
        report(name, by_log[name]["ratio"])
    return headline(by_log)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print the result."""
    options = Options("preprocess", __doc__, rounds=5)
    options.add_logs([*LOGS])
    return options.run(measure, argv)


if __name__ == "__main__":
    sys.exit(main())

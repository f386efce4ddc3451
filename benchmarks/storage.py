"""Bytes of datasets against the same rows as zstd Parquet, in three orders.

`python -m benchmarks.storage [--json] [--datasets NAME,NAME] [--groups named|auto] [--rounds N]
[--shared-data DIR]`

Each log is built by its job: the shipped ones, and synthetic logs of clickouts in which little
repeats (`logs.py`); `--groups auto` replaces the groups of the job by `groups: auto`. A peer holds
the expanded rows, with all columns of the job's SQL, in one file: shuffled, in time order, or
clustered by session (in the order of the dataset, of session keys, or of the times of sessions),
each with pyarrow's defaults, with encodings from the same trial as in a build, and by DuckDB. All
sides use zstd 3. `ours` is samples and groups
without derived columns (from transforms), which the peers do not have; derived columns and the
oracle are reported separately.

`folder` is every file of the dataset except the oracle (`access/`, `edges/`, `index-*`), including
statistics, manifests, job and schema. `limit` is 1.02 times the clustered file with the best
encodings plus 64 kB. It is compared with the same columns on both sides: without derived columns,
and with them (`clustered with made columns`). Bytes do not depend on the machine; each round
shuffles with another seed.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from benchmarks.logs import (
    LOGS,
    SYNTHETIC_LOGS,
    build_job,
    each_log,
    job_path,
    log_parser,
    with_auto,
    write_result,
)
from pipelines.clustering.storage_layout import COMPRESSION_LEVEL as LEVEL
from pipelines.report.sizes import (
    bytes_by_table,
    dataset_bytes,
    derived_bytes,
    flat_rows,
    folder_bytes,
    oracle_bytes,
    shuffled,
    time_ordered,
    write_best,
    write_flat,
)
from schemas.dataset.opened import Dataset, open_dataset
from schemas.dataset.samples import column_names

LIMIT_RATIO, LIMIT_BYTES = 1.02, 64_000
"""Limit for a dataset without its oracle, relative to the best clustered file."""
HEADLINE = "mind"


def write_duckdb(table: pa.Table, path: Path) -> int:
    """Write rows by DuckDB with the newer encodings, and return the bytes."""
    options = f"FORMAT parquet, PARQUET_VERSION v2, COMPRESSION zstd, COMPRESSION_LEVEL {LEVEL}"
    with duckdb.connect() as connection:
        connection.register("rows", table)
        connection.execute(f"COPY rows TO '{path}' ({options})")
    return path.stat().st_size


ENCODINGS: Mapping[str, Callable[[pa.Table, Path], int]] = {
    "default": write_flat,
    "best": write_best,
    "duckdb": write_duckdb,
}


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of one dataset.

    Attributes:
        ours: samples and groups, without derived columns.
        transforms: derived columns.
        folder: every file of the dataset except the oracle, with derived columns.
        dedup_factor: values of the plain rows over stored values; a list counts as one.
        oracle: access lists, edges and indexes.
        tables: samples and each group, with derived columns.
        peers: `order, encodings` -> bytes; shuffled peers are those of the first round.
        made_peers: `encodings` -> bytes of the clustered rows with derived columns.
        shuffles: `encodings` -> bytes of the shuffled rows in each round.
    """

    ours: int
    transforms: int
    folder: int
    dedup_factor: float
    oracle: int
    tables: Mapping[str, int]
    peers: Mapping[str, int]
    made_peers: Mapping[str, int]
    shuffles: Mapping[str, Sequence[int]]

    def ratios(self) -> dict[str, float]:
        """Return peer bytes over ours for each peer."""
        return {name: round(size / self.ours, 3) for name, size in self.peers.items()}

    def folder_against(self) -> dict[str, float | str]:
        """Compare the whole folder with clustered files of the same columns."""
        columns, best = self.folder - self.transforms, self.peers["clustered, best"]
        clustered = {p: n for p, n in self.peers.items() if p.startswith(("clustered", "by "))}
        smallest = min(clustered, key=clustered.__getitem__)
        return {
            "smallest_clustered": smallest,
            "ours_over_smallest_clustered": round(self.ours / clustered[smallest], 3),
            "ours_of_limit": round(self.ours / limit_of(clustered[smallest]), 3),
            "dedup_factor": round(self.dedup_factor, 2),
            "folder": self.folder,
            "folder_without_made": columns,
            "over_best": round(columns / best, 3),
            "of_limit": round(columns / limit_of(best), 3),
            "default_over_folder": round(self.peers["clustered, default"] / columns, 3),
            "over_best_with_made": round(self.folder / self.made_peers["best"], 3),
            "of_limit_with_made": round(self.folder / limit_of(self.made_peers["best"]), 3),
            "default_over_folder_with_made": round(self.made_peers["default"] / self.folder, 3),
            "over_best_made_on_our_side_only": round(self.folder / best, 3),
        }


def limit_of(best: int) -> float:
    """Return the limit for a dataset without its oracle, from the bytes of the best peer."""
    return LIMIT_RATIO * best + LIMIT_BYTES


def by_session(table: pa.Table, session: str, time: str) -> dict[str, pa.Table]:
    """Return the rows clustered by session: by session key, and by first time of the session."""
    key = np.unique(table[session].to_numpy(), return_inverse=True)[1]
    times = pc.cast(table[time], pa.int64()).to_numpy()
    order = np.lexsort((times, key))
    starts = np.flatnonzero(np.diff(key[order], prepend=-1))
    first = np.repeat(times[order][starts], np.diff(starts, append=len(key)))
    by_time = order[np.lexsort((np.arange(len(key)), key[order], first))]
    rows = {"by session key": order, "by time of session": by_time}
    return {name: table.take(pa.array(each)) for name, each in rows.items()}


def dedup_factor(dataset: Dataset) -> float:
    """Return the values of the plain rows over stored values; a list counts as one."""
    derived, data = set(dataset.job.data.derived_columns), dataset.job.data
    plain = stored = 0
    for segment in dataset.segments:
        manifest = segment.manifest
        for name in set(manifest.columns) - derived:
            group = data.group_of_column.get(name)
            plain += manifest.num_samples
            stored += manifest.groups[group].num_unique if group else manifest.num_samples
    return plain / stored


def measure(dataset: Dataset, rounds: int, scratch: Path) -> Sizes:
    """Write every peer of a dataset and return all sizes."""
    rows = flat_rows(dataset)
    assert rows.share == 1, "the benchmark writes all rows of its logs"
    clustered = rows.read(column_names(dataset, model_inputs=False))
    path = scratch / "peer.parquet"
    peers: dict[str, int] = {}
    shuffles: dict[str, list[int]] = {encodings: [] for encodings in ENCODINGS}
    for seed in range(rounds):
        table = shuffled(clustered, seed)
        for encodings, write in ENCODINGS.items():
            shuffles[encodings].append(write(table, path))
    session = dataset.job.data.session
    orders = {
        "time-ordered": time_ordered(clustered, session.time),
        "clustered": clustered,
        **by_session(clustered, session.key, session.time),
    }
    for order, table in orders.items():
        peers |= {f"{order}, {e}": write(table, path) for e, write in ENCODINGS.items()}
    with_derived = rows.read(column_names(dataset, model_inputs=True))
    derived = derived_bytes(dataset)
    return Sizes(
        ours=dataset_bytes(dataset) - derived,
        transforms=derived,
        folder=folder_bytes(dataset),
        dedup_factor=dedup_factor(dataset),
        oracle=oracle_bytes(dataset),
        tables=bytes_by_table(dataset),
        peers={f"shuffled, {e}": sizes[0] for e, sizes in shuffles.items()} | peers,
        made_peers={e: write(with_derived, path) for e, write in ENCODINGS.items()},
        shuffles=shuffles,
    )


def details(
    name: str, log: Path, rounds: int, scratch: Path, *, auto: bool = False
) -> dict[str, Any]:
    """Build one log, with `groups: auto` if `auto`, and measure it."""
    start = time.perf_counter()
    job = job_path(name, scratch)
    built = build_job(with_auto(job, scratch) if auto else job, log, scratch / "dataset")
    seconds = time.perf_counter() - start
    sizes = measure(open_dataset(scratch / "dataset"), rounds, scratch)
    best = min(sizes.peers, key=lambda peer: sizes.peers[peer])
    return {
        "num_samples": built["num_samples"],
        "build_sec": round(seconds, 2),
        "groups": built["groups"],
        "ours": sizes.ours,
        "transforms": sizes.transforms,
        "oracle": sizes.oracle,
        "tables": sizes.tables,
        "peers": sizes.peers,
        "ratios": sizes.ratios(),
        "clustered with made columns": sizes.made_peers,
        "whole": sizes.folder_against(),
        "ratio_with_transforms": {
            name: round(size / (sizes.ours + sizes.transforms), 3)
            for name, size in sizes.peers.items()
        },
        "smallest_peer": best,
        "rounds_shuffled": {
            encodings: [round(size / sizes.ours, 3) for size in each]
            for encodings, each in sizes.shuffles.items()
        },
    }


def headline(by_log: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Return MIND, or else the first log, against shuffled Parquet with pyarrow's defaults."""
    name = HEADLINE if HEADLINE in by_log else next(iter(by_log))
    rounds = by_log[name]["rounds_shuffled"]["default"]
    return {
        "ours": by_log[name]["ours"],
        "peer": by_log[name]["peers"]["shuffled, default"],
        "ratio": round(statistics.median(rounds), 3),
        "unit": f"bytes, {name}, samples and groups against shuffled zstd Parquet",
        "rounds": rounds,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print the result."""
    parser = log_parser("storage", __doc__, [*LOGS, *SYNTHETIC_LOGS])
    parser.add_argument("--groups", choices=("named", "auto"), default="named")
    parser.add_argument("--rounds", type=int, default=3, help="shuffles")
    options = parser.parse_args(argv)
    by_log: dict[str, dict[str, Any]] = {}
    for name, log, scratch in each_log(options):
        auto = options.groups == "auto"
        by_log[name] = details(name, log, options.rounds, scratch, auto=auto)
        sys.stderr.write(f"{name}: {by_log[name]['ratios']} {by_log[name]['whole']}\n")
    write_result(headline(by_log) | {"details": by_log}, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())

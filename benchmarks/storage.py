"""Bytes of datasets against the same rows as zstd Parquet, in three orders.

`logs`: each log is built by its job: the shipped ones, and synthetic logs of clickouts in which
little repeats. A peer holds the expanded rows, with all columns of the job's SQL, in one file:
shuffled, in time order, or clustered by session (in the order of the dataset, of session keys, or
of the times of sessions), each with pyarrow's defaults, with encodings from the same trial as in a
build, and by DuckDB. All sides use zstd 3. `ours` is samples and groups without derived columns
(from transforms), which the peers do not have; derived columns and the oracle are reported
separately. `folder` is every file of the dataset except the oracle (`access/`, `edges/`,
`index-*`), including statistics, manifests, job and schema. `limit` is 1.02 times the clustered
file with the best encodings plus 64 kB. It is compared with the same columns on both sides: without
derived columns, and with them. `auto` are the figures of the same job with `groups: auto`: bytes of
samples and groups, and the values that a reader decodes and looks up, stored lists counted by
entry. `requests` are those of a pass over a million samples, one for each row group of each table.

`shapes`: each synthetic table of `common/shapes.py` is rewritten as a star schema (`star`: groups
chosen), as plain files (`flat`), and built with all columns in one group (`together`) and with a
group for each column (`apart`), which are bad choices for most logs. The peer is the smallest file
of the same rows in any of these orders and encodings, or as they are; figures are bytes over the
limit, of samples and groups and of every file but the oracle's (`folder`).

Bytes do not depend on the machine; each round shuffles with another seed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from benchmarks.common.clickouts import CLICKOUTS
from benchmarks.common.harness import Options, compared, report
from benchmarks.common.logs import (
    LOGS,
    build_job,
    each_log,
    job_path,
    read_job,
    with_auto,
    write_job_file,
)
from benchmarks.common.shapes import SHAPES
from presage.pipelines.clustering.storage_layout import COMPRESSION_LEVEL as LEVEL
from presage.pipelines.report.sizes import (
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
from presage.pipelines.rewrite.input import inspect_rows
from presage.pipelines.rewrite.rewrite import RewriteRequest, rewrite
from presage.pipelines.sources.raw_rows import folder_of
from presage.schemas.config.job import MAX_GROUPS
from presage.schemas.dataset.opened import OpenDataset, open_dataset
from presage.schemas.dataset.samples import column_names
from presage.schemas.errors import SchemaError
from presage.schemas.layout import DATA_DIRECTORIES
from presage.schemas.storage.location import Location

LIMIT_RATIO, LIMIT_BYTES = 1.02, 64_000
"""Limit for a dataset without its oracle, relative to the best clustered file."""


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
        peers: `order, encodings` -> bytes; shuffled peers are those of the first round.
        made_peers: `encodings` -> bytes of the clustered rows with derived columns.
        shuffles: `encodings` -> bytes of the shuffled rows in each round.
    """

    ours: int
    transforms: int
    folder: int
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
            "ours_of_limit": round(self.ours / limit_of(clustered[smallest]), 3),
            "folder": self.folder,
            "folder_without_made": columns,
            "over_best": round(columns / best, 3),
            "of_limit": round(columns / limit_of(best), 3),
            "default_over_folder": round(self.peers["clustered, default"] / columns, 3),
            "over_best_with_made": round(self.folder / self.made_peers["best"], 3),
            "of_limit_with_made": round(self.folder / limit_of(self.made_peers["best"]), 3),
            "default_over_folder_with_made": round(self.made_peers["default"] / self.folder, 3),
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


def dedup_factor(dataset: OpenDataset) -> float:
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


def requests_per_million(dataset: OpenDataset) -> float:
    """Return the requests of a pass over a million samples: one a row group of each table."""
    num_requests = num_samples = 0
    for segment in dataset.segments:
        num_samples += segment.manifest.num_samples
        for path in segment.files:
            if path.startswith(tuple(DATA_DIRECTORIES)):
                num_requests += segment.file(path).metadata.num_row_groups
    return round(1e6 * num_requests / num_samples, 1)


def num_values(dataset: OpenDataset) -> int:
    """Return the stored values that a reader decodes and looks up, lists counted by entry."""
    values, data = 0, dataset.job.data
    for segment in dataset.segments:
        manifest = segment.manifest
        own = [name for name in manifest.columns if name not in data.group_of_column]
        values += len(own) * manifest.num_samples
        for name, group in manifest.groups.items():
            values += len(data.groups[name]) * group.num_unique + group.num_values_dedup
            values += manifest.num_samples  # the inverse index
    return values


def measure_dataset(dataset: OpenDataset, rounds: int, scratch: Path) -> Sizes:
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
        peers={f"shuffled, {e}": sizes[0] for e, sizes in shuffles.items()} | peers,
        made_peers={e: write(with_derived, path) for e, write in ENCODINGS.items()},
        shuffles=shuffles,
    )


def measure_log(name: str, log: Path, rounds: int, scratch: Path) -> dict[str, Any]:
    """Build one log, also with `groups: auto`, and measure it."""
    job = job_path(name, scratch)
    built = build_job(job, log, scratch / "dataset")
    build_job(with_auto(job, scratch), log, scratch / "auto-dataset")
    dataset, auto = open_dataset(scratch / "dataset"), open_dataset(scratch / "auto-dataset")
    sizes = measure_dataset(dataset, rounds, scratch)
    auto_bytes = dataset_bytes(auto)
    return compared(
        [sizes.ours] * rounds,
        sizes.shuffles["default"],
        "bytes, samples and groups against shuffled zstd Parquet",
        num_samples=built["num_samples"],
        transforms=sizes.transforms,
        oracle=oracle_bytes(dataset),
        tables=bytes_by_table(dataset),
        peers=sizes.peers,
        ratios=sizes.ratios(),
        made_peers=sizes.made_peers,
        whole=sizes.folder_against(),
        dedup_factor=round(dedup_factor(dataset), 2),
        requests=requests_per_million(dataset),
        groups=built["groups"],
        auto={
            "groups": {name: list(columns) for name, columns in auto.job.data.groups.items()},
            "bytes": auto_bytes,
            "bytes_ratio": round(auto_bytes / (sizes.ours + sizes.transforms), 4),
            "values_ratio": round(num_values(auto) / num_values(dataset), 4),
        },
    )


def smallest_file(table: pa.Table, session: str, time: str | None, path: Path) -> tuple[str, int]:
    """Return name and bytes of the smallest plain file of some rows."""
    orders = {"as is": table}
    if time:
        orders |= {"by time": time_ordered(table, time), **by_session(table, session, time)}
    sizes: dict[str, int] = {}
    for order, rows in orders.items():
        for encodings, write in ENCODINGS.items():
            sizes[f"{order}, {encodings}"] = write(rows, path)
    name = min(sizes, key=sizes.__getitem__)
    return name, sizes[name]


def named(dataset: Path, scratch: Path, groups: str) -> Path:
    """Write the job of a rewritten log with badly named groups."""
    job = read_job(dataset / "job.yaml")
    columns = list(open_dataset(dataset).segments[0].manifest.columns)
    apart = {f"g{i}": [n] for i, n in enumerate(columns[:MAX_GROUPS])}
    bad = {"all": columns} if groups == "together" else apart
    job["data"]["groups"] = bad
    return write_job_file(scratch / groups, job, dataset / "job.yaml")


def measure_shape(table: pa.Table, scratch: Path) -> dict[str, Any]:
    """Rewrite and build one log, and compare it with its smallest file."""
    folder = scratch / "log"
    folder.mkdir(parents=True)
    pq.write_table(table, folder / "log.parquet")
    rows = inspect_rows(folder_of(str(folder)), None, None)
    peer, best = smallest_file(table, rows.session, rows.time, scratch / "peer.parquet")
    limit = limit_of(best)
    figures: dict[str, Any] = {"rows": table.num_rows, "peer": peer, "best": best}

    def add(name: str, num_bytes: int, dataset: Path | None) -> None:
        figures[name] = round(num_bytes / limit, 3)
        if dataset is not None:
            figures[f"{name}_folder"] = round(folder_bytes(open_dataset(dataset)) / limit, 3)

    for layout in ("star", "flat"):
        output = scratch / layout
        request = RewriteRequest(
            folder=str(folder),
            output=Location.parse(output),
            layout=layout,
            session=None,
            time=None,
            label=None,
            beam_args=["--runner=InProcess"],
            attempt="benchmark",
        )
        try:
            done = rewrite(request)
        except SchemaError as error:
            figures[layout] = str(error)
            continue
        add(layout, done["bytes_after"], output if layout == "star" else None)
    if (scratch / "star").exists():
        for groups in ("together", "apart"):
            job, output = named(scratch / "star", scratch, groups), scratch / f"built-{groups}"
            built = build_job(job, folder, output)
            add(groups, built["dataset_bytes"], output)
    return figures


def measure_logs(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Build and measure each log."""
    logs = each_log(options, scratch)
    return {name: measure_log(name, log, options.rounds, folder) for name, log, folder in logs}


def measure_shapes(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Rewrite each shape; a round is a shape."""
    shapes: dict[str, Any] = {}
    for name in SHAPES:
        table = SHAPES[name](np.random.default_rng(0), options.rows)
        shapes[name] = measure_shape(table, scratch / name)
        report(name, shapes[name])
    over_limit = [one["star"] for one in shapes.values() if isinstance(one["star"], float)]
    unit = "bytes of a rewritten log over the limit"
    return compared(over_limit, [1.0] * len(over_limit), unit, shapes=shapes)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print the result."""
    options = Options("storage", __doc__, rounds=3)
    options.add_parts({"logs": measure_logs, "shapes": measure_shapes}, small=("logs",))
    options.add_logs([*LOGS, *CLICKOUTS], small=("ten_rows", "demo_small"))
    options.add("--rows", 100_000, "of the largest shapes")
    return options.run_parts(argv)


if __name__ == "__main__":
    sys.exit(main())

"""Bytes of datasets and rewritten files of many shapes of logs against the best sorted Parquet.

`python -m benchmarks.shapes [--json] [--rows N] [--shapes NAME;NAME] [DIR...]`

Each log is a synthetic table (`SHAPES`), or the Parquet files of a folder. It is rewritten as a
star schema (`star`: groups chosen), as plain files (`flat`), and built with all columns in one
group (`together`) and with a group for each column (`apart`), which are bad choices for most logs.
The peer is the smallest zstd file of the same rows: as they are, by time, and clustered by session
in the order of keys or of starts; by pyarrow with its defaults or the best encoding of each
column, or by DuckDB; row groups of 1,048,576 or 122,880 rows. `limit` is 1.02 times the peer plus
64 kB; figures are bytes over the limit, of samples and groups (`ours`) and of every file but the
oracle's (`folder`).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from benchmarks.logs import build_job, read_job, write_job_file, write_result
from benchmarks.storage import ENCODINGS, by_session, limit_of
from pipelines.report.sizes import folder_bytes, time_ordered
from pipelines.rewrite.input import inspect_rows
from pipelines.rewrite.rewrite import RewriteRequest, rewrite
from pipelines.sources.raw_rows import folder_of
from schemas.config.job import MAX_GROUPS
from schemas.dataset.opened import open_dataset
from schemas.errors import SchemaError
from schemas.storage.location import Location

DAY_SEC, START_US = 86_400, 1_767_225_600_000_000


def log(
    rng: np.random.Generator,
    num_rows: int,
    samples_per_session: int,
    unit_us: int = 1_000_000,
    /,
    **columns: Any,
) -> pa.Table:
    """Return a day of sessions that overlap in time, in the order of time.

    Args:
        rng: draws keys and times.
        num_rows: samples.
        samples_per_session: the last session may have fewer.
        unit_us: of times.
        columns: values of all samples by session, or a function of the index of their sessions.
    """
    session = np.arange(num_rows) // samples_per_session
    num_sessions = session[-1] + 1
    seconds = rng.integers(0, DAY_SEC, num_sessions)[session] + rng.exponential(600, num_rows)
    order = np.argsort(seconds, kind="stable")
    time = START_US + (seconds * 1e6).astype(np.int64) // unit_us * unit_us
    values = {name: c(session) if callable(c) else c for name, c in columns.items()}
    key = rng.permutation(1 << 24)[:num_sessions][session]
    table = pa.table({"session": key, "time": pa.array(time, pa.timestamp("us")), **values})
    return table.take(pa.array(order))


def lists_of(values: NDArray[Any], lengths: NDArray[np.int64]) -> pa.Array:
    """Return consecutive lists of values."""
    return pa.ListArray.from_arrays(np.cumsum([0, *lengths]).astype(np.int32), pa.array(values))


Rng = np.random.Generator
Shape = Callable[[Rng, int], pa.Table]


def _of_sessions(values: NDArray[Any]) -> Callable[[NDArray[np.int64]], NDArray[Any]]:
    return lambda session: values[session]


def _lists_of_sessions(values: NDArray[Any]) -> Callable[[NDArray[np.int64]], pa.Array]:
    return lambda s: lists_of(values[s].ravel(), np.full(len(s), values.shape[1]))


def _histories(rng: Rng, num_rows: int) -> pa.Array:
    """Return the last 20 items of sessions of 10."""
    items = rng.zipf(1.3, num_rows + 20) % 5000
    starts = np.arange(num_rows) % 10
    lengths = np.minimum(20, starts)
    first = np.repeat(np.arange(num_rows) - lengths, lengths)
    within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return lists_of(items[first + within], lengths)


SHAPES: Mapping[str, Shape] = {
    "one row": lambda r, n: log(r, 1, 1, item=[3]),
    "ten rows": lambda r, n: log(r, 10, 3, item=r.integers(0, 9, 10)),
    "one sample a session": lambda r, n: log(r, n, 1, item=r.zipf(1.3, n) % 5000),
    "one sample a session, in microseconds": lambda r, n: log(
        r, n, 1, 1, item=r.zipf(1.3, n) % 5000
    ),
    "one sample a session, numbered": lambda r, n: log(r, n, 1, item=np.arange(n)),
    "sessions of two": lambda r, n: log(
        r, n, 2, user=lambda s: s * 7 % 9973, item=r.integers(0, 5000, n)
    ),
    "next items": lambda r, n: log(
        r, n, 5, item=r.zipf(1.2, n) % 5000, next_item=r.zipf(1.2, n) % 5000
    ),
    "next items, in microseconds": lambda r, n: log(
        r, n, 5, 1, item=r.zipf(1.2, n) % 5000, next_item=r.zipf(1.2, n) % 5000
    ),
    "next items with histories": lambda r, n: log(
        r, n, 10, item=r.zipf(1.3, n) % 5000, history=_histories(r, n)
    ),
    "sessions of 5,000": lambda r, n: log(
        r, n, 5000, user=lambda s: s * 7, item=r.zipf(1.2, n) % 5000
    ),
    "numbers": lambda r, n: log(
        r,
        n // 10,
        3,
        **{f"f{i}": r.normal(size=n // 10).astype(np.float32) for i in range(20)},
        **{f"d{i}": r.normal(size=n // 10) for i in range(20)},
    ),
    "numbers of sessions": lambda r, n: log(
        r, n // 10, 6, **{f"d{i}": _of_sessions(r.normal(size=n)) for i in range(40)}
    ),
    "long lists": lambda r, n: log(
        r,
        n // 50,
        4,
        items=lists_of(r.integers(0, 1 << 20, n // 50 * 200), np.full(n // 50, 200)),
    ),
    "lists of sessions": lambda r, n: log(
        r,
        n // 10,
        8,
        items=_lists_of_sessions(r.integers(0, 1 << 20, (n, 50))),
    ),
    "constant columns": lambda r, n: log(r, n, 3, item=np.full(n, 3), text=["a"] * n),
    "nulls": lambda r, n: log(r, n, 3, item=pa.nulls(n, pa.int64()), text=pa.nulls(n, pa.string())),
    "half null": lambda r, n: log(
        r,
        n,
        3,
        item=pa.array(r.integers(0, 99, n), mask=r.random(n) < 0.5),
        user=_of_sessions(r.integers(0, 977, n)),
    ),
    "texts of 4,000": lambda r, n: log(
        r, n // 100, 3, text=[r.bytes(2000).hex() for _ in range(n // 100)]
    ),
    "sentences": lambda r, n: log(
        r,
        n // 10,
        3,
        text=[" ".join(f"word{w}" for w in words) for words in (r.zipf(1.3, (n // 10, 40)) % 3000)],
    ),
    "random ids": lambda r, n: log(r, n, 4, **{f"id{i}": r.integers(0, 1 << 62, n) for i in "ab"}),
    "ids as texts": lambda r, n: log(
        r,
        n,
        4,
        uuid=lambda s: [f"{i:032x}" for i in (s.astype(object) * (1 << 90) % 2**127)],
        item=[f"item-{i}" for i in r.zipf(1.3, n) % 5000],
    ),
    "flags": lambda r, n: log(
        r, n, 6, **{f"b{i}": r.random(n) < 0.01 * (i + 1) for i in range(20)}
    ),
    "500 columns": lambda r, n: log(
        r, n // 50, 3, **{f"c{i}": r.integers(0, 99, n // 50) for i in range(500)}
    ),
    "500 columns of sessions": lambda r, n: log(
        r, n // 50, 6, **{f"c{i}": lambda s, i=i: s * (i + 3) % 991 for i in range(500)}
    ),
    "slowly changing": lambda r, n: log(
        r, n, 8, count=np.cumsum(r.random(n) < 0.3), price=np.round(r.gamma(2, 20, n), 2)
    ),
}


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


def measure(folder: Path, table: pa.Table, scratch: Path) -> dict[str, Any]:
    """Rewrite and build one log, and compare it with its smallest file."""
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


def tables(options: argparse.Namespace) -> Iterator[tuple[str, Path | None, pa.Table]]:
    """Yield the chosen logs."""
    for folder in options.folders:
        files = sorted(folder.rglob("*.parquet"))
        yield str(folder), folder, pa.concat_tables(map(pq.read_table, files))
    if not options.folders:
        for name in options.shapes.split(";") if options.shapes else SHAPES:
            yield name, None, SHAPES[name](np.random.default_rng(0), options.rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print the result."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.shapes", description=__doc__)
    parser.add_argument("folders", nargs="*", type=Path)
    parser.add_argument("--json", action="store_true", help="one JSON object on one line")
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--shapes", default="")
    options = parser.parse_args(argv)
    details: dict[str, Any] = {}
    for name, folder, table in tables(options):
        with tempfile.TemporaryDirectory(prefix="presage-shapes-") as scratch:
            if folder is None:
                folder = Path(scratch) / "log"
                folder.mkdir()
                pq.write_table(table, folder / "log.parquet")
            details[name] = measure(folder, table, Path(scratch))
        sys.stderr.write(f"{name}: {json.dumps(details[name])}\n")
    write_result({"details": details}, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())

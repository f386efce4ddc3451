"""Drawn logs with the skew of production tables, and the reuse distances of real logs.

How often rows are used is drawn from the histograms of Meta's published traces
(`meta_locality_stats`), two years of them. When each use of a row happens follows KuaiRand and
30Music: a row takes the times of a user, a video or a song that is used about as often there, as
shares of the whole log, so distances grow with the log. Its times move together by a drawn shift,
which keeps their distances and makes the load even. All choices are below; none depends on a
measured time.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
from numpy.typing import NDArray

from benchmarks.common.id_logs import write_id_job, write_id_log
from benchmarks.common.logs import MissingError, build_dataset, read_job, write_yaml

HISTOGRAMS = {"2021": "2021_locality_stats.txt", "2022": "2022_locality_stats.txt"}
"""Year -> Meta's statistics; the first of each file's traces is taken."""
REAL_TIMES = {
    "user": (
        "kuairand_pure_part/{test,val}.parquet",
        "SELECT DISTINCT user_id AS id, video_id, time_ms AS time",
    ),
    "video": (
        "kuairand_pure_part/{test,val}.parquet",
        "SELECT DISTINCT video_id AS id, user_id, time_ms AS time",
    ),
    "listener": (
        "30music_sample10/sessions_sample_10.parquet.snappy",
        "SELECT user_id AS id, ts AS time",
    ),
    "song": (
        "30music_sample10/sessions_sample_10.parquet.snappy",
        "SELECT song_id AS id, ts AS time",
    ),
}
"""Column -> the files and the query of its ids and times."""
MOST_USES = 1 << 17
"""Uses of the most frequent row, at most: the histograms end with `more than 32,768`."""


@dataclass(frozen=True, slots=True)
class _Times:
    """Times of the ids of a real log, by number of uses; at least two each."""

    starts: NDArray[np.int64]
    counts: NDArray[np.int64]  # ascending
    times: NDArray[np.float64]


def draw_columns(
    shared_data: Path, num_samples: int, seed: int = 0
) -> Mapping[str, tuple[NDArray[np.int64], int]]:
    """Draw the columns of a log: the row of each sample in time order, and the rows of its table.

    Args:
        shared_data: folder of the published logs.
        num_samples: of the log, each with one row of each column.
        seed: of all draws.

    Raises:
        MissingError: a published log is not there.
    """
    columns: dict[str, tuple[NDArray[np.int64], int]] = {}
    for column in REAL_TIMES:
        times = _real_times(shared_data, column)
        for year, file in HISTOGRAMS.items():
            rng = np.random.default_rng([seed, len(columns)])
            path = shared_data / "meta_locality_stats" / file
            uses = _draw_uses(_shares_of_uses(path), num_samples, rng)
            columns[f"{column}_{year}"] = _order(uses, times, rng), len(uses)
    return columns


def _shares_of_uses(path: Path) -> NDArray[np.float64]:
    """Return the share of accesses of the rows with (2**(k-1), 2**k] uses, for each k."""
    if not path.is_file():
        raise MissingError(f"{path.name} must exist, got none in {path.parent}; give --shared-data")
    text = path.read_text(encoding="utf-8").partition("Ratio of index distribution")[2]
    shares = [float(share) for share in re.findall(r"^\(\d+.*: ([\d.]+)$", text, re.MULTILINE)]
    found = np.array(shares[: shares.index(shares[-1]) + 1][:17])
    return found / found.sum()


def _draw_uses(
    shares: NDArray[np.float64], num_accesses: int, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Return the number of uses of each row, in no order; their sum is `num_accesses`."""
    uses: list[NDArray[np.int64]] = []
    for k, share in enumerate(shares):
        low, high = (1, 1) if k == 0 else ((1 << k - 1) + 1, min(1 << k, MOST_USES))
        if k == len(shares) - 1:
            high = MOST_USES
        budget = round(share * num_accesses)
        count = 2 * budget // (low + high) + 64
        drawn = np.exp(rng.uniform(np.log(low), np.log(high + 1), count)).astype(np.int64)
        kept = drawn[: int(np.searchsorted(np.cumsum(drawn), budget, side="right"))]
        rest = budget - int(kept.sum())
        uses.append(np.append(kept, [rest] if rest else []).astype(np.int64))
    found = np.concatenate(uses)
    largest = int(found.argmax())
    found[largest] += num_accesses - int(found.sum())  # the shares are rounded
    return rng.permutation(found)


def _real_times(shared_data: Path, column: str) -> _Times:
    """Return when each id of a real log is used, as shares of the log."""
    files, query = REAL_TIMES[column]
    path = shared_data / files
    if not path.parent.is_dir():
        raise MissingError(f"{files} must exist, got none in {shared_data}; give --shared-data")
    names = [str(path).replace("{test,val}", part) for part in ("test", "val")]
    table = duckdb.connect().execute(f"{query} FROM read_parquet({sorted({*names})})").fetchnumpy()
    time = np.argsort(np.argsort(table["time"], kind="stable")) / len(table["time"])
    _, numbers, counts = np.unique(table["id"], return_inverse=True, return_counts=True)
    order = np.lexsort((time, numbers, counts[numbers]))
    order = order[counts[numbers[order]] > 1]
    of_ids = np.sort(counts[counts > 1])
    return _Times(np.cumsum(of_ids) - of_ids, of_ids, time[order])


def _order(uses: NDArray[np.int64], real: _Times, rng: np.random.Generator) -> NDArray[np.int64]:
    """Return the row of each access, in time order."""
    # An id of about as many uses: the nearest of the drawn neighbours in the ascending counts.
    near = np.searchsorted(real.counts, uses)
    spread = np.maximum(1, len(real.counts) // 50)
    donor = np.clip(near + rng.integers(-spread, spread + 1, len(uses)), 0, len(real.counts) - 1)
    rows = np.repeat(np.arange(len(uses)), uses)
    number = np.arange(len(rows)) - np.repeat(np.cumsum(uses) - uses, uses)
    num_real = real.counts[donor]
    # With fewer uses than the id: some that follow each other. With more: at times between its.
    first = (rng.random(len(uses)) * np.maximum(1, num_real - uses + 1)).astype(np.int64)
    is_more = (uses > num_real)[rows]
    at = rng.random(len(rows)) * (num_real[rows] - 1)
    at = np.where(is_more, at, (first[rows] + number) % num_real[rows])
    before = at.astype(np.int64)
    start = real.starts[donor][rows]
    after = np.minimum(before + 1, num_real[rows] - 1)
    low, high = real.times[start + before], real.times[start + after]
    time = low + (at - before) * (high - low) + rng.random(len(uses))[rows]
    return rows[np.argsort(time % 1.0, kind="stable")]


# ---- Its dataset ----

BATCH_SAMPLES = 4096
NUM_NUMBERS = 2
NUM_SEGMENTS, WINDOW = 14, "16h"
"""As of a fortnight, and of two of its hours: samples are one second apart, so 57,600 of 1e7."""


def build_reuse(shared_data: Path, num_samples: int, folder: Path) -> Path:
    """Build the dataset of a drawn log in a folder, unless it exists; return its path.

    One table has the rows of all columns, so that a cache has one limit.

    Raises:
        MissingError: a published log is not there.
    """
    dataset = folder / "dataset"
    if dataset.is_dir():
        return dataset
    columns: dict[str, Any] = {}
    num_rows = 0
    for name, (rows, count) in draw_columns(shared_data, num_samples).items():
        columns[name] = rows + num_rows
        num_rows += count
    job = {name: num_rows for name in columns}
    rng = np.random.default_rng(2)
    for k in range(NUM_NUMBERS):
        columns[f"number_{k}"], job[f"number_{k}"] = rng.random(num_samples, np.float32), 0
    data = {"oracle": {"batch_samples": BATCH_SAMPLES}, "window": {"span": WINDOW}}
    path = write_id_job(folder / "job", job, data, {})
    body = read_job(path)
    features = [name for name, rows in job.items() if rows]
    table = {"features": features, "rows": "identity", "num_rows": num_rows}
    body["data"]["tables"] = {"rows": table}
    write_yaml(path, body)
    ends = np.linspace(0, num_samples, NUM_SEGMENTS + 1).astype(int)
    for first, end in pairwise(ends.tolist()):
        part = {name: values[first:end] for name, values in columns.items()}
        log = write_id_log(folder / "log", part, end - first, first=first)
        build_dataset(path, log, folder / "unfinished")
        shutil.rmtree(log)
    return (folder / "unfinished").rename(dataset)

"""Logs of some days with histories, and datasets of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from presage.pipelines.build import build
from tests.pipelines.appending import addition
from tests.pipelines.logs import IN_PROCESS, request

JOB = """
name: plays
data:
  sources:
    log: {{files: "log*.parquet", format: parquet}}
    plays: {{files: "plays*.parquet", format: parquet}}
  samples:
    source: log
    map: SELECT user, time, id, item, label FROM log
  histories:
    plays:
      source: plays
      columns: {{item: item, kind: item % 3}}
      where: item % 5 != 0
      available: time + to_seconds({delay})
      tables: {{item: items, kind: kinds}}
      before: {before}
      {order}
      tick: 5s
    shown:
      columns: {{item: item}}
      tables: {{item: items}}
      before: {before}
      {order}
  session: {{key: user, time: time}}
  groups: {groups}
  block_samples: 16
  tables:
    items: {{features: [item], rows: identity, num_rows: 1000}}
    kinds: {{features: [], rows: identity, num_rows: 3}}
  oracle: {{batch_samples: 32}}
train: {{batch_samples: 32}}
"""
SCHEMA = """
feature { name: "user" type: %s annotation { tag: "kept" } }
feature { name: "time" type: INT annotation { tag: "kept" } }
feature { name: "id" type: INT annotation { tag: "kept" } }
feature { name: "item" type: INT presence { min_fraction: 1.0 } annotation { tag: "sparse" } }
feature { name: "label" type: INT int_domain { min: 0 max: 1 } annotation { tag: "label" } }
"""
FIRST = date(2026, 1, 1)


@dataclass(frozen=True)
class Days:
    """Raw rows of each day, their job, and the dataset of them."""

    log: Sequence[pa.Table]
    plays: Sequence[pa.Table]
    job: Path
    delay: int
    before: str

    @property
    def dataset(self) -> Path:
        """The dataset of `build_days`."""
        return self.job.parent / "dataset"

    def folder(self, day: int) -> Path:
        """The log of a day."""
        return self.job.parent / f"day-{day}"


def rows_of_day(
    rng: np.random.Generator, day: int, count: int, first_id: int, texts: bool
) -> pa.Table:
    """Return rows with many equal times, in any order."""
    start = ((FIRST - date(1970, 1, 1)).days + day) * 86_400_000_000
    users = rng.integers(0, 12, count)
    return pa.table(
        {
            "user": pa.array([f"user {u}" for u in users]) if texts else pa.array(users),
            "time": pa.array(
                start + rng.integers(0, 40, count) * 2_157_500_000, pa.timestamp("us")
            ),
            "id": pa.array(first_id + rng.permutation(count)),
            "item": pa.array(rng.integers(0, 200, count)),
            "label": pa.array(rng.integers(0, 2, count)),
        }
    )


def write_days(
    directory: Path, *, num_days: int, before: str, texts: bool, delay: int, seed: int
) -> Days:
    """Write the logs of some days."""
    rng, log, plays = np.random.default_rng(seed), list[pa.Table](), list[pa.Table]()
    directory.mkdir()
    order = "order: id" if before == "order" else ""
    groups = "{user: [user]}" if texts else "{}"
    job = directory / "job.yaml"
    expression = f"item % 7 * {delay}"
    job.write_text(JOB.format(before=before, order=order, groups=groups, delay=expression))
    (directory / "schema.pbtxt").write_text(SCHEMA % ("BYTES" if texts else "INT"))
    for day in range(num_days):
        folder = directory / f"day-{day}"
        folder.mkdir()
        count = int(rng.integers(20, 120))
        log.append(rows_of_day(rng, day, count, 10_000 * day, texts))
        plays.append(rows_of_day(rng, day, int(rng.integers(1, 400)), 10_000 * day + 5_000, texts))
        for name, table in (("log", log[-1]), ("plays", plays[-1])):
            cut = int(rng.integers(0, table.num_rows))
            pq.write_table(table.slice(0, cut), folder / f"{name}-0.parquet")
            pq.write_table(table.slice(cut), folder / f"{name}-1.parquet")
    return Days(log, plays, job, delay, before)


def build_days(days: Days, dataset: Path, beam_args: Sequence[str] = (IN_PROCESS,)) -> None:
    """Build a segment for each day."""
    for day in range(len(days.log)):
        make = addition if day else request
        label = (FIRST + timedelta(days=day)).isoformat()
        build(make(days.job, days.folder(day), dataset, day=label, beam_args=list(beam_args)))

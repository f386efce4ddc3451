"""A log whose histories shift, built in every layout that its groups can have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from presage.pipelines.build import build
from presage.pipelines.clustering.star import Star
from presage.pipelines.clustering.storage_layout import StoredGroup
from tests.pipelines.logs import SCHEMA, request

JOB = """
name: shop
data:
  sources: {log: {files: "*.parquet", format: parquet}}
  samples: {map: "SELECT session, time, user, history, item, label FROM log"}
  session: {key: session, time: time}
  split: {evaluation_from: 2026-01-01 00:08:00}
  groups: {user: [session, user, history], item: [item]}
  transforms: {user: {num_history: ln(1 + len(history))}}
  block_samples: 16
  tables:
    items: {features: [item, history], rows: identity, num_rows: 1000}
    users: {features: [user], rows: hash, num_rows: 65536}
  oracle: {batch_samples: 32}
train: {batch_samples: 32}
"""
STORAGES: dict[str, Mapping[str, StoredGroup] | None] = {
    "plain": {},
    "auto": None,
    "windows": {"user": StoredGroup(False, ("history",))},
    "shared": {"user": StoredGroup(True), "item": StoredGroup(True)},
    "both": {"user": StoredGroup(True, ("history",)), "item": StoredGroup(True)},
}


@contextmanager
def stored_as(layouts: Mapping[str, StoredGroup] | None) -> Iterator[None]:
    """Build with these layouts of groups, plain ones for others; chosen by the rows if None."""

    def choose(star: Star) -> dict[str, StoredGroup]:
        return {group: (layouts or {}).get(group, StoredGroup()) for group in star.groups}

    with pytest.MonkeyPatch.context() as patch:
        if layouts is not None:
            patch.setattr("presage.pipelines.clustering.storage_layout.choose_layouts", choose)
            # None is stored per sample.
            patch.setattr("presage.pipelines.clustering.storage_layout.TRIFLE", 1.0)
        yield


def shifting_log(directory: Path, num_rows: int) -> None:
    rng = np.random.default_rng(5)
    session = np.sort(rng.integers(0, num_rows // 12, num_rows))
    item = rng.integers(0, 50, num_rows)
    first = np.searchsorted(session, session)
    histories = [item[max(f, i - 20) : i].tolist() for i, f in enumerate(first.tolist())]
    second = np.sort(rng.integers(0, 600, num_rows))
    directory.mkdir(parents=True)
    table = pa.table(
        {
            "session": pa.array(session),
            "time": pa.array(1_767_225_600_000_000 + second * 1_000_000, pa.timestamp("us")),
            "user": pa.array(session % 7),
            "history": pa.array(
                [None if i % 17 == 3 else h for i, h in enumerate(histories)], pa.list_(pa.int64())
            ),
            "item": pa.array(item),
            "label": pa.array((rng.random(num_rows) < 0.3).astype(np.int8)),
        }
    )
    pq.write_table(table, directory / "log.parquet")


def built_in_every_layout(directory: Path, num_rows: int = 2000) -> dict[str, Path]:
    """Build one log under each of `STORAGES` and return the datasets by its name."""
    shifting_log(directory / "log", num_rows)
    found: dict[str, Path] = {}
    for name, layouts in STORAGES.items():
        (directory / name).mkdir()
        job = directory / name / "job.yaml"
        job.write_text(JOB)
        (directory / name / "schema.pbtxt").write_text(SCHEMA)
        with stored_as(layouts):
            build(request(job, directory / "log", directory / name / "dataset"))
        found[name] = directory / name / "dataset"
    return found

"""Pins: whole sessions, the same whatever order the samples came in."""

from itertools import pairwise

import numpy as np
import pyarrow as pa

from pipelines.clustering.writer import sample_sessions
from pipelines.samples.sql import LIST_INDEX
from pipelines.samples.tuples import Tuples
from pipelines.sources.rows import ORIGIN
from schemas.config.job import DataConfig, SamplesConfig, SessionConfig, SourceConfig

DATA = DataConfig(
    sources={"log": SourceConfig(files="*", format="parquet")},
    samples=SamplesConfig(map="SELECT * FROM log"),
    session=SessionConfig(key="s", time="t"),
    tables={},
)


def parts_of(sessions: np.ndarray, cuts: list[int]) -> list[Tuples]:
    times = np.arange(len(sessions))
    rows = pa.table({"s": sessions, "t": times, ORIGIN: times, LIST_INDEX: times * 0})
    bounds = [0, *cuts, len(sessions)]
    return [Tuples(rows.slice(a, b - a), {}, {}) for a, b in pairwise(bounds)]


def chosen(parts: list[Tuples], limit: int) -> dict[int, int]:
    keys = [k for p in sample_sessions(parts, DATA, limit) for k in p.samples["s"].to_pylist()]
    return {key: keys.count(key) for key in set(keys)}


def test_few_sessions_are_whole_and_do_not_depend_on_order_or_cuts() -> None:
    sessions = np.repeat(np.arange(100), np.arange(1, 101))
    shuffled = np.random.default_rng(0).permutation(sessions)
    found = chosen(parts_of(sessions, [100, 2000]), 500)
    assert found == chosen(parts_of(shuffled, [7, 1000, 3000]), 500)
    assert all(count == key + 1 for key, count in found.items())
    assert 500 <= sum(found.values()) <= 600


def test_a_part_with_few_samples_is_looked_at_whole() -> None:
    sessions = np.repeat(np.arange(10), 3)
    assert sum(chosen(parts_of(sessions, [4]), 500).values()) == 30


def test_a_hot_session_is_cut_by_time() -> None:
    parts = parts_of(np.zeros(1000, np.int64), [300, 301])
    found = pa.concat_tables([p.samples for p in sample_sessions(parts, DATA, 100)])
    assert found["t"].to_pylist() == list(range(200))

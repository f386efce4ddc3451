"""Order, cuts and deduplication of one part, against slow and obvious versions."""

from collections.abc import Sequence
from datetime import datetime, timedelta

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.clustering.dedup import to_star
from pipelines.clustering.order import cluster, cut_blocks
from pipelines.clustering.writer import plan_row_groups
from pipelines.partition import hash_session_keys, microseconds, part_of_key
from pipelines.samples.sql import LIST_INDEX
from pipelines.samples.tuples import Tuples, hash_column, separate
from pipelines.sources.rows import ORIGIN
from schemas.config.job import (
    DataConfig,
    SamplesConfig,
    SessionConfig,
    SourceConfig,
    SplitConfig,
    TableConfig,
    WindowConfig,
)

GROUPS = {"user": ("session", "name"), "clicks": ("history",)}
START = microseconds(datetime(2026, 1, 1))


def data_config(
    gap: int | None = None, evaluation_from: int | None = None, window: int | None = None
) -> DataConfig:
    """Return a data section; times in seconds."""
    return DataConfig(
        sources={"log": SourceConfig(files="*", format="parquet")},
        samples=SamplesConfig(map="SELECT 1"),
        session=SessionConfig(
            key="session", time="time", gap=None if gap is None else timedelta(seconds=gap)
        ),
        window=WindowConfig(span=None if window is None else timedelta(seconds=window)),
        split=SplitConfig(
            evaluation_from=None
            if evaluation_from is None
            else datetime(2026, 1, 1) + timedelta(seconds=evaluation_from)
        ),
        groups=GROUPS,
        transforms={"user": {"doubled": "session * 2"}},
        tables={"items": TableConfig(features=("history",), num_rows=10)},
        block_samples=16,
    )


def samples_of(rows: Sequence[tuple[int, int, str | None, list[int] | None]]) -> Tuples:
    """Return samples of (session, second, name, history), each its own raw row."""
    table = pa.table(
        {
            "session": pa.array([r[0] for r in rows], pa.int64()),
            "time": pa.array([START + r[1] * 1_000_000 for r in rows], pa.timestamp("us")),
            "name": pa.array([r[2] for r in rows], pa.string()),
            "history": pa.array([r[3] for r in rows], pa.large_list(pa.int64())),
            ORIGIN: pa.array(range(len(rows)), pa.int64()),
            LIST_INDEX: pa.array([0] * len(rows), pa.int32()),
            **{hash_column(g): pa.array([7] * len(rows), pa.uint64()) for g in GROUPS},
        }
    )
    return separate(table, GROUPS)


ROWS = st.lists(
    st.tuples(
        st.integers(-3, 3),
        st.integers(0, 40),
        st.sampled_from([None, "", "a", "b"]),
        st.sampled_from([None, [], [1], [1, 2], [2, 1]]),
    ),
    min_size=1,
    max_size=60,
)


@pytest.mark.slow
@given(ROWS, st.sampled_from([None, 5, 20]), st.sampled_from([None, 15]), st.randoms())
def test_cluster_orders_as_plain_sorting_does_whatever_order_rows_arrive_in(
    rows: list[tuple[int, int, str | None, list[int] | None]],
    gap: int | None,
    evaluation_from: int | None,
    random: object,
) -> None:
    table = samples_of(rows)
    shuffled = np.arange(len(rows))
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    found = cluster(table.take(shuffled), data_config(gap, evaluation_from))
    hashes = hash_session_keys(table.column("session")).tolist()
    held = [evaluation_from is not None and r[1] >= evaluation_from for r in rows]
    expected = sorted(
        range(len(rows)), key=lambda i: (held[i], hashes[i], rows[i][0], rows[i][1], i)
    )
    assert found.samples.column(ORIGIN).to_pylist() == expected
    assert found.is_evaluation.tolist() == [held[i] for i in expected]
    times: dict[int, list[int]] = {}
    for row in rows:
        times.setdefault(row[0], []).append(row[1])
    pauses = [b - a for t in times.values() for a, b in zip(sorted(t), sorted(t)[1:], strict=False)]
    assert found.num_sessions == len(times) + sum(gap is not None and p > gap for p in pauses)


@pytest.mark.slow
@given(ROWS)
def test_star_joined_back_gives_the_samples_and_no_tuple_stands_twice_in_a_block(
    rows: list[tuple[int, int, str | None, list[int] | None]],
) -> None:
    clustered = cluster(samples_of(rows), data_config(evaluation_from=20))
    star = to_star(clustered, 3, data_config())
    blocks = star.samples["block"].to_pylist()
    assert [b >> 20 for b in blocks] == [3] * len(rows)
    for group, columns in (("user", ["session", "name"]), ("clicks", ["history"])):
        tuples = star.groups[group].to_pylist()
        by_place = {(t["block"], t["unique_index"]): t for t in tuples}
        assert len(by_place) == len(tuples)
        values = {(t["block"], *(str(t[c]) for c in columns)) for t in tuples}
        assert len(values) == len(tuples)
        inverse = star.samples[f"{group}_inverse"].to_pylist()
        joined = [by_place[place] for place in zip(blocks, inverse, strict=True)]
        for column in columns:
            assert [t[column] for t in joined] == clustered.samples.column(column).to_pylist()
    doubled = star.groups["user"]["doubled"].to_pylist()
    assert doubled == [2 * s for s in star.groups["user"]["session"].to_pylist()]


@given(st.lists(st.booleans(), min_size=1, max_size=80), st.sampled_from([1, 2, 7, 16]))
def test_cut_blocks_counts_anew_in_every_range(starts: list[bool], size: int) -> None:
    starts[0] = True
    block, filled, expected = -1, 0, []
    for start in starts:
        if start or filled == size:
            block, filled = block + 1, 0
        filled += 1
        expected.append(block)
    assert cut_blocks(np.array(starts), size).tolist() == expected


def test_windows_put_a_session_where_its_first_sample_is() -> None:
    rows = [(1, 5, "a", None), (1, 25, "a", None), (2, 12, "b", None), (2, 13, "b", None)]
    found = cluster(samples_of(rows), data_config(window=10))
    windows = dict(
        zip(found.samples.column("session").to_pylist(), found.window.tolist(), strict=True)
    )
    assert windows[2] - windows[1] == 1
    assert found.samples.column("session").to_pylist() == [1, 1, 2, 2]
    assert found.block.tolist() == [0, 0, 1, 1]


def test_parts_are_ascending_ranges_of_the_hash() -> None:
    hashes = np.sort(hash_session_keys(pa.array(range(10_000))))
    parts = part_of_key(hashes, 7)
    assert (np.diff(parts) >= 0).all()
    assert np.bincount(parts, minlength=7).min() > 1_200


PINNED = {7: 4523036206011702797, 8: 12149354890098576009}


def test_session_keys_hash_as_they_always_did() -> None:
    keys = pa.array(list(PINNED))
    assert dict(zip(keys.to_pylist(), hash_session_keys(keys).tolist(), strict=True)) == PINNED


@pytest.mark.parametrize("limit", [1, 250, 10_000])
def test_row_groups_hold_whole_blocks_of_one_split(limit: int) -> None:
    is_evaluation = np.array([False] * 5 + [True])
    window = np.array([0, 0, 0, 1, 1, 1])
    groups = plan_row_groups(is_evaluation, window, 100.0, limit, limit)
    assert [b for g in groups for b in range(g.first, g.end)] == list(range(6))
    assert all(len(set(is_evaluation[g.first : g.end])) == 1 for g in groups)
    assert all(g.end - g.first <= max(1, limit // 100) for g in groups)


@pytest.mark.parametrize(
    ("windows_limit", "expected"), [(1, [0, 3, 4, 5]), (200, [0, 3, 5]), (400, [0, 4]), (900, [0])]
)
def test_small_windows_share_a_row_group_up_to_a_limit(
    windows_limit: int, expected: list[int]
) -> None:
    window = np.array([5, 5, 5, 6, 7, 8])
    groups = plan_row_groups(np.zeros(6, bool), window, 100.0, 1000, windows_limit)
    assert [g.first for g in groups] == expected
    assert groups[-1].end == 6

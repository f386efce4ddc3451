"""Order, blocks, deduplication and chunks of one part, against slow and obvious versions."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from presage.pipelines.build import build
from presage.pipelines.clustering import star
from presage.pipelines.clustering.part import plan_row_groups
from presage.pipelines.clustering.star import (
    cluster,
    cluster_chunks,
    cut_blocks,
    expanded_bytes,
    split_at_blocks,
    to_star,
)
from presage.pipelines.samples.sql import LIST_INDEX
from presage.pipelines.samples.tuples import (
    Tuples,
    concat_tuples,
    drop_unused_tuples,
    hash_session_keys,
    separate_tuples,
)
from presage.pipelines.sources.raw_rows import ORIGIN, microseconds
from presage.pipelines.table.verify import verify
from presage.schemas.config.job import (
    DataConfig,
    SamplesConfig,
    SessionConfig,
    SourceConfig,
    SplitConfig,
    TableConfig,
    WindowConfig,
)
from presage.schemas.dataset.opened import open_dataset
from presage.schemas.hashing import partition_of_key
from presage.schemas.layout import STATISTICS
from tests.pipelines.logs import request, samples_of, stored_samples, stored_table, write_job
from tests.pipelines.logs import write_log as write_small_log

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


def tuples_of(rows: Sequence[tuple[int, int, str | None, list[int] | None]]) -> Tuples:
    """Return samples of (session, second, name, history), each its own raw row."""
    table = pa.table(
        {
            "session": pa.array([r[0] for r in rows], pa.int64()),
            "time": pa.array([START + r[1] * 1_000_000 for r in rows], pa.timestamp("us")),
            "name": pa.array([r[2] for r in rows], pa.string()),
            "history": pa.array([r[3] for r in rows], pa.large_list(pa.int64())),
            ORIGIN: pa.array(range(len(rows)), pa.int64()),
            LIST_INDEX: pa.array([0] * len(rows), pa.int32()),
        }
    )
    return separate_tuples(table, GROUPS)


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
    table = tuples_of(rows)
    shuffled = np.arange(len(rows))
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(star, "ORDERED_KEYS", 3)
        found = cluster(table.take(shuffled), data_config(gap, evaluation_from))
    hashes = hash_session_keys(table.column("session")).tolist()
    held = [evaluation_from is not None and r[1] >= evaluation_from for r in rows]
    expected = sorted(
        range(len(rows)), key=lambda i: (held[i], hashes[i], rows[i][0], rows[i][1], i)
    )
    in_block: dict[int, list[int]] = {}
    for b, i in zip(found.block.tolist(), expected, strict=True):
        in_block.setdefault(b, []).append(i)
    for places in in_block.values():
        first = {rows[i][0]: rows[i][1] for i in reversed(places)}
        if len(first) >= 3:
            places.sort(key=lambda i, first=first: (first[rows[i][0]], rows[i][0]))
    expected = [i for places in in_block.values() for i in places]
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
    clustered = cluster(tuples_of(rows), data_config(evaluation_from=20))
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


def test_keys_of_equal_hashes_are_ordered_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        star, "hash_session_keys", lambda keys: keys.to_numpy().astype(np.uint64) % 2
    )
    monkeypatch.setattr(star, "cut_blocks", lambda starts, _: np.arange(len(starts)) // 3)
    rows = [(key, second, "a", None) for second in range(3) for key in (4, 1, 2, 3)]
    found = cluster(tuples_of(rows), data_config())
    assert found.samples.column("session").to_pylist() == [2] * 3 + [4] * 3 + [1] * 3 + [3] * 3


def test_windows_put_a_session_where_its_first_sample_is() -> None:
    rows = [(1, 5, "a", None), (1, 25, "a", None), (2, 12, "b", None), (2, 13, "b", None)]
    found = cluster(tuples_of(rows), data_config(window=10))
    windows = dict(
        zip(found.samples.column("session").to_pylist(), found.window.tolist(), strict=True)
    )
    assert windows[2] - windows[1] == 1
    assert found.samples.column("session").to_pylist() == [1, 1, 2, 2]
    assert found.block.tolist() == [0, 0, 1, 1]


def test_parts_are_ascending_ranges_of_the_hash() -> None:
    hashes = np.sort(hash_session_keys(pa.array(range(10_000))))
    parts = partition_of_key(hashes, 7)
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


BLOCK = data_config().block_samples


def parts_of(rng: np.random.Generator, sizes: list[int], num_sessions: int) -> list[Tuples]:
    """Return parts of samples with a group of few tuples, sessions of very unequal lengths."""
    parts: list[Tuples] = []
    first = 0
    for size in sizes:
        session = np.minimum(rng.geometric(0.4, size), num_sessions)
        samples = {
            "session": pa.array(session),
            "time": pa.array(START + rng.integers(0, 40, size) * 1_000_000, pa.timestamp("us")),
            ORIGIN: pa.array(first + np.arange(size)),
            LIST_INDEX: pa.array(np.zeros(size, np.int32)),
        }
        uniques = pa.table({"_hash_g": pa.array(np.arange(7, dtype=np.uint64)), "g": np.arange(7)})
        references = {"g": rng.integers(0, 7, size)}
        parts.append(Tuples(pa.table(samples), references, {"g": uniques}))
        first += size
    return parts


@pytest.mark.slow
@pytest.mark.parametrize("limit", [1, 600, 2000, 1 << 20])
@given(seed=st.integers(0, 1000), sizes=st.lists(st.integers(1, 60), min_size=1, max_size=4))
def test_pieces_are_the_part_in_order(limit: int, seed: int, sizes: list[int]) -> None:
    data = data_config(gap=15, evaluation_from=20)
    parts = parts_of(np.random.default_rng(seed), sizes, 5)
    whole = cluster(concat_tuples(parts), data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(star, "CHUNK_BYTES", limit)
        found = list(cluster_chunks(parts, data))
    assert sum(p.num_sessions for p in found) == whole.num_sessions
    for name in ("starts_session", "session_samples", "is_evaluation", "window"):
        joined = np.concatenate([getattr(p, name) for p in found])
        assert np.array_equal(joined, getattr(whole, name)), name
    blocks = np.concatenate([p.block + p.first_block for p in found])
    assert np.array_equal(blocks, whole.block)
    for column in ("session", "time", "g", ORIGIN):
        joined = pa.concat_arrays([p.samples.column(column) for p in found])
        assert joined.equals(whole.samples.column(column)), column
    assert all(p.samples.num_samples <= BLOCK for p in found) or limit > 1
    assert len(found) == 1 or limit < 1 << 20


def test_bytes_are_those_of_expanded_samples_however_they_are_cut() -> None:
    (part,) = parts_of(np.random.default_rng(0), [100], 5)
    assert expanded_bytes(part).tolist() == [(8 + 8 + 8 + 4) + (8 + 8)] * 100
    cut = part.take(np.arange(30, 100))
    assert expanded_bytes(drop_unused_tuples(cut)).tolist() == expanded_bytes(cut).tolist()
    texts = pa.table({"x": pa.array([["a", "bcd"], [], None, [""]])})
    assert expanded_bytes(Tuples(texts, {}, {})).tolist() == [8 + 9 + 11, 8, 8, 8 + 8]


@given(
    st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=5), min_size=1, max_size=20),
    st.integers(1, 60),
)
def test_cuts_lie_between_blocks_and_cover_all_samples(sizes: list[list[int]], limit: int) -> None:
    block = np.repeat(np.arange(len(sizes)), [len(s) for s in sizes])
    flat = np.array([size for of_block in sizes for size in of_block])
    found = split_at_blocks(block, flat, limit)
    assert [found[0].start, *(c.stop for c in found)] == [*(c.start for c in found), len(block)]
    largest = max(map(sum, sizes))
    for cut in found:
        assert cut.stop == len(block) or block[cut.stop] != block[cut.stop - 1]
        assert flat[cut].sum() <= limit + largest
    assert len(found) <= max(1, -(-int(flat.sum()) // limit))


REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("piece_bytes", [1, 10_000])
def test_a_part_in_pieces_holds_the_same_samples_in_the_same_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece_bytes: int
) -> None:
    rows = write_small_log(tmp_path / "log", 600)
    job = write_job(tmp_path / "job")
    build(request(job, tmp_path / "log", tmp_path / "whole"))
    monkeypatch.setattr(star, "CHUNK_BYTES", piece_bytes)
    build(request(job, tmp_path / "log", tmp_path / "pieces"))
    assert not verify(tmp_path / "pieces")["problems"]
    assert stored_samples(tmp_path / "pieces") == samples_of(rows)
    assert stored_table(tmp_path / "pieces") == stored_table(tmp_path / "whole")
    whole, cut = (open_dataset(tmp_path / d).segments[0] for d in ("whole", "pieces"))
    assert whole.blocks.drop_columns(["row_group"]) == cut.blocks.drop_columns(["row_group"])
    assert cut.blocks["row_group"].to_pylist() != whole.blocks["row_group"].to_pylist()
    assert whole.manifest.groups == cut.manifest.groups
    assert whole.manifest.tables == cut.manifest.tables
    assert whole.manifest.num_sessions == cut.manifest.num_sessions
    statistics = [(s.directory / STATISTICS).read_bytes() for s in (whole, cut)]
    assert statistics[0] == statistics[1]

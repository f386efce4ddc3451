"""Choice of groups: optimal on small inputs, and dependent on the values only."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import zstandard

from presage.pipelines.autogroup.costs import LEAST_DEDUP_FACTOR, Costs, feature_of
from presage.pipelines.autogroup.search import choose_groups, search
from presage.schemas.config.job import MAX_GROUPS

BLOCK = 64


def columns_of(seed: int, num_samples: int = 256) -> dict[str, pa.Array]:
    """Columns that change at different rates, some of them together."""
    rng = np.random.default_rng(seed)
    session = np.sort(rng.integers(0, num_samples // 16, num_samples))
    request = session * 100 + np.cumsum(rng.random(num_samples) < 0.3)
    lists = [rng.integers(0, 1000, rng.integers(1, 20)).tolist() for _ in range(3000)]
    return {
        "user": pa.array(session * 7919 % 1_000_003),
        "country": pa.array(session % 5),
        "query": pa.array(request * 31 % 100_003),
        "history": pa.array([lists[r % 3000] for r in request.tolist()]),
        "item": pa.array(rng.integers(0, 10**9, num_samples)),
    }


def costs_of(columns: dict[str, pa.Array], bytes_per_group: float = 40) -> Costs:
    features = [feature_of(n, "sparse", pa.chunked_array([c])) for n, c in columns.items()]
    num_samples = len(next(iter(columns.values())))
    usable = [f for f in features if f is not None]
    return Costs(np.arange(num_samples) // BLOCK, usable, bytes_per_group)


def starts(costs: Costs, every: int = 16) -> np.ndarray:
    return np.arange(costs.num_samples) % every == 0


def placements(members: Sequence[int]) -> Iterator[list[frozenset[int]]]:
    """Every way to put features into groups or none."""
    if not members:
        yield []
        return
    first, *rest = members
    for sets in placements(rest):
        yield sets
        yield [*sets, frozenset([first])]
        for s in sets:
            yield [s | {first} if s == t else t for t in sets]


def total(costs: Costs, sets: Sequence[frozenset[int]]) -> float:
    grouped = frozenset[int]().union(*sets)
    alone = [m for m in range(len(costs.features)) if m not in grouped]
    return sum(map(costs.as_group, sets)) + sum(map(costs.in_samples, alone))


@pytest.mark.parametrize("seed", range(12))
def test_search_finds_what_trying_every_placement_finds(seed: int) -> None:
    costs = costs_of(columns_of(seed))
    best = min(total(costs, sets) for sets in placements(range(len(costs.features))))
    assert total(costs, search(costs)) == pytest.approx(best, rel=1e-9)


def test_search_in_parts_finds_the_same_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = costs_of(columns_of(0, 4096))
    whole = search(costs)
    monkeypatch.setattr("presage.pipelines.autogroup.search.MAX_SETS", 3)
    assert set(search(costs)) == set(whole)


def test_features_that_change_together_share_a_group_and_others_stay_in_samples() -> None:
    choice = choose_groups(costs_of(columns_of(0, 4096)), np.arange(4096) % 16 == 0)
    assert choice.mapping() == {"user": ("user", "country"), "query": ("query", "history")}
    assert choice.features["item"].dedup_factor < 1.01


@pytest.mark.parametrize("every", [10, 30])
def test_no_group_is_chosen_that_a_build_warns_of(every: int) -> None:
    rng = np.random.default_rng(0)
    long = rng.integers(0, 10**9, (4096, 40))
    long[1::every] = long[0::every][: len(long[1::every])]  # so few repeat, yet bytes are saved
    costs = costs_of({"long": pa.array(long.tolist())}, bytes_per_group=0)
    groups = choose_groups(costs, starts(costs)).groups
    assert bool(groups) == (every == 10)
    assert all(g.repetition.dedup_factor >= LEAST_DEDUP_FACTOR for g in groups)


def test_lists_that_grow_are_a_group_although_none_repeats() -> None:
    rng = np.random.default_rng(0)
    songs = rng.integers(0, 10_000, 4096)
    grown = pa.array([songs[i - i % 12 : i].tolist() or [i] for i in range(4096)])
    fresh = pa.array(rng.integers(0, 10**9, 4096))
    costs = costs_of({"grown": grown, "fresh": fresh})
    (group,) = choose_groups(costs, starts(costs)).groups
    assert group.features == ("grown",)
    assert group.repetition.dedup_factor < LEAST_DEDUP_FACTOR
    assert costs.as_group(frozenset([0])) < 0.5 * costs.in_samples(0)


def test_what_transforms_make_of_a_column_counts_with_it() -> None:
    column = pa.chunked_array([pa.array(np.random.default_rng(0).integers(0, 10**9, 4096))])
    kept, columns_of, part = (feature_of("x", "kept", column, n) for n in (0.0, 1.0, 0.5))
    costs = Costs(np.arange(4096) // BLOCK, [f for f in (kept, columns_of, part) if f is not None])
    assert costs.in_samples(1) == 2 * costs.in_samples(0)
    assert costs.in_samples(2) == 1.5 * costs.in_samples(0)


def test_bytes_of_texts_are_about_those_of_zstd() -> None:
    rng = np.random.default_rng(0)
    ids = [f"{rng.integers(2**62):016x}" for _ in range(2000)]
    distinct, few, repeated = ids, [ids[i % 7] for i in range(2000)], sorted(ids[:40] * 50)
    for texts in (distinct, few, repeated, [None, "", *few[2:]]):
        column = pa.array(texts, pa.large_string())
        feature = feature_of(
            "x", "kept", pa.chunked_array([column.slice(0, 900), column.slice(900)])
        )
        assert feature is not None
        wanted = len(zstandard.compress("".join(t or "" for t in texts).encode()))
        result = feature.num_bytes(np.arange(2000))
        assert wanted / 2 - 400 < result < wanted * 1.2 + 1500, (wanted, result)


def test_dedup_factor_is_counted_within_blocks() -> None:
    columns = columns_of(3, 4096)
    choice = choose_groups(costs_of(columns), np.arange(4096) % 16 == 0)
    rows = list(zip(columns["query"].to_pylist(), map(str, columns["history"].to_pylist()),
                    (np.arange(4096) // BLOCK).tolist(), strict=True))  # fmt: skip
    group = next(g for g in choice.groups if g.name == "query")
    assert group.repetition.dedup_factor == 4096 / len(set(rows))


def test_change_rate_counts_samples_that_follow_another_of_their_session() -> None:
    column = pa.array([1, 1, 2, 2, 9, 9, 9, 9])
    choice = choose_groups(costs_of({"a": column}), np.array([1, 0, 0, 0, 1, 0, 0, 0], bool))
    assert choice.features["a"].change_rate == 1 / 6


def test_a_jump_from_one_session_to_the_next_is_no_change() -> None:
    choice = choose_groups(costs_of({"a": pa.array([1, 1, 2, 2])}), np.array([1, 0, 1, 0], bool))
    assert choice.features["a"].change_rate == 0
    assert choice.features["a"].dedup_factor == 2


def test_more_than_eight_useful_groups_are_reduced_to_eight() -> None:
    rng = np.random.default_rng(0)
    columns = {}
    for phase in range(0, 30, 3):  # long lists that change at different times: each wants its own
        number = (np.arange(2048) + phase) // 32
        lists = rng.integers(0, 10**9, (66, 40)).tolist()
        columns[f"f{phase:02}"] = pa.array([lists[n] for n in number.tolist()])
    costs = costs_of(columns, bytes_per_group=0)
    sets = search(costs)
    assert len(sets) == MAX_GROUPS
    assert frozenset[int]().union(*sets) == set(range(10))
    pairs = [frozenset([2 * i, 2 * i + 1]) for i in range(5)]
    assert total(costs, sets) <= total(costs, pairs)


ODD = {
    "nulls": pa.array([1, None, None, 1] * 64),
    "nan beside null": pa.array([float("nan"), None, float("nan"), 0.0] * 64),
    "texts": pa.array(["a", "", None, "a"] * 64),
    "null and empty lists": pa.array([[], None, [1], []] * 64),
    "only null": pa.array([None] * 256, pa.int64()),
    "largest unsigned": pa.array([2**64 - 1, 0, None, 0] * 64, pa.uint64()),
    "smallest and largest": pa.array([-(2**63), 2**63 - 1] * 128),
    "flags": pa.array([True, False, None, True] * 64),
    "times": pa.array([0, None, 5, 0] * 64, pa.timestamp("us")),
    "texts in lists": pa.array([["a", "b"], ["ab"], [], None] * 64, pa.list_(pa.string())),
    "floats in lists": pa.array([[0.0], [-0.0], [float("nan")], None] * 64, pa.list_(pa.float32())),
}


@pytest.mark.parametrize("name", ODD)
def test_values_of_any_kind_are_told_apart_as_the_build_does(name: str) -> None:
    costs = costs_of({"a": ODD[name]})
    distinct = {str(v) for v in ODD[name].to_pylist()}
    assert costs.num_unique(frozenset([0])) == len(distinct) * (256 // BLOCK)
    choose_groups(costs, starts(costs))


def test_a_type_that_cannot_be_compared_stays_in_samples() -> None:
    assert feature_of("a", "kept", pa.chunked_array([pa.array([{"x": 1}])])) is None


@pytest.mark.parametrize("kind", [pa.int64(), pa.string()])
def test_lists_that_are_all_empty_join_the_groups_of_others(kind: pa.DataType) -> None:
    empty = pa.array([[]] * 64, pa.large_list(kind))
    costs = costs_of({"a": pa.array([1, 2] * 32), "b": empty, "c": empty})
    choose_groups(costs, starts(costs))


def test_one_sample_is_enough_to_choose_from(tmp_path: Path) -> None:
    costs = costs_of({"a": pa.array([1])})
    assert choose_groups(costs, np.array([True])).mapping() == {}

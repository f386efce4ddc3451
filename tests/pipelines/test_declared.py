# ruff: noqa: E501 - tables of cases, one a line
"""Declared transforms against plain Python, value by value."""

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from presage.pipelines.transforms.apply import (
    apply_declared,
    apply_sql,
    bucketize,
    clip,
    columns_of,
    hash_columns,
    truncate_lists,
)
from presage.schemas.config.transforms import (
    BucketizeConfig,
    ClipConfig,
    CrossConfig,
    HashConfig,
    LogConfig,
    NormalizeConfig,
    TransformConfig,
    TruncateConfig,
    VocabularyLookupConfig,
)
from presage.schemas.dataset.fitted import FittedStats, FittedValues, Vocabulary
from presage.schemas.errors import SchemaError

INTS = st.none() | st.integers(-(2**40), 2**40)
FLOATS = st.none() | st.floats(-1e6, 1e6, width=32)
FITTED = FittedValues(
    {"v": Vocabulary(pa.array([3, 1, 2]), 2)},
    {"g.y": FittedStats(center=3.0, scale=2.0, boundaries=(0.0, 10.0))},
)


def applied(column: pa.Array, fitted: FittedValues = FITTED, **kind: Any) -> pa.Array:
    return apply_declared(pa.table({"x": column}), "g", "y", TransformConfig(**kind), fitted)


def of_float(f: Callable[[float], float]) -> Callable[[Any], Any]:
    return lambda x: None if x is None else np.float32(f(float(x)))


# Kind to its config and what it does to one value.
KINDS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "clip": (ClipConfig(column="x", minimum=-2, maximum=100), lambda x: None if x is None else min(100, max(-2, x))),
    "log": (LogConfig(column="x", offset=0.5), of_float(lambda x: math.log(0.5 + max(0.0, x)))),
    "normalize": (NormalizeConfig(column="x"), of_float(lambda x: (x - 3) / 2)),
    "bucketize": (
        BucketizeConfig(column="x", boundaries=(-1, 0, 7.5)),
        lambda x: None if x is None else sum(b <= x for b in (-1, 0, 7.5)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("values", [INTS, FLOATS], ids=["ints", "floats"])
@given(data=st.data())
def test_numbers_and_lists_of_them_are_transformed_value_by_value(
    kind: str, values: st.SearchStrategy[Any], data: st.DataObject
) -> None:
    config, reference = KINDS[kind]
    type_ = pa.int64() if values is INTS else pa.float32()
    flat = data.draw(st.lists(values, max_size=12))
    result = applied(pa.array(flat, type_), **{kind: config})
    assert result.to_pylist() == [reference(x) for x in flat]
    inner = [x for x in flat if x is not None]
    nested = [None, inner, [], inner[:2]]
    lists = pa.array([[9], *nested], pa.large_list(type_)).slice(1)
    wanted = [None if row is None else [reference(x) for x in row] for row in nested]
    assert applied(lists, **{kind: config}).to_pylist() == wanted


@given(
    st.lists(st.none() | st.lists(st.integers(0, 9), max_size=6), max_size=8),
    st.integers(1, 4),
    st.booleans(),
)
def test_cut_lists_are_slices(rows: list[list[int] | None], count: int, from_end: bool) -> None:
    column = pa.array([[1, 2], *rows], pa.large_list(pa.int64())).slice(1)
    result = truncate_lists(column, count, from_end)
    slices = [None if r is None else (r[-count:] if from_end else r[:count]) for r in rows]
    assert result.to_pylist() == slices
    assert result.type == pa.large_list(pa.int64())


def test_hash_is_one_to_one_with_values_and_null_where_one_is() -> None:
    city = pa.array(["a", "b", None, "a"])
    age = pa.array([1, 1, 1, None])
    one = hash_columns([city], 10**9, "").to_pylist()
    assert one[0] == one[3] != one[1]
    assert one[2] is None
    both = hash_columns([city, age], 10**9, "").to_pylist()
    assert both[2:] == [None, None]
    assert both[0] != both[1]
    assert both[0] != hash_columns([city, age], 10**9, "other").to_pylist()[0]
    assert both[0] == hash_columns([city, age.cast(pa.int8())], 10**9, "").to_pylist()[0]
    assert hash_columns([pa.array(["a", "b"])], 1000, "city").to_pylist() == PINNED


PINNED = [138, 751]


def test_list_is_crossed_with_scalars_value_by_value() -> None:
    lists = pa.array([[1, 2], None, [], [3], [1]], pa.large_list(pa.int64()))
    left = pa.array(["a", "a", "b", None, "b"])
    right = pa.array([1, 1, 1, 1, None])
    result = hash_columns([left, lists], 10**9, "").to_pylist()
    flat = hash_columns([pa.array(["a", "a", "b"]), pa.array([1, 2, 1])], 10**9, "").to_pylist()
    assert result == [flat[:2], None, [], None, flat[2:]]
    assert hash_columns([left, lists, right], 10**9, "").to_pylist()[1:] == [None, [], None, None]
    turned = hash_columns([lists, left], 10**9, "").to_pylist()
    assert turned[0] != result[0]


def test_hashes_fill_their_range() -> None:
    rows = hash_columns([pa.array(np.arange(20_000))], 16, "x").to_numpy()
    assert np.abs(np.bincount(rows, minlength=16) - 1250).max() < 200


def test_vocabulary_gives_rows_of_values_and_lists() -> None:
    look = VocabularyLookupConfig(name="v", column="x")
    assert applied(pa.array([3, None, 2]), vocabulary=look).to_pylist() == [2, None, 4]
    lists = pa.array([[1, 3], None, []], pa.large_list(pa.int64()))
    assert applied(lists, vocabulary=look).to_pylist() == [[3, 2], None, []]


def test_lists_of_texts_are_looked_up_hashed_and_cut_as_their_values() -> None:
    fitted = FittedValues({"v": Vocabulary(pa.array(["b", ""]), 1)})
    lists = pa.array([["x"], ["b", "", "c"], None, []], pa.large_list(pa.string())).slice(1)
    look = VocabularyLookupConfig(name="v", column="x")
    assert applied(lists, fitted, vocabulary=look).to_pylist() == [[1, 2, 0], None, []]
    flat = hash_columns([pa.array(["b", "", "c"])], 1000, "s").to_pylist()
    assert hash_columns([lists], 1000, "s").to_pylist() == [flat, None, []]
    assert truncate_lists(lists, 2, from_end=True).to_pylist() == [["", "c"], None, []]


def test_what_is_not_finite_becomes_null_and_limits_hold_for_infinities() -> None:
    odd = pa.array([float("nan"), float("inf"), -float("inf"), 1.0], pa.float64())
    assert applied(odd, normalize=NormalizeConfig(column="x")).to_pylist() == [
        None,
        None,
        None,
        -1.0,
    ]
    assert applied(odd, log=LogConfig(column="x")).null_count == 3
    assert bucketize(odd, np.array([0.0])).to_pylist() == [None, 1, 0, 1]
    assert clip(odd, 0, 5).to_pylist() == [None, 5, 0, 1]
    assert clip(odd, None, 5).to_pylist() == [None, 5, None, 1]
    assert clip(pa.array([1e300, 2.0]), None, None).to_pylist() == [None, 2.0]
    assert clip(pa.array([2**63 - 1, -(2**63), None]), -1e30, 1e30).to_pylist()[:2] == [
        2**63 - 1,
        -(2**63),
    ]


def test_lists_hold_no_nulls_whatever_their_values_are() -> None:
    odd = pa.array([[float("nan"), float("inf"), 1.0], None, []], pa.list_(pa.float32()))
    kinds: list[dict[str, Any]] = [
        {"normalize": NormalizeConfig(column="x")},
        {"log": LogConfig(column="x")},
        {"clip": ClipConfig(column="x", minimum=0)},
    ]
    for kind in kinds:
        result = applied(odd, **kind)
        assert result.values.null_count == 0
        assert np.isfinite(result[0].values.to_numpy()).tolist() == [False, False, True]
        assert result.to_pylist()[1:] == [None, []]
    buckets = applied(odd, bucketize=BucketizeConfig(column="x", boundaries=(0.0, 2.0)))
    assert buckets.to_pylist() == [[0, 2, 1], None, []]


def test_null_in_a_list_that_sql_makes_is_told_by_its_name() -> None:
    table = pa.table({"x": pa.array([[1, 2]])})
    with pytest.raises(SchemaError, match="hold no nulls in lists, got 2 in 'y'; leave"):
        apply_sql(table, {"y": "[nullif(v, v) for v in x]"})


def test_quantiles_use_the_fitted_boundaries() -> None:
    config = BucketizeConfig(column="x", quantiles=3)
    assert applied(pa.array([-1, 0, 10]), bucketize=config).to_pylist() == [0, 1, 2]


# What is wrong, to column, kind and message.
REFUSED: dict[str, tuple[pa.Array, dict[str, Any], str]] = {
    "a text to clip": (pa.array(["x"]), {"clip": ClipConfig(column="x", minimum=1)}, "clip must read numbers, got string"),
    "a time to normalise": (pa.array([1], pa.timestamp("us")), {"normalize": NormalizeConfig(column="x")}, "normalize must read numbers, got timestamp[us]"),
    "a boolean to bucket": (pa.array([True]), {"bucketize": BucketizeConfig(column="x", quantiles=2)}, "bucketize must read numbers, got bool"),
    "numbers up to 2**64": (pa.array([1], pa.uint64()), {"log": LogConfig(column="x")}, "log must read numbers, got uint64"),
    "a number to cut": (pa.array([1]), {"last": TruncateConfig(column="x", count=1)}, "first and last must read a list, got int64"),
    "half a limit for whole numbers": (pa.array([1]), {"clip": ClipConfig(column="x", minimum=0.5)}, "clip must have whole limits for int64, got 0.5"),
    "quantiles of lists": (pa.array([[1]], pa.large_list(pa.int64())), {"bucketize": BucketizeConfig(column="x", quantiles=2)}, "bucketize by quantiles must read one number, got large_list"),
    "floats in a vocabulary": (pa.array([0.5]), {"vocabulary": VocabularyLookupConfig(name="v", column="x")}, "vocabulary must read integers or texts, got double"),
}  # fmt: skip


@pytest.mark.parametrize(("column", "kind", "message"), REFUSED.values(), ids=REFUSED)
def test_columns_of_wrong_types_are_refused_even_without_rows(
    column: pa.Array, kind: dict[str, Any], message: str
) -> None:
    for rows in (column, column.slice(0, 0)):
        with pytest.raises(SchemaError, match=re.escape(message)):
            applied(rows, **kind)


def test_two_lists_are_not_crossed() -> None:
    lists = pa.array([[1]], pa.large_list(pa.int64()))
    table = pa.table({"x": lists, "z": lists})
    configs = (
        TransformConfig(cross=CrossConfig(columns=("x", "z"), num_rows=5)),
        TransformConfig(hash=HashConfig(columns=("x", "z"), num_rows=5)),
    )
    for config in configs:
        with pytest.raises(SchemaError, match="hash must read at most one list, got large_list"):
            apply_declared(table, "g", "y", config, FITTED)


def test_columns_of_an_expression_are_those_it_names() -> None:
    lambdas = "CASE WHEN a > 1 THEN list_transform(b, lambda x: x + c) END"
    assert columns_of(lambdas) == {"a", "b", "c"}
    assert columns_of('"odd name" + 1') == {"odd name"}
    assert columns_of("(j -> '$.a')::INT + (j ->> k)") == {"j", "k"}
    assert columns_of("len(list_filter(h, lambda a: a > b)) + a") == {"h", "a", "b"}

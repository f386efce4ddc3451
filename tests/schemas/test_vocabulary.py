"""Vocabularies: permanent rows, an order independent of the input's, a row for every value."""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from presage.schemas.dataset import fitted as module
from presage.schemas.dataset.fitted import (
    Vocabulary,
    encode_version,
    merge_versions,
    new_entries,
    shards_of,
    value_type,
    version_path,
)
from presage.schemas.errors import SchemaError

INTS = st.integers(-(2**63), 2**63 - 1)
VALUES = {
    "int64": (pa.int64(), INTS | st.integers(0, 5)),
    "string": (pa.string(), st.text(max_size=3)),
}


def empty(kind: pa.DataType, oov_rows: int = 2) -> Vocabulary:
    return Vocabulary(pa.array([], kind), oov_rows)


def counted(counts: Mapping[Any, int], kind: pa.DataType) -> pa.Table:
    return pa.table(
        {
            "value": pa.array(list(counts), kind),
            "count": pa.array(list(counts.values()), pa.int64()),
        }
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", VALUES)
@given(data=st.data())
def test_entries_are_those_of_a_sorted_list_and_appends_move_none(
    name: str, data: st.DataObject
) -> None:
    kind, values = VALUES[name]
    segments = data.draw(
        st.lists(st.dictionaries(values, st.integers(1, 9), max_size=12), min_size=1, max_size=3)
    )
    min_count, num_rows, oov_rows = data.draw(
        st.tuples(st.integers(1, 4), st.integers(3, 30), st.integers(1, 2))
    )
    known: list[object] = []
    versions: list[pa.Table] = []
    for number, counts in enumerate(segments):
        before = merge_versions(versions, oov_rows, kind)
        found = new_entries(before, counted(counts, kind), min_count, num_rows)
        often = [(-n, v) for v, n in counts.items() if n >= min_count and v not in known]
        if name == "string":
            often = [(n, str(v).encode()) for n, v in often]
        wanted = [v.decode() if isinstance(v, bytes) else v for _, v in sorted(often)]
        known += wanted[: max(0, num_rows - oov_rows - len(known))]
        versions.append(pq.read_table(pa.BufferReader(encode_version(found, number))))
    joined = merge_versions(versions, oov_rows, kind)
    assert joined.values.to_pylist() == known
    rows = joined.rows_of(pa.array(known, kind)).to_pylist()
    assert rows == list(range(oov_rows, oov_rows + len(known)))
    others = [v for v in data.draw(st.lists(values, max_size=20)) if v not in known]
    assert all(0 <= r < oov_rows for r in joined.rows_of(pa.array(others, kind)).to_pylist())


@pytest.mark.parametrize("name", VALUES)
def test_order_of_counts_does_not_matter(name: str) -> None:
    kind, _ = VALUES[name]
    rng = np.random.default_rng(0)
    counts = {(i if name == "int64" else f"v{i}"): int(rng.integers(1, 6)) for i in range(200)}
    table = counted(counts, kind)
    shuffled = table.take(pa.array(rng.permutation(200)))
    one, two = (new_entries(empty(kind), t, 2, 90) for t in (table, shuffled))
    assert one.equals(two)
    assert one.num_rows == 88
    assert encode_version(one, 0) == encode_version(two, 0)


def test_rows_of_nulls_lists_and_narrow_integers() -> None:
    vocabulary = Vocabulary(pa.array([7, 5]), oov_rows=3)
    assert vocabulary.rows_of(pa.array([5, None, 7], pa.int16())).to_pylist() == [4, None, 3]
    assert vocabulary.rows_of(pa.array([], pa.int64())).to_pylist() == []
    texts = Vocabulary(pa.array(["b", ""]), oov_rows=1)
    assert texts.rows_of(pa.array(["", "b", "c", None], pa.large_string())).to_pylist() == [
        2,
        1,
        0,
        None,
    ]


def test_out_of_vocabulary_values_spread_over_their_rows_and_stay_there() -> None:
    values = pa.array(np.arange(1000) * 31)
    small, grown = empty(pa.int64(), 8), Vocabulary(pa.array([31, 62]), 8)
    rows = small.rows_of(values).to_numpy()
    assert np.bincount(rows, minlength=8).min() > 80
    others = np.delete(np.arange(1000), [1, 2])
    assert grown.rows_of(values).to_numpy()[others].tolist() == rows[others].tolist()
    assert empty(pa.int64(), 4).rows_of(pa.array([1, 2, 3, 4, 5])).to_pylist() == PINNED


PINNED = [1, 3, 2, 3, 3]


def test_text_whose_hash_an_entry_has_is_not_taken_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    hashes = {"a": 1, "b": 1, "c": 2}
    monkeypatch.setattr(
        module, "hash_values", lambda v: np.array([hashes[x] for x in v.to_pylist()], np.uint64)
    )
    counts = counted({"a": 3, "b": 5, "c": 4}, pa.string())
    found = new_entries(empty(pa.string(), 1), counts, 1, 10)
    assert found["value"].to_pylist() == ["b", "c"]
    vocabulary = Vocabulary(pa.array(["b", "c"]), 1)
    assert vocabulary.rows_of(pa.array(["a", "b", "c"])).to_pylist() == [0, 1, 2]
    assert new_entries(vocabulary, counts, 1, 10).num_rows == 0


def test_name_of_a_version_holds_its_number_and_content() -> None:
    entries = new_entries(empty(pa.int64()), counted({5: 1}, pa.int64()), 1, 10)
    data = encode_version(entries, 3)
    assert re.fullmatch(
        r"vocabularies/items/00003-[0-9a-f]{12}\.parquet", version_path("items", 3, data)
    )
    assert version_path("items", 3, data) != version_path("items", 3, data + b" ")


DAMAGED = {
    "a gap between rows": ([2, 4], [5, 6], "rows of a vocabulary are not consecutive from 2"),
    "rows from elsewhere": ([0, 1], [5, 6], "rows of a vocabulary are not consecutive from 2"),
    "a value twice": ([2, 3], [5, 5], "value of a vocabulary has two rows"),
}


@pytest.mark.parametrize(("rows", "values", "message"), DAMAGED.values(), ids=DAMAGED)
def test_damaged_versions_are_refused(rows: list[int], values: list[int], message: str) -> None:
    table = pa.table({"row": rows, "value": values, "count": [1, 1], "version": [0, 0]})
    with pytest.raises(SchemaError, match=re.escape(message)):
        merge_versions([table], 2, pa.int64())


@pytest.mark.parametrize(
    "kind", [pa.float32(), pa.uint64(), pa.bool_(), pa.timestamp("us"), pa.large_list(pa.float32())]
)
def test_vocabulary_of_other_types_is_refused(kind: pa.DataType) -> None:
    with pytest.raises(SchemaError, match="vocabulary must read integers or texts, got"):
        value_type(kind)


def test_shards_hold_each_value_once_whatever_its_width() -> None:
    values = np.arange(-500, 500)
    shards = shards_of(pa.array(values), 16)
    assert shards.tolist() == shards_of(pa.array(values, pa.int16()), 16).tolist()
    assert np.bincount(shards, minlength=16).min() > 30

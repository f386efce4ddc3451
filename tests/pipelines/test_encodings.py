"""The choice of encodings: exact, no larger than what it was chosen from, the same each time."""

from datetime import datetime

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.clustering.encodings import (
    PAGE_BYTES,
    TRIAL_BYTES,
    Encodings,
    candidate_encodings,
    choose_encodings,
    open_writer,
    trial_rows,
)
from schemas.arrays import large_list, offsets_of


def written(table: pa.Table, encodings: Encodings) -> pa.Buffer:
    """Return the bytes of a file."""
    sink = pa.BufferOutputStream()
    with open_writer(sink, table.schema, encodings) as writer:
        writer.write_table(table)
    return sink.getvalue()


def chunk_bytes(buffer: pa.Buffer) -> int:
    """Return the bytes of all column chunks of a file, the footer left out."""
    metadata = pq.read_metadata(pa.BufferReader(buffer))
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    return sum(g.column(i).total_compressed_size for g in groups for i in range(g.num_columns))


def lists(rng: np.random.Generator, num_rows: int, length: int) -> pa.Array:
    lengths = rng.integers(0, length, num_rows)
    return large_list(rng.integers(0, 1 << 20, lengths.sum()), offsets_of(lengths))


def columns(rng: np.random.Generator) -> dict[str, pa.Array]:
    """Return one column of each kind that format 1 has, some with nulls."""
    n = 3000
    return {
        "ascending ids": pa.array(np.arange(n) * 7 + 1_000_000_000),
        "few ids": pa.array(rng.integers(0, 9, n)),
        "random ids": pa.array(rng.integers(-(1 << 62), 1 << 62, n)),
        "narrow ids with nulls": pa.array([None, 3, -4] * (n // 3), pa.int8()),
        "floats with nan": pa.array(np.where(rng.random(n) < 0.1, np.nan, rng.random(n))),
        "rounded floats": pa.array(rng.integers(0, 100, n).astype(np.float32) / 8),
        "texts": pa.array([f"item {i % 50}" if i % 7 else None for i in range(n)]),
        "flags": pa.array(rng.random(n) < 0.5),
        "times": pa.array([datetime(2026, 1, 1 + i % 28) for i in range(n)], pa.timestamp("us")),
        "lists": lists(rng, n, 5),
        "empty lists": large_list(np.empty(0, np.int64), np.zeros(n + 1, np.int64)),
        "nulls": pa.array([None] * n, pa.float32()),
    }


COLUMNS = columns(np.random.default_rng(0))


@pytest.mark.parametrize("name", COLUMNS)
def test_chosen_encoding_keeps_every_value_and_is_the_smallest_candidate(name: str) -> None:
    table = pa.table({name: COLUMNS[name]})
    chosen = choose_encodings(table)
    buffer = written(table, chosen)
    others = [
        chunk_bytes(written(table, Encodings({path: e}, p)))
        for path, usable in candidate_encodings(table.schema.field(0)).items()
        for e in usable
        for p in PAGE_BYTES
    ]
    assert chunk_bytes(buffer) == min(others)
    back = pq.read_table(pa.BufferReader(buffer), page_checksum_verification=True)
    assert back.schema.equals(table.schema)
    assert str(back[name].to_pylist()) == str(table[name].to_pylist())


def test_leaves_of_nested_columns_are_encoded_one_by_one() -> None:
    rng = np.random.default_rng(4)
    pairs = [{"id": i * 3, "tags": ["x" * 30] * (i % 3)} for i in range(5000)]
    table = pa.table(
        {
            "pair": pa.array(pairs, pa.struct({"id": pa.int64(), "tags": pa.list_(pa.string())})),
            "map": pa.array([[("k", i % 9)] for i in range(5000)], pa.map_("string", "int32")),
            "price": pa.array(rng.integers(0, 99, 5000)).cast(pa.decimal128(21)),
            "category": pa.array([f"c{i % 4}" for i in range(5000)]).dictionary_encode(),
            "half": pa.array(rng.random(5000).astype(np.float16)),
        }
    )
    chosen = choose_encodings(table)
    assert set(chosen.by_path) == {
        "pair.id",
        "pair.tags.list.element",
        "map.key_value.key",
        "map.key_value.value",
        "price",
        "category",
        "half",
    }
    assert chosen.by_path["pair.id"] == "DELTA_BINARY_PACKED"
    buffer = written(table, chosen)
    plain = Encodings(dict.fromkeys(chosen.by_path, "PLAIN"))
    assert chunk_bytes(buffer) < 0.7 * chunk_bytes(written(table, plain))
    assert pq.read_table(pa.BufferReader(buffer)).equals(table)


def test_choice_does_not_depend_on_chunks() -> None:
    table = pa.table(COLUMNS)
    cut = pa.concat_tables([table.slice(0, 100), table.slice(100, 1), table.slice(101)])
    assert choose_encodings(cut) == choose_encodings(table)


def test_long_histories_that_return_late_get_large_pages() -> None:
    rng = np.random.default_rng(1)
    users = [rng.integers(0, 1 << 40, 5000).tolist() for _ in range(4)]  # 160 kB together
    table = pa.table({"history": pa.array(users * 20, pa.large_list(pa.int64()))})
    chosen = choose_encodings(table)
    assert chosen.page_bytes == PAGE_BYTES[0]
    small = Encodings(chosen.by_path, 64 << 10)
    assert written(table, chosen).size < 0.2 * written(table, small).size


def test_dictionary_that_grows_gets_small_pages() -> None:
    rng = np.random.default_rng(2)
    item = (np.arange(60_000) * rng.random(60_000) / 3).astype(np.int64)  # new ones all the time
    prices = rng.random(20_000).astype(np.float32)[item]
    chosen = choose_encodings(pa.table({"price": pa.array(prices)}))
    assert chosen == Encodings({"price": "DICTIONARY"}, PAGE_BYTES[-1])


def test_trial_sees_a_page_of_long_lists_and_at_least_one_row() -> None:
    table = pa.table({"history": lists(np.random.default_rng(3), 10_000, 400)})
    seen = trial_rows(table)
    assert 0.9 * TRIAL_BYTES < seen.nbytes <= TRIAL_BYTES
    one = pa.table({"history": pa.array([[1] * 2_000_000] * 2, pa.large_list(pa.int64()))})
    assert trial_rows(one).num_rows == 1
    assert choose_encodings(table.slice(0, 0)) == choose_encodings(table.slice(0, 0))

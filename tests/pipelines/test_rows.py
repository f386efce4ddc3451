"""The samples of a dataset by its SQL view, and the content hash of rows."""

import os
import shutil
from datetime import UTC, date, datetime, time
from decimal import Decimal
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pytest

from presage.pipelines.build import build
from presage.pipelines.table.expand import (
    VIEW,
    ContentHash,
    _literal,
    content_hash,
    value_hashes,
    view_sql,
)
from presage.schemas.dataset.opened import open_dataset
from tests import real_logs
from tests.pipelines.appending import DEFAULT, EXTRA, addition, changed
from tests.pipelines.logs import SCHEMA, built, bytes_of, request, stored_table, write_log
from tests.pipelines.shifting import JOB, STORAGES, shifting_log, stored_as


def by_view(dataset: Path, name: str) -> pa.Table:
    """Run the view from inside the dataset, as its first line says."""
    before = Path.cwd()
    os.chdir(dataset)
    try:
        connection = duckdb.connect()
        connection.execute((dataset / VIEW).read_text())
        return connection.sql(f"FROM {name}").to_arrow_table()
    finally:
        os.chdir(before)


def check(dataset: Path) -> None:
    for name, model_inputs in (("samples", False), ("model_inputs", True)):
        expected = stored_table(dataset, model_inputs=model_inputs)
        found = by_view(dataset, name)
        assert found.column_names == expected.column_names
        assert content_hash([found]) == content_hash([expected])


@pytest.mark.slow
@pytest.mark.parametrize("name", STORAGES)
def test_view_covers_every_layout_of_a_group(name: str, tmp_path: Path) -> None:
    shifting_log(tmp_path / "log", 1000)
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "schema.pbtxt").write_text(SCHEMA)
    with stored_as(STORAGES[name]):
        build(request(tmp_path / "job.yaml", tmp_path / "log", tmp_path / "dataset"))
    check(tmp_path / "dataset")
    found = by_view(tmp_path / "dataset", "samples")["history"]
    assert found.null_count > 0
    assert [] in found.to_pylist()


@pytest.mark.slow
def test_view_joins_parts_and_stays_true_when_the_dataset_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("presage.pipelines.prepare.PART_INPUT_BYTES", 2_000)
    dataset = built(tmp_path)
    assert len(list(dataset.glob("segments/*/samples/*"))) > 3
    check(Path(shutil.move(dataset, tmp_path / "else where")))


@pytest.mark.slow
@pytest.mark.parametrize("default", ["", DEFAULT])
def test_view_answers_for_columns_that_a_segment_lacks(default: str, tmp_path: Path) -> None:
    dataset = built(tmp_path)
    write_log(tmp_path / "log-1", num_rows=200, seed=1)
    job = changed(
        tmp_path / "newer",
        ("clicked AS label", "clicked AS label, 1.5::FLOAT AS price"),
        schema=SCHEMA + EXTRA + default,
    )
    build(addition(job, tmp_path / "log-1", dataset))
    check(dataset)
    assert len(open_dataset(dataset).segments) == 2


@pytest.mark.slow
def test_view_quotes_names_that_sql_would_misread(tmp_path: Path) -> None:
    write_log(tmp_path / "log")
    job = changed(
        tmp_path / "job",
        ("clicked AS label", 'clicked AS label, 1 AS "it\'s ""new"" [*]", 2 AS "select"'),
        schema=SCHEMA
        + 'feature { name: "it\'s \\"new\\" [*]" type: INT annotation { tag: "kept" } }\n'
        + 'feature { name: "select" type: INT annotation { tag: "kept" } }\n',
    )
    build(request(job, tmp_path / "log", tmp_path / "dataset"))
    check(tmp_path / "dataset")


@pytest.mark.slow
def test_view_without_groups_reads_the_samples_alone(tmp_path: Path) -> None:
    write_log(tmp_path / "log")
    job = changed(
        tmp_path / "job",
        ("{user: [session, user, history]}", "{}"),
        ("transforms: {user:", "transforms: {samples:"),
    )
    build(request(job, tmp_path / "log", tmp_path / "dataset"))
    assert "JOIN" not in (tmp_path / "dataset" / VIEW).read_text()
    check(tmp_path / "dataset")


@pytest.mark.slow
def test_view_is_the_same_text_whenever_it_is_made(tmp_path: Path) -> None:
    dataset = built(tmp_path)
    assert view_sql(open_dataset(dataset)) == (dataset / VIEW).read_text()
    before = bytes_of(dataset)
    build(request(tmp_path / "job" / "job.yaml", tmp_path / "log", dataset))
    assert bytes_of(dataset) == before


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["mind", "ebnerd"])
def test_view_of_real_logs(name: str, shared_data: Path, tmp_path: Path) -> None:
    check(real_logs.built(name, shared_data)[0])


MOMENT = datetime(2026, 1, 2, 3, 4, 5, 6)
VALUES = {
    "small integers": pa.array([1, 2, None, 2, 300], pa.int16()),
    "large integers": pa.array([1, 2**63, None, 2, 2**64 - 1], pa.uint64()),
    "floats": pa.array([0.0, -0.0, None, float("inf"), 1e-300]),
    "texts": pa.array(["", "a", None, "aa", "b"]),
    "bytes": pa.array([b"", b"\x00", None, b"\x00\x00", b"b"]),
    "flags": pa.array([True, False, None, True, True]),
    "times": pa.array([MOMENT, None, None, MOMENT, MOMENT], pa.timestamp("ns")),
    "zoned times": pa.array([MOMENT.replace(tzinfo=UTC)] * 5, pa.timestamp("ms", "UTC")),
    "dates": pa.array([date(2026, 1, 2), None, None, date(1969, 1, 1), None]),
    "times of day": pa.array([time(1, 2), None, None, time(3), time(4)]),
    "decimals": pa.array([Decimal("1.10"), None, None, Decimal("-2.00"), Decimal("3.00")]),
    "categories": pa.array(["a", "b", None, "a", "c"]).dictionary_encode(),
    "lists": pa.array([[1, 2], [], None, [1], [None, 2]]),
    "lists of texts": pa.array([["a", None], [], None, ["aa"], ["a", "a"]]),
    "lists of lists": pa.array([[[1], [2]], [[1, 2]], None, [[], [1, 2]], [None]]),
    "pairs": pa.array([{"a": 1, "b": "x"}, {"a": 1, "b": None}, None, {"a": 2, "b": "x"}, None]),
    "maps": pa.array([[("k", 1)], [], None, [("k", 2)], [("l", 1)]], pa.map_("string", "int8")),
    "nulls": pa.array([None] * 5),
}


@pytest.mark.parametrize("name", VALUES)
def test_hashes_are_equal_exactly_where_values_are(name: str) -> None:
    column = VALUES[name]
    hashes = value_hashes(column).tolist()
    for i, left in enumerate(column.to_pylist()):
        for j, right in enumerate(column.to_pylist()):
            same = str(left) == str(right)  # tells 0.0 and -0.0 apart
            assert (hashes[i] == hashes[j]) == same, (left, right)


@pytest.mark.parametrize("name", VALUES)
def test_hashes_do_not_depend_on_the_batch(name: str) -> None:
    column = VALUES[name]
    single = [value_hashes(column.slice(i, 1))[0] for i in range(len(column))]
    assert value_hashes(column).tolist() == single
    cut = pa.chunked_array([column.slice(0, 2), column.slice(2)])
    assert value_hashes(cut).tolist() == single


def test_content_hash_is_the_same_in_any_order_and_any_batches() -> None:
    table = pa.table(VALUES)
    expected = content_hash([table])
    shuffled = table.take(pa.array(np.random.default_rng(0).permutation(5)))
    assert content_hash([shuffled]) == expected
    assert content_hash([shuffled.slice(3), shuffled.slice(0, 0), shuffled.slice(0, 3)]) == expected
    assert content_hash(shuffled.select(sorted(VALUES)).to_batches(2)) == expected
    assert content_hash([table, table]) == expected + expected
    assert content_hash([]) == ContentHash()


CHANGES = {
    "a row lost": lambda t: t.slice(1),
    "a row repeated instead of another": lambda t: pa.concat_tables([t.slice(0, 1), t.slice(0, 1)]),
    "a value changed": lambda t: t.set_column(0, "a", pa.array([1, 3])),
    "a null for a zero": lambda t: t.set_column(2, "c", pa.array([None, 1])),
    "an empty list for a null": lambda t: t.set_column(1, "b", pa.array([[1], []])),
    "values of two columns exchanged": lambda t: t.rename_columns(["c", "b", "a"]),
    "values of two rows exchanged": lambda t: t.set_column(0, "a", pa.array([2, 1])),
    "a column lost": lambda t: t.drop_columns(["c"]),
}


@pytest.mark.parametrize("name", CHANGES)
def test_content_hash_changes_with(name: str) -> None:
    table = pa.table({"a": [1, 2], "b": pa.array([[1], None]), "c": [0, 1]})
    changed = CHANGES[name](table)
    assert str(content_hash([changed])) != str(content_hash([table]))


def test_content_hash_takes_narrower_types_for_the_same_values() -> None:
    table = pa.table({"a": pa.array([1, -2], pa.int8()), "b": pa.array(["x", None])})
    wide = table.cast(pa.schema({"a": pa.int64(), "b": pa.large_string()}))
    assert content_hash([wide]) == content_hash([table])


def test_defaults_of_the_view_are_numbers_of_any_kind() -> None:
    for value in (1.5, float("nan"), float("inf"), float("-inf")):
        statement = f"SELECT CAST({_literal(value)} AS DOUBLE)"
        ((found,),) = duckdb.execute(statement).fetchall()
        assert np.array_equal(found, value, equal_nan=True)

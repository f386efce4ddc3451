"""Statistics are exact, encodings lossless, and SQL keeps the origin of rows."""

from io import BytesIO
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from google.protobuf import text_format
from tensorflow_metadata.proto.v0 import statistics_pb2

from presage.pipelines.clustering.storage_layout import choose_encodings, open_writer
from presage.pipelines.quality.column_statistics import (
    column_statistics,
    sum_columns,
    table_statistics,
)
from presage.pipelines.quality.segment_statistics import (
    SliceStatistics,
    read_statistics,
    statistics_text,
    write_statistics,
)
from presage.pipelines.samples.sql import Connection, map_rows, run, with_list_index
from presage.pipelines.samples.statements import select_origin
from presage.pipelines.sources.raw_rows import ORIGIN
from presage.schemas.errors import SchemaError
from presage.schemas.layout import STATISTICS
from presage.schemas.storage.location import Location


def text_of(table: pa.Table) -> str:
    statistics = SliceStatistics(table.num_rows, table_statistics(table), {}, {}, {})
    return statistics_text({"segment": statistics}, "session")


def test_statistics_of_the_largest_numbers_are_finite() -> None:
    largest = np.finfo(np.float64).max
    table = pa.table({"x": [largest, -largest, 1.0], "y": [largest, largest, 0.0]})
    text = text_of(table)
    proto = text_format.Parse(text, statistics_pb2.DatasetFeatureStatisticsList())
    x, y = (feature.num_stats for feature in proto.datasets[0].features)
    assert (x.min, x.max) == (-largest, largest)
    assert 0 < x.std_dev < float("inf")
    assert y.mean == pytest.approx(2 / 3 * largest)


COLUMNS = {
    "ints with a null": pa.array([3, None, -4, 0], pa.int64()),
    "floats with a nan": pa.array([1.5, float("nan"), 2.5, None], pa.float32()),
    "lists": pa.array([[1, 2], None, [], [3]], pa.large_list(pa.int64())),
    "texts": pa.array(["a", "", None, "long"], pa.string()),
}


@pytest.mark.parametrize("column", COLUMNS.values(), ids=COLUMNS.keys())
def test_statistics_of_two_halves_add_up_to_those_of_the_whole(column: pa.Array) -> None:
    whole = column_statistics(column)
    for cut in range(1, 4):
        assert sum_columns([column_statistics(p) for p in (column[:cut], column[cut:])]) == whole


@pytest.mark.parametrize("zeros", [[0.0, -0.0], [-0.0, 0.0]])
def test_limits_do_not_depend_on_the_order_of_signed_zeros(zeros: list[float]) -> None:
    parts = [column_statistics(pa.array([zero])) for zero in zeros]
    both = [sum_columns(parts), column_statistics(pa.array(zeros))]
    assert {str(x) for s in both for x in (s.minimum, s.maximum)} == {"0.0"}


def test_statistics_text_says_what_numpy_says() -> None:
    values = np.array([3.0, 5.0, 10.0])
    table = pa.table({"x": pa.array([*values, None]), "h": pa.array([[1], [], [2, 3], None])})
    text = text_of(table)
    proto = text_format.Parse(text, statistics_pb2.DatasetFeatureStatisticsList())
    lists, numbers = proto.datasets[0].features
    assert proto.datasets[0].num_examples == 4
    assert numbers.num_stats.mean == values.mean()
    assert numbers.num_stats.std_dev == pytest.approx(values.std())
    assert (numbers.num_stats.min, numbers.num_stats.max) == (3.0, 10.0)
    assert numbers.num_stats.common_stats.num_missing == 1
    assert lists.num_stats.common_stats.tot_num_values == 3
    assert lists.num_stats.common_stats.max_num_values == 2


def test_chosen_encodings_are_lossless_and_no_larger_than_the_default() -> None:
    rng = np.random.default_rng(0)
    table = pa.table(
        {
            "sorted": np.arange(20_000) // 7,
            "skewed": (rng.random(20_000) ** 6 * 1000).astype(np.int64),
            "float": rng.random(20_000).astype(np.float32),
            "flag": rng.random(20_000) < 0.1,
            "text": [f"user-{i // 3}" for i in range(20_000)],
            "list": pa.array([[i, i + 1] for i in range(20_000)], pa.large_list(pa.int64())),
            "null": pa.array([None if i % 3 else i for i in range(20_000)], pa.int64()),
        }
    )
    sink, default = pa.BufferOutputStream(), BytesIO()
    with open_writer(sink, table.schema, choose_encodings(table)) as writer:
        writer.write_table(table)
    pq.write_table(table, default, compression="zstd", write_statistics=False)
    data = sink.getvalue()
    assert pq.read_table(pa.BufferReader(data)).equals(table)
    assert data.size < len(default.getvalue())


RAW = pa.table({"a": [1, 2, 3], "items": [[5, 6], [], [7]], ORIGIN: [10, 11, 12]})
STATEMENTS = {
    "a select": ("SELECT a FROM log", [10, 11, 12]),
    "a star": ("SELECT * FROM log", [10, 11, 12]),
    "an unnest": ("SELECT a, unnest(items) AS item FROM log", [10, 10, 12]),
    "a subquery that passes everything": (
        "SELECT a FROM (SELECT * FROM log) WHERE a > 1",
        [11, 12],
    ),
    "a join with unnest": ("SELECT a, i FROM log, unnest(items) AS t(i)", [10, 10, 12]),
}


@pytest.mark.parametrize(("statement", "origins"), STATEMENTS.values(), ids=STATEMENTS.keys())
def test_select_origin_keeps_the_raw_row_of_each_sample(statement: str, origins: list[int]) -> None:
    samples = run(Connection(), select_origin(statement, "key"), {"log": RAW})
    assert samples[ORIGIN].to_pylist() == origins


@pytest.mark.parametrize("statement", ["SELECT 1 UNION SELECT 2", "SELECT 1; SELECT 2", "DROP t"])
def test_select_origin_refuses_statements_without_one_row_per_sample(statement: str) -> None:
    with pytest.raises(SchemaError, match=r"^key (must be|is not valid SQL)"):
        select_origin(statement, "key")


def test_map_rows_finds_the_rows_that_raise() -> None:
    rows = pa.table({"x": ["1", "two", "3", "4", "five"], ORIGIN: [0, 1, 2, 3, 4]})
    statement = select_origin("SELECT CAST(x AS BIGINT) AS x FROM log", "key")
    result = map_rows(Connection(), statement, "log", rows)
    assert result.samples is not None
    assert result.samples["x"].to_pylist() == [1, 3, 4]
    assert result.bad_rows["origin"].to_pylist() == [1, 4]
    assert result.bad_rows["value"].to_pylist() == ["{'x': 'two'}", "{'x': 'five'}"]


@pytest.mark.parametrize(
    "statement", ["SELECT * FROM read_csv('/etc/passwd')", "SELECT * FROM RAW", "SET threads = 4"]
)
def test_sql_of_a_job_reaches_no_file_no_variable_and_no_setting(statement: str) -> None:
    with pytest.raises(duckdb.Error):
        run(Connection(), statement, {})


def test_list_index_counts_the_samples_of_each_row() -> None:
    samples = pa.table({ORIGIN: [5, 5, 3, 5, 3]})
    assert with_list_index(samples)["_list_index"].to_pylist() == [0, 1, 0, 2, 1]


def test_statistics_are_read_back_compressed(tmp_path: Path) -> None:
    text = text_of(pa.table({"a": [1, 2, 2]}))
    write_statistics(tmp_path, text)
    assert (tmp_path / STATISTICS).stat().st_size < len(text) / 2
    proto = read_statistics(Location.parse(tmp_path))
    assert proto == text_format.Parse(text, statistics_pb2.DatasetFeatureStatisticsList())


@pytest.mark.parametrize("damage", [slice(5, None), slice(None, -9)])
def test_damaged_statistics_are_refused_by_name(tmp_path: Path, damage: slice) -> None:
    write_statistics(tmp_path, text_of(pa.table({})))
    (tmp_path / STATISTICS).write_bytes((tmp_path / STATISTICS).read_bytes()[damage])
    with pytest.raises(SchemaError, match=r"statistics cannot be read: .*statistics\.pbtxt\.zst"):
        read_statistics(Location.parse(tmp_path))

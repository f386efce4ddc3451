"""Lists that SQL only passes on: found by name, and equal to what the SQL would have given."""

import numpy as np
import pyarrow as pa
import pytest

from pipelines.samples.sql import Connection, select_origin
from pipelines.samples.sql_rejects import map_rows
from pipelines.samples.statements import Passthrough, map_samples, unchanged_lists
from pipelines.samples.tuples import with_hashes
from pipelines.sources.rows import ORIGIN

ROWS = pa.table(
    {
        "id": pa.array([7, 8, 9, 10]),
        "seen": pa.array([[1, 2], None, [], [3, None]], pa.list_(pa.int32())),
        "price": pa.array([[0.5], [1.5, 2.5], None, []], pa.list_(pa.float64())),
        "names": pa.array([["a"], [], None, ["b"]], pa.list_(pa.string())),
        ORIGIN: pa.array([100, 101, 102, 105]),
    }
)
NUMBERS = ("seen", "price")

STATEMENTS = {
    "star": ("SELECT * EXCLUDE (names) FROM log", NUMBERS),
    "filtered": ("SELECT id, seen FROM log WHERE id <> 8", ("seen",)),
    "sorted": ("SELECT id, price, l.seen FROM log l ORDER BY id DESC", NUMBERS),
    "unnested": ("SELECT id, seen, unnest([1, 2, 3]) AS n FROM log", ("seen",)),
    "also used": ("SELECT seen, len(seen) AS n, list_reverse(price) AS price FROM log", ("seen",)),
    "replaced": ("SELECT * EXCLUDE (names) REPLACE (seen[1:1] AS seen) FROM log", ("price",)),
    "excluded": ("SELECT * EXCLUDE (names, seen) FROM log", ("price",)),
    "renamed": ("SELECT id, seen AS price FROM log", ()),
    "other case": ("SELECT id, Seen FROM log", ()),
    "twice": ("SELECT * EXCLUDE (names), seen[1:1] AS seen FROM log", ("price",)),
    "subquery": ("SELECT * FROM (SELECT _origin, id, seen[1:1] AS seen FROM log)", ()),
    "with": ("WITH log AS (SELECT _origin, seen[1:1] AS seen FROM log) SELECT * FROM log", ()),
    "joined": ("SELECT a.* EXCLUDE (names) FROM log a JOIN log b USING (id)", ()),
    "pattern": ("SELECT COLUMNS('seen|id') FROM log", ()),
    "aliased table": ("SELECT id, seen FROM log AS l(id, price, seen)", ()),
}


@pytest.mark.parametrize(("statement", "expected"), STATEMENTS.values(), ids=STATEMENTS.keys())
def test_lists_are_passed_only_where_nothing_touches_them(
    statement: str, expected: tuple[str, ...]
) -> None:
    result = unchanged_lists(statement, "log", ROWS.schema)
    assert result == expected


PASSING = {name: statement for name, (statement, lists) in STATEMENTS.items() if lists}


@pytest.mark.parametrize("statement", PASSING.values(), ids=PASSING.keys())
def test_samples_are_those_of_the_sql(statement: str) -> None:
    statement = select_origin(statement, "data.samples.map")
    connection = Connection()
    plain = map_rows(connection, statement, "log", ROWS).samples
    assert plain is not None
    lists = unchanged_lists(statement, "log", ROWS.schema)
    assert lists
    passed = Passthrough(lists, tuple(plain.column_names))
    around = with_hashes(statement, {}, lists)
    assert map_samples(connection, around, passed, "log", ROWS).samples == plain


def test_rows_that_raise_are_left_out_and_the_others_keep_their_lists() -> None:
    rows = ROWS.select(["id", "seen", ORIGIN])
    statement = "SELECT CAST(if(id = 8, 'x', '1') AS INT) AS x, seen, _origin FROM log"
    passed = Passthrough(("seen",), ("x", "seen", ORIGIN))
    around = with_hashes(statement, {}, ["seen"])
    result = map_samples(Connection(), around, passed, "log", rows)
    assert result.bad_rows["origin"].to_pylist() == [101]
    assert result.samples is not None
    assert result.samples["seen"].to_pylist() == [[1, 2], [], [3, None]]
    assert np.array_equal(result.samples[ORIGIN].to_numpy(), [100, 102, 105])

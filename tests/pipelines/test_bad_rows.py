"""Rows on which SQL raises: as if each row were run alone, isolated in a few runs."""

from collections.abc import Mapping

import duckdb
import numpy as np
import pyarrow as pa
import pytest

from presage.pipelines.samples import sql_rejects as bad_rows
from presage.pipelines.samples.per_key import PerKey, run_keys
from presage.pipelines.samples.sql import Connection, map_rows, run, with_list_index
from presage.pipelines.samples.sql_rejects import (
    BadRowsError,
    SqlResult,
    reject_reason,
    remove_marked,
)
from presage.pipelines.samples.statements import select_origin
from presage.pipelines.sources.raw_rows import ORIGIN
from presage.schemas.arrays import comparable_tuple, hash_keys

SIDE = pa.table({"code": [0, 1, 2, 3], "name": ["0", "one", "2", "3"]})

STATEMENTS = {
    "a cast": "SELECT CAST(x AS BIGINT) AS x FROM log",
    "two that fail, one of a part of a value": (
        "SELECT CAST(substr(x, 2) AS INT) AS x, CAST(y AS DATE) AS y FROM log"
    ),
    "a guard in WHERE": "SELECT CAST(x AS INT) AS x FROM log WHERE x <> '' AND CAST(x AS INT) > 1",
    "an OR in WHERE": "SELECT y FROM log WHERE x = 'n' OR CAST(x AS INT) > 1",
    "a guard in CASE": "SELECT CASE WHEN x <> 'n' THEN CAST(x AS INT) END AS x FROM log",
    "a list of texts": (
        "SELECT list_transform(string_split(z, ' '), lambda e: CAST(e AS BIGINT)) AS z FROM log"
    ),
    "a cast of what is unnested": "SELECT CAST(unnest(string_split(z, ' ')) AS INT) AS z FROM log",
    "an alias that fails later": "SELECT CAST(x AS INT) AS a, 1 // (1 - a) AS b FROM log",
    "an aggregate over a list": (
        "SELECT (SELECT max(CAST(e AS INT)) FROM unnest(string_split(z, ' ')) AS t(e)) AS s "
        "FROM log"
    ),
    "a subquery with a filter around it": (
        "SELECT * FROM (SELECT CAST(x AS INT) AS a, k, _origin FROM log) WHERE k > 2"
    ),
    "a column that nobody reads": (
        "SELECT k FROM (SELECT CAST(x AS INT) AS a, k, _origin FROM log)"
    ),
    "common table expressions": (
        "WITH a AS (SELECT *, CAST(x AS INT) AS n FROM log), b AS (SELECT *, n + 1 AS m FROM a) "
        "SELECT m, CAST(y AS DATE) AS y FROM b"
    ),
    "a filter within a common table expression": (
        "WITH a AS (SELECT *, CAST(x AS INT) AS n FROM log), b AS (SELECT * FROM a WHERE n > 0) "
        "SELECT n, CAST(y AS DATE) AS y FROM b"
    ),
    "a join that fails": (
        "SELECT log.y, side.name FROM log LEFT JOIN side ON CAST(log.x AS INT) = side.code"
    ),
    "a side's value that fails": (
        "SELECT CAST(side.name AS INT) AS n FROM log LEFT JOIN side ON log.k % 4 = side.code"
    ),
    "a constant that fails": "SELECT CAST('no' AS INT) AS n FROM log",
    "a function that raises": (
        "SELECT CASE WHEN k = 3 THEN error('three') ELSE k END AS k FROM log"
    ),
    "nothing that fails": "SELECT x, y FROM log",
    "a cast of a struct's field in CASE": (
        "SELECT CASE WHEN s.p = 'n' THEN 0 ELSE CAST(s.p AS INT) END AS p, "
        "CAST(s.p = 'n' AS FLOAT) AS q FROM log"
    ),
    "a field of a field": "SELECT CAST(s.d.q AS INT) AS p FROM log",
    "a cast to a struct": "SELECT CAST(struct_pack(a := x) AS STRUCT(a INT)).a AS p FROM log",
    "a cast of a list": "SELECT CAST(l AS INT[]) AS l FROM log",
    "a list of structs": "SELECT [CAST(e.v AS INT) FOR e IN ls] AS l FROM log",
    "a filter of a list": "SELECT list_filter(l, lambda e: CAST(e AS INT) > 0) AS l FROM log",
    "a reduction": "SELECT list_reduce([1], lambda a, e: a + CAST(x AS INT) + e) AS l FROM log",
    "a lambda in a lambda": (
        "SELECT list_transform(l, lambda e: list_transform(l, lambda f: f || CAST(e AS INT))[1]) "
        "AS l FROM log"
    ),
    "two that are unnested": (
        "SELECT CAST(unnest(l) AS INT) AS v, CAST(unnest(string_split(z, ' ')) AS INT) AS w "
        "FROM log"
    ),
    "unnest in FROM": "SELECT CAST(e AS INT) AS e FROM log, unnest(l) AS t(e)",
    "a cast in FROM": "SELECT e FROM log, unnest(CAST(l AS INT[])) AS t(e)",
    "structs unnested in a subquery": (
        "SELECT CAST(e.v AS INT) AS v FROM (SELECT unnest(ls) AS e, _origin FROM log)"
    ),
    "the same cast twice": "SELECT CAST(x AS INT) + 1 AS a, CAST(x AS INT) * 2 AS b FROM log",
    "the same cast twice in one expression": (
        "SELECT CASE WHEN k > 1 THEN CAST(x AS INT) * CAST(x AS INT) END AS a FROM log"
    ),
    "BETWEEN": "SELECT x FROM log WHERE CAST(x AS INT) BETWEEN 0 AND CAST(k AS INT)",
    "AND in the select list": "SELECT x <> '' AND CAST(x AS INT) > 0 AS a FROM log",
    "an error() that is guarded": (
        "SELECT CASE WHEN x = 'n' THEN error('bad ' || x)::INT ELSE k END AS x FROM log"
    ),
    "an error() for what is no number": (
        "SELECT coalesce(TRY_CAST(x AS INT), error('no number: ' || x)) AS x FROM log"
    ),
    "a cast in a subquery": (
        "SELECT (SELECT name FROM side WHERE code = CAST(x AS INT)) AS n FROM log"
    ),
    "a cast beside a subquery": "SELECT CAST(x AS INT) IN (SELECT code FROM side) AS n FROM log",
    "a cast of a subquery": (
        "SELECT CAST((SELECT any_value(name) FROM side WHERE code = log.k % 4) AS INT) AS n "
        "FROM log"
    ),
    "a lateral subquery": "SELECT v.x FROM log, LATERAL (SELECT CAST(log.x AS INT) AS x) AS v",
    "an ASOF join": (
        "SELECT log.y, side.name FROM log ASOF LEFT JOIN side ON CAST(log.x AS INT) >= side.code"
    ),
    "a UNION": (
        "SELECT * FROM (SELECT CAST(x AS INT) AS v, _origin FROM log WHERE k < 3 UNION ALL "
        "SELECT k, _origin FROM log WHERE k >= 3 AND CAST(x AS INT) > 0)"
    ),
    "REPLACE": "SELECT * EXCLUDE (s, ls) REPLACE (CAST(x AS INT) AS x) FROM log",
    "QUALIFY": (
        "SELECT x FROM log "
        "QUALIFY row_number() OVER (PARTITION BY _origin ORDER BY CAST(x AS INT)) = 1"
    ),
    "an alias in CASE": (
        "SELECT CAST(s.p AS INT) AS a, CASE WHEN a > 1 THEN CAST(y AS DATE) END AS b FROM log"
    ),
    "COLUMNS": "SELECT COLUMNS('x|y')::INT FROM log",
    "two that are unnested in one expression": (
        "SELECT CAST(unnest(l) AS INT) + CAST(unnest(string_split(z, ' ')) AS INT) AS w FROM log"
    ),
    "a value that no column can hold": (
        "SELECT [CAST(k AS UBIGINT) + 9223372036854775805] AS l FROM log"
    ),
}
NOT_MARKED = (
    "a guard in WHERE", "an OR in WHERE", "BETWEEN", "QUALIFY", "a cast of what is unnested",
    "two that are unnested", "two that are unnested in one expression", "an aggregate over a list",
    "a filter within a common table expression", "a join that fails", "a cast in FROM",
    "a cast in a subquery", "a cast beside a subquery", "a cast of a subquery",
    "a lateral subquery", "an ASOF join", "a UNION", "a function that raises",
    "an error() that is guarded", "COLUMNS", "a value that no column can hold",
)  # fmt: skip
"""Statements whose bad rows are found by bisection, as long as they are few."""
PER_KEY = {
    "a history over a cast": (
        "SELECT CAST(y AS DATE) AS y, list(CAST(x AS INT)) OVER (ORDER BY _origin "
        "ROWS BETWEEN 5 PRECEDING AND 1 PRECEDING) AS h FROM log"
    ),
    "a cast beside a window": (
        "SELECT * EXCLUDE (s, ls) "
        "FROM (SELECT *, row_number() OVER (ORDER BY _origin) AS n FROM log) "
        "WHERE n > 0 AND CAST(x AS INT) > 0"
    ),
    "a cast of what a window gives": (
        "SELECT CAST(lag(x, 1, '1') OVER (ORDER BY _origin) AS INT) AS p FROM log"
    ),
    "several samples of a row": "SELECT CAST(unnest(string_split(z, ' ')) AS INT) AS z FROM log",
}


def rows_of(seed: int, num_rows: int = 24, share: float = 0.3) -> pa.Table:
    """Return raw rows of which about a share cannot be cast, in each column."""
    rng = np.random.default_rng(seed)

    def texts(good: list[str | None], bad: list[str | None]) -> list[str | None]:
        picks = rng.random(num_rows) < share
        return [rng.choice(np.array(bad if b else good, object)) for b in picks]

    def text(good: str, bad: str) -> str:
        return bad if rng.random() < share else good

    return pa.table(
        {
            "x": pa.array(texts(["1", "2", "77", None], ["", "n", "n/a", "2a\nb"])),
            "y": pa.array(texts(["2026-01-02", "1999-12-31"], ["never", "2026-13-01"])),
            "z": pa.array(texts(["1", "1 2 3", None], ["1 x", "1,2", "2 3 y"])),
            "k": pa.array(rng.integers(0, 6, num_rows)),
            "s": [{"p": text(str(i), "n"), "d": {"q": text("7", "no")}} for i in range(num_rows)],
            "l": [[text(str(j), "x") for j in range(i % 3)] for i in range(num_rows)],
            "ls": [[{"v": text(str(j), "x")} for j in range(i % 3)] for i in range(num_rows)],
            ORIGIN: pa.array(np.arange(num_rows) * 3 + 5),
        }
    )


def one_by_one(
    connection: Connection, statement: str, rows: pa.Table
) -> tuple[list[pa.Table], dict[int, str]]:
    """Return the samples of each good row, and why each bad row is bad."""
    good: list[pa.Table] = []
    bad: dict[int, str] = {}
    for index in range(rows.num_rows):
        row = rows.slice(index, 1)
        try:
            good.append(run(connection, statement, {"log": row}))
        except (duckdb.Error, pa.ArrowInvalid) as error:
            bad[row[ORIGIN][0].as_py()] = reject_reason(error)
    return good, bad


def hashes(samples: pa.Table) -> list[int]:
    """Return a hash of each sample and of its place in its row, sorted."""
    samples = with_list_index(samples)
    return sorted(hash_keys(comparable_tuple(samples, samples.column_names)).tolist())


def same(result: SqlResult, good: list[pa.Table]) -> bool:
    """Tell whether samples are those of rows run one by one."""
    if result.samples is None or not result.samples.num_rows:
        return not sum(t.num_rows for t in good)
    return hashes(result.samples) == hashes(pa.concat_tables(good))


def reasons_of(result: SqlResult) -> dict[int, str]:
    """Return why each bad row is bad."""
    origins, reasons = (result.bad_rows[n].to_pylist() for n in ("origin", "reason"))
    assert len(set(origins)) == len(origins)
    return dict(zip(origins, reasons, strict=True))


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in NOT_MARKED else n for n in STATEMENTS]
)
def test_bad_rows_are_those_that_raise_alone_and_marks_find_them(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bad_rows, "EXEMPLARS", 14)
    attempt, rows = Counted(), rows_of(2, num_rows=14)
    attempt.connection.register("side", SIDE)
    text = select_origin(STATEMENTS[name], "key")
    good, bad = one_by_one(attempt.connection, text, rows)
    result = map_rows(attempt.connection, text, "log", rows)
    assert reasons_of(result) == bad
    assert same(result, good)
    left, _ = remove_marked(text, attempt, lambda row: attempt(text, row), rows)
    assert (left.num_rows == len(rows) - len(bad)) == (name not in NOT_MARKED)


@pytest.mark.parametrize("statement", PER_KEY.values(), ids=PER_KEY)
@pytest.mark.parametrize("seed", range(2))
def test_keys_without_a_bad_row_are_as_alone_and_bad_rows_raise_alone(
    statement: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bad_rows, "EXEMPLARS", 24)
    connection, rows = Connection(), rows_of(seed, share=0.1)
    text = select_origin(statement, "key")
    results = list(run_keys(connection, PerKey(text, "log", "k"), {"log": rows}))
    actual: dict[int, str] = {}
    for result in results:
        actual |= reasons_of(result)
    samples = pa.concat_tables([r.samples for r in results if r.samples is not None])
    expected: list[pa.Table] = []
    bad: dict[int, str] = {}
    for key in range(6):
        left = rows.filter(pa.array(rows["k"].to_numpy() == key))
        while left.num_rows:
            try:
                expected.append(run(connection, text, {"log": left}))
                break
            except duckdb.Error as error:
                alone = one_by_one(connection, text, left)[1]
                alone = alone or dict.fromkeys(left[ORIGIN].to_pylist(), reject_reason(error))
            bad |= alone
            left = left.filter(pa.array([o not in alone for o in left[ORIGIN].to_pylist()]))
    assert actual == bad
    assert hashes(samples) == hashes(pa.concat_tables(expected))


class Counted:
    """Runs statements and counts them."""

    def __init__(self) -> None:
        self.connection, self.count = Connection(), 0

    def __call__(self, statement: str, rows: pa.Table) -> pa.Table:
        """Run one."""
        self.count += 1
        return run(self.connection, statement, {"log": rows})


def many_rows(num_rows: int, bad: Mapping[int, str]) -> pa.Table:
    """Return numbers as texts, some of them replaced."""
    texts = [bad.get(i, str(i)) for i in range(num_rows)]
    return pa.table({"x": texts, ORIGIN: range(num_rows)})


def test_thousands_of_bad_rows_take_a_few_runs_and_some_have_their_own_reason() -> None:
    bad = {i: f"no {i}" for i in range(0, 60_000, 7)}
    rows, attempt = many_rows(60_000, bad), Counted()
    statement = select_origin("SELECT CAST(x AS BIGINT) AS x FROM log", "key")
    good, result = remove_marked(statement, attempt, lambda row: attempt(statement, row), rows)
    assert attempt.count < 10
    assert good.num_rows == 60_000 - len(bad)
    assert result["origin"].to_pylist() == list(bad)
    start = "row fails in the job's SQL: Conversion Error: Could not convert string "
    end = " to INT64 when casting from source column x"
    own = [f"{start}'{text}'{end}" for text in bad.values()]
    reasons = result["reason"].to_pylist()
    assert sum(map(str.__eq__, reasons, own)) == 4
    assert {*reasons} - {*own} == {f"{start}'...'{end}"}


def test_reasons_of_several_kinds_name_the_expression() -> None:
    bad = {i: "no" if i % 2 else f"{2**31 - 1}" for i in range(10, 90)}
    statement = select_origin("SELECT CAST(x AS INTEGER) + 1 AS x FROM log", "key")
    result = map_rows(Connection(), statement, "log", many_rows(200, bad))
    reasons = result.bad_rows["reason"].to_pylist()
    rest = "row fails in the job's SQL: an error in (CAST(x AS INTEGER) + 1)"
    assert (len(reasons), reasons.count(rest)) == (80, 76)
    assert len({*reasons} - {rest}) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("statement", "named"),
    [
        ("SELECT COLUMNS('x|w')::INT FROM log", "CAST(COLUMNS('x|w') AS INTEGER)"),
        ("SELECT *, hash(l) AS h FROM (SELECT [hash(x)] AS l FROM log)", "list_value(hash(x))"),
    ],
)
def test_good_rows_are_not_rejected_with_bad_ones_that_nothing_tells_apart(
    statement: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bad_rows, "MAX_ATTEMPTS", 100)
    rows = many_rows(2_000, {i: f"no {i}" for i in range(0, 2_000, 7)})
    rows = rows.append_column("w", many_rows(2_000, {i: "no" for i in range(0, 2_000, 5)})["x"])
    with pytest.raises(BadRowsError) as error:
        map_rows(Connection(), select_origin(statement, "key"), "log", rows)
    text = str(error.value)
    assert "raises on more rows than 100 runs can isolate: " in text
    assert named in text
    assert "TRY_CAST(... AS ...)" in text


@pytest.mark.parametrize("cut", ["whole", "slice", "chunks"])
def test_bad_rows_with_nested_structs_have_their_own_reason(cut: str) -> None:
    rows = [
        {
            "u": {"id": f"x{i}", "d": {"o": "no" if i in (8, 21) else str(i)}},
            "l": [{"i": {"j": k}} for k in range(i % 4)],
            ORIGIN: i,
        }
        for i in range(40)
    ]
    table = pa.Table.from_pylist(rows)
    part = {
        "whole": table,
        "slice": table.slice(7, 20),
        "chunks": pa.concat_tables([table.slice(3, 6), table.slice(20, 9)]),
    }[cut]
    text = "SELECT u.id AS id, u.d.o::INT AS o, [x.i.j FOR x IN l] AS l FROM log"
    result = map_rows(Connection(), select_origin(text, "key"), "log", part)
    assert result.bad_rows["origin"].to_pylist() == [8, 21]
    assert all("string 'no' to INT32" in r for r in result.bad_rows["reason"].to_pylist())
    assert result.samples is not None
    assert result.samples.to_pylist() == [
        {"id": f"x{i}", "o": i, "l": [*range(i % 4)], ORIGIN: i}
        for i in part[ORIGIN].to_pylist()
        if i not in (8, 21)
    ]

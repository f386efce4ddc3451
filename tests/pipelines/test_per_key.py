"""SQL over whole keys: many keys in one statement give what each key alone gives."""

import numpy as np
import pyarrow as pa
import pytest

from pipelines.samples.sql import Connection, select_origin
from pipelines.samples.sql_rejects import run_key
from pipelines.samples.statements import PerKey, run_keys
from pipelines.sources.rows import ORIGIN

PLAYS = pa.table(
    {
        "user": [3, 1, 3, 2, 1, 3, 2, 9],
        "song": [30, 10, 31, 20, 11, 32, 21, 90],
        "sec": [5, 1, 7, 2, 3, 6, 9, 1],
        ORIGIN: list(range(8)),
    }
)
PROFILES = pa.table({"user": pa.array([1, 2, 3, 4], pa.int32()), "age": [11, 22, 33, 44]})
TABLES = {"plays": PLAYS, "profiles": PROFILES.append_column(ORIGIN, pa.array([0, 1, 2, 3]))}

STATEMENTS = {
    "a history by a window function": (
        "SELECT list(song) OVER (ORDER BY sec ROWS BETWEEN 50 PRECEDING AND 1 PRECEDING) AS h "
        "FROM plays"
    ),
    "a join with another source": "SELECT song, age FROM plays LEFT JOIN profiles USING (user)",
    "a count of the key's rows": "SELECT song, (SELECT count(*) FROM plays) AS n FROM plays",
    "a rank without a partition": "SELECT song, row_number() OVER (ORDER BY sec) AS n FROM plays",
    "several samples of a row": "SELECT song, unnest([song, sec, 7]) AS item FROM plays",
}


def rows_of(table: pa.Table) -> list[dict[str, object]]:
    """Return rows sorted by origin, rows of one origin in their order."""
    order = np.argsort(table[ORIGIN].to_numpy(), kind="stable")
    return table.take(pa.array(order)).to_pylist()


@pytest.mark.parametrize("statement", STATEMENTS.values(), ids=STATEMENTS.keys())
def test_many_keys_at_once_give_what_each_key_alone_gives(statement: str) -> None:
    per = PerKey(select_origin(statement, "key"), "plays", "user")
    made = [r.samples for r in run_keys(Connection(), per, TABLES)]
    alone = []
    for user in (1, 2, 3, 9):
        tables = {
            "plays": PLAYS.filter(pa.array(PLAYS["user"].to_numpy() == user)),
            "profiles": PROFILES.filter(pa.array(PROFILES["user"].to_numpy() == user)),
        }
        alone.append(run_key(Connection(), per.statement, "plays", tables).samples)
    assert rows_of(pa.concat_tables(made)) == rows_of(pa.concat_tables(alone))


def test_row_that_raises_costs_its_key_nothing_else() -> None:
    statement = select_origin("SELECT 100 // (song - 31) AS x FROM plays", "key")
    per = PerKey(statement, "plays", "user")
    results = list(run_keys(Connection(), per, TABLES))
    assert sorted(r["_origin"] for t in results if t.samples for r in t.samples.to_pylist()) == [
        0, 1, 3, 4, 5, 6, 7]  # fmt: skip
    assert [o for t in results for o in t.bad_rows["origin"].to_pylist()] == [2]


def test_keys_without_rows_in_the_other_source_are_kept() -> None:
    per = PerKey(select_origin(STATEMENTS["a join with another source"], "key"), "plays", "user")
    empty = {**TABLES, "profiles": TABLES["profiles"].slice(0, 0)}
    (result,) = run_keys(Connection(), per, empty)
    assert result.samples is not None
    assert result.samples["age"].to_pylist() == [None] * 8


WINDOW = "list(song) OVER (ORDER BY sec ROWS BETWEEN 50 PRECEDING AND 1 PRECEDING) AS h"


def one_key(songs: list[int]) -> dict[str, pa.Table]:
    """Return rows of one key in time order."""
    count = len(songs)
    columns = {"user": [1] * count, "song": songs, "sec": range(count), ORIGIN: range(count)}
    return {"plays": pa.table({name: pa.array(v, pa.int64()) for name, v in columns.items()})}


def test_good_rows_of_a_key_with_a_bad_one_keep_their_whole_history() -> None:
    statement = select_origin(f"SELECT 100 // (song - 9) AS x, {WINDOW} FROM plays", "key")
    result = run_key(Connection(), statement, "plays", one_key(list(range(16))))
    assert result.bad_rows["origin"].to_pylist() == [9]
    assert result.samples is not None
    expected = [song for song in range(16) if song != 9]
    histories = {r[ORIGIN]: r["h"] or [] for r in rows_of(result.samples)}
    assert histories == {song: expected[: expected.index(song)] for song in expected}


def test_rows_that_fail_only_together_are_all_rejected() -> None:
    text = "SELECT song, 1 // (3 - (SELECT count(*) FROM plays)) AS x FROM plays"
    result = run_key(Connection(), select_origin(text, "key"), "plays", one_key([5, 6, 7]))
    assert result.samples is None
    assert result.bad_rows["origin"].to_pylist() == [0, 1, 2]


def test_key_with_a_bad_row_is_dropped_as_a_whole_when_asked_for() -> None:
    statement = select_origin(f"SELECT 100 // (song - 31) AS x, {WINDOW} FROM plays", "key")
    (result,) = run_keys(Connection(), PerKey(statement, "plays", "user"), TABLES, "log:{}".format)
    assert result.samples is not None
    assert sorted(result.samples[ORIGIN].to_pylist()) == [1, 3, 4, 6, 7]
    bad = {row["origin"]: row["reason"] for row in result.bad_rows.to_pylist()}
    own = "row must pass the job's SQL, got "
    assert bad.keys() == {0, 2, 5}
    assert bad[2].startswith(own)
    assert bad[0] == bad[5] == f"another row of the key is bad, got log:2: {bad[2]}"

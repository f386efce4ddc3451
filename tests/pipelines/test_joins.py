# ruff: noqa: E501 - tables of faults, one a line
"""Side tables: equal samples and bytes for broadcast and join by key, look-ups as of a time."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from presage.pipelines.build import build
from presage.pipelines.samples import lookups
from presage.pipelines.samples.lookups import common_type, look_up, side_table, sort_side_rows
from presage.pipelines.sources.raw_rows import ORIGIN
from presage.schemas.config.sources import JoinConfig, SideConfig
from presage.schemas.errors import SchemaError
from tests.pipelines.logs import bytes_of, request, stored_table

# Look-ups.

JOB = """
name: shop
data:
  sources:
    log: {files: "log/*.parquet", format: parquet}
  sides:
    items: {files: "items.jsonl", format: jsonl, key: item, columns: {item: int32, price: float32, tags: list<int64>}}
    users: {files: "users/*.parquet", format: parquet, key: user, time: since}
  samples:
    map: SELECT session, time, user, unnest(items) AS item, label FROM log
    joins:
      - {side: items}
      - {side: users, columns: {level: level, user_name: name}}
  session: {key: session, time: time}
  groups: {user: [session, user, level, user_name], item: [item, price, tags]}
  block_samples: 16
  tables:
    items: {features: [item, tags], num_rows: 1000}
    users: {features: [user], num_rows: 65536}
  oracle: {batch_samples: 32}
train: {batch_samples: 32}
"""

SCHEMA = """
feature { name: "session" type: INT annotation { tag: "kept" } }
feature { name: "time" type: INT annotation { tag: "kept" } }
feature { name: "user" type: INT annotation { tag: "sparse" } }
feature { name: "item" type: INT annotation { tag: "sparse" } }
feature { name: "label" type: INT annotation { tag: "label" } }
feature { name: "price" type: FLOAT annotation { tag: "dense" } }
feature { name: "tags" type: INT value_count { min: 0 } annotation { tag: "sparse" } }
feature { name: "level" type: INT annotation { tag: "kept" } }
feature { name: "user_name" type: BYTES annotation { tag: "kept" } }
"""
START = 1_767_225_600_000_000


def write_job(directory: Path, job: str = JOB, schema: str = SCHEMA) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "job.yaml").write_text(job)
    (directory / "schema.pbtxt").write_text(schema)
    return directory / "job.yaml"


def write_input(root: Path) -> None:
    rng = np.random.default_rng(7)
    count = 400
    session = rng.integers(0, 60, count)
    second = np.sort(rng.integers(0, 600, count))
    rows = pa.table(
        {
            "session": session,
            "time": pa.array(START + second * 1_000_000, pa.timestamp("us")),
            "user": pa.array([None if s % 11 == 0 else int(s) - 20 for s in session], pa.int64()),
            "items": pa.array(
                [rng.integers(0, 50, rng.integers(1, 4)).tolist() for _ in range(count)]
            ),
            "label": pa.array(rng.integers(0, 2, count), pa.int8()),
        }
    )
    (root / "log").mkdir(parents=True)
    (root / "users").mkdir()
    for i in range(3):
        pq.write_table(rows.slice(i * 140, 140), root / "log" / f"{i}.parquet", row_group_size=50)
    lines = [f'{{"item": {i}, "price": {i / 4}, "tags": [{i}, 7]}}' for i in range(0, 50, 2)]
    (root / "items.jsonl").write_text("\n".join(lines))
    users = [(u, t, f"u{u}") for u in range(-20, 30) for t in range(0, 600, 100 + abs(u))]
    order = rng.permutation(len(users))
    for i in range(2):
        part = [users[o] for o in order[i::2]]
        pq.write_table(
            pa.table(
                {
                    "user": pa.array([u for u, _, _ in part], pa.int32()),
                    "since": pa.array(
                        [START + t * 1_000_000 for _, t, _ in part], pa.timestamp("us")
                    ),
                    "name": [n for _, _, n in part],
                    "level": pa.array([t // 10 for _, t, _ in part], pa.int16()),
                }
            ),
            root / "users" / f"{i}.parquet",
        )


def expected(root: Path) -> list[tuple[Any, ...]]:
    """The samples by plain Python, row by row."""
    users = [r for p in sorted((root / "users").glob("*")) for r in pq.read_table(p).to_pylist()]
    samples = []
    for path in sorted((root / "log").glob("*")):
        for row in pq.read_table(path).to_pylist():
            known = [u for u in users if u["user"] == row["user"] and u["since"] <= row["time"]]
            newest = max(known, key=lambda u: u["since"], default={"level": None, "name": None})
            for item in row["items"]:
                price, tags = (item / 4, (item, 7)) if item % 2 == 0 else (None, None)
                side = (price, tags, newest["level"], newest["name"])
                samples.append(
                    (row["session"], row["time"], row["user"], item, row["label"], *side)
                )
    return sorted(samples, key=str)


def samples_of(dataset: Path) -> list[tuple[Any, ...]]:
    names = ["session", "time", "user", "item", "label", "price", "tags", "level", "user_name"]
    rows = stored_table(dataset).select(names).to_pylist()
    result = [tuple(tuple(v) if isinstance(v, list) else v for v in r.values()) for r in rows]
    return sorted(result, key=str)


def rejects_of(dataset: Path) -> list[tuple[str, int, str]]:
    result = list(dataset.rglob("rejects/*.parquet"))
    rows = pq.read_table(result[0]).to_pylist() if result else []
    return [(r["file"], r["position"], r["reason"]) for r in rows]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_input(tmp_path / "input")
    return tmp_path / "input"


LIMITS = {"all broadcast": 1 << 30, "the larger by key": 2500, "all by key": 0}


@pytest.mark.slow
def test_side_tables_give_the_same_bytes_broadcast_and_by_key(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = write_job(tmp_path / "job")
    result = {}
    for name, limit in LIMITS.items():
        monkeypatch.setattr(lookups, "BROADCAST_BYTES", limit)
        build(request(job, root, tmp_path / name))
        result[name] = bytes_of(tmp_path / name)
    assert samples_of(tmp_path / "all broadcast") == expected(root)
    assert result["all broadcast"] == result["the larger by key"] == result["all by key"]


IN_SQL = """SELECT session, time, l.user, unnest(items) AS item, label, level, name AS user_name
      FROM log l ASOF LEFT JOIN users u ON l.user = u.user AND l.time >= u.since
    joins: [{side: items}]
"""
REORDERED = """SELECT session, time, l.user, item, label, price, tags, level, name AS user_name
      FROM (SELECT *, unnest(items) AS item FROM log) l LEFT JOIN items USING (item)
      ASOF LEFT JOIN users u ON l.user = u.user AND l.time >= u.since
"""


def sql_job(directory: Path, sql: str) -> Path:
    text = re.sub(r"map: .*?(?=  session:)", f"map: >\n      {sql}", JOB, count=1, flags=re.DOTALL)
    return write_job(directory, text)


@pytest.mark.slow
def test_side_tables_are_tables_in_sql_when_they_are_small(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = sql_job(tmp_path / "job", IN_SQL)
    build(request(job, root, tmp_path / "sql", check_sql=True))
    assert samples_of(tmp_path / "sql") == expected(root)
    monkeypatch.setattr(lookups, "BROADCAST_BYTES", 1000)
    message = "side 'users' must be at most 1000 bytes to be a table in SQL, got "
    with pytest.raises(SchemaError, match=re.escape(message)):
        build(request(job, root, tmp_path / "large"))


def test_join_in_sql_that_loses_the_order_of_samples_is_found_out(
    root: Path, tmp_path: Path
) -> None:
    job = sql_job(tmp_path / "job", REORDERED)
    with pytest.raises(SchemaError, match=r"^data\.samples\.map is not row-local: other samples"):
        build(request(job, root, tmp_path / "sql", check_sql=True))


@pytest.mark.slow
def test_map_over_per_looks_up_too(root: Path, tmp_path: Path) -> None:
    per = """per: {key: session, sql: "SELECT *, row_number() OVER (ORDER BY time, _origin) AS n FROM log"}
    map: SELECT session, time, user, unnest(items) AS item, label FROM per"""
    text = JOB.replace(
        "map: SELECT session, time, user, unnest(items) AS item, label FROM log", per
    )
    job = write_job(tmp_path / "job", text)
    build(request(job, root, tmp_path / "dataset", check_sql=True))
    assert samples_of(tmp_path / "dataset") == expected(root)


@pytest.mark.parametrize("limit", [0, 1 << 30])
def test_key_twice_without_time_is_refused_with_both_places(
    limit: int, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookups, "BROADCAST_BYTES", limit)
    with (root / "items.jsonl").open("a") as file:
        file.write('\n{"item": 8}\n{"item": 4}\n')
    message = (
        "side 'items' must have one row for each item, got 4 in items.jsonl:2 and "
        "items.jsonl:26; remove one, or declare the time from which each holds"
    )
    with pytest.raises(SchemaError, match="^" + re.escape(message) + "$"):
        build(request(write_job(tmp_path / "job"), root, tmp_path / "dataset"))
    assert not (tmp_path / "dataset" / "_manifests").exists()


@pytest.mark.slow
def test_key_twice_at_one_time_is_refused_if_the_rows_differ(root: Path, tmp_path: Path) -> None:
    first = pq.read_table(root / "users" / "0.parquet").slice(0, 1)
    job = write_job(tmp_path / "job")
    pq.write_table(first, root / "users" / "10.parquet")
    build(request(job, root, tmp_path / "equal"))
    other = first.set_column(2, "name", pa.array(["other"]))
    pq.write_table(other, root / "users" / "11.parquet")
    with pytest.raises(SchemaError, match=r"one row for each user and since, got .* they differ"):
        build(request(job, root, tmp_path / "differ"))


@pytest.mark.slow
@pytest.mark.parametrize("limit", [0, 1 << 30])
def test_side_row_without_key_or_time_is_a_reject_and_the_others_are_found(
    limit: int, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookups, "BROADCAST_BYTES", limit)
    with (root / "items.jsonl").open("a") as file:
        file.write('\n{"price": 8}\nnot json\n')
    users = {"user": pa.array([1, None], pa.int32()), "name": ["a", "b"]}
    users |= {
        "since": pa.array([None, 1], pa.timestamp("us")),
        "level": pa.array([1, 2], pa.int16()),
    }
    pq.write_table(pa.table(users), root / "users" / "2.parquet")
    build(request(write_job(tmp_path / "job"), root, tmp_path / "dataset"))
    assert rejects_of(tmp_path / "dataset") == [
        ("items.jsonl", 25, "key 'item' of side 'items' must not be null"),
        ("items.jsonl", 26, "line must be one JSON object, from { to }"),
        ("users/2.parquet", 0, "time 'since' of side 'users' must not be null"),
        ("users/2.parquet", 1, "key 'user' of side 'users' must not be null"),
    ]
    (root / "users" / "2.parquet").unlink()
    assert samples_of(tmp_path / "dataset") == expected(root)


@pytest.mark.slow
@pytest.mark.parametrize("limit", [0, 1 << 30])
def test_side_table_without_a_usable_row_gives_nulls(
    limit: int, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookups, "BROADCAST_BYTES", limit)
    (root / "items.jsonl").write_text("[]\n")
    build(request(write_job(tmp_path / "job"), root, tmp_path / "dataset"))
    result = samples_of(tmp_path / "dataset")
    assert {r[5:7] for r in result} == {(None, None)}


WRONG: dict[str, tuple[str, str, str]] = {
    "an unknown side table": ("{side: items}", "{side: item}", "data.samples.joins[0].side must be a side table, got 'item'"),
    "an unknown key": ("{side: items}", "{side: items, key: itm}", "data.samples.joins[0].key must be a column, got 'itm' in "),
    "a key of another type": ("{side: items}", "{side: users, key: time, columns: [name]}", "data.sides.users.key must have one type in all tables, got int32 in 'users' and timestamp[us] in \"the samples' time\""),
    "a time that is none": ("time: since", "time: level", "data.sides.users.time must be a timestamp, got int16 for 'level'"),
    "as of a number": ("{side: users,", "{side: users, as_of: label,", "data.samples.joins[1].as_of must be a timestamp, got int8 for 'label'"),
    "as of a time in a table without": ("{side: items}", "{side: items, as_of: time}", "data.samples.joins[0].as_of needs a side table with time: 'items' has none"),
    "a column that is there already": ("{side: items}", "{side: items, columns: {label: price}}", "data.samples.joins[0].columns must be new to the samples, got 'label'"),
    "an unknown column": ("{side: items}", "{side: items, columns: [prize]}", "data.samples.joins[0].columns must be a column, got 'prize' in "),
    "the name of a source": ("    items: {files", "    log: {files", "sides must not have the name of a source, got 'log'"),
    "no file": ("items.jsonl", "item.jsonl", "no file of source 'items' matches 'item.jsonl'"),
}  # fmt: skip


@pytest.mark.parametrize(("old", "new", "message"), WRONG.values(), ids=WRONG)
def test_wrong_join_is_refused_before_the_work(
    old: str, new: str, message: str, root: Path, tmp_path: Path
) -> None:
    assert old in JOB
    job = write_job(tmp_path / "job", JOB.replace(old, new, 1))
    with pytest.raises(SchemaError, match=re.escape(message)):
        build(request(job, root, tmp_path / "dataset"))


KEYS: list[tuple[pa.DataType, Callable[[int], Any]]] = [
    (pa.int32(), int),
    (pa.string(), str),
    (pa.timestamp("us"), int),
]


@given(
    rows=st.lists(st.tuples(st.integers(-3, 3), st.integers(0, 9)), max_size=30),
    asked=st.lists(st.tuples(st.none() | st.integers(-4, 4), st.integers(-1, 10)), max_size=30),
    kind=st.sampled_from(KEYS),
    parts=st.integers(1, 3),
)
def test_newest_row_that_is_not_after_the_sample_is_found(
    rows: list[tuple[int, int]],
    asked: list[tuple[int | None, int]],
    kind: tuple[pa.DataType, Callable[[int], Any]],
    parts: int,
) -> None:
    type_, make = kind
    config = SideConfig(files="*", format="parquet", key="k", time="t")
    table = pa.table(
        {
            "k": pa.array([make(k) for k, _ in rows], type_),
            "t": pa.array([t for _, t in rows], pa.timestamp("us")),
            ORIGIN: pa.array(range(len(rows)), pa.int64()),
            "v": pa.array(range(len(rows)), pa.int64()),
        }
    )
    samples = pa.table(
        {
            "k": pa.array([None if k is None else make(k) for k, _ in asked], type_),
            "at": pa.array([t for _, t in asked], pa.timestamp("us")),
        }
    )
    side = side_table(sort_side_rows(table, config, type_), config)
    result = look_up(samples, side, config, JoinConfig(side="s", columns=("v",)), "at")[
        "v"
    ].to_pylist()
    reference = [
        max(((t, v) for v, (k, t) in enumerate(rows) if k == key and t <= at), default=(0, None))[1]
        for key, at in asked
    ]
    assert result == reference


def test_keys_of_equal_hash_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "presage.pipelines.samples.lookups.key_hashes", lambda keys: np.zeros(len(keys), np.uint64)
    )
    config = SideConfig(files="*", format="parquet", key="k")
    rows = pa.table({"k": ["a", "b", "c"], "v": [1, 2, 3], ORIGIN: [0, 1, 2]})
    side = side_table(sort_side_rows(rows, config, pa.string()), config)
    asked = pa.table({"k": ["c", "a", "x", "b"]})
    assert look_up(asked, side, config, JoinConfig(side="s"), "t")["v"].to_pylist() == [
        3,
        1,
        None,
        2,
    ]


def test_row_between_two_microseconds_holds_from_the_next_on() -> None:
    config = SideConfig(files="*", format="parquet", key="k", time="t")
    rows = pa.table({"k": [1], "t": pa.array([1001], pa.timestamp("ns")), "v": [7], ORIGIN: [0]})
    side = side_table(sort_side_rows(rows, config, pa.int64()), config)
    asked = pa.table({"k": [1, 1], "at": pa.array([1, 2], pa.timestamp("us"))})
    assert look_up(asked, side, config, JoinConfig(side="s", columns=("v",)), "at")[
        "v"
    ].to_pylist() == [None, 7]


# Keys of several tables are compared in one type.

START = 1_767_225_600_000_000


def written(directory: Path, job: str, schema: str) -> Path:
    directory.mkdir()
    (directory / "job.yaml").write_text(job)
    (directory / "schema.pbtxt").write_text(schema)
    return directory / "job.yaml"


def test_keys_without_a_common_type_are_refused() -> None:
    assert common_type({"a": pa.int8(), "b": pa.uint32()}, "k") == pa.int64()
    assert common_type({"a": pa.uint8(), "b": pa.uint64()}, "k") == pa.uint64()
    for other in (pa.string(), pa.float64(), pa.uint64()):
        with pytest.raises(
            SchemaError, match=r"^k must have one type in all tables, got int64 in 'a' and "
        ):
            common_type({"a": pa.int64(), "b": other}, "k")


@pytest.mark.slow
def test_negative_keys_of_two_widths_meet_in_one_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("presage.pipelines.prepare.PART_INPUT_BYTES", 400)  # many parts
    users = pa.array(range(-30, 10), pa.int32())
    log = {
        "user": users.cast(pa.int64()),
        "time": pa.array([START] * 40, pa.timestamp("us")),
        "label": [1] * 40,
    }
    (tmp_path / "input").mkdir()
    pq.write_table(pa.table(log), tmp_path / "input" / "log.parquet")
    pq.write_table(
        pa.table({"user": users, "age": range(40)}), tmp_path / "input" / "users.parquet"
    )
    job = """
name: keys
data:
  sources:
    log: {files: log.parquet, format: parquet}
    users: {files: users.parquet, format: parquet}
  samples:
    source: log
    per: {key: user, sql: "SELECT user, time, label, age FROM log LEFT JOIN users USING (user)"}
  session: {key: user, time: time}
  tables: {users: {features: [user], num_rows: 100}}
  block_samples: 16
  oracle: {batch_samples: 32}
train: {batch_samples: 32}
"""
    schema = "\n".join(
        f'feature {{ name: "{name}" type: INT annotation {{ tag: "{tag}" }} }}'
        for name, tag in {
            "user": "sparse",
            "time": "kept",
            "label": "label",
            "age": "dense",
        }.items()
    )
    build(request(written(tmp_path / "job", job, schema), tmp_path / "input", tmp_path / "dataset"))
    rows = stored_table(tmp_path / "dataset").to_pylist()
    assert {r["user"]: r["age"] for r in rows} == {u: u + 30 for u in range(-30, 10)}

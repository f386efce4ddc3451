"""`init`: a job that builds without changes, with the reason of each choice."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import cast

import duckdb
import fastavro
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from presage.pipelines.build import build
from presage.pipelines.cli import main
from presage.pipelines.demo_log.generate import GeneratorConfig, write_log
from presage.pipelines.init import sample_sources as files
from presage.pipelines.init.columns import ScannedColumn, columns_of
from presage.pipelines.init.first_job import init, num_rows_of
from presage.pipelines.init.plan import PlannedFeature
from presage.pipelines.table.verify import verify
from presage.schemas.config.job import TableConfig, load_job
from presage.schemas.rows import rows_of_ids
from presage.schemas.run.records import SUMMARY, read_summary
from presage.trainer.__main__ import main as trainer_main
from tests.pipelines.logs import request, stored_table
from tests.shared import error_of, json_of

NUM_ROWS = 400


def rows(seed: int = 0) -> list[dict[str, object]]:
    """Rows of sessions of four, with lists, times and texts."""
    rng = np.random.default_rng(seed)
    result = []
    for i in range(NUM_ROWS):
        user = i // 4
        result.append(
            {
                "user_id": user,
                "ts": 1_767_225_600 + i * 30,
                "item_id": int(rng.integers(100, 400)),
                "city": ["bern", "ulm", "oslo"][user % 3],
                "price": round(float(rng.random()) * 10, 2),
                "seen": [int(x) for x in rng.integers(100, 400, user % 4)],
                "clicked": int(rng.random() < 0.3),
            }
        )
    return result


def csv_log(root: Path) -> None:
    """Lists between bars, ISO times, a header, quotes, and a side table as TSV."""
    with (root / "clicks.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["user_id", "time", "item_id", "city", "seen", "tags", "words", "clicked"])
        for i, r in enumerate(rows()):
            time = np.datetime64(int(str(r["ts"])), "s")
            seen = "|".join(map(str, r["seen"]))  # pyright: ignore[reportArgumentType]
            tags, words = f"[{i % 7}, {i % 5}]", f"a{i % 9} b{i % 4}"
            values = [r["user_id"], time, r["item_id"], f"{r['city']}, x", seen, tags, words]
            writer.writerow([*values, r["clicked"]])
    lines = [f"{i}\tbrand {i % 9}\t{i / 7:.3f}" for i in range(100, 400)]
    (root / "items.tsv").write_text("item_id\tbrand\tweight_kg\n" + "\n".join(lines) + "\n")


def json_log(root: Path) -> None:
    """Nested objects, a list of objects, epochs, compressed, in folders by day."""
    for day in range(2):
        (root / f"day-{day}").mkdir()
        with gzip.open(root / f"day-{day}" / "part.jsonl.gz", "wt") as file:
            for r in rows(day):
                line = {
                    "context": {"user_id": r["user_id"], "city": r["city"], "geo": {"lat": 1.5}},
                    "ts_ms": (r["ts"] + day * 86_400) * 1000,  # pyright: ignore[reportOperatorIssue]
                    "items": [{"id": x, "score": 0.5} for x in r["seen"]],  # pyright: ignore[reportGeneralTypeIssues]
                    "label": r["clicked"],
                }
                file.write(json.dumps(line) + "\n")


def avro_log(root: Path) -> None:
    """Unions with null, and a second kind of files with the items' prices."""
    kinds = {"user_id": "long", "ts": "long", "item_id": "long", "clicked": "int"}
    fields = [{"name": n, "type": ["null", k]} for n, k in kinds.items()]
    schema = {"type": "record", "name": "click", "fields": fields}
    with (root / "clicks.avro").open("wb") as file:
        fastavro.writer(file, schema, [{n: r[n] for n in kinds} for r in rows()])
    prices = {"item_id": list(range(100, 400)), "price": [i / 10 for i in range(300)]}
    pq.write_table(pa.table(prices), root / "prices.parquet")


def shown_log(root: Path) -> None:
    """What was shown and what of it was clicked, as two lists."""
    result = rows()
    shown = [[i, i + 1, i + 2] for i in range(NUM_ROWS)]
    table = {
        "visitor": [f"v{r['user_id']}" for r in result],
        "time": pa.array([r["ts"] for r in result], pa.timestamp("s")),
        "shown": shown,
        "picked": [s[1:2] if r["clicked"] else [] for s, r in zip(shown, result, strict=True)],
    }
    pq.write_table(pa.table(table), root / "log.parquet")


def odd_log(root: Path) -> None:
    """Lists of objects with what became of each, and a few values of other types."""
    with (root / "pages.jsonl").open("w") as file:
        for i, r in enumerate(rows()):
            outcomes = [{"clicked": r["clicked"] == 1 and k == 0, "dwell_sec": 3} for k in range(2)]
            items = [{"id": f"i{i % 50 + k}", "pos": k, "outcome": outcomes[k]} for k in range(2)]
            line = {
                "user": r["user_id"], "time": f"2026-01-0{i // 100 + 1}T00:{i % 60:02}:00Z",
                "version": 2 if i % 3 else "1.2", "spent": 10 ** (i % 6), "items": items,
            }  # fmt: skip
            line |= {"items": "none"} if i == 7 else {"time": "unknown"} if i == 8 else {}
            file.write(json.dumps(line) + "\n")


def unions_log(root: Path) -> None:
    """Avro with unions of several types, and seconds in the place of a label."""
    kinds = {"user": ["long", "string"], "price": ["null", "float", "string"], "show": "long"}
    fields = [{"name": n, "type": k} for n, k in kinds.items()]
    fields.append({"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}})
    fields.append({"name": "play_seconds", "type": ["null", "int"]})
    schema = {"type": "record", "name": "play", "fields": fields}
    result = [
        {
            "user": int(str(r["user_id"])) if i % 8 < 4 else f"guest-{r['user_id']}",
            "price": [None, 1.5, "free"][i % 3], "show": r["item_id"],
            "at": int(str(r["ts"])) * 1000, "play_seconds": 40 if r["clicked"] else None,
        }
        for i, r in enumerate(rows())
    ]  # fmt: skip
    with (root / "plays.avro").open("wb") as file:
        fastavro.writer(file, schema, result, sync_interval=2000)


def bare_log(root: Path) -> None:
    """Neither time nor session nor label, and names that SQL reserves."""
    table = {"select": [0.5, 1.5, float("nan"), None], "Ordered By!": [1.0, 2.0, 3.5, 4.5]}
    pq.write_table(pa.table(table), root / "x.parquet")
    (root / "README").write_text("nothing")


def one_column(root: Path) -> None:
    """Tab-separated, without a header, with one column of texts and one of numbers."""
    lines = [f"N{i % 40}\t{1_700_000_000 + i}" for i in range(NUM_ROWS)]
    (root / "plays.txt").write_text("\n".join(lines))


LOGS: dict[str, tuple[Callable[[Path], None], dict[str, object]]] = {
    "json lines": (json_log, {
        "session": "context_user_id", "time": "ts_ms", "label": "label", "sides": [],
        "columns": {
            "label": "label", "context_user_id": "sparse", "context_city": "sparse",
            "context_geo_lat": "kept", "ts_ms": "kept", "items_id": "sparse",
            "items_score": "kept",
        },
    }),
    "avro": (avro_log, {
        "session": "user_id", "time": "ts", "label": "clicked", "sides": ["prices"],
        "columns": {
            "clicked": "label", "user_id": "sparse", "ts": "kept", "item_id": "sparse",
            "price": "kept", "price_scaled": "dense",
        },
    }),
    "shown and clicked": (shown_log, {
        "session": "visitor", "time": "time", "label": "label", "sides": [],
        "columns": {"item": "sparse", "label": "label", "visitor": "sparse", "time": "kept"},
    }),
    "odd values": (odd_log, {
        "session": "user", "time": "time", "label": "items_outcome_clicked", "sides": [],
        "columns": {
            "items_outcome_clicked": "label", "user": "sparse", "time": "kept", "spent": "kept",
            "items_id": "sparse", "items_pos": "sparse", "items_outcome_dwell_sec": "kept",
            "spent_log": "dense",
        },
        "left_out": ["version of pages"], "num_rejects": 2,
        "evaluation_from": "2026-01-04T00:00:00",
    }),
    "unions": (unions_log, {
        "session": "user", "time": "at", "label": "label", "sides": [],
        "columns": {
            "label": "label", "user": "sparse", "price": "sparse", "show": "sparse", "at": "kept",
            "play_seconds": "kept",
        },
        "evaluation_from": "2026-01-01T02:59:00",
    }),
    "nothing to go by": (bare_log, {
        "session": "all_rows", "time": "row_time", "label": None, "sides": [],
        "columns": {
            "row_time": "kept", "select": "dense", "ordered_by": "dense", "all_rows": "kept",
        },
    }),
    "without a header": (one_column, {
        "session": "c0", "time": "row_time", "label": None, "sides": [],
        "columns": {"row_time": "kept", "c0": "sparse", "c1": "kept"},
    }),
}  # fmt: skip


def built(job: Path, log: Path, dataset: Path) -> dict[str, object]:
    """Build a dataset of a job as it is, and verify it."""
    result = build(request(job, log, dataset))
    assert verify(dataset)["problems"] == []
    return result


@pytest.mark.slow
@pytest.mark.parametrize(("write", "wanted"), LOGS.values(), ids=LOGS.keys())
def test_a_first_job_has_what_is_in_the_files_and_builds_as_it_is(
    write: Callable[[Path], None], wanted: dict[str, object], tmp_path: Path
) -> None:
    (tmp_path / "log").mkdir()
    write(tmp_path / "log")
    actual = init(tmp_path / "log", tmp_path / "job")
    assert {key: actual[key] for key in wanted} == wanted
    result = built(tmp_path / "job" / "job.yaml", tmp_path / "log", tmp_path / "dataset")
    assert result["num_rejects"] == wanted.get("num_rejects", 0)
    assert result["num_samples"] == actual["num_samples"] or actual["num_samples"] >= NUM_ROWS
    if actual["label"] is not None:
        trained(tmp_path / "job" / "job.yaml", tmp_path / "dataset", tmp_path / "run")


def trained(job: Path, dataset: Path, run: Path) -> None:
    """Train a few steps with a job as it is, and evaluate."""
    words = [str(job), "--dataset", str(dataset)]
    assert trainer_main(["train", *words, "--output", str(run), "--steps", "3"]) == 0
    assert trainer_main(["evaluate", *words, "--run", str(run), "--json"]) == 0
    metrics = read_summary(run / SUMMARY)
    assert (metrics.num_steps, metrics.ne is not None) == (3, True)


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, object]]:
    """A log of CSV with its first job and the dataset of it, and what `init` said."""
    directory = tmp_path_factory.mktemp("shop")
    (directory / "log").mkdir()
    csv_log(directory / "log")
    (directory / "log" / "LICENSE").write_text("free")
    actual = init(directory / "log", directory / "job")
    result = built(directory / "job" / "job.yaml", directory / "log", directory / "dataset")
    assert (result["num_samples"], result["num_rejects"]) == (NUM_ROWS, 0)
    return directory, actual


@pytest.mark.slow
def test_a_first_job_of_csv_has_lists_times_and_a_side_table(
    shop: tuple[Path, dict[str, object]],
) -> None:
    _, result = shop
    assert (result["session"], result["time"], result["label"]) == ("user_id", "time", "clicked")
    assert (result["sides"], result["left_out"]) == (["items"], ["LICENSE"])
    assert result["columns"] == {
        "clicked": "label", "user_id": "sparse", "time": "kept", "item_id": "sparse",
        "city": "sparse", "seen": "sparse", "tags": "sparse", "words": "sparse",
        "brand": "sparse", "weight_kg": "kept", "weight_kg_scaled": "dense",
    }  # fmt: skip


def test_values_of_a_first_job_are_those_of_the_log(shop: tuple[Path, dict[str, object]]) -> None:
    samples = stored_table(shop[0] / "dataset").sort_by("time").to_pylist()
    for i, (sample, row) in enumerate(zip(samples, rows(), strict=True)):
        assert (sample["user_id"], sample["item_id"]) == (row["user_id"], row["item_id"])
        assert (sample["seen"] or []) == row["seen"]
        assert sample["tags"] == [i % 7, i % 5]
        assert sample["words"] == [f"a{i % 9}", f"b{i % 4}"]
        assert sample["brand"] == f"brand {row['item_id'] % 9}"  # pyright: ignore[reportOperatorIssue]


def test_a_first_job_says_why(shop: tuple[Path, dict[str, object]]) -> None:
    job = shop[0] / "job" / "job.yaml"
    text = job.read_text()
    for line in (
        "# Not used: LICENSE: no readable format, or no rows.",
        "# session.key: by its name; 4.0 rows per value.",
        "# session.time: ISO times; 400 distinct.",
        "# both have a column 'item_id'; each item_id is unique.",
        "# About the last tenth of the rows is for evaluation.",
    ):
        assert line in text
    assert "# values between '|'" in (shop[0] / "job" / "schema.pbtxt").read_text()
    assert str(load_job(job).data.split.evaluation_from) == "2026-01-01 02:59:00"


@pytest.mark.slow
def test_types_and_split_are_those_of_most_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "ROWS", 400)
    lines = ["user_id,time,price,clicked"]
    for i in range(4000):  # the first 400 have 3 odd prices, all have 27; a quote is not closed
        price = "n/a" if i % 150 == 99 else str(i % 9)
        user = f'"{i % 40}' if i == 1500 else str(i % 40)
        lines.append(f"{user},2026-01-{i // 200 + 1:02}T00:{i % 60:02}:00,{price},{i % 3 // 2}")
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "clicks.csv").write_text("\n".join(lines) + "\n")
    actual = init(tmp_path / "log", tmp_path / "job")
    assert actual["columns"] == {
        "clicked": "label", "user_id": "sparse", "time": "kept", "price": "dense"
    }  # fmt: skip
    assert "2026-01-17" <= actual["evaluation_from"] <= "2026-01-20"
    why = "numbers, except 3 of 400 values, such as 'n/a'; these become null"
    assert why in (tmp_path / "job" / "schema.pbtxt").read_text()
    result = built(tmp_path / "job" / "job.yaml", tmp_path / "log", tmp_path / "dataset")
    assert (result["num_samples"], result["num_rejects"]) == (3999, 1)
    assert stored_table(tmp_path / "dataset")["price"].null_count == 27


@pytest.mark.slow
def test_split_of_avro_is_of_all_files_and_one_that_is_cut_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "ROWS", 50)
    (tmp_path / "log").mkdir()
    unions_log(tmp_path / "log")
    whole = (tmp_path / "log" / "plays.avro").read_bytes()
    (tmp_path / "log" / "plays-2.avro").write_bytes(whole[:-20])
    messages: list[str] = []
    split = init(tmp_path / "log", tmp_path / "job", messages.append)["evaluation_from"]
    assert "2026-01-01T02:20" <= split <= "2026-01-01T03:19"
    assert [line.rpartition(" on: ")[0] for line in messages if "WARNING" in line] == [
        "WARNING: plays-2.avro: block could not be read from row 312"
    ]
    assert "# user: a union of long | string." in (tmp_path / "job" / "job.yaml").read_text()


@pytest.mark.slow
def test_init_says_when_rows_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    result = [{"user": i // 4 if i % 5 < 2 else None, "ts": 1_767_225_600 + i} for i in range(200)]
    lines = "".join(json.dumps(line) + "\n" for line in result)
    (tmp_path / "log" / "log.jsonl").write_text(lines)
    message = "WARNING: 60% of the first rows are rejected, 120 of 120 by: "
    words = ["init", str(tmp_path / "log"), "--output", str(tmp_path / "job")]
    assert message in error_of(main, words, 0)


@pytest.mark.nightly
def test_a_first_job_of_the_demo_builds_as_it_is(tmp_path: Path) -> None:
    write_log(GeneratorConfig(num_samples=1000, seed=3), tmp_path / "log")
    actual = init(tmp_path / "log", tmp_path / "job")
    assert [actual[k] for k in ("session", "time", "label")] == ["session_id", "time", "clicked"]
    result = built(tmp_path / "job" / "job.yaml", tmp_path / "log", tmp_path / "dataset")
    assert (result["num_samples"], result["num_rejects"]) == (1000, 0)


@pytest.mark.slow
def test_ids_keep_their_values_and_columns_distinct_names(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    users = [cast(int, r["user_id"]) for r in rows()]
    columns = {
        "session_id": pa.array(users),
        "time": pa.array([r["ts"] for r in rows()], pa.timestamp("s")),
        "clicked": pa.array([r["clicked"] for r in rows()]),
        "whole_id": pa.array([Decimal((1 << 60) + u) for u in users], pa.decimal128(20, 0)),
        "large_id": pa.array([Decimal((1 << 80) + u) for u in users], pa.decimal128(38, 0)),
        "unsigned_id": pa.array([(1 << 64) - 1 - u for u in users], pa.uint64()),
        "Item ID": pa.array([r["item_id"] for r in rows()]),
        "item_id": pa.array([r["item_id"] for r in rows()]),
        "uuid": pa.array([f"{u:032x}" for u in users]),
    }
    pq.write_table(pa.table(columns), tmp_path / "log" / "log.parquet")
    init(tmp_path / "log", tmp_path / "job")
    result = built(tmp_path / "job" / "job.yaml", tmp_path / "log", tmp_path / "dataset")
    assert (result["num_samples"], result["num_rejects"]) == (NUM_ROWS, 0)
    samples = stored_table(tmp_path / "dataset")
    for name in ("whole_id", "large_id", "unsigned_id"):
        expected = map(str, set(columns[name].to_pylist()))
        assert set(map(str, samples[name].to_pylist())) == set(expected)
    assert samples["item_id"].to_pylist() == samples["item_id_2"].to_pylist()


@pytest.mark.slow
@pytest.mark.parametrize("at", ["any place", "the end"])
def test_chosen_one_of_a_list_is_the_label_unless_the_list_is_a_history(
    at: str, tmp_path: Path
) -> None:
    """And columns of small integers of other kinds share no table, times and prices have none."""
    draw = np.random.default_rng(0)
    shown = [draw.choice(900, 8, replace=False).tolist() for _ in range(NUM_ROWS)]
    chosen = [each[-1 if at == "the end" else int(draw.integers(8))] for each in shown]
    log = {
        "user": draw.integers(0, 150, NUM_ROWS), "ts": [r["ts"] for r in rows()],
        "impressions": ["|".join(map(str, each)) for each in shown],
        "reference": [str(each) for each in chosen], "step": draw.integers(1, 160, NUM_ROWS),
        "prices": [draw.integers(30, 300, 8).tolist() for _ in range(NUM_ROWS)],
        "published": draw.integers(1_700_000_000, 1_700_900_000, NUM_ROWS),
    }  # fmt: skip
    (tmp_path / "log").mkdir()
    pq.write_table(pa.table(log), tmp_path / "log" / "log.parquet")
    result = init(tmp_path / "log", tmp_path / "job")
    tables = [t.features for t in load_job(tmp_path / "job" / "job.yaml").data.tables.values()]
    kept = {"published": "kept", "prices": "kept"}
    assert kept.items() <= cast(dict[str, str], result["columns"]).items()
    if at == "the end":
        assert (result["label"], result["num_samples"]) == (None, NUM_ROWS)
        assert sorted(tables) == [("impressions",), ("reference",), ("step",), ("user",)]
    else:
        assert (result["label"], result["num_samples"]) == ("label", 8 * NUM_ROWS)
        assert sorted(tables) == [("item",), ("step",), ("user",)]


@pytest.mark.slow
def test_init_keeps_a_job_that_is_there(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    words = ["init", str(tmp_path / "log"), "--output", str(tmp_path / "job"), "--json"]
    message = "input has no file in one of the formats parquet, avro, jsonl, csv"
    assert message in error_of(main, words)
    pq.write_table(pa.table({"a": pa.array([], pa.int64())}), tmp_path / "log" / "empty.parquet")
    assert "files of the folder have no row" in error_of(main, words)
    shown_log(tmp_path / "log")
    assert json_of(main, words)["session"] == "visitor"
    message = f"job exists already in {tmp_path / 'job' / 'job.yaml'}; choose"
    assert message in error_of(main, words)


TEXTS = {
    "bars": (["1|2|3", "4", "5|6"], "list", "int"),
    "brackets": (["[1, 2]", "[3]", "[]"], "list", "int"),
    "quoted words in brackets": (["['a', 'b']", "['c']", "['a']"], "list", "text"),
    "blanks": (["N1 N2", "N3", "N1 N3 N4"], "list", "text"),
    "decimals": (["0.5;1.5", "2.5;1", "0.5"], "list", "float"),
    "a sentence": (["to be or not", "the end", "no more words"], "text", None),
    "American times": (["11/12/2019 2:14:46 PM", "1/2/2020 1:00:00 AM"], "time", None),
    "ISO times": (["2026-01-31T12:00:00Z", "2026-01-31T12:00:01Z"], "time", None),
    "a date": (["2026-01-31", "2026-02-01"], "time", None),
    "numbers": (["1", "-2", "3"], "int", None),
    "names of digits": (["007", "008", "123"], "text", None),
}


@pytest.mark.parametrize(("texts", "shape", "of"), TEXTS.values(), ids=TEXTS.keys())
def test_texts_are_taken_for_what_they_hold(texts: list[str], shape: str, of: str | None) -> None:
    (result,) = columns_of(pa.table({"x": texts}))
    assert isinstance(result, ScannedColumn)
    assert (result.shape, result.of) == (shape, of)


@pytest.mark.parametrize(("name", "is_wide"), [("fans_user_num", True), ("user", False)])
def test_counts_of_things_are_numbers(name: str, is_wide: bool) -> None:
    column = ScannedColumn(name, name, "int", pa.array([0, 3, 47, 47, 60, 1_986_250]), 6)
    assert (column.is_wide, column.is_id) == (is_wide, not is_wide)


def test_zone_of_texts_is_not_left_out() -> None:
    texts = ["2026-05-05T03:19:18+02:00", "2026-05-05T03:19:18Z", "2026-05-05 03:19:18-0130"]
    (result,) = columns_of(pa.table({"x": texts}))
    assert isinstance(result, ScannedColumn)
    with duckdb.connect() as connection:
        connection.execute("SET TimeZone = 'UTC'")
        connection.register("log", pa.table({"x": texts}))
        times = (
            connection.sql(f"SELECT {result.expr} AS t FROM log").to_arrow_table()["t"].to_pylist()
        )
    assert [str(time) for time in times] == [
        "2026-05-05 01:19:18", "2026-05-05 03:19:18", "2026-05-05 04:49:18"]  # fmt: skip


@pytest.mark.parametrize("num_distinct", [2, 3, 20, 400, 5000, 100_000])
def test_values_of_a_table_seldom_share_rows(num_distinct: int) -> None:
    ids = np.arange(num_distinct)
    column = ScannedColumn("x", "x", "int", pa.array(np.tile(ids, 20)), 20 * num_distinct)
    num_rows = num_rows_of([PlannedFeature(column, "sparse", "")], 1.0)
    table = TableConfig(features=("x",), num_rows=num_rows)
    shared = 1 - len(np.unique(rows_of_ids(ids, "x", table))) / num_distinct
    assert shared < (0.02 if num_distinct <= 400 else 0.13)
    assert num_rows <= max(1 << 10, min(128 * num_distinct, 1 << 16), 8 * num_distinct)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("log", "label"),
    [
        ("mind", "label"),
        pytest.param("ebnerd_test", "label", marks=pytest.mark.nightly),
        pytest.param("30music_sample10", "label", marks=pytest.mark.nightly),
        pytest.param("kuairand_pure_part", "is_click", marks=pytest.mark.chaos),
    ],
)
def test_a_first_job_of_the_first_rows_of_a_real_log_is_trained_as_it_is(
    log: str, label: str, shared_data: Path, tmp_path: Path
) -> None:
    (tmp_path / "log").mkdir()
    num_rows = 400 if log.startswith("kuairand") else 200  # of fewer, a join matches none
    for path in (shared_data / log).iterdir():
        if path.suffix in (".parquet", ".snappy"):
            pq.write_table(pq.read_table(path).slice(0, num_rows), tmp_path / "log" / path.name)
        elif path.suffix in (".tsv", ".csv"):
            lines = path.read_bytes().splitlines(keepends=True)[:num_rows]
            (tmp_path / "log" / path.name).write_bytes(b"".join(lines))
    actual = init(tmp_path / "log", tmp_path / "job")
    assert actual["label"] == label
    result = built(tmp_path / "job" / "job.yaml", tmp_path / "log", tmp_path / "dataset")
    assert result["num_rejects"] == 0
    assert int(str(result["num_samples"])) >= 199
    trained(tmp_path / "job" / "job.yaml", tmp_path / "dataset", tmp_path / "run")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("log", "samples"),
    [
        pytest.param("mind", 189_359, marks=pytest.mark.chaos),
        ("ebnerd_test", 10_848),
        ("30music_sample10", 343_183),
    ],
)
def test_a_first_job_of_a_real_log_keeps_all_of_its_samples(
    log: str, samples: int, shared_data: Path, tmp_path: Path
) -> None:
    init(shared_data / log, tmp_path / "job")
    result = built(tmp_path / "job" / "job.yaml", shared_data / log, tmp_path / "dataset")
    assert (result["num_samples"], result["num_rejects"]) == (samples, 0)


@pytest.mark.nightly
def test_a_first_job_of_a_log_with_many_tables_joins_them(
    shared_data: Path, tmp_path: Path
) -> None:
    log = shared_data / "kuairand_pure_part"
    result = init(log, tmp_path / "job")  # and a preview, no build
    assert (result["session"], result["time"], result["label"]) == (
        "user_id",
        "time_ms",
        "is_click",
    )
    assert result["sides"] == ["item_features", "user_sequences", "user_features"]
    assert (result["num_samples"], result["num_rejects"]) == (1000, 0)
    columns = result["columns"]
    assert (columns["watch_seq"], columns["is_like"]) == ("sparse", "kept")

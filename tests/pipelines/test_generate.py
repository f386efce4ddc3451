import re
from dataclasses import replace
from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from presage.pipelines.cli import main
from presage.pipelines.demo_log.entities import (
    CARDINALITIES,
    HOT_FRACTION,
    HOT_SHARE,
    item_brand,
    item_genre,
    item_ids,
)
from presage.pipelines.demo_log.generate import (
    HISTORIES,
    LOG_SCHEMA,
    GeneratorConfig,
    generate,
    write_log,
)
from presage.pipelines.demo_log.sessions import MAX_HISTORY, MAX_SESSION_SAMPLES, click_logit
from presage.schemas.config.job import load_job
from presage.schemas.dataset.opened import open_dataset
from tests.shared import error_of, json_of

SMALL = GeneratorConfig(num_samples=20_000, seed=7, span=timedelta(hours=6))
LARGE = GeneratorConfig(num_samples=240_000, seed=3)
REQUEST_COLUMNS = (
    *("session_id", "page", "hour", "query", "page_depth", "time_since_last_sec"),
    *(name for name in LOG_SCHEMA.names if name.startswith("user_")),
)
META_LOOKUPS = 420_000  # where the fit of `generate_items` holds


def read(config: GeneratorConfig) -> pa.Table:
    return pa.Table.from_batches(generate(config))


@pytest.fixture(scope="module")
def small() -> pa.Table:
    return read(SMALL)


@pytest.fixture(scope="module")
def large() -> pa.Table:
    return read(LARGE)


def column(table: pa.Table, name: str) -> np.ndarray:
    return table[name].to_numpy()


def auc(score: np.ndarray, label: np.ndarray) -> float:
    rank = np.empty(len(score))
    rank[np.argsort(score, kind="stable")] = np.arange(len(score))
    positive = label == 1
    return float((rank[positive].mean() - (positive.sum() - 1) / 2) / (~positive).sum())


def sessions(table: pa.Table) -> list[list[dict]]:
    """Requests of each session in order, each as its samples in order."""
    names = ["session_id", "request_id", "item_id", "clicked", "slot", *HISTORIES, "user_clicks_7d"]
    by_session: dict[int, dict[int, list[dict]]] = {}
    for row in table.select(names).to_pylist():
        by_session.setdefault(row["session_id"], {}).setdefault(row["request_id"], []).append(row)
    return [
        [{**rows[0], "samples": rows} for rows in requests.values()]
        for requests in by_session.values()
    ]


@pytest.mark.parametrize("num_samples", [1, 15, 4_999, 20_000])
def test_generate_any_size_yields_exactly_that_many_rows(num_samples: int) -> None:
    table = read(replace(SMALL, num_samples=num_samples))
    assert table.num_rows == num_samples
    assert table.schema == LOG_SCHEMA
    assert all(table[name].null_count == 0 for name in table.schema.names)


@pytest.mark.slow
def test_generate_several_chunks_stay_in_order_of_time() -> None:
    time = column(read(replace(LARGE, row_group_samples=1_000)), "time")
    assert (np.diff(time) >= np.timedelta64(0)).all()
    start = np.datetime64(LARGE.start)
    assert start <= time[0] < start + np.timedelta64(1, "h")
    assert (time < start + np.timedelta64(3, "D")).all()


@pytest.mark.slow
def test_generate_dense_traffic_carries_sessions_over_in_order() -> None:
    # sessions outlast several chunks, and small batches leave nothing settled behind
    table = read(replace(LARGE, span=timedelta(minutes=3), row_group_samples=1_000))
    assert table.num_rows == LARGE.num_samples
    assert (np.diff(column(table, "time")) >= np.timedelta64(0)).all()


def test_generate_same_config_gives_same_rows_however_batched(small: pa.Table) -> None:
    assert read(SMALL).equals(small)
    assert read(replace(SMALL, row_group_samples=333)).equals(small)
    assert not read(replace(SMALL, seed=8)).equals(small)


def test_generate_batches_are_bounded_and_full() -> None:
    sizes = [batch.num_rows for batch in generate(replace(SMALL, row_group_samples=700))]
    assert sizes == [700] * 28 + [400]


def test_generate_sessions_have_the_stated_length_and_a_long_tail(large: pa.Table) -> None:
    _, lengths = np.unique(column(large, "session_id"), return_counts=True)
    assert lengths.mean() == pytest.approx(16.5, rel=0.05)
    assert np.quantile(lengths, 0.99) > 5 * lengths.mean()
    assert 200 < lengths.max() <= MAX_SESSION_SAMPLES


def test_generate_sessions_interleave(large: pa.Table) -> None:
    session = column(large, "session_id")
    assert (session[1:] != session[:-1]).mean() > 0.5


def test_generate_ids_stay_below_their_cardinality(large: pa.Table) -> None:
    for name, cardinality in CARDINALITIES.items():
        values = column(large, name)
        assert values.min() >= 0, name
        assert values.max() < cardinality, name
        assert len(np.unique(values)) >= min(cardinality // 2, 1_000), name


def test_generate_request_columns_are_constant_within_a_request(large: pa.Table) -> None:
    _, first, inverse = np.unique(
        column(large, "request_id"), return_index=True, return_inverse=True
    )
    for name in REQUEST_COLUMNS:
        values = column(large, name)
        assert (values == values[first][inverse]).all(), name
    assert 2.0 < large.num_rows / len(first) < 4.0
    slot = inverse * CARDINALITIES["slot"] + column(large, "slot")
    assert len(np.unique(slot)) == large.num_rows


def test_generate_position_counts_slots_from_the_top_of_the_page(large: pa.Table) -> None:
    position, slot = column(large, "position"), column(large, "slot")
    pages_up = (position - slot) / CARDINALITIES["slot"]
    assert (pages_up == np.floor(pages_up)).all()
    assert (pages_up < column(large, "page_depth")).all()
    assert pages_up.min() == 0
    assert 0.2 < (pages_up > 0).mean() < 0.9


def test_generate_user_features_hardly_change_within_a_session(large: pa.Table) -> None:
    _, inverse, size = np.unique(
        column(large, "session_id"), return_inverse=True, return_counts=True
    )
    order = np.argsort(inverse, kind="stable")
    same_session = np.diff(inverse[order]) == 0
    for name, low, high in [
        ("user_age", 0.0, 0.0),
        ("user_city", 1e-4, 0.002),
        ("user_interest", 0.001, 0.01),
        ("user_clicks_7d", 0.05, 0.4),
        ("query", 0.05, 0.3),
        ("item_id", 0.95, 1.0),
    ]:
        changes = np.diff(column(large, name)[order])[same_session] != 0
        assert low <= changes.mean() <= high, name
    assert size.sum() == large.num_rows


@pytest.mark.slow
def test_generate_histories_append_what_the_session_clicked_and_viewed(small: pa.Table) -> None:
    num_checked = 0
    for requests in sessions(small):
        for before, after in pairwise(requests):
            clicked = [row["item_id"] for row in before["samples"] if row["clicked"]]
            assert after["clicked_items"] == (before["clicked_items"] + clicked)[-MAX_HISTORY:]
            viewed = [before["samples"][0]["item_id"]]
            assert after["viewed_items"] == (before["viewed_items"] + viewed)[-MAX_HISTORY:]
            assert after["user_clicks_7d"] == before["user_clicks_7d"] + len(clicked)
            num_checked += len(clicked)
        for request in requests:
            for row in request["samples"]:
                assert all(row[name] == request[name] for name in HISTORIES)
    assert num_checked > 1_000


def test_generate_sessions_of_a_user_begin_with_the_same_snapshot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("presage.pipelines.demo_log.sessions.NUM_USERS", 50)
    table = read(SMALL)
    users, num_shared = {}, 0
    for row in table.filter(pa.array(column(table, "page_depth") == 1)).to_pylist():
        snapshot = tuple(tuple(row[name]) for name in HISTORIES)
        sessions_of, expected = users.setdefault(row["user_id"], (set(), snapshot))
        assert snapshot == expected
        sessions_of.add(row["session_id"])
        num_shared += len(sessions_of) > 1
    assert num_shared > 100
    assert len({expected for _, expected in users.values()}) == len(users)


def test_generate_clicked_brands_are_the_brands_of_clicked_items(small: pa.Table) -> None:
    items, brands = small["clicked_items"].combine_chunks(), small["clicked_brands"]
    assert items.offsets.equals(brands.combine_chunks().offsets)
    assert (brands.combine_chunks().values.to_numpy() == item_brand(items.values.to_numpy())).all()
    lengths = items.value_lengths().to_numpy()
    assert lengths.max() == MAX_HISTORY
    assert 35.0 < lengths.mean() < 46.0


def test_generate_item_features_are_functions_of_the_item(small: pa.Table) -> None:
    for name, values in item_ids(column(small, "item_id")).items():
        assert (column(small, name) == values).all(), name
    _, first, inverse = np.unique(column(small, "item_id"), return_index=True, return_inverse=True)
    for name in ("item_price", "item_discount", "item_rating", "item_ctr_7d", "item_age_days"):
        values = column(small, name)
        assert (values == values[first][inverse]).all(), name


def test_generate_hot_items_take_their_share(large: pa.Table) -> None:
    _, counts = np.unique(column(large, "item_id"), return_counts=True)
    num_hot = int(CARDINALITIES["item_id"] * HOT_FRACTION)
    share = np.sort(counts)[::-1][:num_hot].sum() / large.num_rows
    assert share == pytest.approx(HOT_SHARE, abs=0.03)


def read_reuse_histogram(path: Path) -> np.ndarray:
    """The first histogram of unique rows by reuse in a file of dlrm_datasets."""
    lines = path.read_text().split("Histogram of col sizes:\n")[1].splitlines()[:17]
    return np.array([float(line.rsplit(":", 1)[1]) for line in lines])


def test_generate_item_reuse_follows_production_histogram(
    large: pa.Table, shared_data: Path
) -> None:
    """Compare as many item lookups as the fit is for, session repeats taken out."""
    production = read_reuse_histogram(shared_data / "meta_locality_stats/2022_locality_stats.txt")
    _, first = np.unique(column(large, "session_id"), return_index=True)
    once = large.take(pa.array(np.sort(first)))
    lookups = np.concatenate(
        [
            once[name].combine_chunks().flatten().to_numpy()
            for name in ("clicked_items", "viewed_items")
        ]
    )[:META_LOOKUPS]
    assert len(lookups) == META_LOOKUPS
    _, reuse = np.unique(lookups, return_counts=True)
    edges = [0.5, *(2.0**power + 0.5 for power in range(16)), np.inf]
    ours = np.histogram(reuse, edges)[0] / len(reuse)
    assert np.abs(np.cumsum(ours) - np.cumsum(production)).max() < 0.06
    assert reuse.mean() == pytest.approx(12.7, rel=0.3)


@pytest.mark.slow
def test_generate_clicks_can_be_learnt_from_the_past(large: pa.Table) -> None:
    history = large["clicked_items"].combine_chunks()
    owner = np.repeat(np.arange(large.num_rows), history.value_lengths().to_numpy())
    genre = item_genre(column(large, "item_id"))
    match = item_genre(history.flatten().to_numpy()) == genre[owner]
    share = np.bincount(owner, match, large.num_rows) / np.maximum(
        np.bincount(owner, minlength=large.num_rows), 1
    )
    label = column(large, "clicked").astype(float)
    dense = [column(large, "item_ctr_7d"), column(large, "user_ctr_7d")]
    scores = {}
    for name, features in {"dense": dense, "history": [*dense, share]}.items():
        x = np.stack(features, axis=1)
        x = np.column_stack([(x - x.mean(0)) / x.std(0), np.ones(len(x))])
        past = len(x) * 3 // 4
        weight = np.zeros(x.shape[1])
        for _ in range(8):  # Newton steps of logistic regression
            p = 1.0 / (1.0 + np.exp(-x[:past] @ weight))
            hessian = (x[:past] * (p * (1.0 - p))[:, None]).T @ x[:past]
            weight += np.linalg.solve(hessian, x[:past].T @ (label[:past] - p))
        scores[name] = auc(x[past:] @ weight, label[past:])
    assert 0.15 < label.mean() < 0.25
    assert scores["dense"] > 0.6
    assert scores["history"] > scores["dense"] + 0.03


def test_generate_true_probability_ranks_clicks_with_the_stated_auc(large: pa.Table) -> None:
    user, item, query = (column(large, name) for name in ("user_id", "item_id", "query"))
    logit = click_logit(user, item, query, column(large, "position").astype(np.int64))
    assert auc(logit, column(large, "clicked")) == pytest.approx(0.8, abs=0.02)


@pytest.mark.slow
def test_write_log_same_config_writes_same_bytes(tmp_path: Path) -> None:
    config = replace(SMALL, num_files=3, row_group_samples=1_500)
    first, second = (write_log(config, tmp_path / name) for name in ("a", "b"))
    assert [path.name for path in first] == [f"log-{k:05d}.parquet" for k in range(3)]
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


def test_write_log_cuts_into_files_and_row_groups_in_order(small: pa.Table, tmp_path: Path) -> None:
    paths = write_log(replace(SMALL, num_files=3, row_group_samples=1_500), tmp_path)
    assert pa.concat_tables([pq.read_table(path) for path in paths]).equals(small)
    groups = [
        metadata.row_group(k)
        for metadata in (pq.read_metadata(path) for path in paths)
        for k in range(metadata.num_row_groups)
    ]
    assert [group.num_rows for group in groups] == [1_500] * 13 + [500]
    assert {group.column(0).compression for group in groups} == {"ZSTD"}


def test_write_log_into_a_used_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "old.parquet").touch()
    message = (
        f"directory has Parquet files, such as 'old.parquet': {str(tmp_path)!r}; "
        "remove them or choose another directory"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        write_log(SMALL, tmp_path)


@pytest.mark.slow
def test_example_has_job_log_and_dataset_and_is_not_overwritten(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    words = ["demo", str(folder), "--num-samples", "300", "--json"]
    assert json_of(main, words)["num_samples"] == 300
    assert len(open_dataset(folder / "dataset").segments) == 1
    assert load_job(folder / "job.yaml").name == "demo"
    assert "folder has a dataset in " in error_of(main, words)


def test_example_leaves_another_job_alone(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("name: mine\n")
    assert "folder has another job in " in error_of(main, ["demo", str(tmp_path)])
    assert [path.name for path in tmp_path.iterdir()] == ["job.yaml"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_samples": 0}, "num_samples must be at least 1, got num_samples=0"),
        ({"seed": -1}, "seed must be in [0, 2 ** 63), got seed=-1"),
        ({"span": timedelta(0)}, "span must be positive, got span=datetime.timedelta(0)"),
    ],
)
def test_config_value_outside_its_range_is_refused(values: dict, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        replace(SMALL, **values)


def test_config_start_with_a_time_zone_is_refused() -> None:
    aware = datetime.fromisoformat("2026-01-05T00:00:00+01:00")
    with pytest.raises(ValueError, match=r"start must have no time zone \(UTC\), got start="):
        replace(SMALL, start=aware)

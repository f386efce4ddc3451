"""Declared transforms in a whole build.

Right values, once per tuple, the same bytes, no bad job.
"""

# ruff: noqa: E501 - a table of faults, one a line
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from presage.pipelines import build as build_module
from presage.pipelines.build import build
from presage.pipelines.prepare import BuildRequest
from presage.pipelines.table.verify import verify
from presage.schemas.dataset.fitted import load_fitted
from presage.schemas.dataset.opened import open_dataset
from presage.schemas.errors import SchemaError
from tests.pipelines import transform_jobs as jobs
from tests.pipelines.appending import addition
from tests.pipelines.logs import (
    bytes_of,
    copy_of,
    request,
    reverse_listings,
    stored_table,
    unnamed_places,
)


def built(directory: Path, seed: int = 0, num_files: int = 3) -> Path:
    log = jobs.write_log(directory / "log", jobs.raw_rows(400, seed), num_files)
    build(request(jobs.write_job(directory / "job"), log, directory / "dataset"))
    return directory / "dataset"


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset, not to be changed."""
    return built(tmp_path_factory.mktemp("transforms"))


def expected_rows(
    counts: Counter[object], min_count: int, num_rows: int, oov_rows: int
) -> dict[object, int]:
    often = sorted((-n, v) for v, n in counts.items() if n >= min_count)
    return {v: oov_rows + i for i, (_, v) in enumerate(often[: num_rows - oov_rows])}


@pytest.mark.slow
def test_model_inputs_are_those_of_plain_python(dataset: Path) -> None:
    rows = stored_table(dataset, model_inputs=True).to_pylist()
    training = [r for r in rows if str(r["time"]) < "2026-01-01 00:08"]
    assert 500 < len(training) < len(rows)
    items, cities = Counter(), Counter()  # type: ignore[var-annotated]
    for row in training:
        items.update([row["item"], *(row["history"] or [])[-3:]])
        cities.update([] if row["city"] is None else [row["city"]])
    item_rows, city_rows = expected_rows(items, 3, 60, 4), expected_rows(cities, 1, 60, 1)
    young = np.array([r["young"] for r in training if r["young"] is not None], float)
    prices = np.array(sorted(r["price"] for r in training))
    cuts = sorted({prices[i * len(prices) // 4] for i in (1, 2, 3)})
    assert len(item_rows) == 56
    for row in rows:
        history, age = row["history"], row["age"]
        assert row["recent"] == (None if history is None else history[-3:])
        assert row["oldest"] == (None if history is None else history[:2])
        known = [item_rows.get(v, -1) for v in row["recent"] or []]
        result = row["recent_rows"] or []
        assert [f if f >= 4 else -1 for f in result] == known
        assert row["item_row"] == item_rows.get(row["item"], row["item_row"] % 4)
        assert row["city_row"] == (None if row["city"] is None else city_rows[row["city"]])
        assert row["young"] == (None if age is None else min(40, max(20, age)))
        assert row["age_bucket"] == (None if age is None else sum(b <= age for b in (20, 30, 40)))
        assert (row["city_id"] is None) == (row["city"] is None)
        assert (row["city_age"] is None) == (row["city"] is None or age is None)
        assert row["price_bucket"] == sum(bool(c <= row["price"]) for c in cuts)
        if age is not None:
            assert row["age_scale"] == pytest.approx(
                (row["young"] - young.mean()) / young.std(), rel=1e-5, abs=1e-6
            )
        scale = (row["price"] - prices[0]) / (prices[-1] - prices[0])
        assert row["price_scale"] == pytest.approx(scale, rel=1e-5, abs=1e-6)
        assert row["doubled"] == pytest.approx(2 * scale, rel=1e-5, abs=1e-6)
        assert row["price_log"] == pytest.approx(np.log1p(row["price"]), rel=1e-6)


def test_samples_without_model_inputs_have_the_columns_of_the_sql(dataset: Path) -> None:
    columns = {"session", "time", "user", "city", "age", "history", "item", "price", "label"}
    assert set(stored_table(dataset).column_names) == columns


def test_what_was_fitted_is_named_by_the_manifest_and_verified(
    dataset: Path, tmp_path: Path
) -> None:
    opened = open_dataset(dataset)
    files = opened.segments[0].manifest.fitted
    on_disk = {
        str(p.relative_to(dataset))
        for d in ("vocabularies", "fitted")
        for p in (dataset / d).rglob("*.*")
    }
    assert set(files) == on_disk
    assert sorted(p.split("/")[0] for p in files) == ["fitted", "vocabularies", "vocabularies"]
    fitted = load_fitted(dataset, files, opened.job.data)
    assert len(fitted.vocabularies["items"].values) == 56
    assert set(fitted.stats) == {"user.age_scale", "samples.price_scale", "samples.price_bucket"}
    assert verify(dataset)["problems"] == []
    damaged = copy_of(dataset, tmp_path / "damaged")
    path = next((damaged / "vocabularies" / "items").iterdir())
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    (problem,) = verify(damaged)["problems"]
    assert "file must have sha256" in problem
    path.unlink()
    (problem,) = verify(damaged)["problems"]
    assert "file is missing" in problem


def test_transformed_columns_lie_with_the_unique_tuples(dataset: Path) -> None:
    result = [*dataset.glob("segments/*/tuples/user/*"), *dataset.glob("segments/*/groups/user/*")]
    group = pq.read_table(result[0])
    samples = pq.read_table(next(dataset.glob("segments/*/samples/*.parquet")))
    assert {"recent_rows", "city_age", "age_scale"} <= set(group.column_names)
    assert {"item_row", "price_bucket"} <= set(samples.column_names)
    assert group.num_rows < samples.num_rows / 4


@pytest.mark.slow
def test_same_bytes_again_with_files_in_another_order(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reverse_listings(monkeypatch)
    assert bytes_of(built(tmp_path)) == bytes_of(dataset)


@pytest.mark.slow
def test_other_cuts_into_files_and_parts_learn_the_same(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("presage.pipelines.prepare.PART_INPUT_BYTES", 4_000)
    many = built(tmp_path, num_files=7)
    assert len(set(open_dataset(many).segments[0].column("file").tolist())) > 3
    assert {
        p: b for p, b in bytes_of(many).items() if p.startswith(("vocabularies", "fitted"))
    } == {p: b for p, b in bytes_of(dataset).items() if p.startswith(("vocabularies", "fitted"))}
    assert verify(many)["problems"] == []


def later(directory: Path, dataset: Path, seed: int, shift: int) -> BuildRequest:
    """Return a request that appends a log with some items of its own."""
    rows = jobs.raw_rows(300, seed)
    index = rows.column_names.index("items")
    items = [[i + (shift if i > 9 else 0) for i in row] for row in rows["items"].to_pylist()]
    rows = rows.set_column(index, "items", pa.array(items, pa.list_(pa.int64())))
    log = jobs.write_log(directory / f"log-{seed}", rows)
    return addition(roomy_job(directory / f"job-{seed}"), log, dataset, attempt=f"later-{seed}")


def roomy_job(directory: Path) -> Path:
    """Write the job with room for more entries."""
    job = jobs.write_job(directory)
    text = job.read_text().replace("num_rows: 60, min", "num_rows: 400, min")
    job.write_text(text.replace("identity, num_rows: 64", "identity, num_rows: 400"))
    return job


def vocabulary(dataset: Path, segment: int) -> list[object]:
    opened = open_dataset(dataset)
    files = opened.segments[segment].manifest.fitted
    return load_fitted(dataset, files, opened.job.data).vocabularies["items"].values.to_pylist()


@pytest.mark.slow
def test_later_segment_appends_and_keeps_every_row_and_number(tmp_path: Path) -> None:
    log = jobs.write_log(tmp_path / "log", jobs.raw_rows(400, 0))
    dataset = tmp_path / "dataset"
    build(request(roomy_job(tmp_path / "job"), log, dataset))
    first = open_dataset(dataset).segments[0].manifest.fitted
    build(later(tmp_path, dataset, 5, shift=5000))
    old, new = vocabulary(dataset, 0), vocabulary(dataset, 1)
    assert new[: len(old)] == old
    added = new[len(old) :]
    assert len(added) > 5
    assert {v for v in added if isinstance(v, int) and v > 5000}
    second = open_dataset(dataset).segments[1].manifest.fitted
    assert set(first.items()) < set(second.items())
    assert [p.split("-")[0] for p in set(second) - set(first)] == ["vocabularies/items/00001"]
    rows = {v: i + 4 for i, v in enumerate(new)}
    table = stored_table(dataset, model_inputs=True).select(["item", "item_row"]).to_pylist()
    for row in table[open_dataset(dataset).segments[0].manifest.num_samples :]:
        assert row["item_row"] == rows.get(row["item"], row["item_row"] % 4)
    assert verify(dataset)["problems"] == []
    before = bytes_of(dataset)
    build(later(tmp_path, dataset, 5, shift=5000))
    assert bytes_of(dataset) == before


@pytest.mark.slow
def test_segments_that_learn_at_once_do_not_both_enter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = jobs.write_log(tmp_path / "log", jobs.raw_rows(400, 0))
    dataset = tmp_path / "dataset"
    build(request(roomy_job(tmp_path / "job"), log, dataset))
    slow, fast = later(tmp_path, dataset, 5, 5000), later(tmp_path, dataset, 6, 9000)
    commit_segment = build_module.commit_segment

    def overtaken(*args: Any) -> Any:
        monkeypatch.setattr(build_module, "commit_segment", commit_segment)
        build(fast)
        return commit_segment(*args)

    monkeypatch.setattr(build_module, "commit_segment", overtaken)
    message = "segment was fitted without vocabularies"
    with pytest.raises(SchemaError, match=message):
        build(slow)
    assert len(open_dataset(dataset).segments) == 2
    assert unnamed_places(dataset) == []
    build(slow)  # again: on top of the other
    assert vocabulary(dataset, 2)[: len(vocabulary(dataset, 1))] == vocabulary(dataset, 1)
    assert verify(dataset)["problems"] == []


@pytest.mark.slow
def test_new_column_of_a_later_segment_learns_numbers_of_its_own(tmp_path: Path) -> None:
    log = jobs.write_log(tmp_path / "log", jobs.raw_rows(400, 0))
    dataset = tmp_path / "dataset"
    build(request(roomy_job(tmp_path / "job"), log, dataset))
    more = later(tmp_path, dataset, 7, 0)
    job = Path(more.input.job_path)
    text = job.read_text()
    added = "      age_scale: {normalize: {column: young}}\n"
    job.write_text(
        text.replace(added, f"{added}      range: {{normalize: {{column: age, by: min_max}}}}\n")
    )
    schema = job.parent / "schema.pbtxt"
    schema.write_text(
        schema.read_text() + 'feature { name: "range" type: FLOAT annotation { tag: "dense" } }\n'
    )
    build(more)
    opened = open_dataset(dataset)
    numbers = [
        load_fitted(dataset, s.manifest.fitted, opened.job.data).stats for s in opened.segments
    ]
    assert set(numbers[1]) - set(numbers[0]) == {"user.range"}
    assert {k: numbers[1][k] for k in numbers[0]} == numbers[0]
    assert numbers[1]["user.range"].scale > 1


# What is wrong, to what is replaced in the job by what, and the message.
FAULTS: dict[str, tuple[str, str, str]] = {
    "an input that is not there": ("{last: {column: history,", "{last: {column: histori,", "transforms.user.recent must read columns of its group, or of earlier transforms, got 'histori'"),
    "an input that is made later": ("{last: {column: history,", "{last: {column: recent_rows,", "transforms.user.recent must read columns of its group, or of earlier transforms, got 'recent_rows'"),
    "an input of the samples": ("{first: {column: history,", "{first: {column: price,", "transforms.user.oldest must read columns of its group, or of earlier transforms, got 'price'"),
    "a list that is cut from a number": ("{first: {column: history,", "{first: {column: age,", "transforms.user.oldest: first and last must read a list, got int64"),
    "a text that is clipped": ("{clip: {column: age,", "{clip: {column: city,", "transforms.user.young: clip must read numbers, got string"),
    "a limit that is not whole": ("minimum: 20, maximum: 40", "minimum: 20.5", "transforms.user.young: clip must have whole limits for int64, got 20.5"),
    "two lists in a cross": ("columns: [city, recent]", "columns: [history, recent]", "transforms.user.city_recent: hash must read at most one list"),
    "floats in a vocabulary": ("items: {columns: [item, recent]", "items: {columns: [item, recent, price]", "data.vocabularies.items.columns: vocabulary must read integers or texts, got double"),
    "texts and numbers in a vocabulary": ("items: {columns: [item, recent]", "items: {columns: [item, city]", "data.vocabularies.items.columns must have one type in vocabulary 'items', got string for 'city' and int64 for 'item'"),
    "texts looked up among numbers": ("{name: items, column: item}", "{name: cities, column: item}", "transforms.samples.item_row must have one type in vocabulary 'cities', got int64 for 'item' and string for 'city'"),
    "a vocabulary of an unknown column": ("cities: {columns: [city]", "cities: {columns: [citi]", "data.vocabularies.cities.columns must be columns of the samples, got 'citi'"),
    "a vocabulary of a fitted column": ("items: {columns: [item, recent]", "items: {columns: [item, recent_rows]", "data.vocabularies.items.columns must not depend on a fitted transform, got 'recent_rows'"),
    "numbers of fitted numbers": ("normalize: {column: young}", "normalize: {column: city_row}", "transforms.user.age_scale must not depend on a fitted transform, got 'city_row'"),
    "a vocabulary larger than its table": ("identity, num_rows: 64", "identity, num_rows: 59", "transforms.user.recent_rows must have ids below the rows of table 'items', got 60 and 59"),
    "a hash larger than its table": ("identity, num_rows: 50", "identity, num_rows: 49", "transforms.user.city_id must have ids below the rows of table 'city_ids', got 50 and 49"),
    "more buckets than rows": ("quantiles: 4", "quantiles: 5", "transforms.samples.price_bucket must have ids below the rows of table 'prices', got 5 and 4"),
    "a bucket declared as a float": ("price_log: {log: {column: price}}", "price_log: {bucketize: {column: price, boundaries: [1]}}", "feature 'price_log' must be FLOAT, got int64"),
    "a list declared as one value": ("city_row: {vocabulary: {name: cities, column: city}}", "city_row: {cross: {columns: [city, history], num_rows: 9}}", "feature 'city_row' must be one value, got large_list"),
    "an undeclared new column": ("oldest: {first", "eldest: {first", "samples have no column 'oldest'"),
    "SQL that is wrong": ("ln(1 + len(recent))", "ln(1 + len(recant))", "transforms.user.num_recent cannot run on the columns of its group: Binder Error"),
    "quantiles of a list": ("normalize: {column: young}", "bucketize: {column: history, quantiles: 3}", "transforms.user.age_scale: bucketize by quantiles must read one number, got large_list"),
}  # fmt: skip


@pytest.mark.parametrize(("old", "new", "message"), FAULTS.values(), ids=FAULTS)
def test_transforms_that_do_not_fit_are_refused_before_any_work(
    old: str, new: str, message: str, tmp_path: Path
) -> None:
    log = jobs.write_log(tmp_path / "log", jobs.raw_rows(30, 0))
    job = jobs.write_job(tmp_path / "job")
    assert old in job.read_text()
    job.write_text(job.read_text().replace(old, new, 1))
    with pytest.raises(SchemaError, match=re.escape(message)):
        build(request(job, log, tmp_path / "dataset"))
    assert not (tmp_path / "dataset" / "segments").exists()


def test_nothing_to_learn_from_is_said_by_name_and_leaves_nothing(tmp_path: Path) -> None:
    log = jobs.write_log(tmp_path / "log", jobs.raw_rows(60, 0))
    job = jobs.write_job(tmp_path / "job")
    job.write_text(job.read_text().replace("2026-01-01 00:08:00", "2020-01-01"))
    with pytest.raises(SchemaError, match="has no numbers in the training range"):
        build(request(job, log, tmp_path / "dataset"))
    assert bytes_of(tmp_path / "dataset") == {}
    assert not (tmp_path / "dataset" / "fitted").exists()


def test_transform_that_gives_no_finite_number_is_named_with_its_value(tmp_path: Path) -> None:
    log = jobs.write_log(tmp_path / "log", jobs.raw_rows(60, 0))
    job = jobs.write_job(tmp_path / "job")
    text = job.read_text()
    assert "ln(1 + len(recent))" in text
    job.write_text(text.replace("ln(1 + len(recent))", "CAST('inf' AS DOUBLE) * len(recent)"))
    with pytest.raises(SchemaError, match=r"transform 'num_recent' must give finite numbers, got"):
        build(request(job, log, tmp_path / "dataset"))
    assert bytes_of(tmp_path / "dataset") == {}


def test_manifest_holds_the_whole_hash_of_each_file(dataset: Path) -> None:
    body = json.loads(next(dataset.glob("segments/*/MANIFEST.json")).read_text())
    assert len(body["fitted"]) == 3
    assert all(re.fullmatch(r"[0-9a-f]{64}", v) for v in body["fitted"].values())

"""Partial results of fitted transforms: equal sums for any chunks and order of merging."""

import hashlib
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from presage.pipelines.beam.stage_transforms import MergePartials
from presage.pipelines.samples.sql import Connection, map_rows, with_list_index
from presage.pipelines.samples.tuples import Tuples, separate_tuples
from presage.pipelines.transforms import fit
from presage.pipelines.transforms.apply import fit_inputs, transforms_of_column
from presage.pipelines.transforms.fit import (
    BottomKSample,
    Moments,
    Partial,
    ValueCounts,
    bottom_k_sample,
    counted_column,
    fitted_files,
    moments,
    partial_fits,
)
from presage.schemas.config.job import DataConfig, load_job
from presage.schemas.dataset.fitted import (
    FittedStats,
    FittedValues,
    encode_stats,
    load_fitted,
    stats_path,
)
from presage.schemas.errors import SchemaError
from presage.schemas.storage.location import Location
from tests.pipelines import transform_jobs as jobs


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    return load_job(jobs.write_job(tmp_path_factory.mktemp("job"))).data


def chunks(data: DataConfig, rows: pa.Table, cuts: list[int]) -> list[Tuples]:
    rows = rows.append_column("_origin", pa.array(np.arange(rows.num_rows)))
    sql = (data.samples.map or "").replace("label FROM", "label, _origin FROM")
    actual: list[Tuples] = []
    for start, end in zip([0, *cuts], [*cuts, rows.num_rows], strict=True):
        result = map_rows(Connection(), sql, "log", rows.slice(start, end - start))
        assert result.samples is not None
        actual.append(separate_tuples(with_list_index(result.samples), data.groups))
    return actual


def added_up(parts: list[Tuples], data: DataConfig) -> dict[str, Partial]:
    """Merge as Beam would, by key, in two accumulators."""
    fn = MergePartials()
    accumulators: dict[str, list[list[Partial]]] = {}
    for number, part in enumerate(parts):
        for key, partial in partial_fits(part, fit_inputs(data), data):
            pair = accumulators.setdefault(key, [fn.create_accumulator(), fn.create_accumulator()])
            pair[number % 2] = fn.add_input(pair[number % 2], partial)
    return {
        k: fn.extract_output(fn.merge_accumulators(map(fn.compact, a)))
        for k, a in accumulators.items()
    }


def comparable(result: dict[str, Partial]) -> dict[str, object]:
    plain: dict[str, object] = {}
    for key, partial in result.items():
        if isinstance(partial, ValueCounts):
            plain[key] = partial.table.sort_by("value").to_pylist()
        elif isinstance(partial, BottomKSample):
            plain[key] = partial.keys.tolist(), partial.values.tolist()
        else:
            plain[key] = partial
    return plain


@pytest.mark.slow
def test_sums_do_not_depend_on_cuts_or_order(data: DataConfig) -> None:
    rows = jobs.raw_rows(300, 1)
    whole = added_up(chunks(data, rows, []), data)
    many = chunks(data, rows, list(range(10, 300, 10)))
    assert len(whole) > 10
    assert comparable(added_up(many, data)) == comparable(whole)
    assert comparable(added_up(many[::-1], data)) == comparable(whole)


def test_counts_and_sums_are_those_of_the_training_samples_one_by_one(data: DataConfig) -> None:
    rows = jobs.raw_rows(300, 2)
    result = added_up(chunks(data, rows, [77, 200]), data)
    items, cities, ages, prices = Counter(), Counter(), [], []  # type: ignore[var-annotated]
    for row in rows.to_pylist():
        if str(row["time"]) >= "2026-01-01 00:08":
            continue
        for item in row["items"]:
            items.update([item, *(row["history"] or [])[-3:]])
            cities.update([] if row["city"] is None else [row["city"]])
            ages += [] if row["age"] is None else [min(40, max(20, row["age"]))]
            prices.append(row["price"])
    counted = {"items": Counter(), "cities": Counter()}  # type: ignore[var-annotated]
    for key, partial in result.items():
        if isinstance(partial, ValueCounts):
            for row in partial.table.to_pylist():
                counted[key.split("/")[0]][row["value"]] += row["count"]
    assert counted == {"items": items, "cities": cities}
    age, price = result["user.age_scale"], result["samples.price_bucket"]
    assert isinstance(age, Moments)
    assert isinstance(price, BottomKSample)
    assert age.stats("mean_std", "x").center == pytest.approx(np.mean(ages), rel=1e-15)
    assert age.stats("mean_std", "x").scale == pytest.approx(np.std(ages), rel=1e-12)
    assert sorted(price.values.tolist()) == sorted(prices)
    ordered = sorted(prices)
    cuts = tuple(dict.fromkeys(ordered[i * len(ordered) // 4] for i in (1, 2, 3)))
    assert price.stats(4, "x").boundaries == cuts


def test_evaluation_samples_teach_nothing(data: DataConfig) -> None:
    rows = jobs.raw_rows(300, 3)
    late = [str(t) >= "2026-01-01 00:08" for t in rows["time"].to_pylist()]
    early = rows.filter(pa.array([not x for x in late]))
    assert sum(late) > 20
    whole = comparable(added_up(chunks(data, rows, []), data))
    assert whole == comparable(added_up(chunks(data, early, []), data))
    assert (
        list(partial_fits(chunks(data, rows.filter(pa.array(late)), [])[0], fit_inputs(data), data))
        == []
    )


def test_quantiles_of_more_samples_than_are_kept_stay_close(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fit, "SAMPLE_SIZE", 4096)
    rng = np.random.default_rng(0)
    values, keys = rng.normal(size=100_000), rng.integers(0, 2**63, 100_000).astype(np.uint64)
    parts = [bottom_k_sample(keys[i::7], values[i::7]) for i in range(7)]
    merged = parts[0].merged(parts[1:])
    assert len(merged.keys) == 4096
    assert merged.values.tolist() == bottom_k_sample(keys, values).values.tolist()
    bounds = np.array(merged.stats(10, "x").boundaries)
    ranks = np.searchsorted(np.sort(values), bounds) / len(values)
    np.testing.assert_allclose(ranks, np.arange(1, 10) / 10, atol=4 * 0.5 / 64)


def test_sums_of_repeated_values_equal_those_written_out() -> None:
    rng = np.random.default_rng(1)
    values = np.append(rng.normal(size=50) * 10.0 ** rng.integers(-8, 8, 50), [np.nan, np.inf])
    counts = rng.integers(0, 9, 52)
    repeated = np.repeat(values, counts)
    result = moments(values, counts)
    assert result == moments(
        repeated[rng.permutation(len(repeated))], np.ones(len(repeated), np.int64)
    )
    assert result.num_values == np.isfinite(repeated).sum()


@pytest.mark.parametrize("zeros", [[0.0, -0.0], [-0.0, 0.0]])
def test_what_is_fitted_does_not_depend_on_the_order_of_signed_zeros(zeros: list[float]) -> None:
    first, second = (moments(np.array([zero]), np.ones(1, np.int64)) for zero in zeros)
    assert str(first.merged([second]).stats("min_max", "x").center) == "0.0"
    one, other = (bottom_k_sample(np.zeros(1, np.uint64), np.array([zero])) for zero in zeros)
    assert [str(x) for x in one.merged([other]).stats(2, "x").boundaries] == ["0.0"]


def test_constant_and_missing_numbers() -> None:
    ones = moments(np.ones(5), np.ones(5, np.int64))
    assert ones.stats("mean_std", "x") == FittedStats(1.0, 1.0)
    assert ones.stats("min_max", "x") == FittedStats(1.0, 1.0)
    sample = bottom_k_sample(np.arange(5).astype(np.uint64), np.ones(5))
    assert sample.stats(4, "x").boundaries == (1.0,)
    message = "transforms.user.x has no numbers in the training range"
    with pytest.raises(SchemaError, match=re.escape(message)):
        moments(np.zeros(0), np.zeros(0, np.int64)).stats("min_max", "user.x")


def test_only_what_a_fitted_column_is_made_of_runs_before(data: DataConfig) -> None:
    before = {(i.vocabulary or i.stats_key, i.column): list(i.before) for i in fit_inputs(data)}
    assert before == {
        ("items", "item"): [],
        ("items", "recent"): ["recent"],
        ("cities", "city"): [],
        ("user.age_scale", "young"): ["young"],
        ("samples.price_scale", "price"): [],
        ("samples.price_bucket", "price"): [],
    }
    assert list(transforms_of_column("user", "num_recent", "x", data)) == ["recent", "num_recent"]
    message = "x must not depend on a fitted transform, got 'price_scale'; read the column that it"
    with pytest.raises(SchemaError, match=re.escape(message)):
        transforms_of_column("samples", "doubled", "x", data)


def test_counted_column_is_taken_once_per_tuple(data: DataConfig) -> None:
    (samples,) = chunks(data, jobs.raw_rows(200, 4), [])
    (wanted,) = [i for i in fit_inputs(data) if i.column == "recent"]
    column, counts = counted_column(samples, wanted, np.ones(samples.num_samples, bool))
    assert len(column) == samples.uniques["user"].num_rows < samples.num_samples / 4
    assert counts.sum() == samples.num_samples


def test_fitted_files_are_verified_when_read(tmp_path: Path, data: DataConfig) -> None:
    numbers = {
        "user.age_scale": FittedStats(0.1, 1 / 3, (1e300, float(np.nextafter(1e300, 2e300))))
    }
    content = encode_stats(numbers)
    path = stats_path(content)
    (tmp_path / "fitted").mkdir()
    (tmp_path / path).write_bytes(content)
    digest = hashlib.sha256(content).hexdigest()
    assert load_fitted(tmp_path, {path: digest}, data).stats == numbers
    newer = content.replace(b'"center"', b'"centre"')
    (tmp_path / path).write_bytes(newer)
    message = r"^unknown key: user\.age_scale\.centre in .*fitted"
    with pytest.raises(SchemaError, match=message):
        load_fitted(tmp_path, {path: hashlib.sha256(newer).hexdigest()}, data)
    (tmp_path / path).write_bytes(content.replace(b"0.1", b"0.2"))
    with pytest.raises(SchemaError, match="file must have sha256"):
        load_fitted(tmp_path, {path: digest}, data)
    (tmp_path / path).unlink()
    with pytest.raises(SchemaError, match="file is missing"):
        load_fitted(tmp_path, {path: digest}, data)
    none = replace(data, vocabularies={}, transforms={})
    assert load_fitted(tmp_path, {}, none) == FittedValues()
    assert fitted_files(Location.parse(tmp_path)) == {}

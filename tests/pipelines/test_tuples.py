# ruff: noqa: E501 - tables of faults, one a line
"""Samples with their unique tuples, and downsampling of negatives."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from presage.pipelines.build import build
from presage.pipelines.samples.sql import Connection, map_rows, with_list_index
from presage.pipelines.samples.tuples import (
    Tuples,
    Unit,
    concat_tuples,
    draws,
    hash_samples,
    sample_negatives,
    separate_tuples,
)
from presage.schemas.config.job import DataConfig, load_job
from presage.schemas.dataset.opened import open_dataset
from presage.schemas.errors import SchemaError
from presage.schemas.features import FeatureSet, load_features
from presage.schemas.layout import SAMPLE_WEIGHT
from presage.trainer.data.decode import spec_of
from tests.pipelines.logs import bytes_of, raw_rows, request, stored_table, write_job, write_log

GROUPS = {"history": ("history",)}


def rows(lists: list[list[int] | None]) -> pa.Table:
    kind = pa.large_list(pa.int64())
    return pa.table({"item": np.arange(len(lists)), "history": pa.array(lists, kind)})


def test_different_lists_stay_apart_and_equal_ones_meet_across_chunks() -> None:
    chunks = [[[7], [0, 7], [7]], [[7], [7]], [[0, 7], [0, 7], [], None]]
    joined = concat_tuples([separate_tuples(rows(lists), GROUPS) for lists in chunks])
    expected = [row for lists in chunks for row in lists]
    assert joined.column("history").to_pylist() == expected
    references = joined.references["history"].tolist()
    assert [references.index(r) for r in references] == [expected.index(row) for row in expected]


# Downsampling: unbiased, independent of batches, with weights that multiply.

UNITS: tuple[Unit, ...] = ("session", "sample")
FEATURE = 'feature { name: "sample_weight" type: FLOAT annotation { tag: "weight" } }\n'
OWN = 'feature { name: "worth" type: FLOAT annotation { tag: "weight" } }\n'


def sampling_job(directory: Path, sampling: str, worth: bool = False) -> Path:
    """Write the shop's job with sampling, and perhaps a weight of its own."""
    job = write_job(directory)
    text = job.read_text().replace("  block_samples", f"  sampling: {sampling}\n  block_samples")
    if worth:
        text = text.replace("AS label FROM", "AS label, CAST(user % 3 + 1 AS FLOAT) AS worth FROM")
    job.write_text(text)
    schema = directory / "schema.pbtxt"
    schema.write_text(schema.read_text() + FEATURE + (OWN if worth else ""))
    return job


def parsed(directory: Path, sampling: str, worth: bool = False) -> tuple[DataConfig, FeatureSet]:
    job = sampling_job(directory, sampling, worth)
    return load_job(job).data, load_features(job.parent / "schema.pbtxt")


def chunks(data: DataConfig, num_rows: int, num_chunks: int, worth: bool = False) -> list[Tuples]:
    """The samples of a log, in chunks of raw rows."""
    rows = raw_rows(num_rows, seed=5)
    rows = rows.append_column("_origin", pa.array(np.arange(num_rows)))
    more = ", CAST(user % 3 + 1 AS FLOAT) AS worth" if worth else ""
    statement = (
        f"SELECT session, time, user, history, unnest(items) AS item, clicked AS label, _origin"
        f"{more} FROM log"
    )
    size = -(-num_rows // num_chunks)
    actual: list[Tuples] = []
    for index in range(num_chunks):
        result = map_rows(Connection(), statement, "log", rows.slice(index * size, size))
        assert result.samples is not None
        actual.append(separate_tuples(with_list_index(result.samples), data.groups))
    return actual


def with_seed(data: DataConfig, seed: int) -> DataConfig:
    """The same job, other draws."""
    assert data.sampling is not None
    return replace(data, sampling=replace(data.sampling, seed=seed))


@pytest.mark.slow
@pytest.mark.parametrize("unit", UNITS)
def test_weighted_sums_over_many_seeds_equal_those_of_all_samples(
    unit: Unit, tmp_path: Path
) -> None:
    data, features = parsed(tmp_path, f"{{negatives: 0.3, unit: {unit}}}", worth=True)
    (samples,) = chunks(data, 120, 1, worth=True)
    own = samples.column("worth").to_numpy().astype(float)
    item = samples.column("item").to_numpy()
    result = []
    for seed in range(500):
        kept = sample_negatives(samples, features, with_seed(data, seed))
        weight = kept.column(SAMPLE_WEIGHT).to_numpy().astype(float)
        result.append([weight.sum(), weight @ kept.column("item").to_numpy()])
    mean, deviation = np.mean(result, axis=0), np.std(result, axis=0) / np.sqrt(len(result))
    np.testing.assert_array_less(np.abs(mean - [own.sum(), own @ item]), 4 * deviation)


def test_positives_and_evaluation_samples_stay_with_the_weight_of_the_job(tmp_path: Path) -> None:
    data, features = parsed(tmp_path, "{negatives: 0.25, unit: sample, seed: 3}", worth=True)
    (samples,) = chunks(data, 300, 1, worth=True)
    kept = sample_negatives(samples, features, data)
    limit = np.datetime64("2026-01-01T00:08:00")

    def free(s: Tuples) -> np.ndarray:
        return (s.column("label").to_numpy() == 1) | (s.column("time").to_numpy() >= limit)

    assert free(kept).sum() == free(samples).sum()
    negatives, dropped = (~free(samples)).sum(), (~free(kept)).sum()
    assert 0.15 < dropped / negatives < 0.35
    own = kept.column("worth").to_numpy()
    expected = np.where(free(kept), own, own / 0.25).astype(np.float32)
    assert kept.column(SAMPLE_WEIGHT).to_numpy().tolist() == expected.tolist()
    assert kept.samples.schema.field(SAMPLE_WEIGHT).type == pa.float32()


def test_negatives_of_a_session_share_one_draw_and_samples_have_their_own(tmp_path: Path) -> None:
    data, _ = parsed(tmp_path, "{negatives: 0.5}")
    (samples,) = chunks(data, 200, 1)
    session = samples.column("session").to_numpy()
    shared, own = (draws(samples, unit, 0, "session") for unit in UNITS)
    assert {len(set(shared[session == s])) for s in set(session.tolist())} == {1}
    assert len(set(own.tolist())) > 0.95 * len(own)  # only equal samples share
    assert abs(own.mean() - 0.5) < 0.05
    assert 0 <= own.min() <= own.max() < 1
    assert not np.array_equal(own, draws(samples, "sample", 1, "session"))


@pytest.mark.slow
@pytest.mark.parametrize("unit", UNITS)
def test_draws_do_not_depend_on_chunks_nulls_or_the_order_of_columns(
    unit: Unit, tmp_path: Path
) -> None:
    data, _ = parsed(tmp_path, "{negatives: 0.5}")
    (whole,) = chunks(data, 200, 1)
    cut = chunks(data, 200, 7)
    drawn = draws(whole, unit, 4, "session").tolist()
    assert np.concatenate([draws(c, unit, 4, "session") for c in cut]).tolist() == drawn
    turned = Tuples(
        whole.samples.select(whole.samples.column_names[::-1]), whole.references, whole.uniques
    )
    assert draws(turned, unit, 4, "session").tolist() == drawn
    item = whole.samples.column_names.index("item")
    gaps = pa.array([None, *whole.column("item").to_pylist()[1:]], pa.int32())
    holed = Tuples(whole.samples.set_column(item, "item", gaps), whole.references, whole.uniques)
    assert hash_samples(holed)[1:].tolist() == hash_samples(whole)[1:].tolist()
    assert hash_samples(holed)[0] != hash_samples(whole)[0]


def test_ten_draws_are_pinned(tmp_path: Path) -> None:
    data, _ = parsed(tmp_path, "{negatives: 0.5}")
    (samples,) = chunks(data, 30, 1)
    result = [
        draws(samples, unit, 7, "session")[[0, 4, 8, 12, 16]].round(6).tolist() for unit in UNITS
    ]
    assert result == PINNED


PINNED = [
    [0.874394, 0.551858, 0.551858, 0.874394, 0.551858],
    [0.360307, 0.484771, 0.285005, 0.152376, 0.020063],
]


def build_of(
    directory: Path, sampling: str, files: int, worth: bool = False, positives: float = 0.3
) -> Path:
    write_log(directory / "log", 400, seed=2, num_files=files)
    rng = np.random.default_rng(0)
    for path in sorted((directory / "log").iterdir()) if positives < 0.3 else ():
        table = pq.read_table(path)
        clicked = pa.array((rng.random(table.num_rows) < positives).astype(np.int8))
        pq.write_table(table.set_column(5, "clicked", clicked), path)
    job = sampling_job(directory / "job", sampling, worth)
    build(request(job, directory / "log", directory / "dataset"))
    return directory / "dataset"


@pytest.mark.slow
@pytest.mark.parametrize("unit", UNITS)
def test_build_keeps_the_same_samples_however_the_log_is_cut_into_files(
    unit: Unit, tmp_path: Path
) -> None:
    rows = []
    for files in (1, 4):
        dataset = build_of(tmp_path / str(files), f"{{negatives: 0.4, unit: {unit}}}", files)
        rows.append(sorted(map(str, stored_table(dataset, model_inputs=True).to_pylist())))
    assert rows[0] == rows[1]
    assert bytes_of(dataset) == bytes_of(
        build_of(tmp_path / "again", f"{{negatives: 0.4, unit: {unit}}}", 4)
    )


@pytest.mark.slow
def test_weight_column_is_read_by_the_trainer_and_left_out_of_the_original_samples(
    tmp_path: Path,
) -> None:
    dataset = build_of(tmp_path, "{negatives: 0.4, unit: sample}", 2, worth=True)
    original, inputs = stored_table(dataset), stored_table(dataset, model_inputs=True)
    assert SAMPLE_WEIGHT not in original.column_names
    assert "worth" in original.column_names
    ratio = inputs[SAMPLE_WEIGHT].to_numpy() / inputs["worth"].to_numpy()
    assert set(ratio.round(3).tolist()) == {1.0, 2.5}
    assert spec_of(open_dataset(dataset), "float32").weight == SAMPLE_WEIGHT


@pytest.mark.slow
def test_session_unit_keeps_the_higher_dedup_factor(tmp_path: Path) -> None:
    measured = {}
    for unit in UNITS:
        sampling = f"{{negatives: 0.2, unit: {unit}}}"
        dataset = build_of(tmp_path / unit, sampling, 3, positives=0.02)
        opened = open_dataset(dataset)
        measured[unit] = opened.segments[0].manifest.groups["user"].dedup_factor
    assert measured["session"] > 1.2 * measured["sample"]


# What is wrong, to (old, new) in the job or its schema, and the message.
FAULTS = {
    "a share of nothing": ("negatives: 0.4", "negatives: 0", "data.sampling.negatives must be in (0, 1], got 0.0"),
    "a share above one": ("negatives: 0.4", "negatives: 1.5", "data.sampling.negatives must be in (0, 1], got 1.5"),
    "an unknown unit": ("negatives: 0.4", "negatives: 0.4, unit: user", "data.sampling.unit must be one of session, sample, got 'user'"),
    "a negative seed": ("negatives: 0.4", "negatives: 0.4, seed: -1", "data.sampling.seed must be in [0, 2**63), got -1"),
    "no share": ("negatives: 0.4", "seed: 1", "missing key: data.sampling.negatives"),
    "a label of any number": ("int_domain { min: 0 max: 1 }", "", "data.sampling needs a binary label: 'label' is of type INT from None to None"),
    "a label of three classes": ("max: 1 }", "max: 2 }", "data.sampling needs a binary label: 'label' is of type INT from 0 to 2"),
    "no declared weight": (FEATURE, "", "data.sampling needs the feature 'sample_weight', declared is none"),
    "a weight that is an input": (FEATURE, FEATURE.replace("weight\" }", "dense\" }"), "data.sampling needs the feature 'sample_weight', declared is FLOAT tagged dense"),
    "a weight that SQL makes": ("clicked AS label", "clicked AS label, 1 AS sample_weight", "samples must not have column 'sample_weight', which data.sampling adds"),
    "a transform that makes the weight": ("num_history:", "sample_weight: '1.0', num_history:", "data.transforms.user.sample_weight exists already"),
    "two weights": (FEATURE, FEATURE + OWN + OWN.replace("worth", "value"), "samples have several weights: ['worth', 'value']"),
}  # fmt: skip


@pytest.mark.parametrize(("old", "new", "message"), FAULTS.values(), ids=FAULTS)
def test_sampling_that_does_not_fit_is_refused_before_any_work(
    old: str, new: str, message: str, tmp_path: Path
) -> None:
    write_log(tmp_path / "log", 50)
    job = sampling_job(tmp_path / "job", "{negatives: 0.4}")
    for path in (job, job.parent / "schema.pbtxt"):
        path.write_text(path.read_text().replace(old, new))
    with pytest.raises(SchemaError, match=re.escape(message)):
        build(request(job, tmp_path / "log", tmp_path / "dataset"))
    assert not (tmp_path / "dataset" / "segments").exists()


@pytest.mark.slow
def test_sampling_that_leaves_a_part_of_the_log_empty_still_builds(tmp_path: Path) -> None:
    rows = raw_rows(60, 1)
    clicked = pa.array(np.arange(60) == 0, pa.bool_()).cast(pa.int8())
    rows = rows.set_column(rows.column_names.index("clicked"), "clicked", clicked)
    (tmp_path / "log").mkdir()
    for index in range(3):
        pq.write_table(rows.slice(index * 20, 20), tmp_path / "log" / f"{index}.parquet")
    job = sampling_job(tmp_path / "job", "{negatives: 1.0e-9}")
    build(request(job, tmp_path / "log", tmp_path / "dataset"))
    segment = open_dataset(tmp_path / "dataset").segments[0]
    (first,) = pq.read_table(tmp_path / "log" / "0.parquet").slice(0, 1).to_pylist()
    late = [r for r in rows.to_pylist() if str(r["time"]) >= "2026-01-01 00:08"]
    expected = len(first["items"]) + sum(len(r["items"]) for r in late if r != first)
    assert segment.manifest.num_samples == expected

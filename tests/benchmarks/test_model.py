"""The published measurements, and the accuracy of predictions for held-out sizes."""

from pathlib import Path

import pytest

from benchmarks.model import convert, cross_validate, doubled, doubling_cut, optimus, ours
from presage.scheduler.model.measurements import Measurements, read_measurements

COUNTS = {
    "resnet-50": 210,
    "vgg-16": 202,
    "resnext-110": 57,
    "inception-bn": 56,
    "seq2seq": 57,
    "cnn-text-classification": 78,
    "dssm": 78,
    "wlm": 57,
    "ncf-aws": 1661,
    "ncf-azure": 924,
    "ncf-dgx": 924,
    "ncf-quad": 84,
    "ncf-rtx": 924,
}


@pytest.fixture(scope="module")
def published(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Measurements:
    path = tmp_path_factory.mktemp("model") / "measurements.csv"
    convert(shared_data, path)
    return read_measurements(path)


def test_convert_writes_all_measurements_and_nine_without_speed_are_skipped(
    published: Measurements,
) -> None:
    assert {job: len(rows) for job, rows in published.rows.items()} == COUNTS
    assert published.num_skipped == 9


@pytest.mark.parametrize("job", ["dssm", "cnn-text-classification", "resnet-50"])
def test_held_out_sizes_are_predicted_within_10_percent(published: Measurements, job: str) -> None:
    error, inside = cross_validate(ours, published.rows[job], seed=0)
    assert error <= 0.10
    assert inside >= 0.85


def test_doubled_workers_of_dssm_are_predicted_within_15_percent(published: Measurements) -> None:
    rows = published.rows["dssm"]
    assert doubling_cut(rows) == 11
    error, inside = doubled(ours, rows)
    assert error <= 0.15 < doubled(optimus, rows)[0]
    assert inside >= 0.80


@pytest.mark.parametrize("job", [job for job in COUNTS if job != "ncf-azure"])
def test_doubled_workers_are_inside_the_interval(published: Measurements, job: str) -> None:
    assert doubled(ours, published.rows[job])[1] >= 0.80

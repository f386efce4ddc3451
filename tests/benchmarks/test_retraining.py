"""Days and job of daily retraining in the order benchmark."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from benchmarks.order import LOG, compare_days, write_daily_job, write_days
from presage.schemas.config.job import load_job


@pytest.mark.slow
def test_write_days_splits_the_log_into_disjoint_days(shared_data: Path, tmp_path: Path) -> None:
    source = shared_data / "kuairand_pure_part"
    days = write_days(source, tmp_path, 15, None)
    assert (days[0], days[-1], len(days)) == ("2022-04-24", "2022-05-08", 15)
    rows = [pq.read_table(tmp_path / day / LOG[0], columns=["time_ms"])["time_ms"] for day in days]
    assert sum(map(len, rows)) == sum(pq.read_metadata(source / name).num_rows for name in LOG)
    for day, times in zip(days, rows, strict=True):
        first = np.datetime64(day, "ms").astype(int)
        assert (times.to_numpy() // 86_400_000 * 86_400_000 == first).all()


def test_job_evaluates_on_the_end_of_each_day_and_has_no_limits(tmp_path: Path) -> None:
    job = load_job(write_daily_job(tmp_path))
    assert job.data.split.evaluation_last is not None
    assert job.schedule.retrain.gate.max_ne is None
    assert job.train.batch_samples == job.data.oracle.batch_samples == 256


def test_comparison_excludes_the_first_day() -> None:
    days = [
        {"warm": {"ne": warm}, "cold": {"ne": cold}}
        for warm, cold in [(9, 9), (0.8, 1.0), (0.5, 1)]
    ]
    found = compare_days(days)
    assert (found["ours"], found["peer"]) == (0.65, 1.0)
    assert (found["ratio"], found["rounds"]) == (1.625, [1.25, 2.0])

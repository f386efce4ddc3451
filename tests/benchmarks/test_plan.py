"""The oracle benchmark measures plans of both policies on one dataset."""

from pathlib import Path

import pytest

from benchmarks.oracle import measure_plan
from presage.schemas.dataset.opened import open_dataset
from tests.trainer.make_dataset import make_dataset, write_job
from tests.trainer.runs import SEGMENTS


@pytest.mark.slow
def test_benchmark_reports_the_share_of_a_step_and_the_time_per_access(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path / "dataset", write_job(tmp_path / "job"), SEGMENTS)
    found = measure_plan(open_dataset(dataset), 1, 3)
    assert found["ratio"] == pytest.approx(found["peer"] / found["ours"], rel=1e-3)
    assert len(found["rounds"]) == 1
    for details in found["policies"].values():
        assert details["ns_per_access"] > 0
        assert details["plan_sec"] > 0
    hits = {name: details["hit_rate"] for name, details in found["policies"].items()}
    assert 0 < hits["ttl"] < 1
    assert 0 < hits["belady"] < 1

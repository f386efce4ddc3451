"""Drawn workloads, and the ratios of completion times over them."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.scheduler.workloads import (
    ARRIVALS,
    MAX_JOBS,
    MIN_JOBS,
    completion_sec,
    distribution,
    draw_workload,
    main,
)
from presage.scheduler.simulator.cluster import EndedJob, ResourceUse, Result
from presage.scheduler.simulator.jobs import synthetic_tables
from tests.shared import json_of

TABLES = [synthetic_tables()]


@pytest.mark.slow
def test_workload_is_the_same_whenever_it_is_drawn_and_fits_its_cluster() -> None:
    drawn = [draw_workload(3, number, TABLES, []) for number in range(20)]
    assert {one.arrivals for one in drawn} == {*ARRIVALS} - {"trace"}
    for one in drawn:
        again = draw_workload(3, one.number, TABLES, [])
        assert (again.label, again.capacity) == (one.label, one.capacity)
        assert [job.request for job in again.specs] == [job.request for job in one.specs]
        assert MIN_JOBS <= len(one.specs) <= MAX_JOBS
        assert max(job.request.cpus for job in one.specs) <= one.capacity.cpus + 1e-9
        submitted = [job.submit_sec for job in one.specs]
        assert submitted == sorted(submitted)


@pytest.mark.slow
def test_requests_that_are_too_small_are_half_to_all_of_the_need() -> None:
    small = next(
        one
        for one in (draw_workload(5, number, TABLES, []) for number in range(40))
        if one.requests == "too small"
    )
    for job in small.specs:
        at = job.request.num_stores, job.request.num_replicas
        need = job.peak * job.cpu_scale * float(job.table.replica_busy[at])
        assert 0.5 <= job.request.replica_cpus / need <= 1.0


def test_job_that_failed_counts_until_the_last_job_of_any_policy_ended() -> None:
    def result(*ended: EndedJob) -> Result:
        return Result(ended, ResourceUse())

    found = completion_sec(
        {
            "one": result(EndedJob(0.0, 10.0, True, None), EndedJob(5.0, 6.0, False, None)),
            "other": result(EndedJob(0.0, 20.0, True, None), EndedJob(5.0, 25.0, True, None)),
        }
    )
    assert found == {"one": 15.0, "other": 20.0}


def test_distribution_of_ratios() -> None:
    found = distribution([0.5, 1.0, 1.03, 2.0])
    assert found["within_target"] == 0.75
    assert found["max"] == 2.0
    assert found["geometric_mean"] == pytest.approx(np.exp(np.log(1.03) / 4), abs=1e-4)


@pytest.mark.slow
def test_main_prints_the_ratios_of_each_workload(tmp_path: Path) -> None:
    # Without published data only synthetic kinds and arrivals are drawn.
    words = ["--json", "--seed", "1", "--first", "6", "--workloads", "2"]
    found = json_of(main, [*words, "--shared-data", str(tmp_path)])
    assert [row["number"] for row in found["workloads"]] == [6, 7]
    assert found["over_static"]["max"] == max(row["over_static"] for row in found["workloads"])
    assert found["over_static"]["max"] <= 1.03

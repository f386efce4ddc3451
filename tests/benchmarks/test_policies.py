"""The policies benchmark: jobs of published traces, and a small run."""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from benchmarks.common.harness import SKIPPED
from benchmarks.policies import (
    ALIBABA,
    OURS,
    SAME_JOB_SEC,
    WITHOUT,
    alibaba,
    interval,
    main,
    philly,
    ratios,
    simulate_round,
    speeds,
    window,
)
from presage.scheduler.simulator.command import POLICIES
from presage.scheduler.simulator.jobs import Knobs
from tests.shared import error_of


@pytest.mark.slow
def test_philly_has_all_jobs_in_order(shared_data: Path) -> None:
    jobs = philly(shared_data)
    assert len(jobs) == 82_247
    assert all(a.submit_sec <= b.submit_sec for a, b in pairwise(jobs))
    assert sum(job.num_replicas == 32 for job in jobs) == 67


def test_alibaba_joins_instances_that_are_created_together(shared_data: Path) -> None:
    jobs = alibaba(shared_data)
    assert sum(job.num_replicas for job in jobs) == 12_390
    assert all(a.submit_sec <= b.submit_sec for a, b in pairwise(jobs))
    assert all(job.cpus and job.memory_bytes for job in jobs)


def test_alibaba_instances_of_one_role_within_a_minute_are_one_job(tmp_path: Path) -> None:
    path = tmp_path / ALIBABA
    path.parent.mkdir()
    head = "app_name,role,creation_time,deletion_time,cpu_request,memory_request"
    at = (0.0, SAME_JOB_SEC, SAME_JOB_SEC + 1.0)
    rows = [f"a,CN,{sec},5000,4,8" for sec in at] + ["a,HN,0,5000,4,8", "b,CN,0,,4,8"]
    path.write_text("\n".join([head, *rows]) + "\n")
    assert sorted(job.num_replicas for job in alibaba(tmp_path)) == [1, 1, 2]


def test_speeds_are_the_measured_ones(shared_data: Path) -> None:
    tables = speeds(shared_data)
    assert len(tables) == 8
    assert tables["dssm"].speed[1, 1] == pytest.approx(462.228)
    assert tables["dssm"].speed[1, 5] == pytest.approx(1188, abs=1)
    for table in tables.values():
        assert np.isfinite(table.replica_busy[table.allowed]).all()


@pytest.mark.slow
def test_window_begins_at_zero_and_depends_on_the_seed(shared_data: Path) -> None:
    jobs = philly(shared_data)
    first, again, other = window(jobs, 50, 1), window(jobs, 50, 1), window(jobs, 50, 2)
    assert first == again != other
    assert first[0].submit_sec == 0.0
    assert len(first) == 50


def test_windows_of_consecutive_seeds_share_no_arrival(shared_data: Path) -> None:
    jobs = alibaba(shared_data)
    blocks = len(jobs) // 500
    names = [{job.name for job in window(jobs, 500, seed)} for seed in range(200, 200 + blocks)]
    assert len(set[str]().union(*names)) == 500 * blocks
    assert window(jobs[:40], 500, 7)[-1].name == jobs[39].name


@pytest.mark.slow
def test_one_round_has_every_policy_and_the_bound(shared_data: Path) -> None:
    jobs = window(philly(shared_data), 40, 0)
    found = simulate_round(jobs, speeds(shared_data), Knobs(oom=0.3), 0, tuple(POLICIES), 0.8)
    assert list(found) == ["bound", *POLICIES]
    best = min(found[name]["jct_mean_sec"] for name in POLICIES)
    assert found["bound"]["jct_mean_sec"] <= best
    assert found["static"]["completion_rate"] < 1.0 == found[OURS]["completion_rate"]


@pytest.mark.slow
def test_each_part_can_be_disabled_and_is_not_a_peer(shared_data: Path) -> None:
    jobs = window(philly(shared_data), 20, 0)
    names = ("static", OURS, *WITHOUT)
    found = simulate_round(jobs, speeds(shared_data), Knobs(), 0, names, 0.8)
    assert list(found) == ["bound", *names]
    assert len({one["cpu_utilisation"] for name, one in found.items() if name != "bound"}) > 2
    assert ratios([found])[0] == "static"


def test_ratios_compare_with_the_best_other_policy() -> None:
    rounds = [
        {"bound": {"jct_mean_sec": 1.0}, "static": {"jct_mean_sec": 9.0},
         "goodput": {"jct_mean_sec": 6.0}, OURS: {"jct_mean_sec": 3.0}},
        {"bound": {"jct_mean_sec": 1.0}, "static": {"jct_mean_sec": 5.0},
         "goodput": {"jct_mean_sec": 6.0}, OURS: {"jct_mean_sec": 4.0}},
    ]  # fmt: skip
    assert ratios(rounds) == ("goodput", [2.0, 1.5])
    assert interval([2.0]) == {"mean": 2.0, "half": float("inf")}


@pytest.mark.slow
def test_main_prints_one_object(shared_data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--json", "--jobs", "8", "--rounds", "2", "--shared-data", str(shared_data)]
    assert main(words) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert {"ours", "peer", "ratio", "unit", "rounds"} <= found.keys()
    assert len(found["rounds"]) == 4
    assert set(found["traces"]) == {"philly", "alibaba_dlrm_v2025"}


def test_main_without_the_measurements_fails_with_a_message(tmp_path: Path) -> None:
    words = ["--shared-data", str(tmp_path)]
    assert "measurements must exist, got no" in error_of(main, words, SKIPPED)


@pytest.mark.parametrize("policies", ["static,marginal", "presage"])
def test_main_refuses_policies_without_presage_or_a_peer(
    policies: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["--policies", policies])
    assert f"must name presage and a peer, got '{policies}'" in capsys.readouterr().err

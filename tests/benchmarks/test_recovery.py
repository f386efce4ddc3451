"""The recovery benchmark reads commit times and replica counts from the files of a run."""

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.common.commits import CommitWatcher
from benchmarks.recovery import compare, rejoin_costs
from presage.schemas.run.records import METRICS, StepMetric


def test_rejoin_costs_end_at_the_first_step_of_both_replicas(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    watcher = CommitWatcher(tmp_path, process)
    watcher.commits = [(0.0, 1), (5.0, 2), (6.0, 3), (8.5, 4), (9.0, 5), (11.0, 6)]
    lines: list[str] = []
    for step, replicas in enumerate([2, 1, 1, 2, 2, 2]):
        metric = StepMetric(
            step=step, loss=0.5, num_samples=1, num_replicas=replicas, samples_per_sec=1, phases={}
        )
        lines.append(json.dumps(asdict(metric)) + "\n")
    (tmp_path / METRICS).write_text("".join(lines))
    found = rejoin_costs(tmp_path, watcher, 5.0)
    assert found == {"both_sec": 3.5, "join_gap_sec": 2.5, "late_gap_sec": 1.5}


def test_watcher_records_commits_as_the_file_grows_and_shrinks(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    watcher, moments = CommitWatcher(tmp_path, process), list[float]()
    for count in (1, 3, 4, 2, 5):
        (tmp_path / METRICS).write_text("{}\n" * count)
        moments.append(watcher.wait_for(lambda current, count=count: current == count))
    assert [count for _, count in watcher.commits] == [1, 3, 4, 2, 5]
    assert [at for at, _ in watcher.commits] == moments == sorted(moments)
    assert watcher.longest_gap(moments[2]) <= moments[-1] - moments[2]
    process.communicate(b"\n")
    with pytest.raises(RuntimeError, match=r"^run must commit steps, got 5 and then none$"):
        watcher.wait_for(lambda count: count >= 6)


def test_gaps_of_commits(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    watcher = CommitWatcher(tmp_path, process)
    watcher.commits = [(0.0, 2), (1.0, 3), (2.0, 4), (4.0, 5), (9.0, 6), (10.0, 7)]
    assert watcher.median_gap(4.0) == 1.5
    assert watcher.longest_gap(2.0) == 5.0
    assert watcher.longest_gap(2.0, 4.0) == 2.0
    assert watcher.longest_gap(20.0) == 0.0
    process.wait()


def test_ratio_is_the_median_of_the_ratios_of_the_rounds() -> None:
    costs = {
        "a": [{"next_step_sec": 2.0}] * 3,
        "b": [{"next_step_sec": sec} for sec in (2.0, 3.0, 6.0)],
    }
    found = compare(costs, "a", "b")
    assert (found["ours"], found["peer"], found["ratio"]) == (2.0, 3.0, 1.5)
    assert found["rounds"] == [1.0, 1.5, 3.0]

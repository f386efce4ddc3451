"""What the benchmark of replicas' deaths reads from a run's files."""

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from benchmarks.recovery import RUN, SCENARIOS, of_both, summarised
from benchmarks.recovery_stores import Commits
from schemas.events import METRICS, StepMetric


def test_both_train_again_when_a_step_says_so_and_the_gap_around_that_is_told(
    tmp_path: Path,
) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    commits = Commits(tmp_path, process)
    commits.seen = [(0.0, 1), (5.0, 2), (6.0, 3), (8.5, 4), (9.0, 5), (11.0, 6)]
    lines: list[str] = []
    for step, replicas in enumerate([2, 1, 1, 2, 2, 2]):
        metric = StepMetric(
            step=step, loss=0.5, num_samples=1, num_replicas=replicas, samples_per_sec=1, phases={}
        )
        lines.append(json.dumps(asdict(metric)) + "\n")
    (tmp_path / METRICS).write_text("".join(lines))
    found = of_both(tmp_path, commits, 5.0)
    assert found == {"both_sec": 3.5, "join_gap_sec": 2.5, "late_gap_sec": 1.5}


def test_ratio_is_that_of_everything_to_a_replica_s_death() -> None:
    runs = {scenario: [{"next_step_sec": 1.0, "equal_bits": True}] for scenario in SCENARIOS}
    runs[RUN] = [{"next_step_sec": 8.0, "equal_bits": True}]
    result = summarised(runs)
    assert (result["ours"], result["peer"], result["ratio"]) == (1.0, 8.0, 8.0)
    assert result["equal_bits"] is True
    runs["held"][0]["equal_bits"] = False
    assert summarised(runs)["equal_bits"] is False

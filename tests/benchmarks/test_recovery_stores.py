"""What the benchmark of stores' deaths reads from a run's metrics."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.recovery_stores import SCENARIOS, Commits, summarised
from schemas.events import METRICS


def test_commits_are_seen_as_the_file_grows_and_is_cut(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    commits, moments = Commits(tmp_path, process), list[float]()
    for count in (1, 3, 4, 2, 5):
        (tmp_path / METRICS).write_text("{}\n" * count)
        moments.append(commits.until(lambda seen, count=count: seen == count))
    assert [count for _, count in commits.seen] == [1, 3, 4, 2, 5]
    assert [at for at, _ in commits.seen] == moments == sorted(moments)
    assert commits.longest_gap(moments[2]) <= moments[-1] - moments[2]
    process.communicate(b"\n")
    with pytest.raises(RuntimeError, match=r"^run must commit steps, got 5 and then none$"):
        commits.until(lambda count: count >= 6)


def test_gaps_are_those_between_commits(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    commits = Commits(tmp_path, process)
    commits.seen = [(0.0, 2), (1.0, 3), (2.0, 4), (4.0, 5), (9.0, 6), (10.0, 7)]
    assert commits.median_gap(4.0) == 1.5
    assert commits.longest_gap(2.0) == 5.0
    assert commits.longest_gap(2.0, 4.0) == 2.0
    assert commits.longest_gap(20.0) == 0.0
    process.wait()


def test_ratio_is_that_of_a_stores_death_to_that_of_everything() -> None:
    one = {"next_step_sec": 8.0, "longest_gap_sec": 2.0, "loss_last": 0.5}
    result = summarised({scenario: [one, one] for scenario in SCENARIOS})
    assert (result["ours"], result["peer"], result["ratio"]) == (2.0, 8.0, 4.0)
    assert result["rounds"] == [4.0, 4.0]
    assert result["equal_losses"] is True

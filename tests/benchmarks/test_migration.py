"""Headline, options and jobs of the migration benchmark; its runs take minutes."""

from pathlib import Path

import pytest

from benchmarks.migration import KINDS, compare, main, write_job
from presage.scheduler.model.plan_inputs import take_snapshot
from presage.scheduler.planner.policy import plan

FOUND = {
    "replica": [
        {"pause_sec": 2.0, "usual_gap_sec": 0.1},
        {"pause_sec": 1.0, "usual_gap_sec": 0.1},
        {"pause_sec": 4.0, "usual_gap_sec": 0.2},
    ],
    "segment": [{"pause_sec": 2.0, "work_sec": 20.0}],
}


def test_pauses_are_compared_with_the_usual_time() -> None:
    found = compare(FOUND, "replica")
    assert (found["ours"], found["peer"], found["ratio"]) == (2.0, 0.1, 0.05)
    assert found["rounds"] == [0.05, 0.1, 0.05]
    assert compare(FOUND, "segment")["ratio"] == 10.0


def test_main_refuses_an_unknown_part(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--parts", "replica,moon"])
    assert "parts must be of replica, coordinator, store, node, segment, got 'moon'" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize("kind", sorted(set(KINDS.values())))
def test_plan_of_each_job_has_the_processes_to_kill(tmp_path: Path, kind: str) -> None:
    snapshot = take_snapshot(write_job(tmp_path / kind, kind), None, None)
    chosen = plan(snapshot, snapshot.job.schedule).chosen
    wanted = {"replicas": (2, 0), "stores": (1, 2)}[kind]
    assert (chosen.num_replicas, chosen.num_stores) == wanted

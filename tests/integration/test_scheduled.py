"""Two jobs under one budget as real processes: one of each kind is killed, and the scheduler."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from presage.schemas.dataset.manifest import read_dataset
from tests.integration.scheduled_jobs import (
    Scheduler,
    check_run,
    ends_of,
    num_steps,
    paused,
    pid_of,
    run_command,
    send,
    words_for,
    write_jobs,
)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_jobs_whose_processes_and_scheduler_are_killed_finish_with_the_bits_of_undisturbed_ones(
    repository: Path, tmp_path: Path
) -> None:
    demo, urgent = write_jobs(repository, tmp_path)
    words, output = words_for(tmp_path, [demo, urgent]), tmp_path / "out"
    # The urgent job has a log of one file, made from what its job file says.
    log, logs = output / "urgent" / "log", tmp_path / "urgent-log"
    done = run_command(repository, "pipelines", "generate", str(urgent), "--output", str(logs))
    assert done.returncode == 0, done.stderr
    log.mkdir(parents=True)
    pq.write_table(pq.read_table(min(logs.glob("*.parquet"))), log / "one.parquet")

    scheduler = Scheduler(repository, words, tmp_path / "first")
    with paused(output, "demo", "segment-3.1"):  # without it the run cannot end
        scheduler.until(lambda: pid_of(output, "urgent", "segment-0.1"))
        send(output, "urgent", "segment-0.1")
        scheduler.until(lambda: pid_of(output, "urgent", "replica-1.1"))
        send(output, "urgent", "replica-1.1")
        scheduler.until(lambda: num_steps(output / "demo" / "run") >= 3)
        send(output, "demo", "store-1.1")
        send(output, "demo", "coordinator-0.1")
        scheduler.until(lambda: pid_of(output, "demo", "coordinator-0.2"))
        scheduler.process.kill()
        scheduler.process.wait()

    jobs = Scheduler(repository, words, tmp_path / "second").result()
    assert {name: job["phase"] for name, job in jobs.items()} == {
        "demo": "finished",
        "urgent": "finished",
    }
    ends = ends_of(output)
    killed = {"urgent": ["segment-0.1", "replica-1.1"], "demo": ["coordinator-0.1", "store-1.1"]}
    outcomes = [ends[job, process].outcome for job, names in killed.items() for process in names]
    assert outcomes == ["lost"] * 4
    done = [(job, p.partition(".")[0]) for (job, p), end in ends.items() if end.outcome == "done"]
    assert len(done) == len(set(done)), "nothing is done twice"
    for name, count in (("demo", 4), ("urgent", 1)):
        assert len(read_dataset(output / name / "dataset").segments) == count
        verified = run_command(repository, "trainer", "verify", str(output / name / "run"))
        assert verified.returncode == 0, verified.stderr
    past = (output / "history" / "jobs.jsonl").read_text().splitlines()
    assert sorted(json.loads(line)["name"] for line in past) == ["demo", "urgent"]
    check_run(repository, demo, output / "demo", tmp_path / "undisturbed")

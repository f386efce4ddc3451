"""Two jobs as processes of this machine with their files at a URL: one of each kind is killed."""

from pathlib import Path

import pytest

from presage.schemas.storage.location import Location
from tests.integration.scheduled_jobs import (
    Scheduler,
    check_run,
    ends_of,
    num_steps,
    paused,
    pid_of,
    send,
    words_for,
    write_jobs,
)
from tests.object_store import Store

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(3600)]


def test_jobs_at_a_url_whose_processes_are_killed_finish_with_the_bits_of_undisturbed_ones(
    repository: Path, s3_store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in s3_store.environment.items():
        monkeypatch.setenv(name, value)
    storage = Location.parse(f"{s3_store.new_url()}/scheduled")
    demo, urgent = write_jobs(repository, tmp_path)
    output = tmp_path / "out"
    words = words_for(tmp_path, [demo, urgent], "--storage", str(storage), "--status", "off")

    scheduler = Scheduler(repository, words, tmp_path / "first")
    with paused(output, "demo", "segment-3.1"):  # without it the run cannot end
        with paused(output, "urgent", "segment-3.1"):
            scheduler.until(lambda: num_steps(storage / "urgent" / "run") >= 2)
            send(output, "urgent", "replica-1.1")
            scheduler.until(lambda: pid_of(output, "urgent", "replica-1.2"))
        scheduler.until(lambda: num_steps(storage / "demo" / "run") >= 2)
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
    killed = {("urgent", "replica-1.1"), ("demo", "coordinator-0.1"), ("demo", "store-1.1")}
    assert {ends[process].outcome for process in killed} == {"lost"}
    assert not list(output.glob("*/work")), "copies are removed"
    for job in (demo, urgent):
        check_run(repository, job, storage / job.stem, tmp_path / f"undisturbed-{job.stem}")

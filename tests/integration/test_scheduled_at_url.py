"""Two jobs as processes of this machine with their files at a URL: one of each kind is killed."""

from pathlib import Path

import pytest

from scheduler.controller.events import Ended
from scheduler.controller.log import LOG, read_log, replay
from schemas.storage import Location
from tests.integration.test_scheduled import (
    Scheduler,
    check_bits,
    command,
    held,
    num_steps,
    pid_of,
    send,
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
    (tmp_path / "budget.yaml").write_text("cpus: 4\nmemory: 8GiB\n")
    words = [str(demo), str(urgent), "--output", str(output), "--storage", str(storage)]
    words += ["--budget", str(tmp_path / "budget.yaml"), "--json", "--status", "off"]

    scheduler = Scheduler(repository, words, tmp_path / "said")
    with held(output, "demo", "segment-3.1"):  # without it the run cannot end
        with held(output, "urgent", "segment-3.1"):
            scheduler.until(lambda: num_steps(storage / "urgent" / "run") >= 2)
            send(output, "urgent", "replica-1.1")
            scheduler.until(lambda: pid_of(output, "urgent", "replica-1.2"))
        scheduler.until(lambda: num_steps(storage / "demo" / "run") >= 2)
        send(output, "demo", "store-1.1")
        send(output, "demo", "coordinator-0.1")
        scheduler.until(lambda: pid_of(output, "demo", "coordinator-0.2"))
        scheduler.process.kill()
        scheduler.process.wait()

    jobs = Scheduler(repository, words, tmp_path / "said-again").result()
    assert {name: job["phase"] for name, job in jobs.items()} == {
        "demo": "finished",
        "urgent": "finished",
    }
    ends = [entry.event for entry in read_log(output / LOG) if isinstance(entry.event, Ended)]
    told = {(end.job, end.process): end.outcome for end in ends}
    assert len(told) == len(ends), "each process ends once"
    killed = {("urgent", "replica-1.1"), ("demo", "coordinator-0.1"), ("demo", "store-1.1")}
    assert {told[process] for process in killed} == {"lost"}
    assert not replay(output / LOG).differences
    assert not list(output.glob("*/work")), "copies are removed"
    for job in (demo, urgent):
        folder = storage / job.stem
        verified = command(repository, "trainer", "verify", str(folder / "run"))
        assert verified.returncode == 0, verified.stderr
        check_bits(repository, job, folder, tmp_path / f"undisturbed-{job.stem}")

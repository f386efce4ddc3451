"""A run at an S3 store whose requests fail, and whose trainers die: its bits do not show it."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from presage.schemas.run.run_manifest import read_newest_state
from presage.schemas.storage.location import Location
from presage.trainer.run import upload
from tests.fault_proxy import Faults
from tests.object_store import Store
from tests.shared import make_once
from tests.trainer.processes import PATIENCE, start_training, train_to_end, wait_for, wait_for_end
from tests.trainer.url_hosts import Hosts
from tests.trainer.url_runs import check_equal, check_objects, newest_of, train_at, write_saved_run

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(300)]

PAUSE_SEC = 0.02
"""Of each step, so that several uploads begin while a run trains."""


@pytest.fixture
def faults() -> Faults:
    """The faults of the proxy: none yet."""
    return Faults()


@pytest.fixture
def url(s3_store: Store, faults: Faults, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A new URL behind the proxy, as this process and its children see it."""
    monkeypatch.setattr(upload, "POLL_SEC", 0.01)
    with s3_store.behind_proxy(faults) as store:
        for name, value in store.environment.items():
            monkeypatch.setenv(name, value)
        yield store.new_url()


@pytest.fixture(scope="module")
def folder() -> Path:
    """A folder with a job and its run, saved every four steps, which no test changes."""
    return make_once(write_saved_run)


@pytest.fixture
def job(folder: Path) -> Path:
    return folder / "job" / "job.yaml"


def pause(step: int, drain: object) -> None:
    time.sleep(PAUSE_SEC)


SCRIPTS = {
    "replies are dropped": [("PUT", "drop_reply"), ("_manifests/00000002", "drop_reply")],
    "a commit is answered by 503": [("PUT /bucket", "error_before"), ("00000002", "error_after")],
    "a commit is answered by 409": [
        ("PUT", "conflict_before"),
        ("_manifests/00000002", "conflict_before"),
        ("_manifests/00000002", "conflict_before"),
    ],
    "connections are reset": [("PUT", "reset"), ("DELETE", "reset"), ("GET", "reset")],
}


@pytest.mark.parametrize("case", SCRIPTS)
def test_run_is_whole_although(
    case: str, folder: Path, job: Path, dataset: Path, url: str, faults: Faults, tmp_path: Path
) -> None:
    faults.script = list(SCRIPTS[case])
    train_at(url, tmp_path / "work", job, dataset, on_step=pause)
    assert sum(faults.counts.values()) >= len(SCRIPTS[case]) - 1
    check_equal(url, folder / "run", tmp_path / "copy")


@pytest.mark.parametrize("seed", range(2))
def test_run_is_whole_under_faults_drawn_for_any_request(
    seed: int, folder: Path, job: Path, dataset: Path, url: str, faults: Faults, tmp_path: Path
) -> None:
    faults.rates = dict.fromkeys(
        ("drop_reply", "error_after", "error_before", "conflict_before", "cut_body", "reset"), 0.01
    )
    train_at(url, tmp_path / "work", job, dataset, on_step=pause, steps=14)
    train_at(url, tmp_path / "elsewhere", job, dataset, on_step=pause, resume=True)
    faults.rates = {}
    check_equal(url, folder / "run", tmp_path / "copy")


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.chaos) for seed in range(1, 24))]
)
def test_killed_trainers_and_empty_machines_change_no_bit(
    seed: int, folder: Path, job: Path, dataset: Path, url: str, faults: Faults, tmp_path: Path
) -> None:
    draws = random.Random(seed)
    faults.latency_sec = draws.choice((0.0, 0.005, 0.02))
    work: list[str] = []
    for attempt in range(8):
        has_run = read_newest_state(Location.parse(url)) is not None
        work = ["--work", str(tmp_path / f"work{attempt}")]
        more = [*work, *(["--resume"] if has_run else [])]
        process = start_training(job, dataset, url, *more)
        requests = faults.requests["PUT"] + draws.randrange(1, 60)
        while process.poll() is None and faults.requests["PUT"] < requests:
            time.sleep(0.001)
        if process.poll() is not None:
            assert process.returncode == 0, wait_for_end(process)
            break
        process.kill()
        process.communicate()
        if draws.random() < 0.5:
            shutil.rmtree(work[1], ignore_errors=True)
    else:
        train_to_end(job, dataset, url, "--resume", *work)
    check_equal(url, folder / "run", tmp_path / "copy")


def test_one_of_two_trainers_continues(
    folder: Path, job: Path, dataset: Path, url: str, faults: Faults, tmp_path: Path
) -> None:
    faults.latency_sec = 0.005
    works = [["--work", str(tmp_path / name)] for name in ("a", "b")]
    processes = [start_training(job, dataset, url, *work) for work in works]
    results = [wait_for_end(process) for process in processes]
    assert sorted(status for status, _ in results) == [0, 1], results
    [error] = [text for status, text in results if status]
    line = error.splitlines()[-1]
    assert "another process trains this run" in line or "has a run already" in line
    check_objects(url)
    check_equal(url, folder / "run", tmp_path / "copy")
    assert len({newest_of(url).writer}) == 1


@pytest.mark.parametrize("more", [[], ["--embedding", "cached", "--stores", "2"]])
def test_replicas_of_one_machine_train_at_a_url(
    more: list[str], folder: Path, job: Path, dataset: Path, url: str, tmp_path: Path
) -> None:
    (job_url := Location.parse(f"{url}-job/job.yaml")).upload(job)
    words = ["--replicas", "2", "--work", str(tmp_path / "work"), *more]
    train_to_end(job_url, dataset, url, *words, "--steps", "10")
    words = ["--replicas", "2", "--work", str(tmp_path / "elsewhere"), *more]
    train_to_end(job_url, dataset, url, *words, "--resume")
    check_equal(url, folder / "run", tmp_path / "copy")


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.chaos) for seed in range(1, 12))]
)
def test_killed_replicas_lost_disks_and_faults_of_the_store_change_no_bit(
    seed: int, folder: Path, job: Path, dataset: Path, url: str, faults: Faults, tmp_path: Path
) -> None:
    draws = random.Random(seed)
    faults.rates = dict.fromkeys(
        ("drop_reply", "error_after", "error_before", "conflict_before", "cut_body", "reset"), 0.01
    )
    hosts = Hosts(url, job, dataset, tmp_path / "hosts")
    try:
        running = hosts.launch()
        replicas = {number: hosts.start(number, expected=2) for number in (0, 1)}
        for step in sorted(draws.sample(range(2, 24), 2)):
            wait_for(hosts.saved(step))
            number = draws.choice([*replicas])
            replicas[number].kill()
            replicas[number].wait()
            if draws.random() < 0.5:
                shutil.rmtree(hosts.folder_of(number))
            replicas[number] = hosts.start(number)
        assert running.result(PATIENCE).num_steps == 32
    finally:
        hosts.close()
    faults.rates = {}
    check_equal(url, folder / "run", tmp_path / "copy")

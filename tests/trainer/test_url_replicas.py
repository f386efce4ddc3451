"""Replicas, and stores, on hosts that share only URLs: the bits are those of one process."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from presage.schemas.config.job import load_job
from presage.schemas.errors import SchemaError
from presage.schemas.run.records import (
    EXIT_BEHIND,
    EXIT_LOST_ROWS,
    LEDGER,
    SUMMARY,
    RunSummary,
    read_summary,
)
from presage.schemas.run.run_manifest import ALL, fetch_run, read_run_file
from presage.schemas.storage.location import Location
from presage.trainer.__main__ import main
from presage.trainer.elastic import launcher
from presage.trainer.elastic.attempt import TOKEN
from presage.trainer.elastic.launcher import request_leave
from presage.trainer.elastic.peer_state import REPLICAS
from presage.trainer.recovery import DrainInterrupt
from presage.trainer.run import upload
from presage.trainer.stores.remote.connection import resolve_address
from tests.object_store import Store
from tests.shared import make_once
from tests.trainer.faults import Faults
from tests.trainer.following_replicas import WAITS
from tests.trainer.growing import commit, grown_versions
from tests.trainer.make_dataset import write_job
from tests.trainer.processes import (
    PATIENCE,
    num_steps,
    run_until,
    start_training,
    wait_for,
    wait_for_end,
    with_keys,
)
from tests.trainer.runs import run_job, small_dataset
from tests.trainer.stores import StoreProcess, running, start_store
from tests.trainer.url_hosts import Hosts, statuses
from tests.trainer.url_runs import check_equal, write_saved_run

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def folder() -> Path:
    """A folder with a job and its run by one process, saved every four steps."""
    return make_once(write_saved_run)


@pytest.fixture
def url(s3_store: Store, monkeypatch: pytest.MonkeyPatch) -> str:
    """A new URL, as this process and its children see it."""
    monkeypatch.setattr(upload, "POLL_SEC", 0.01)
    monkeypatch.setattr(launcher, "URL_POLL_SEC", 0.1)
    for name, value in s3_store.environment.items():
        monkeypatch.setenv(name, value)
    return s3_store.new_url()


@pytest.fixture
def hosts(folder: Path, dataset: Path, url: str, tmp_path: Path) -> Iterator[Hosts]:
    hosts = Hosts(url, folder / "job" / "job.yaml", dataset, tmp_path / "a")
    yield hosts
    hosts.close()


def names_of(url: str) -> set[str]:
    data = read_run_file(Location.parse(url), LEDGER)
    assert data is not None
    return {line.split('"replica":"')[1][:3] for line in data.decode().splitlines()}


@pytest.mark.parametrize("options", [{}, {"embedding": "cached", "stores": 2}], ids=str)
def test_replicas_that_share_a_url_alone_have_the_bits_of_one_process(
    options: dict[str, object], hosts: Hosts, folder: Path, tmp_path: Path
) -> None:
    running = hosts.launch(**options)
    replicas = [hosts.start(number, expected=2, faults=Faults()) for number in (0, 1)]
    assert running.result(PATIENCE).num_steps == 32
    assert statuses(*replicas) == [0, 0]
    check_equal(hosts.url, folder / "run", tmp_path / "copy")
    assert names_of(hosts.url) == {"000", "001"}
    left = {entry.path.split("/")[0] for entry in hosts.run.entries()}
    assert left == {"_manifests", "files", REPLICAS}, "neither token nor rendezvous"
    for name in ("launcher", 0, 1):
        assert [path.suffix for path in hosts.folder_of(name).iterdir()] == [".lock"]


def test_loss_of_the_writer_and_its_disk_changes_no_bit(
    hosts: Hosts, folder: Path, tmp_path: Path
) -> None:
    running = hosts.launch()
    first, second = (hosts.start(number, expected=2) for number in (0, 1))
    wait_for(hosts.saved(4))
    first.kill()
    first.wait()
    shutil.rmtree(hosts.folder_of(0))
    again = hosts.start(0)
    running.result(PATIENCE)
    assert statuses(second, again) == [0, 0]
    check_equal(hosts.url, folder / "run", tmp_path / "copy")


def test_run_that_was_stopped_continues_on_empty_machines(
    hosts: Hosts, folder: Path, dataset: Path, url: str, tmp_path: Path
) -> None:
    running = hosts.launch()
    replicas = [hosts.start(number, expected=2) for number in (0, 1)]
    wait_for(hosts.saved(4))
    request_leave(replicas[0])  # the writer
    assert statuses(replicas[0]) == [0]
    wait_for(hosts.saved(12))
    request_leave(replicas[1])
    assert statuses(replicas[1]) == [0]
    hosts.drain.ask("test")
    with pytest.raises(DrainInterrupt) as interrupt:
        running.result(PATIENCE)
    assert f"continue {url} with --resume" in interrupt.value.message
    elsewhere = Hosts(url, folder / "job" / "job.yaml", dataset, tmp_path / "b")
    try:
        running = elsewhere.launch(resume=True)
        replica = elsewhere.start(2, faults=Faults())
        running.result(PATIENCE)
        assert statuses(replica) == [0]
    finally:
        elsewhere.close()
    check_equal(url, folder / "run", tmp_path / "copy")
    assert names_of(url) == {"000", "001", "002"}


def test_launcher_that_takes_over_fences_the_first_one_and_its_replicas(
    hosts: Hosts, folder: Path, dataset: Path, url: str, tmp_path: Path
) -> None:
    running = hosts.launch()
    former = hosts.start(0)
    wait_for(hosts.saved(4))
    other = Hosts(url, folder / "job" / "job.yaml", dataset, tmp_path / "b")
    try:
        continued = other.launch(resume=True)
        with pytest.raises(SchemaError, match=r"^another process trains this run"):
            running.result(PATIENCE)
        replica = other.start(1, faults=Faults())
        continued.result(PATIENCE)
        assert statuses(former, replica) == [EXIT_BEHIND, 0]
    finally:
        other.close()
    check_equal(url, folder / "run", tmp_path / "copy")


def test_loss_of_the_writer_while_all_wait_for_segments_changes_no_bit(
    url: str, tmp_path: Path
) -> None:
    versions, dataset = grown_versions(), tmp_path / "dataset"
    commit(versions[0], dataset)
    hosts = Hosts(url, versions[0].parent / "job" / "job.yaml", dataset, tmp_path / "a")
    try:
        running = hosts.launch(follow=True)
        first, second = (hosts.start(number, expected=2, faults=Faults()) for number in (0, 1))
        wait_for(hosts.saved(WAITS[0]))
        first.kill()
        first.wait()
        shutil.rmtree(hosts.folder_of(0))
        for version in versions[1:]:
            commit(version, dataset)
        assert running.result(PATIENCE).num_steps == 22
        assert statuses(second) == [0]
    finally:
        hosts.close()
    check_equal(url, versions[0].parent / "whole", tmp_path / "copy")


def test_replica_of_a_url_must_have_a_token(
    hosts: Hosts, capsys: pytest.CaptureFixture[str]
) -> None:
    hosts.launch()
    assert main(["replica", hosts.url, "--number", "0"]) == 1
    assert "give each the same --token-file" in capsys.readouterr().err
    assert not (hosts.run / TOKEN).exists()


EVERY = 6
"""Steps between checkpoints."""
DELAY = ("--delay-sec", "0.05")
"""Of each response, so that a store dies while a run trains."""


def _folder_run(folder: Path) -> None:
    run_job(write_job(folder / "job", every_steps=str(EVERY)), small_dataset(), folder / "run")


@pytest.fixture(scope="module")
def undisturbed() -> Path:
    """A run with all rows in memory, which no test changes."""
    return make_once(_folder_run) / "run"


@pytest.fixture
def start(url: str, tmp_path: Path) -> Iterator[Callable[[int, str], StoreProcess]]:
    """Start a store of some number in the directory of some host; end it after the test."""
    stores: list[StoreProcess] = []

    def start_at(number: int, host: str) -> StoreProcess:
        options = ["--address-file", address_of(url, number), *DELAY]
        stores.append(start_store(tmp_path / host, *options))
        return stores[-1]

    yield start_at
    with running(*stores):
        pass


def address_of(url: str, number: int) -> str:
    return f"{url}/stores/{number}/address"


def job_at(url: str, folder: Path, token: Path) -> Location:
    """Write a job that names stores by URLs, and return its URL."""
    addresses = ", ".join(f'"{address_of(url, number)}"' for number in range(2))
    stores = f'stores: {{addresses: [{addresses}], token_file: "{token}", timeout: 120s}}'
    with_keys(write_job(folder, every_steps=str(EVERY)), stores)
    for entry in Location.parse(folder).entries():
        (Location.parse(url) / "job" / entry.path).upload(folder / entry.path)
    return Location.parse(url) / "job" / "job.yaml"


def summary_of(url: str, folder: Path) -> RunSummary:
    fetch_run(Location.parse(url), folder, ALL)
    return read_summary(folder / SUMMARY)


@pytest.mark.parametrize("embedding", ["cached", "uncached"])
def test_store_that_loses_its_machine_takes_the_run_back_to_its_checkpoint(
    embedding: str,
    start: Callable[[int, str], StoreProcess],
    undisturbed: Path,
    url: str,
    tmp_path: Path,
) -> None:
    first, second = (start(number, f"host-{number}") for number in range(2))
    job = job_at(url, tmp_path / "job", tmp_path / "host-0.token")
    assert load_job(job).train.stores.addresses == (address_of(url, 0), address_of(url, 1))
    output, work = f"{url}/run", tmp_path / "work"
    options = ["--work", str(work), "--embedding", embedding]
    trainer = start_training(job, small_dataset(), output, *options)

    def steps() -> int:
        return max([0, *(num_steps(folder) for folder in work.glob("run-*"))])

    run_until(trainer, lambda: steps() >= 2)
    first.kill()
    again = start(0, "host-0")  # its machine is back: with its directory, at another port
    assert again.port != first.port
    run_until(trainer, lambda: steps() >= EVERY + 3)
    second.kill()
    shutil.rmtree(tmp_path / "host-1")
    empty = start(1, "host-2")
    assert resolve_address(address_of(url, 1)) == empty.address
    status, stderr = wait_for_end(trainer)
    assert status == 0, stderr
    assert stderr.count("rows were lost: back to step") == 1
    summary = summary_of(output, tmp_path / "fetched")
    assert summary.num_rollbacks == 1
    assert summary.recomputed_steps <= EVERY + 3
    check_equal(output, undisturbed, tmp_path / "copy")


def test_replicas_find_stores_at_urls_and_go_back_when_one_loses_its_machine(
    start: Callable[[int, str], StoreProcess], undisturbed: Path, url: str, tmp_path: Path
) -> None:
    first, second = (start(number, f"host-{number}") for number in range(2))
    job = job_at(url, tmp_path / "job", tmp_path / "host-0.token")
    hosts = Hosts(f"{url}/run", job, small_dataset(), tmp_path / "hosts")
    try:
        running = hosts.launch(embedding="cached")
        replicas = [hosts.start(number, expected=2) for number in range(2)]
        wait_for(hosts.saved(EVERY))
        first.kill()
        assert start(0, "host-0").port != first.port
        before = hosts.rendezvous()
        second.kill()
        shutil.rmtree(tmp_path / "host-1")
        start(1, "host-2")
        assert set(statuses(*replicas)) == {EXIT_LOST_ROWS}
        wait_for(lambda: hosts.rendezvous() not in (None, before))
        replicas = [hosts.start(number, expected=2, faults=Faults()) for number in range(2)]
        assert running.result(PATIENCE).num_rollbacks == 1
        assert statuses(*replicas) == [0, 0]
    finally:
        hosts.close()
    check_equal(f"{url}/run", undisturbed, tmp_path / "copy")

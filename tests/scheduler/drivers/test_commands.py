"""Every command line is accepted by the other packages; store files are written as planned."""

import stat
from dataclasses import replace
from pathlib import Path

import pytest

from presage.pipelines.cli import build_parser as pipelines_parser
from presage.scheduler.drivers.base import Endpoint
from presage.scheduler.drivers.job_files import (
    JobPaths,
    coordinator_command,
    copy_job_file,
    discard_stores,
    generate_command,
    move_command,
    prepare_stores,
    replica_command,
    segment_command,
    store_command,
)
from presage.schemas.config.job import load_job
from presage.schemas.features import load_features
from presage.schemas.storage.location import Location
from presage.trainer.__main__ import build_parser as trainer_parser
from tests.scheduler.small_job import paths_of, write_job


@pytest.fixture
def paths(tmp_path: Path) -> JobPaths:
    """A job of three segments whose rows lie in two stores."""
    found = paths_of(tmp_path / "small", write_job(tmp_path), 3)
    copy_job_file(found, found.source.read_bytes().decode())
    prepare_stores(found, (0, 1))
    return found


@pytest.fixture
def remote(paths: JobPaths) -> JobPaths:
    """The same job with its files at a URL."""
    return replace(paths, storage=Location("s3://bucket/small"))


WORK = Path("/work")


def test_commands_of_trainers_parse(paths: JobPaths) -> None:
    parser = trainer_parser()
    alone = parser.parse_args(
        coordinator_command(paths, WORK, has_replicas=False, served=False)[3:]
    )
    assert (alone.job, alone.replicas, alone.embedding) == (paths.job_file.local, 1, "plain")
    assert alone.work is None
    assert alone.follow
    assert alone.resume
    group = parser.parse_args(coordinator_command(paths, WORK, has_replicas=True, served=True)[3:])
    assert (group.job, group.replicas, group.embedding) == (paths.served_job.local, 0, "cached")
    replica = parser.parse_args(replica_command(paths, WORK, 2, 3)[3:])
    assert (replica.run, replica.number, replica.threads) == (paths.run.local, 2, 3)
    store = parser.parse_args(store_command(paths, WORK, 1)[3:])
    assert paths.store_address(1) == f"file://{store.directory}/address"
    move = parser.parse_args(move_command(paths, (3, 5), (0, 2), 1)[3:])
    assert (move.slots, move.sources, move.to) == (
        "768:1024,1280:1536",
        f"{paths.store_address(0)},{paths.store_address(2)}",
        paths.store_address(1),
    )
    assert move.token_file == store.token_file
    assert parser.parse_args(move_command(paths, (), (2,), 1)[3:]).slots == "0:4096"


def test_commands_of_a_job_at_a_url_name_folders_of_their_own(remote: JobPaths) -> None:
    parser, url = trainer_parser(), "s3://bucket/small"
    coordinator = parser.parse_args(
        coordinator_command(remote, WORK, has_replicas=True, served=True)[3:]
    )
    assert (str(coordinator.job), str(coordinator.output)) == (
        f"{url}/job-with-stores.yaml",
        f"{url}/run",
    )
    assert (str(coordinator.dataset), coordinator.work) == (f"{url}/dataset", WORK / "coordinator")
    replica = parser.parse_args(replica_command(remote, WORK, 2, 3)[3:])
    assert (str(replica.run), replica.work) == (f"{url}/run", WORK / "replica-2")
    assert replica.token_file == remote.token
    store = parser.parse_args(store_command(remote, WORK, 1)[3:])
    assert store.directory == WORK / "store-1"
    assert str(store.address_file) == remote.store_address(1) == f"{url}/stores/1/address"
    move = parser.parse_args(move_command(remote, (3,), (0,), 1)[3:])
    assert (move.sources, move.to) == (f"{url}/stores/0/address", f"{url}/stores/1/address")
    assert move.token_file == remote.token
    build, _ = pipelines_parser().parse_known_args(segment_command(remote, 0, 1)[3:])
    assert (str(build.job), str(build.output)) == (f"{url}/job.yaml", f"{url}/dataset")


ENDPOINT = Endpoint(host="$(HOST)", folder="/run/job", name="job.presage")


def test_commands_of_trainers_with_networks_of_their_own_parse(paths: JobPaths) -> None:
    prepare_stores(paths, (0, 1), ENDPOINT)
    stores = load_job(paths.served_job).train.stores
    assert stores.addresses == tuple(f"file://{paths.stores}/{n}/address" for n in (0, 1))
    assert (stores.token_file, stores.certificates) == ("/run/job/token", "/run/job/tls.crt")
    assert stores.certificate_name == "job.presage"
    parser = trainer_parser()
    lone = parser.parse_args(
        coordinator_command(paths, WORK, has_replicas=False, served=True, endpoint=ENDPOINT)[3:]
    )
    assert lone.host == "127.0.0.1", "it serves nobody"
    coordinator = parser.parse_args(
        coordinator_command(paths, WORK, has_replicas=True, served=True, endpoint=ENDPOINT)[3:]
    )
    assert coordinator.host == "$(HOST)"
    served = [
        parser.parse_args(words[3:])
        for words in (
            replica_command(paths, WORK, 2, 3, ENDPOINT),
            store_command(paths, WORK, 1, ENDPOINT),
        )
    ]
    for found in served:
        assert found.host == "$(HOST)"
        files = [found.token_file, found.tls_cert, found.tls_key]
        assert [file.name for file in files] == ["token", "tls.crt", "tls.key"]
        assert {file.parent for file in files} == {Path("/run/job")}
    replica = served[0]
    assert (replica.tls_name, str(replica.trusted)) == ("job.presage", "/run/job/tls.crt")
    store = served[1]
    assert (store.directory / "address") == Path(stores.addresses[1].removeprefix("file://"))
    assert store.port == 0
    move = parser.parse_args(move_command(paths, (3,), (0,), 1, ENDPOINT)[3:])
    assert (move.sources, move.to) == stores.addresses
    assert (move.tls_name, move.token_file.name) == ("job.presage", "token")


def test_prepare_stores_on_another_platform_rewrites_endpoints(paths: JobPaths) -> None:
    before = load_job(paths.served_job).train.stores
    prepare_stores(paths, (0, 1), ENDPOINT)
    between = paths.served_job.read_bytes()
    prepare_stores(paths, (0, 1), ENDPOINT)
    assert paths.served_job.read_bytes() == between
    prepare_stores(paths, (0, 1))
    after = load_job(paths.served_job).train.stores
    assert after.token_file == before.token_file
    assert (after.certificates, after.certificate_name) == (None, None)
    assert after == before


def test_commands_of_pipelines_parse_and_the_last_segment_ends_the_dataset(paths: JobPaths) -> None:
    parser = pipelines_parser()
    parsed = [
        parser.parse_known_args(segment_command(paths, number, workers)[3:])
        for number, workers in enumerate([1, 1, 2])
    ]
    assert [found.command for found, _ in parsed] == ["build", "append", "append"]
    assert [found.final for found, _ in parsed] == [False, False, True]
    assert [str(found.input) for found, _ in parsed] == [str(paths.input)] * 3
    assert [found.only for found, _ in parsed] == [["0.parquet"], ["1.parquet"], ["2.parquet"]]
    assert [(found.position, found.in_order) for found, _ in parsed[1:]] == [(1, True), (2, True)]
    assert [beam for _, beam in parsed] == [
        ["--direct_num_workers=1"],
        ["--direct_num_workers=1"],
        ["--direct_num_workers=2"],
    ]
    whole = replace(paths, segments=((),))
    found, _ = parser.parse_known_args(segment_command(whole, 0, 1)[3:])
    assert (found.only, found.final) == ([], True)
    parsed = parser.parse_args(generate_command(paths.source, paths.folder)[3:])
    assert (parsed.command, parsed.output) == ("generate", Location.parse(paths.folder))


def test_prepare_stores_lists_owners_and_discard_removes_the_rest(paths: JobPaths) -> None:
    for number in (0, 1, 3):
        paths.address_file(number).write_bytes(b"grpc://127.0.0.1:1\n")
    token = paths.token.read_bytes()
    prepare_stores(paths, (0, 3))
    addresses = load_job(paths.served_job).train.stores.addresses
    assert addresses == (paths.store_address(0), paths.store_address(3))
    discard_stores(paths, {0, 3}, WORK)
    assert paths.stores.children() == (["0", "3"], ["token"])
    assert paths.token.read_bytes() == token


def test_stores_of_a_job_at_a_url_are_discarded_with_their_folders(tmp_path: Path) -> None:
    paths = paths_of(tmp_path, storage=f"memory://{tmp_path.name}/small")
    for number in (0, 1):
        paths.store(number, tmp_path).mkdir()
        paths.address_file(number).write_bytes(b"grpc://127.0.0.1:1\n")
    discard_stores(paths, {1}, tmp_path)
    assert [entry.path for entry in paths.stores.entries()] == ["1/address"]
    assert [path.name for path in tmp_path.iterdir()] == ["store-1"]


def test_prepare_stores_changes_only_the_stores_section(paths: JobPaths) -> None:
    job, served = load_job(paths.job_file), load_job(paths.served_job)
    assert len(set(served.train.stores.addresses)) == 2
    assert replace(served.train, stores=job.train.stores) == job.train
    assert served.data == job.data
    assert load_features(paths.storage / served.data.schema).features
    token = Path(served.train.stores.token_file or "")
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    before = paths.served_job.read_bytes(), token.read_bytes()
    prepare_stores(paths, (0, 1))
    assert (paths.served_job.read_bytes(), token.read_bytes()) == before

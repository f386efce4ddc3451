"""Every command line is one that the other packages take, and stores are served as planned."""

import stat
from dataclasses import replace
from pathlib import Path

import pytest

from pipelines.cli import build_parser as pipelines_parser
from scheduler.drivers.base import Reach
from scheduler.drivers.local.commands import (
    generate_command,
    lead_command,
    move_command,
    replica_command,
    segment_command,
    store_command,
)
from scheduler.drivers.local.job_files import (
    Workplace,
    address_of,
    discard_stores,
    prepare_stores,
    store_folder,
    token_of,
)
from schemas.config.job import load_job
from schemas.features import load_features
from tests.scheduler.made import write_job
from trainer.__main__ import build_parser as trainer_parser


@pytest.fixture
def place(tmp_path: Path) -> Workplace:
    """A job of three segments whose rows lie in two stores."""
    found = Workplace(write_job(tmp_path), tmp_path / "small", 3)
    prepare_stores(found, (0, 1))
    return found


def test_commands_of_trainers_parse(place: Workplace) -> None:
    parser = trainer_parser()
    alone = parser.parse_args(lead_command(place, grouped=False, served=False)[3:])
    assert (alone.job, alone.replicas, alone.embedding) == (place.job_file, 1, "plain")
    assert alone.follow
    assert alone.resume
    group = parser.parse_args(lead_command(place, grouped=True, served=True)[3:])
    assert (group.job, group.replicas, group.embedding) == (place.served_job, 0, "cached")
    replica = parser.parse_args(replica_command(place, 2, 3)[3:])
    assert (replica.run, replica.number, replica.threads) == (place.run, 2, 3)
    store = parser.parse_args(store_command(place, 1, 2)[3:])
    assert store.slots == "2048:4096"
    assert address_of(place, 1) == f"file://{store.directory}/address"
    assert parser.parse_args(store_command(place, 2, 2)[3:]).slots == "none"
    move = parser.parse_args(move_command(place, (3, 5), (0, 2), 1)[3:])
    assert (move.slots, move.givers, move.to) == (
        "768:1024,1280:1536",
        f"{address_of(place, 0)},{address_of(place, 2)}",
        address_of(place, 1),
    )
    assert move.served
    assert move.token_file == store.token_file
    assert parser.parse_args(move_command(place, (), (2,), 1)[3:]).slots == "0:4096"


def test_word_of_a_single_writer_is_handed_to_what_writes(place: Workplace) -> None:
    told = replace(place, single_writer=True, allow_outside=True)
    for number in (0, 1):
        found, _ = pipelines_parser().parse_known_args(segment_command(told, number, 1)[3:])
        assert (found.single_writer, found.allow_outside) == (True, True)
        found, _ = pipelines_parser().parse_known_args(segment_command(place, number, 1)[3:])
        assert (found.single_writer, found.allow_outside) == (False, False)
    parser = trainer_parser()
    for grouped in (False, True):
        lead = lead_command(told, grouped=grouped, served=False)[3:]
        assert parser.parse_args(lead).single_writer
    assert parser.parse_args(store_command(told, 1, 2)[3:]).single_writer


REACH = Reach(host="$(HOST)", folder="/run/job", name="job.presage")


def test_commands_of_trainers_with_networks_of_their_own_parse(place: Workplace) -> None:
    prepare_stores(place, (0, 1), REACH)
    stores = load_job(place.served_job).train.stores
    assert stores.addresses == tuple(f"file://{place.stores / str(n)}/address" for n in (0, 1))
    assert (stores.token_file, stores.certificates) == ("/run/job/token", "/run/job/tls.crt")
    assert stores.certificate_name == "job.presage"
    parser = trainer_parser()
    lone = parser.parse_args(lead_command(place, grouped=False, served=True, reach=REACH)[3:])
    assert lone.host == "127.0.0.1", "it serves nobody"
    lead = parser.parse_args(lead_command(place, grouped=True, served=True, reach=REACH)[3:])
    assert lead.host == "$(HOST)"
    served = [
        parser.parse_args(words[3:])
        for words in (replica_command(place, 2, 3, REACH), store_command(place, 1, 2, REACH))
    ]
    for found in served:
        assert (found.host, found.tls_name) == ("$(HOST)", "job.presage")
        files = [found.token_file, found.tls_cert, found.tls_key, found.trusted]
        assert [file.name for file in files] == ["token", "tls.crt", "tls.key", "tls.crt"]
        assert {file.parent for file in files} == {Path("/run/job")}
    store = served[1]
    assert (store.directory / "address") == Path(stores.addresses[1].removeprefix("file://"))
    assert store.port == 0
    move = parser.parse_args(move_command(place, (3,), (0,), 1, REACH)[3:])
    assert (move.givers, move.to) == stores.addresses
    assert (move.tls_name, move.token_file.name) == ("job.presage", "token")


def test_prepare_stores_says_anew_how_they_are_reached_on_another_platform(
    place: Workplace,
) -> None:
    before = load_job(place.served_job).train.stores
    prepare_stores(place, (0, 1), REACH)
    between = place.served_job.read_bytes()
    prepare_stores(place, (0, 1), REACH)
    assert place.served_job.read_bytes() == between
    prepare_stores(place, (0, 1))
    after = load_job(place.served_job).train.stores
    assert after.token_file == before.token_file
    assert (after.certificates, after.certificate_name) == (None, None)
    assert after == before


def test_commands_of_pipelines_parse_and_the_last_segment_ends_the_dataset(
    place: Workplace,
) -> None:
    parser = pipelines_parser()
    parsed = [
        parser.parse_known_args(segment_command(place, number, workers)[3:])
        for number, workers in enumerate([1, 1, 2])
    ]
    assert [found.command for found, _ in parsed] == ["build", "append", "append"]
    assert [found.final for found, _ in parsed] == [False, False, True]
    assert [(found.position, found.in_order) for found, _ in parsed[1:]] == [(1, True), (2, True)]
    assert [beam for _, beam in parsed] == [
        ["--direct_num_workers=1"],
        ["--direct_num_workers=1"],
        ["--direct_num_workers=2", "--direct_running_mode=multi_processing"],
    ]
    made = parser.parse_args(generate_command(place.job_file, place.folder)[3:])
    assert (made.command, made.output) == ("generate", place.folder)


def test_stores_that_have_slots_are_named_and_what_others_left_goes(place: Workplace) -> None:
    for number in (0, 1, 3):
        store_folder(place, number).mkdir()
        (store_folder(place, number) / "address").write_text("grpc://127.0.0.1:1\n")
    token = token_of(place).read_bytes()
    prepare_stores(place, (0, 3))
    addresses = load_job(place.served_job).train.stores.addresses
    assert addresses == (address_of(place, 0), address_of(place, 3))
    discard_stores(place, {0, 3})
    assert sorted(p.name for p in place.stores.iterdir()) == ["0", "3", "job.yaml", "token"]
    assert token_of(place).read_bytes() == token


def test_prepare_stores_changes_nothing_but_where_rows_lie(place: Workplace) -> None:
    job, served = load_job(place.job_file), load_job(place.served_job)
    assert len(set(served.train.stores.addresses)) == 2
    assert replace(served.train, stores=job.train.stores) == job.train
    assert replace(served.data, schema=job.data.schema) == job.data
    assert load_features(Path(served.data.schema)).features
    token = Path(served.train.stores.token_file or "")
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    before = place.served_job.read_bytes(), token.read_bytes()
    prepare_stores(place, (0, 1))
    assert (place.served_job.read_bytes(), token.read_bytes()) == before

"""A process without the token of a run is no member of it, and is sent nothing that helps it."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow.flight as fl
import pytest

from presage.schemas.run.records import RENDEZVOUS
from presage.trainer.elastic.membership import MAX_DEPARTED, Lighthouse, connect_lighthouse
from presage.trainer.elastic.peer_state import PeerClient, PeerError, PeerServer
from presage.trainer.run.compare import compare_runs
from presage.trainer.stores.remote.connection import Access
from tests.trainer.make_dataset import make_dataset, write_job
from tests.trainer.processes import train_to_end, wait_for
from tests.trainer.replica_runs import run_replicas
from tests.trainer.stores import member_of
from tests.trainer.test_draining import SEGMENT
from tests.trainer.test_replica_leaving import NEVER_SEC
from tests.trainer.test_replicas import status

ACCESS = Access(token="secret", timeout_sec=20.0)
FAR_STEP = 1_000_000


def join_as_stranger(lighthouse: str, address: str, data: dict[Hashable, object] | None) -> None:
    """Join one quorum of a run without its token."""
    with suppress(RuntimeError, TimeoutError):
        connect_lighthouse(lighthouse).quorum(
            replica_id="stranger",
            timeout=timedelta(seconds=5),
            address=address,
            store_address=address,
            step=FAR_STEP,
            world_size=1,
            shrink_only=False,
            data=data,
        )


def claims(address: str) -> dict[str, dict[Hashable, object] | None]:
    """Return the data with which a stranger may join."""
    data: dict[Hashable, object] = {**asdict(status(state=address, meeting=address))}
    return {
        "nothing": None,
        "the status of a replica": data,
        "one that another token signs": {"status": json.dumps(data), "signature": "0" * 64},
        "one that is none": {"status": 3, "signature": [7]},
    }


@pytest.mark.parametrize("claim", claims(""))
def test_stranger_at_the_lighthouse_is_no_member(
    claim: str, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        Lighthouse("127.0.0.1", 0, NEVER_SEC) as lighthouse,
        member_of(lighthouse.address, "a", "secret", NEVER_SEC, NEVER_SEC) as member,
        ThreadPoolExecutor(1) as pool,
    ):
        member.agree(0, status())
        for step in (1, 2):  # from its first quorum on the lighthouse waits for the stranger, too
            joined = pool.submit(
                join_as_stranger, lighthouse.address, "grpc://127.0.0.1:1", claims("")[claim]
            )
            wait_for(lambda joined=joined: joined.running() or joined.done())
            agreement = member.agree(step, status())
            while "joined its lighthouse" not in caplog.text:
                agreement = member.agree(step, status())
            joined.result()
            assert (list(agreement.members), agreement.step) == (["a"], step)
    assert len([r for r in caplog.records if "joined its lighthouse" in r.message]) == 1


def test_member_whose_name_a_stranger_uses_asks_again() -> None:
    with (
        Lighthouse("127.0.0.1", 0, NEVER_SEC) as lighthouse,
        member_of(lighthouse.address, "stranger", "secret", 8.0, 60.0) as member,
    ):
        join_as_stranger(lighthouse.address, "grpc://127.0.0.1:1", None)
        agreement = member.agree(3, status())
        assert (list(agreement.members), agreement.step) == (["stranger"], 3)


@contextmanager
def listener() -> Iterator[tuple[str, list[object]]]:
    """Yield an address, and the connections that it gets."""
    found: list[object] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def accept() -> None:
            with suppress(OSError):
                while True:
                    found.append(listening.accept())

        threading.Thread(target=accept, daemon=True).start()
        yield f"grpc://127.0.0.1:{listening.getsockname()[1]}", found
        listening.shutdown(socket.SHUT_RDWR)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "claim", [pytest.param("nothing", marks=pytest.mark.nightly), "the status of a replica"]
)
def test_run_continues_beside_a_stranger_and_sends_it_nothing(claim: str, tmp_path: Path) -> None:
    job, run = write_job(tmp_path, epochs="2"), tmp_path / "run"
    dataset = make_dataset(tmp_path / "dataset", job, SEGMENT)
    train_to_end(job, dataset, tmp_path / "alone")
    ended = threading.Event()
    with listener() as (address, connections), ThreadPoolExecutor(1) as pool:

        def join_on_and_on() -> None:
            lighthouse = json.loads((run / RENDEZVOUS).read_text())["lighthouse"]
            while not ended.is_set():
                join_as_stranger(lighthouse, address, claims(address)[claim])

        try:
            run_replicas(
                job,
                run,
                dataset=dataset,
                on_start=lambda _: pool.submit(join_on_and_on) and None,
                launch={"heartbeat_sec": 1.0, "restarts": 0},
            )
        finally:
            ended.set()
    assert compare_runs(tmp_path / "alone", run).difference is None
    assert connections == []


class Eavesdropper(fl.ServerMiddlewareFactory):
    """Keeps the headers of calls."""

    def __init__(self) -> None:
        self.headers: list[dict[str, Any]] = []

    def start_call(self, info: Any, headers: dict[str, Any]) -> None:
        self.headers.append(headers)


def test_what_a_peer_is_sent_is_of_no_use_elsewhere() -> None:
    heard, server = Eavesdropper(), PeerServer("127.0.0.1", ACCESS, None)
    taker = fl.FlightServerBase("grpc://127.0.0.1:0", middleware={"all": heard})
    try:
        address = f"grpc://127.0.0.1:{taker.port}"  # as if a replica had died that was there
        with PeerClient(address, ACCESS) as peer, pytest.raises(PeerError):
            peer.fetch_state()
        [headers] = heard.headers
        [sent] = headers["authorization"]
        assert "secret" not in str(headers)
        options = fl.FlightCallOptions(timeout=20, headers=[(b"authorization", sent.encode())])
        with (
            fl.FlightClient(server.address) as client,
            pytest.raises(fl.FlightUnauthenticatedError),
        ):
            list(client.do_action(fl.Action("lives", b"{}"), options))
        with PeerClient(server.address, ACCESS) as peer:
            peer.ping()
    finally:
        taker.shutdown()
        server.shutdown()


@pytest.mark.slow
def test_departed_members_leave_no_thread_behind() -> None:
    before = threading.active_count()
    member = member_of("http://127.0.0.1:1", "a", "secret", 0.5, 0.5)
    for number in range(50):
        member.unblock_quorum([f"replica-{number}"])
    wait_for(lambda: threading.active_count() <= before)


def test_many_departed_members_are_answered_for_no_longer() -> None:
    with (
        Lighthouse("127.0.0.1", 0, NEVER_SEC) as lighthouse,
        member_of(lighthouse.address, "a", "secret", NEVER_SEC, NEVER_SEC) as member,
    ):
        agreement = member.agree(1, status())  # who is in no quorum with it may be alone in one
        before, names = threading.active_count(), [f"b{n}" for n in range(MAX_DEPARTED + 1)]
        member.unblock_quorum(names)
        assert threading.active_count() == before
        member.unblock_quorum(names[1:])
        while agreement.leaving != names[1:]:
            agreement = member.agree(2, status())
            member.unblock_quorum(agreement.leaving)
        member.agree(3, status())

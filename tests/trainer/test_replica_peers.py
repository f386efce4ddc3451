"""What replicas give each other, over a real socket."""

from __future__ import annotations

import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from presage.schemas.run.records import StepMetric
from presage.schemas.storage.location import Location
from presage.trainer.__main__ import main
from presage.trainer.elastic.attempt import Rendezvous, write_rendezvous
from presage.trainer.elastic.peer_state import (
    CommittedStep,
    PeerClient,
    PeerError,
    PeerServer,
    rows_from_arrays,
)
from presage.trainer.elastic.state_copy import RowsCopy
from presage.trainer.elastic.sums import GlooGroup, LostPeerError
from presage.trainer.embedding.cache import DirectSource
from presage.trainer.steps import DatasetExtent
from presage.trainer.stores.local import memory_store
from presage.trainer.stores.remote.connection import Access
from presage.trainer.stores.remote.wire import Certificate
from presage.trainer.stores.store import RowsInPlace, TableLayout
from tests.trainer.certificates import make_certificate

ACCESS = Access(token="secret", timeout_sec=20.0)
EXTENT = DatasetExtent(num_segments=2, sealed=False)
METRIC = StepMetric(step=3, loss=0.5, num_samples=4, num_replicas=1, samples_per_sec=1.0, phases={})


@contextmanager
def serving(certificate: Certificate | None) -> Iterator[PeerServer]:
    """Serve the sums of one step."""
    server = PeerServer("127.0.0.1", ACCESS, certificate)
    try:
        server.add_committed(
            3, CommittedStep(EXTENT, METRIC, (), torch.arange(8, dtype=torch.uint8))
        )
        yield server
    finally:
        server.shutdown()


def test_sums_are_sent_over_tls_to_peers_with_the_certificate_and_the_token(tmp_path: Path) -> None:
    certificate = make_certificate(tmp_path)
    trusting = replace(ACCESS, certificates=certificate[0].read_bytes())
    with serving(certificate) as server:
        assert server.address.startswith("grpc+tls://127.0.0.1:")
        with PeerClient(server.address, trusting) as peer:
            sums = peer.fetch_sums(3)
        assert sums is not None
        assert CommittedStep.from_bytes(sums).metric == METRIC
        plain = server.address.replace("+tls", "")
        for address, access in (
            (server.address, ACCESS),
            (plain, trusting),
            (server.address, replace(trusting, token="guess")),
        ):
            with (
                PeerClient(address, access) as peer,
                pytest.raises(PeerError, match="sums of grpc"),
            ):
                peer.fetch_sums(3)


def test_replica_beyond_loopback_must_have_a_certificate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "token").write_text("secret")
    rendezvous = Rendezvous(
        job="j",
        dataset="d",
        lighthouse="http://127.0.0.1:1",
        heartbeat_sec=1.0,
        embedding="plain",
        expanded=False,
        steps=None,
        follow=False,
        extent=EXTENT,
        buffer_bytes=1,
        copy_bytes=0,
        shared=None,
        attempt="a",
    )
    write_rendezvous(Location.parse(tmp_path), rendezvous)
    arguments = ["replica", str(tmp_path), "--number", "0", "--host", "0.0.0.0"]
    assert main(arguments) == 1
    assert "host must be loopback without TLS, got host='0.0.0.0'" in capsys.readouterr().err
    assert main([*arguments, "--tls-cert", "cert.pem"]) == 1
    assert "TLS needs both files" in capsys.readouterr().err


NUM_ROWS, DIM = 60_000, 63
SERVER = f"""
import sys, tracemalloc
from pathlib import Path
from types import SimpleNamespace
import numpy as np
from presage.schemas.config.train import TrainConfig
from presage.trainer.elastic.peer_state import MemoryRows, PeerServer
from presage.trainer.embedding.cache import DirectSource
from presage.trainer.embedding.module import Embedding
from presage.trainer.stores.store import Records, TableLayout
from presage.trainer.stores.local import memory_store
from presage.trainer.stores.remote.connection import Access

layout = TableLayout(table="items", dim={DIM}, state_width=1, dtype="float32", seed=0)
store, rows = memory_store({{"items": layout}}), np.random.default_rng(0).permutation({NUM_ROWS})
block = np.repeat(rows[:, None].astype(np.float32), {DIM} + 1, axis=1)
store.tables["items"].write(rows, Records(block, {DIM}))
del block
memory_rows = MemoryRows(store, Embedding((), TrainConfig(), DirectSource(store)), Path())
server, provided = PeerServer("127.0.0.1", Access(token="secret"), None), []
print(server.address, flush=True)
tracemalloc.start()
def state():
    arrays = memory_rows.state_before(0)
    provided.extend([] if arrays is None else [1])
    return arrays
while not provided:
    server.provide_state(state)
sys.stdin.read()
print(tracemalloc.get_traced_memory()[1])
"""


@pytest.mark.slow
def test_state_is_copied_once_where_it_is_sent_and_is_once_where_it_comes() -> None:
    command, pipe = [sys.executable, "-c", SERVER], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as server:
        assert server.stdout is not None
        with PeerClient(server.stdout.readline().strip(), ACCESS) as peer:
            tracemalloc.start()
            found = peer.fetch_state()
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        peak_of_server = int(server.communicate()[0])
    layout = TableLayout(table="items", dim=DIM, state_width=1, dtype="float32", seed=0)
    back = rows_from_arrays("rows", found, {"items": layout})["items"]
    rows, records = back.rows, back.records
    assert sorted(rows.tolist()) == list(range(NUM_ROWS))
    assert (records.values == rows[:, None]).all()
    assert (records.state[:, 0] == rows).all()
    num_bytes = NUM_ROWS * 4 * (DIM + 1)
    assert peak < 1.3 * num_bytes
    assert peak_of_server < 1.3 * num_bytes


def test_rows_are_copied_in_rounds_while_steps_change_them_and_add_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layout = TableLayout(table="items", dim=3, state_width=1, dtype="float32", seed=0)
    store, rng, num_rows = memory_store({"items": layout}), np.random.default_rng(0), 50_000
    source, trained = DirectSource(store), threading.Event()

    def train(train_step: int, rows: NDArray[np.int64]) -> None:
        gathered = source.gather(train_step, {"items": rows})["items"]
        records = gathered.copy()
        records.values[:] += 1
        records.state[:] = train_step
        gathered.put(records)
        source.release(train_step, {"items": rows})

    def read_late(table: str, positions: NDArray[np.int32]) -> RowsInPlace:
        assert trained.wait(60)
        return read(table, positions)

    read = store.rows_at
    train(0, np.arange(num_rows))
    monkeypatch.setattr(store, "rows_at", read_late)
    copy, step, copied = RowsCopy(store, source, 1), 1, None
    while copied is None:
        train(step, np.unique(rng.integers(0, num_rows + 100 * step, 500)))
        step += 1
        if step == 9:
            trained.set()
        copied = copy.finish(step)
        assert copied is None or step >= 9
    rows, records = copied["items"].rows, copied["items"].records
    assert len(np.unique(rows)) == len(rows) == len(store.tables["items"]) > num_rows
    expected = store.gather("items", rows).copy()
    assert np.array_equal(records.values, expected.values)
    assert np.array_equal(records.state, expected.state)
    assert source.used is None


def test_exchange_that_times_out_by_itself_is_a_lost_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    def time_out(*arguments: object) -> None:
        raise TimeoutError("of a socket")

    group = GlooGroup("127.0.0.1", 1.0, 1.0)
    monkeypatch.setattr(group, "_group", SimpleNamespace(abort=lambda: None))
    monkeypatch.setattr(group, "_all_gather", time_out)
    with pytest.raises(LostPeerError, match="a member did not answer: of a socket"):
        group.all_gather(torch.zeros(1, dtype=torch.uint8), 0.01, lambda: True)

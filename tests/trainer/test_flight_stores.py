"""Store processes against a store in memory: real processes, real Flight calls."""

import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.flight as fl
import pytest

from presage.schemas.errors import SchemaError
from presage.schemas.hashing import MAX_ROW
from presage.schemas.rows import initial_rows
from presage.trainer.__main__ import main
from presage.trainer.stores.local import memory_store
from presage.trainer.stores.remote import connection as connection_module
from presage.trainer.stores.remote.connection import Access, StoreConnection
from presage.trainer.stores.store import Records, StoreUnavailableError, TableLayout
from tests.trainer.certificates import make_certificate
from tests.trainer.processes import PATIENCE
from tests.trainer.stores import (
    ACCESS,
    LAYOUT,
    TOKEN,
    as_records,
    group_over,
    log_bytes,
    running,
    start_store,
    whole,
)

SHAPES = {
    "float32 with row state": LAYOUT,
    "float32 without state": replace(LAYOUT, state_width=0),
    "float64 with a state as wide": replace(LAYOUT, dim=3, state_width=3, dtype="float64"),
}


def random_rows(rng: np.random.Generator) -> np.ndarray:
    return np.unique(rng.integers(0, MAX_ROW, 400) % rng.integers(1, 4000))


def one_record(layout: TableLayout, value: float, count: int = 1) -> Records:
    return as_records(
        np.full((count, layout.dim), value, layout.dtype),
        np.full((count, layout.state_width), value, layout.dtype),
    )


def assert_same(found: Records, wanted: Records) -> None:
    assert found.values.tobytes() == wanted.values.tobytes()
    assert found.state.tobytes() == wanted.state.tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("count", [1, 3])
def test_store_processes_hold_what_a_store_in_memory_does(
    shape: str, count: int, tmp_path: Path
) -> None:
    rng = np.random.default_rng(1)
    layouts = {name: replace(SHAPES[shape], table=name) for name in ("items", "users")}
    started = []
    for part in range(count):
        # messages of few rows, so that requests are split
        options = ("--message-bytes", "4096")
        started.append(start_store(tmp_path / f"store{part}", *options))
    with running(*started):
        stores = group_over(*(s.address for s in started), layouts=layouts)
        wanted = memory_store(layouts).tables
        for step in range(8):
            rows = {name: random_rows(rng) for name in layouts}
            found = stores["items"].all_tables.fetch(step, rows)
            for name, records in found.items():
                assert_same(records, wanted[name].fetch(rows[name]))
                updated = as_records(records.values * 1.5 + step, records.state + 1)
                wanted[name].write(rows[name], updated)
                stores[name].write(rows[name], updated, step)
        for name, store in stores.items():
            (rows_found, found), (rows_wanted, expected) = whole(store), whole(wanted[name])
            assert rows_found.tolist() == rows_wanted.tolist()
            assert_same(found, expected)


def test_rows_of_a_huge_table_cost_nothing_until_they_are_written(tmp_path: Path) -> None:
    with running(start_store(tmp_path / "store")) as (process,):
        store = group_over(process.address)["items"]
        empty = log_bytes(tmp_path / "store")
        rows = np.random.default_rng(0).integers(0, 10_000_000_000, 50_000)
        first = initial_rows(rows, table="items", seed=3, dim=4, dtype="float32")
        assert store.fetch(rows).values.tobytes() == first.tobytes()
        assert not store.fetch(rows).state.any()
        assert whole(store)[0].tolist() == []
        assert log_bytes(tmp_path / "store") == empty


OTHER_TABLES = {
    "another seed": ({"seed": 4}, "table 'items' with seed=3, not seed=4"),
    "another dimension": ({"dim": 8}, "table 'items' with dim=4, not dim=8"),
    "another dtype": ({"dtype": "float64"}, "table 'items' with dtype=float32, not dtype=float64"),
    "another state": ({"state_width": 4}, "table 'items' with state_width=1, not state_width=4"),
    "another table": ({"table": "users"}, "tables ['items'], not ['users']"),
}


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The address of a store with a row of run `run`, and its directory."""
    directory = tmp_path_factory.mktemp("filled") / "store"
    with running(start_store(directory)) as (started,):
        group_over(started.address)["items"].write(np.array([5]), one_record(LAYOUT, 1.0), 0)
        yield started.address, directory


@pytest.mark.parametrize("case", OTHER_TABLES)
def test_store_with_rows_refuses(case: str, filled: tuple[str, Path]) -> None:
    change, text = OTHER_TABLES[case]
    address, directory = filled
    layout = replace(LAYOUT, **change)
    message = (
        f"store holds {text} in {directory} in {address}; train the job that filled it, "
        "or start the store with an empty --directory"
    )
    with pytest.raises(SchemaError, match=f"^{re.escape(message)}$"):
        group_over(address, layouts={layout.table: layout}, session="other")
    rows = whole(group_over(address, joins=True)["items"])[0]
    assert rows.tolist() == [5]


def test_store_with_rows_refuses_another_run(filled: tuple[str, Path]) -> None:
    address, directory = filled
    message = (
        f"store has rows of another run: 'run' in {directory} in {address}; "
        "resume that run, or start the store with an empty --directory"
    )
    with pytest.raises(SchemaError, match=f"^{re.escape(message)}$"):
        group_over(address, owner="another", session="other")


@pytest.mark.parametrize("token", ["", "a-token-of-test", TOKEN + "s"])
def test_store_refuses_a_wrong_token(token: str, filled: tuple[str, Path]) -> None:
    address, _ = filled
    message = (
        f"token is missing, or differs from that of the store's --token-file in {address}; "
        "use the same token file for both"
    )
    with pytest.raises(SchemaError, match=f"^{re.escape(message)}$"):
        group_over(address, access=Access(token=token))


def test_store_answers_the_newest_training_process_only(tmp_path: Path) -> None:
    with running(start_store(tmp_path / "store")) as (process,):
        old = group_over(process.address, session="old")["items"]
        new = group_over(process.address, session="new")["items"]
        message = (
            "session 'old' of the store was replaced in "
            f"{tmp_path / 'store'} in {process.address}; another process trains on it, "
            "end one of the two"
        )
        with pytest.raises(SchemaError, match=f"^{re.escape(message)}$"):
            old.write(np.array([1]), one_record(LAYOUT, 1.0))
        assert whole(new)[0].tolist() == []


def test_store_that_cannot_be_reached_is_one_line(tmp_path: Path) -> None:
    with running(start_store(tmp_path / "store")) as (process,):
        process.kill()
        pattern = (
            rf"^store did not answer within 0\.3 s: '.+' in {re.escape(process.address)}; "
            r"start it with its --port and --directory, it has every write that it acknowledged$"
        )
        with pytest.raises(SchemaError, match=pattern) as caught:
            group_over(process.address, access=replace(ACCESS, timeout_sec=0.3))
        assert "\n" not in str(caught.value)


def test_stranger_on_the_port_of_a_store_that_died_is_waited_out() -> None:
    with fl.FlightServerBase("grpc://127.0.0.1:0") as stranger:
        peer = StoreConnection(
            f"grpc://127.0.0.1:{stranger.port}", replace(ACCESS, timeout_sec=0.3)
        )
        with peer, pytest.raises(SchemaError, match=r"^store did not answer within 0\.3 s"):
            peer.action("hello", {})


class FakeClient:
    """A client whose call `first` fails while `second` is in progress."""

    def __init__(self) -> None:
        self.is_closed = False
        self._begun, self._failed = threading.Event(), threading.Event()

    def do_action(self, action: fl.Action, options: object) -> list[fl.Result]:
        if action.type == "first":
            assert self._begun.wait(PATIENCE)
            raise fl.FlightUnavailableError("the store is gone")
        self._begun.set()
        assert self._failed.wait(PATIENCE)
        if self.is_closed:
            raise pa.ArrowInvalid("FlightClient is closed")
        return [fl.Result(pa.py_buffer(b"{}"))]

    def let_fail(self) -> None:
        self._failed.set()

    def close(self) -> None:
        self.is_closed = True


def test_call_that_fails_leaves_another_one_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    client = FakeClient()
    monkeypatch.setattr(connection_module, "connect", lambda *_: client)
    peer = StoreConnection("grpc://127.0.0.1:1", ACCESS)
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(peer.action_once, "second", {}, PATIENCE)
        with pytest.raises(StoreUnavailableError, match="the store is gone"):
            peer.action_once("first", {}, PATIENCE)
        client.let_fail()
        assert second.result() == {}


@pytest.mark.slow
def test_write_to_a_store_slower_than_the_time_out_fails_in_one_line_and_can_be_repeated(
    tmp_path: Path,
) -> None:
    with running(start_store(tmp_path / "store", "--delay-sec", "0.6")) as (process,):
        store = group_over(process.address)["items"]
        impatient = group_over(process.address, access=replace(ACCESS, timeout_sec=0.2), joins=True)
        rows = np.array([5, 9])
        with pytest.raises(SchemaError, match=r"^store did not answer within 0\.2 s: '.+' in grpc"):
            impatient["items"].write(rows, one_record(LAYOUT, 1.0, 2), 3)
        store.write(rows, one_record(LAYOUT, 1.0, 2), 3)
        assert_same(store.fetch(rows), one_record(LAYOUT, 1.0, 2))


@pytest.mark.slow
def test_store_over_tls_answers_clients_with_its_certificate(tmp_path: Path) -> None:
    chain, key = make_certificate(tmp_path)
    files = ("--tls-cert", str(chain), "--tls-key", str(key))
    with running(start_store(tmp_path / "store", *files)) as (process,):
        assert process.address.startswith("grpc+tls://127.0.0.1:")
        trusted = chain.read_bytes()
        store = group_over(process.address, access=replace(ACCESS, certificates=trusted))["items"]
        store.write(np.array([5]), one_record(LAYOUT, 1.0), 0)
        assert whole(store)[0].tolist() == [5]
        for access in (ACCESS, replace(ACCESS, certificates=trusted)):
            address = process.address if access is ACCESS else process.address.replace("+tls", "")
            with pytest.raises(SchemaError, match=r"^store did not answer within"):
                group_over(address, access=replace(access, timeout_sec=0.5))


COMMANDS = {
    "no TLS beyond loopback": (
        ["--host", "0.0.0.0"],
        "host must be loopback without TLS, got host='0.0.0.0'; give --tls-cert and --tls-key",
    ),
    "a certificate without its key": (
        ["--tls-cert", "cert.pem"],
        "TLS needs both files; give --tls-cert and --tls-key",
    ),
    "messages that are too small": (
        ["--message-bytes", "1000"],
        "message_bytes must be in [4096, 33554432], got 1000; leave the option out",
    ),
}


@pytest.mark.parametrize("case", COMMANDS)
def test_store_is_not_started_with(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options, message = COMMANDS[case]
    (tmp_path / "token").write_text(TOKEN)
    arguments = ["--directory", str(tmp_path / "d"), "--token-file", str(tmp_path / "token")]
    assert main(["store", *arguments, *options]) == 1
    assert capsys.readouterr().err.strip() == f"error: {message}"


def test_store_without_a_token_is_not_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "token").write_text(" \n")
    arguments = ["--directory", str(tmp_path / "d"), "--token-file", str(tmp_path / "token")]
    assert main(["store", *arguments]) == 1
    assert capsys.readouterr().err.startswith("error: token is not one line of printable ASCII")

"""Stores that come back at another address: who knows them by a file or URL finds them again."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from presage.schemas.config.train import StoresConfig, TrainConfig
from presage.schemas.errors import SchemaError, StorageError
from presage.schemas.run.records import STORE_ADDRESS
from presage.schemas.storage.location import Location
from presage.trainer.__main__ import main
from presage.trainer.elastic.shared_rows import launch_shared_stores
from presage.trainer.stores.factory import store_access
from presage.trainer.stores.remote.client import open_remote_store
from presage.trainer.stores.remote.connection import (
    FILE,
    Access,
    StoreConnection,
    publish_address,
    resolve_address,
)
from tests.conftest import REPOSITORY
from tests.object_store import Store
from tests.trainer.certificates import make_certificate
from tests.trainer.processes import PATIENCE
from tests.trainer.stores import (
    ACCESS,
    LAYOUT,
    TableOf,
    group_over,
    record_of,
    running,
    start_store,
    whole,
)


def file_of(directory: Path) -> str:
    return f"{FILE}{directory / STORE_ADDRESS}"


@pytest.fixture(params=["file", "s3"])
def published(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], tuple[str, list[str]]]:
    """The address of a store of some name in the folder of the test, and its options for that."""
    if request.param == "file":
        return lambda name: (file_of(tmp_path / name), [])
    s3_store = request.getfixturevalue("s3_store")
    for name, value in s3_store.environment.items():
        monkeypatch.setenv(name, value)
    url = s3_store.new_url()
    return lambda name: (f"{url}/{name}/address", ["--address-file", f"{url}/{name}/address"])


def secured(folder: Path) -> tuple[Access, Sequence[str]]:
    """Return how stores with one certificate, which names no host of theirs, are reached."""
    chain, key = make_certificate(folder)
    access = replace(ACCESS, certificates=chain.read_bytes(), certificate_name="localhost")
    return access, ["--tls-cert", str(chain), "--tls-key", str(key)]


@pytest.mark.slow
def test_store_that_returns_at_another_host_is_found_by_its_file(
    published: Callable[[str], tuple[str, list[str]]], tmp_path: Path
) -> None:
    access, options = secured(tmp_path)
    directory = tmp_path / "store"
    address, more = published("store")
    options = [*options, *more]
    with running(start_store(directory, "--host", "127.0.0.2", *options)) as (first,):
        store = group_over(address, access=access)["items"]
        store.write(np.array([5]), record_of(1.0, 1), 0)
        first.kill()
        again = start_store(directory, "--host", "127.0.0.3", *options)
        with running(again):
            assert again.address.startswith("grpc+tls://127.0.0.3:")
            assert resolve_address(address) == again.address
            assert (directory / STORE_ADDRESS).exists() == (not more)
            store.write(np.array([6]), record_of(2.0, 1), 1)
            assert whole(store)[0].tolist() == [5, 6]


@pytest.mark.slow
def test_slots_move_between_stores_that_are_known_by_files(
    published: Callable[[str], tuple[str, list[str]]], tmp_path: Path
) -> None:
    access, options = secured(tmp_path)
    (one, first), (two, second) = published("one"), published("two")
    second = [*options, *second]
    stores = (
        start_store(tmp_path / "one", "--host", "127.0.0.2", *options, *first),
        start_store(tmp_path / "two", "--host", "127.0.0.3", *second),
    )
    with running(*stores):
        store = group_over(one, access=access)["items"]
        store.write(np.arange(100), record_of(1.0, 100), 0)
        words = ["migrate-slots", "--from", one, "--to", two, "--slots", "0:2048", "--token-file"]
        words += [f"{tmp_path}/one.token", "--trusted", f"{tmp_path}/cert.pem"]
        assert main([*words, "--tls-name", "localhost"]) == 0
        assert whole(store)[0].tolist() == list(range(100))
        stores[1].kill()
        with running(start_store(tmp_path / "two", "--host", "127.0.0.4", *second)):
            assert whole(store)[0].tolist() == list(range(100))


def test_replicas_get_the_name_of_the_token_file_not_the_target_of_its_link(tmp_path: Path) -> None:
    token = tmp_path / "token"
    with running(start_store(tmp_path / "store")) as (store,):
        token.symlink_to(tmp_path / "store.token")  # as in a volume that a node fills
        config = StoresConfig(addresses=(store.address,), token_file="token")
        layouts, run = {LAYOUT.table: LAYOUT}, tmp_path / "run"
        run.mkdir()
        train = TrainConfig(stores=config)
        with launch_shared_stores(run, tmp_path / "job.yaml", train, layouts, None, None) as shared:
            assert shared.token_file is None, "each host reads the one that the job names"
            access = store_access(config, tmp_path / "job.yaml")
            session = shared.session
            opened = open_remote_store(
                shared.addresses, access, layouts, owner=None, session=session
            )
            assert whole(TableOf(opened))[0].tolist() == []


@pytest.mark.slow
def test_store_whose_certificate_bears_another_name_is_not_talked_to(tmp_path: Path) -> None:
    access, options = secured(tmp_path)
    directory = tmp_path / "store"
    with running(start_store(directory, "--host", "127.0.0.2", *options)):
        for name in (None, "another"):
            stranger = replace(access, certificate_name=name, timeout_sec=0.5)
            with pytest.raises(SchemaError, match=r"^store did not answer within"):
                group_over(file_of(directory), access=stranger)


def test_store_without_a_certificate_gets_no_token(tmp_path: Path) -> None:
    publish_address(tmp_path / STORE_ADDRESS, "grpc://127.0.0.1:1")
    access = replace(ACCESS, certificate_name="stores", timeout_sec=0.3)
    with StoreConnection(file_of(tmp_path), access) as peer, pytest.raises(SchemaError) as caught:
        peer.action("describe", {})
    assert "cannot be checked against the certificate of stores" in str(caught.value)


def test_store_that_has_not_begun_is_waited_for(tmp_path: Path) -> None:
    access = replace(ACCESS, timeout_sec=0.3)
    message = r"^store did not answer within 0\.3 s"
    with (
        StoreConnection(file_of(tmp_path), access) as peer,
        pytest.raises(SchemaError, match=message),
    ):
        peer.action("describe", {})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "file must hold the address of a store, got b'' in memory://"),
        (
            "http://a:1\n",
            "file must hold the address of a store, got b'http://a:1\\n' in memory://",
        ),
        ("grpc://a:1\ngrpc://a:1\n", "file must hold the address of a store"),
        (
            "grpc://10.0.0.1:7070\n",
            "store must publish grpc+tls:// beyond loopback, got grpc://10.",
        ),
        ("grpc://127.0.0.1@a:7070\n", "store must publish grpc+tls:// beyond loopback"),
    ],
)
def test_text_at_a_url_that_no_store_publishes_is_refused_at_once(
    text: str, message: str, tmp_path: Path
) -> None:
    url = f"memory://{tmp_path.name}/address"
    Location.parse(url).write_bytes(text.encode())
    with StoreConnection(url, ACCESS) as peer, pytest.raises(SchemaError) as caught:
        peer.action("describe", {})
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_store_of_addresses_that_refuses_is_named_at_once(
    s3_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (s3_store.environment | {"AWS_SECRET_ACCESS_KEY": "wrong"}).items():
        monkeypatch.setenv(name, value)
    url = f"{s3_store.new_url()}/address".replace("bucket", "another", 1)
    with StoreConnection(url, ACCESS) as peer, pytest.raises(SchemaError) as caught:
        peer.action("describe", {})
    assert str(caught.value).startswith("store refuses access: ")
    assert url in str(caught.value)


def test_store_of_addresses_that_fails_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, read, fails = f"memory://{tmp_path.name}/address", Location.read_bytes, [True] * 3

    def read_or_fail(self: Location) -> bytes:
        if fails:
            fails.pop()
            raise StorageError("store failed: 503; try again when it is reachable", file=self.url)
        return read(self)

    monkeypatch.setattr(Location, "read_bytes", read_or_fail)
    with running(start_store(tmp_path / "store")) as (store,):
        publish_address(Location.parse(url), store.address)
        with StoreConnection(url, ACCESS) as peer:
            assert peer.action("describe", {})["slot_map"] is None
    assert not fails


def test_store_that_cannot_publish_its_address_ends_in_one_line(
    s3_store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in s3_store.environment.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "token").write_text("a-token\n")
    words = ["--directory", tmp_path / "store", "--token-file", tmp_path / "token"]
    words += ["--address-file", "s3://no-such-bucket/address"]
    process = subprocess.run(
        [sys.executable, "-m", "trainer", "store", *words],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert (process.returncode, process.stdout) == (1, "")
    error = "error: bucket does not exist in s3://no-such-bucket/address; create it\n"
    assert process.stderr == error


def test_stores_config_takes_files_and_urls_and_nothing_relative() -> None:
    written = ("file:///a/address", "s3://bucket//run/address/", "grpc+tls://a:1")
    found = StoresConfig(addresses=written, token_file="token")
    assert found.addresses == ("file:///a/address", "s3://bucket/run/address", "grpc+tls://a:1")
    for wrong in ("file://a/address", "address", "s3://bucket", "s3://b/../a", "http://a:1/b", ""):
        message = (
            "addresses must be grpc://host:port, grpc+tls://host:port, file:///path or a URL such "
            f"as s3://bucket/path, got {wrong!r}; use the address that the store announced"
        )
        with pytest.raises(ValueError, match=re.escape(message)):
            StoresConfig(addresses=(wrong,), token_file="token")


def test_command_takes_addresses_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["migrate-slots", "--from", "a", "--to", "s3://bucket", "--token-file", "token"])
    assert "must be grpc://host:port, " in capsys.readouterr().err

"""Stores that come back at another address: who knows them by a file finds them again."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from schemas.config.train import StoresConfig, TrainConfig
from schemas.errors import SchemaError
from schemas.run_log import STORE_ADDRESS
from tests.trainer.certificates import make_certificate
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
from trainer.elastic.shared_rows import launch_shared_stores, open_shared
from trainer.stores.remote.connection import (
    FILE,
    Access,
    StoreConnection,
    publish_address,
    read_access,
    resolve_address,
)
from trainer.stores.remote.processes import migrate_slots

HALF = ((0, 2048),)


def file_of(directory: Path) -> str:
    return f"{FILE}{directory / STORE_ADDRESS}"


def secured(folder: Path) -> tuple[Access, Sequence[str]]:
    """Return how stores with one certificate, which names no host of theirs, are reached."""
    chain, key = make_certificate(folder)
    access = replace(ACCESS, certificates=chain.read_bytes(), certificate_name="localhost")
    options = ["--tls-cert", str(chain), "--tls-key", str(key), "--trusted", str(chain)]
    return access, [*options, "--tls-name", "localhost"]


@pytest.mark.slow
def test_store_that_comes_back_at_another_host_is_found_by_its_file(tmp_path: Path) -> None:
    access, options = secured(tmp_path)
    directory = tmp_path / "store"
    with running(start_store(directory, "--host", "127.0.0.2", *options)) as (first,):
        store = group_over(file_of(directory), access=access)["items"]
        store.write(np.array([5]), record_of(1.0, 1), 0)
        first.kill()
        again = start_store(directory, "--host", "127.0.0.3", *options)
        with running(again):
            assert again.address.startswith("grpc+tls://127.0.0.3:")
            assert resolve_address(file_of(directory)) == again.address
            store.write(np.array([6]), record_of(2.0, 1), 1)
            assert whole(store)[0].tolist() == [5, 6]


@pytest.mark.slow
def test_slots_move_between_stores_that_are_known_by_files(tmp_path: Path) -> None:
    access, options = secured(tmp_path)
    one, two = tmp_path / "one", tmp_path / "two"
    stores = (
        start_store(one, "--host", "127.0.0.2", *options),
        start_store(two, "--host", "127.0.0.3", "--slots", "none", *options),
    )
    with running(*stores):
        store = group_over(file_of(one), access=access)["items"]
        store.write(np.arange(100), record_of(1.0, 100), 0)
        migrate_slots(
            file_of(one),
            file_of(two),
            HALF,
            read_access(one.with_suffix(".token"), tmp_path / "cert.pem", "localhost"),
        )
        assert whole(store)[0].tolist() == list(range(100))
        stores[1].kill()
        with running(start_store(two, "--host", "127.0.0.4", "--slots", "none", *options)):
            assert whole(store)[0].tolist() == list(range(100))


def test_replicas_are_told_the_name_of_the_token_not_where_it_leads_to(tmp_path: Path) -> None:
    token = tmp_path / "token"
    with running(start_store(tmp_path / "store")) as (store,):
        token.symlink_to(tmp_path / "store.token")  # as in a volume that a node fills
        config = StoresConfig(addresses=(store.address,), token_file="token")
        layouts, run = {LAYOUT.table: LAYOUT}, tmp_path / "run"
        run.mkdir()
        train = TrainConfig(stores=config)
        with launch_shared_stores(run, tmp_path / "job.yaml", train, layouts, None, None) as shared:
            assert shared.token_file == str(token)
            opened = open_shared(shared, run, tmp_path / "job.yaml", config, layouts)
            assert whole(TableOf(opened))[0].tolist() == []


@pytest.mark.slow
def test_store_whose_certificate_bears_another_name_is_not_talked_to(tmp_path: Path) -> None:
    access, options = secured(tmp_path)
    directory = tmp_path / "store"
    with running(start_store(directory, "--host", "127.0.0.2", *options)):
        for name in (None, "another"):
            stranger = replace(access, certificate_name=name, timeout_sec=0.5)
            with pytest.raises(SchemaError, match=r"^store must answer within"):
                group_over(file_of(directory), access=stranger)


def test_store_that_would_show_no_certificate_gets_no_token(tmp_path: Path) -> None:
    publish_address(tmp_path, "grpc://127.0.0.1:1")
    access = replace(ACCESS, certificate_name="stores", timeout_sec=0.3)
    with StoreConnection(file_of(tmp_path), access) as peer, pytest.raises(SchemaError) as caught:
        peer.action("describe", {})
    assert "must be grpc+tls:// to check the certificate of stores" in str(caught.value)


def test_store_that_has_not_begun_is_waited_for(tmp_path: Path) -> None:
    access = replace(ACCESS, timeout_sec=0.3)
    message = r"^store must answer within 0\.3 s"
    with (
        StoreConnection(file_of(tmp_path), access) as peer,
        pytest.raises(SchemaError, match=message),
    ):
        peer.action("describe", {})


def test_stores_config_takes_files_and_nothing_relative() -> None:
    found = StoresConfig(addresses=("file:///a/address",), token_file="token")
    assert found.addresses == ("file:///a/address",)
    message = (
        "addresses must be grpc://host:port, grpc+tls://host:port or file:///path, got "
        "'file://a/address'; use the address that the store announced"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        StoresConfig(addresses=("file://a/address",), token_file="token")

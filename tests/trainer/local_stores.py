"""Stores in the process of a test, which die and come back as if they were killed and restarted."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.flight as fl

from schemas.hashing import slot_of_row
from tests.trainer.stores import ACCESS, LAYOUT, TOKEN
from trainer.stores.remote.migration import OutgoingMigrations
from trainer.stores.remote.ownership import Ranges
from trainer.stores.remote.server import Actions, MessageLimits, StoreServer
from trainer.stores.remote.shard import Shard

LIMITS = MessageLimits(message_bytes=4096)
"""A hundred rows a message: a migration is many of them."""


class LocalStore:
    """A server over a shard, on one port and one directory."""

    def __init__(self, directory: Path, slots: Ranges) -> None:
        self.directory = directory
        self._slots, self._port = slots, 0
        self.is_alive = False

    @property
    def address(self) -> str:
        return f"grpc://127.0.0.1:{self._port}"

    def start(self) -> None:
        self.shard = Shard(self.directory, self._slots, sync=False)
        self.shard.load()
        self._outgoing = OutgoingMigrations(self.shard, ACCESS)
        actions = Actions(self.shard, self._outgoing, kill=lambda: None, restart=lambda: None)
        self._server = StoreServer(
            self.shard, self.address, token=TOKEN, limits=LIMITS, actions=actions
        )
        self._port, self.is_alive = self._server.port, True

    def kill(self, *, forget: bool = False) -> None:
        """Write nothing from now on, and stop to answer."""

        def refuse(*_: object) -> None:
            raise fl.FlightUnavailableError("the store is dead")

        log: Any = self.shard._log  # pyright: ignore[reportPrivateUsage]
        with self.shard.lock:
            log.append = log.replace = refuse
        self.shard.close()
        self._outgoing.end()
        self._server.shutdown()
        self.is_alive = False
        if forget:
            shutil.rmtree(self.directory)

    def hold(self, seconds: float) -> None:
        """Answer no call for some time."""
        with self.shard.lock:
            time.sleep(seconds)

    def last_steps(self, num_rows: int) -> np.ndarray:
        """Return the last step that wrote each row of the slots that the store owns, else -1."""
        found, owned = np.full(num_rows, -1), self.shard.control.owned
        if not self.shard.tables:
            return found
        table = self.shard.tables[LAYOUT.table]
        rows, steps, block = table.records(table.rows[owned[slot_of_row(table.rows)]])
        assert (block == steps[:, None]).all()
        found[rows] = steps
        return found

"""Stores in the process of a test, which die and come back as if they were killed and restarted."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.flight as fl

from presage.schemas.hashing import slot_of_row
from presage.trainer.stores.remote.server import StoreOptions, StoreServer
from presage.trainer.stores.remote.shard import Shard
from tests.trainer.stores import LAYOUT, TOKEN

MESSAGE_BYTES = 4096
"""A hundred rows a message: a move is many of them."""


class LocalStore:
    """A server over a shard, on one port and one directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._port = 0
        self.is_alive = False

    @property
    def address(self) -> str:
        return f"grpc://127.0.0.1:{self._port}"

    def start(self) -> None:
        self.shard = Shard(self.directory, sync=False)
        self.shard.load()
        options = StoreOptions(
            directory=self.directory, token=TOKEN, port=self._port, message_bytes=MESSAGE_BYTES
        )
        self._server = StoreServer(self.shard, options)
        self._port, self.is_alive = self._server.port, True

    def kill(self, *, forget: bool = False) -> None:
        """Write nothing from now on, and stop to answer."""

        def refuse(*_: object) -> None:
            raise fl.FlightUnavailableError("the store is dead")

        log: Any = self.shard._log  # pyright: ignore[reportPrivateUsage]
        with self.shard.lock:
            log.append = log.begin_log = refuse
        self.shard.close()
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
        assert owned[slot_of_row(table.rows)].all(), "it has no rows of others"
        rows, records = table.written(table.rows)
        assert (records.block == records.block[:, :1]).all()
        found[rows] = records.block[:, 0]
        return found

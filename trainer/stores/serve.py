"""A store process: one shard behind Flight, from its announcement until it is told to end."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from schemas.hashing import NUM_SLOTS
from trainer.stores.actions import Actions
from trainer.stores.claims import Ranges, check_ranges
from trainer.stores.departures import Departures
from trainer.stores.flight_server import Limits, StoreServer
from trainer.stores.peer import Access
from trainer.stores.shard import Shard
from trainer.stores.tls import Certificate, check_host, read_certificate, read_trusted, scheme_of
from trainer.stores.token import read_token
from trainer.stores.whereabouts import tell_address

_SHUTDOWN_SEC = 5.0
_ANSWER_SEC = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOptions:
    """What a store process is told on its command line."""

    directory: Path
    """Where its log lies."""
    token_file: Path
    """File whose text callers must present."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 0
    """Port to listen on; a free one when 0."""
    slots: Ranges = ((0, NUM_SLOTS),)
    """Slots that it serves from the start: first of each range and the one after its last."""
    certificate: Certificate | None = None
    """For TLS."""
    trusted: Path | None = None
    """PEM file of the authorities of other stores, which slots move to; the system's when None."""
    certificate_name: str | None = None
    """Name that certificates of other stores bear; the host of their address when None."""
    sync: bool = False
    """Whether each write waits for the device."""
    limits: Limits = field(default_factory=Limits)
    """Of messages."""

    def __post_init__(self) -> None:
        """Refuse to send rows over a network in the clear, and slots that there are not."""
        check_host(self.host, self.certificate)
        check_ranges(self.slots)


def run_store(
    options: StoreOptions, announce: Callable[[str], None], end_with: BinaryIO | None
) -> int | None:
    """Serve until SIGTERM or SIGINT, or until a pipe ends.

    Args:
        options: what to serve.
        announce: called with one JSON line when calls are answered: address, pid and slots.
        end_with: a pipe that the parent holds open; None to outlive the parent.

    Returns:
        The port on which it shall be started anew in its place, None when it was told to end.

    Raises:
        SchemaError: the directory or the token cannot be used.
    """
    token = read_token(options.token_file)
    scheme, certificate = scheme_of(options.certificate), read_certificate(options.certificate)
    shard = Shard(options.directory, options.slots, sync=options.sync)
    access = Access(
        token=token,
        certificates=read_trusted(options.trusted),
        certificate_name=options.certificate_name,
    )
    departures = Departures(shard, access, clock=time.monotonic)
    ended, again = threading.Event(), threading.Event()

    def end_soon(function: Callable[[], None]) -> None:
        threading.Timer(_ANSWER_SEC, function).start()  # its caller is answered first

    def restart() -> None:
        again.set()
        ended.set()

    actions = Actions(
        shard,
        departures,
        kill=lambda: end_soon(lambda: os.kill(os.getpid(), signal.SIGKILL)),
        restart=lambda: end_soon(restart),
    )
    try:
        shard.load()
        departures.settle_in_background()
        server = StoreServer(
            shard,
            f"{scheme}://{options.host}:{options.port}",
            token=token,
            limits=options.limits,
            actions=actions,
            certificate=certificate,
        )
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: ended.set())
        if end_with is not None:
            threading.Thread(target=_wait_for_end, args=(end_with, ended), daemon=True).start()
        address = f"{scheme}://{options.host}:{server.port}"
        tell_address(options.directory, address)
        announce(json.dumps({"address": address, "pid": os.getpid(), "slots": options.slots}))
        ended.wait()
        stopping = threading.Thread(target=server.shutdown, daemon=True)
        stopping.start()
        stopping.join(_SHUTDOWN_SEC)
        return server.port if again.is_set() else None
    finally:
        departures.end()
        shard.close()


def _wait_for_end(pipe: BinaryIO, ended: threading.Event) -> None:
    while pipe.read(1024):
        pass
    ended.set()

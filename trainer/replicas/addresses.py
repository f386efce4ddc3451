"""Where living replicas give their state: written for those that join, asked one by one."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from schemas.manifest import replace_bytes
from trainer.replicas.peer import Peer, PeerError
from trainer.stores.failures import BehindError
from trainer.stores.peer import Access

REPLICAS = "replicas.json"
"""File of the run with the addresses."""


class Addresses:
    """Addresses of a run, as one of its replicas uses them."""

    def __init__(self, run: Path, access: Access) -> None:
        """Remember where they are written.

        Args:
            run: run folder.
            access: how replicas reach each other.
        """
        self._path = run / REPLICAS
        self._access = access
        self._told: list[str] = []
        self._alone_since: float | None = None

    def tell(self, addresses: list[str]) -> None:
        """Write them for those that join."""
        if addresses != self._told:
            replace_bytes(self._path, json.dumps(addresses).encode())
            self._told = addresses

    def told(self) -> list[str]:
        """Return what the replica that writes has written."""
        return json.loads(self._path.read_text(encoding="utf-8")) if self._path.is_file() else []

    def first(self, addresses: Iterable[str], use: Callable[[Peer], None]) -> str:
        """Use the first replica that answers.

        Args:
            addresses: of those that can be asked.
            use: called with each until it raises no `PeerError`.

        Returns:
            Why the last one could not be used; empty where one was, or none is there.
        """
        trouble = ""
        for address in addresses:
            try:
                with Peer(address, self._access) as peer:
                    use(peer)
                return ""
            except PeerError as error:
                trouble = str(error)
        return trouble

    def reached(self, trouble: str) -> None:
        """Give up where those that are ahead are not reached for longer than a message may take.

        Args:
            trouble: what `first` returned.

        Raises:
            BehindError: this replica must be started again.
        """
        now = time.monotonic()
        self._alone_since = (self._alone_since or now) if trouble else None
        if self._alone_since and now - self._alone_since > self._access.timeout_sec:
            raise BehindError(f"others are ahead of this replica, and {trouble}; start it again")

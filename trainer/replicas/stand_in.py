"""Answers the lighthouse for members that have left as they were asked, so that nobody waits.

The lighthouse knows no good-bye: it waits for whoever was in the agreement before, and for whoever
showed a sign of life within the heartbeat's time. So the replica that writes the run's files asks
on in the name of those that have left. When it dies, or a step takes longer than the heartbeat's
time, the lighthouse has forgotten them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import suppress

from trainer.replicas.membership import Told, ask, connected

_NEVER = -1
"""A step that is never the one to be committed: others do not count on who tells it."""


class StandIns:
    """Those for whom this replica answers."""

    def __init__(self, lighthouse: str, heartbeat_sec: float) -> None:
        """Answer for nobody yet.

        Args:
            lighthouse: `http://host:port`.
            heartbeat_sec: after which the lighthouse waits for nobody who is silent.
        """
        self._lighthouse = lighthouse
        self._heartbeat_sec = heartbeat_sec
        self._wanted: dict[str, threading.Event] = {}

    def answer(self, names: Iterable[str]) -> None:
        """Answer once, in the next agreement, for members that are gone.

        Args:
            names: of those members.
        """
        for name in names:
            wanted = self._wanted.get(name)
            if wanted is None:
                wanted = self._wanted[name] = threading.Event()
                # a daemon: the end of the process does not wait for its answer
                threading.Thread(target=self._ask, args=(name, wanted), daemon=True).start()
            wanted.set()

    def _ask(self, name: str, wanted: threading.Event) -> None:
        told = Told(since=0, state="", meeting="", leaving=True)
        while wanted.wait():
            wanted.clear()
            # where it fails, the others wait a heartbeat's time, no more
            with suppress(RuntimeError, TimeoutError, ConnectionError):
                ask(connected(self._lighthouse), name, _NEVER, told, self._heartbeat_sec)

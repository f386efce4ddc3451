"""A bound on bytes that are under way at once: who wants more waits, and is told when in vain."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class BusyError(Exception):
    """Say that no room came free in time."""


class Budget:
    """Hands out room for bytes, first to those who fit."""

    def __init__(self, limit_bytes: int, wait_sec: float) -> None:
        """Start with nothing under way.

        Args:
            limit_bytes: most bytes under way.
            wait_sec: longest wait for room.
        """
        self._limit = limit_bytes
        self._wait_sec = wait_sec
        self._used = 0
        self._peak = 0
        self._changed = threading.Condition()

    @property
    def peak_bytes(self) -> int:
        """Most bytes that were under way at once."""
        return self._peak

    @contextmanager
    def reserve(self, num_bytes: int) -> Iterator[None]:
        """Hold room for bytes while inside.

        Raises:
            BusyError: others held it for too long.
        """
        with self._changed:
            if not self._changed.wait_for(
                lambda: self._used + num_bytes <= self._limit, self._wait_sec
            ):
                raise BusyError(f"{self._used} of {self._limit} bytes are under way")
            self._used += num_bytes
            self._peak = max(self._peak, self._used)
        try:
            yield
        finally:
            with self._changed:
                self._used -= num_bytes
                self._changed.notify_all()

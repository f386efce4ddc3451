"""Whether somebody has asked this process to end."""

from __future__ import annotations

import signal
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def asked_to_end() -> Generator[Callable[[], bool]]:
    """Notice the first SIGTERM or SIGINT; the second one ends this process, not its children."""
    seen: list[int] = []

    def notice(number: int, _: FrameType | None) -> None:
        if seen:
            raise SystemExit(128 + number)
        seen.append(number)

    old = {s: signal.signal(s, notice) for s in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield lambda: bool(seen)
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)

"""Ports of loopback for servers that are started later."""

from __future__ import annotations

import secrets
import socket
from itertools import islice
from pathlib import Path

GIVEN = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""First and last port that the kernel gives to connections: one of them is soon somebody's."""
LOWEST, HIGHEST = 10_000, 65_535


def free_ports(count: int) -> list[int]:
    """Return ports that nobody has now and that the kernel gives to no connection meanwhile.

    Args:
        count: so many; fewer where there are no more.
    """
    first, last = map(int, GIVEN.read_text(encoding="ascii").split())
    others = [*range(LOWEST, first), *range(last + 1, HIGHEST + 1)]
    candidates = others if len(others) >= count else [*range(LOWEST, HIGHEST + 1)]
    secrets.SystemRandom().shuffle(candidates)
    return list(islice(filter(_is_free, candidates), count))


def _is_free(port: int) -> bool:
    with socket.socket() as one:
        try:
            one.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True

"""What the processes of a container listen at and call, as the kernel tells it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

LISTENS, IS_CONNECTED = "0A", "01"
"""States in /proc/net/tcp."""


@dataclass(frozen=True, slots=True)
class Sockets:
    """TCP sockets of some processes, each end as (host, port).

    Attributes:
        listening: where they take calls.
        called: ends of the others that they have called.
    """

    listening: frozenset[tuple[str, int]]
    called: frozenset[tuple[str, int]]


def pids_with(variable: str, value: str) -> list[int]:
    """Return the processes that have this value of a variable since they began."""
    wanted = f"{variable}={value}".encode()
    found: list[int] = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


def sockets_of(pids: Iterable[int]) -> Sockets:
    """Return the sockets that processes have now."""
    inodes = {inode for pid in pids for inode in _inodes(pid)}
    rows = [row for row in _rows() if row[3] in inodes]
    listening = frozenset(own for state, own, _, _ in rows if state == LISTENS)
    used = {own[1] for own in listening}
    called = {
        other for state, own, other, _ in rows if state == IS_CONNECTED and own[1] not in used
    }
    return Sockets(listening, frozenset(called))


def _inodes(pid: int) -> Iterator[str]:
    with suppress(OSError):
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                kind, _, inode = str(file.readlink()).partition(":")
                if kind == "socket":
                    yield inode.strip("[]")


def _rows() -> Iterator[tuple[str, tuple[str, int], tuple[str, int], str]]:
    for version in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{version}").read_text().splitlines()[1:]:
            words = line.split()
            yield words[3], _end(words[1]), _end(words[2]), words[9]


def _end(text: str) -> tuple[str, int]:
    """Return host and port; IPv6 in one piece, but for mapped IPv4.

    Example:
        >>> _end("0200007F:1F90"), _end("0000000000000000FFFF00000300007F:0050")
        (('127.0.0.2', 8080), ('127.0.0.3', 80))
        >>> _end("00000000000000000000000000000000:0001")
        ('::', 1)
    """
    host, _, port = text.partition(":")
    mapped = host.removeprefix("0000000000000000FFFF0000")
    if len(mapped) == 8:
        parts = reversed(bytes.fromhex(mapped))
        return ".".join(map(str, parts)), int(port, 16)
    return ("::" if not int(host, 16) else host), int(port, 16)

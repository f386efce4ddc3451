"""Where a store is that is started again elsewhere: its address in a file that its callers see.

The address `file:///FOLDER/address` names the store for good, as `grpc://host:port` names one
that keeps its host: it stands in job files, in the map of slots and in logs of moves. Whoever
connects reads the file anew.
"""

from __future__ import annotations

from pathlib import Path

from schemas.events import STORE_ADDRESS
from schemas.manifest import replace_bytes

FILE = "file://"
"""Begins the address of a store that is found by such a file."""


def tell_address(directory: Path, address: str) -> None:
    """Let callers know where the store of this directory listens from now on."""
    replace_bytes(directory / STORE_ADDRESS, f"{address}\n".encode())


def found_at(address: str) -> str:
    """Return where a store listens now: its address, or what the file says that it names.

    Raises:
        OSError: the store has not begun.

    Example:
        >>> found_at("grpc+tls://store-0:7070")
        'grpc+tls://store-0:7070'
    """
    if not address.startswith(FILE):
        return address
    return Path(address.removeprefix(FILE)).read_text(encoding="utf-8").strip()

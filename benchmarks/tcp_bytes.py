"""Bytes that this process has sent over TCP, as the kernel counts them."""

from __future__ import annotations

import os
import socket
import struct
from contextlib import suppress
from pathlib import Path

_BYTES_SENT = 200
"""Offset of `tcpi_bytes_sent` in `struct tcp_info`, linux/tcp.h; `tcpi_bytes_retrans` follows."""


def sent_bytes(besides: int | None = None) -> int:
    """Return the payload bytes that all open TCP connections of this process have sent.

    Args:
        besides: port of a peer that does not count.
    """
    total = 0
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError), socket.socket(fileno=os.dup(int(entry.name))) as found:
            if found.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            if besides is not None and found.getpeername()[1] == besides:
                continue
            info = found.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_SENT + 16)
            sent, again = struct.unpack_from("=QQ", info, _BYTES_SENT)
            total += sent - again
    return total

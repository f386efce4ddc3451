"""Messages between all replicas over gloo, and the layout of partial sums."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import ProcessGroupGloo

from trainer.embedding.kernels.interface import RowSums
from trainer.gradient_sums import Node, PartialSums

Payload = torch.Tensor
"""(n,) uint8."""


class LostPeerError(Exception):
    """A member did not answer: it died or cannot be reached."""


class MeetingStore:
    """The key-value store through which replicas connect; served by this process."""

    def __init__(self, host: str, timeout_sec: float) -> None:
        """Listen on a free port.

        Args:
            host: address of the one interface to listen on.
            timeout_sec: maximum wait for a response.
        """
        listening = socket.create_server((host, 0))
        port = listening.getsockname()[1]
        self.address = f"{host}:{port}"
        self._store = TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_sec),
            master_listen_fd=listening.detach(),  # by default it listens on all interfaces
        )


class GlooGroup:
    """Connections to all other members; any failure closes them."""

    def __init__(self, host: str, timeout_sec: float, join_sec: float) -> None:
        """Connect to nothing yet.

        Args:
            host: address of the interface that others reach.
            timeout_sec: maximum wait for a message.
            join_sec: maximum wait for a member in `join`; it may have died since the agreement.
        """
        self._host = host
        self._join_timeout = timedelta(seconds=join_sec)
        self._timeout = timedelta(seconds=timeout_sec)
        self._key: str | None = None
        self._group: Any = None
        self._rank = 0
        self._size = 1
        self._pool = ThreadPoolExecutor(1, "gather")  # gloo's waits cannot be interrupted

    @property
    def key(self) -> str | None:
        """Key of the agreement that the connections are of; None without connections."""
        return self._key

    def join(self, key: str, meeting: str, rank: int, size: int) -> None:
        """Connect to all other members, which call this, too.

        Args:
            key: of the agreement; never reused.
            meeting: address of the first member's `Meeting`.
            rank: of this process.
            size: number of members.

        Raises:
            LostPeerError: a member did not join in time.
        """
        self.leave()
        self._rank, self._size = rank, size
        if size > 1:
            host, _, port = meeting.rpartition(":")
            gloo: Any = ProcessGroupGloo  # torch's stubs leave out most of it
            options = gloo._Options()
            options._devices = [gloo.create_device(hostname=self._host)]
            options._timeout = self._timeout
            try:
                store = TCPStore(host, int(port), is_master=False, timeout=self._join_timeout)
                keys = PrefixStore(key, store)
                keys.set(f"here/{rank}", "")
                # gloo would wait `timeout_sec` for a member that has died meanwhile
                keys.wait([f"here/{other}" for other in range(size)], self._join_timeout)
                self._group = gloo(keys, rank, size, options)
            except RuntimeError as error:
                raise LostPeerError(f"members must meet at {meeting}, got {error}") from error
        self._key = key

    def leave(self) -> None:
        """Close all connections; peers that wait for this process get an error."""
        if self._group is not None:
            self._group.abort()
        self._group, self._key = None, None

    def all_gather(
        self, message: Payload, ping_sec: float, others_alive: Callable[[], bool]
    ) -> list[Payload]:
        """Send a message of any size to all members and return those of all, by rank.

        Args:
            message: of this process.
            ping_sec: interval of calls of `others_alive` while waiting.
            others_alive: returns whether to continue to wait.

        Raises:
            LostPeerError: a member did not answer in time or is not alive; connections are closed.
        """
        if self._group is None:
            return [message]
        gathering = self._pool.submit(self._all_gather, self._group, message)
        try:
            while True:
                try:
                    return gathering.result(ping_sec)
                except TimeoutError:
                    if not gathering.done() and not others_alive():
                        self._pool.shutdown(wait=False)
                        self._pool = ThreadPoolExecutor(1, "gather")
                        raise RuntimeError("a member does not answer pings") from None
        except RuntimeError as error:
            self.leave()
            raise LostPeerError(f"a member did not answer: {error}") from error

    def _all_gather(self, group: Any, message: Payload) -> list[Payload]:
        sizes = [torch.empty(1, dtype=torch.int64) for _ in range(self._size)]
        group.allgather([sizes], [torch.tensor([len(message)])]).wait()
        messages = [
            message if rank == self._rank else torch.empty(int(size), dtype=torch.uint8)
            for rank, size in enumerate(sizes)
        ]
        others = [rank for rank in range(self._size) if rank != self._rank]
        works = [group.recv([messages[rank]], rank, 0) for rank in others]
        works += [group.send([message], rank, 0) for rank in others]
        for work in works:
            work.wait()
        return messages


# Layout of partial sums. Row ids are not sent, because all replicas know the rows of a step.
#
#     int64     number of nodes
#     per node  int64 level, number, rows; float64 loss, weight
#     per node  dense gradient; a bit per row of the step; the sums of the rows whose bit is set
#
# Each field starts at a multiple of 8 bytes.

_HEADER_WORDS, _WORD = 5, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class SumsShape:
    """Shape of a step's sums, the same for all replicas.

    Attributes:
        num_parameters: dense parameters.
        num_rows: rows of the step, in all tables.
        dim: of a row.
        dtype: of sums.
    """

    num_parameters: int
    num_rows: int
    dim: int
    dtype: torch.dtype


def pack_sums(held: Mapping[Node, PartialSums], shape: SumsShape) -> torch.Tensor:
    """Return sums, by node of the tree, as (n,) uint8."""
    header = np.zeros((len(held), _HEADER_WORDS), np.int64)
    fields: list[torch.Tensor] = []
    for words, (node, value) in zip(header, held.items(), strict=True):
        words[:3] = node.level, node.number, len(value.rows.rows)
        words[3:] = np.array([value.loss, value.weight]).view(np.int64)
        bits = np.zeros(shape.num_rows, bool)
        bits[value.rows.rows.numpy()] = True
        fields += [value.dense, torch.from_numpy(np.packbits(bits)), value.rows.sums]
    count = torch.tensor([len(held)])
    return torch.cat([_padded_bytes(field) for field in (count, torch.from_numpy(header), *fields)])


def unpack_sums(message: torch.Tensor, shape: SumsShape) -> dict[Node, PartialSums]:
    """Return the sums of a message of `pack_sums`; they share its memory.

    Raises:
        ValueError: the message is of another step or model.
    """
    reader = _FieldReader(message)
    [count] = reader.read(1, torch.int64).tolist()
    header = reader.read(count * _HEADER_WORDS, torch.int64).view(count, _HEADER_WORDS).numpy()
    sums: dict[Node, PartialSums] = {}
    for level, number, num_rows, *_ in header.tolist():
        loss, weight = header[len(sums), 3:].copy().view(np.float64).tolist()
        dense = reader.read(shape.num_parameters, shape.dtype)
        bits = reader.read(-(-shape.num_rows // 8), torch.uint8).numpy()
        rows = np.flatnonzero(np.unpackbits(bits, count=shape.num_rows)).astype(np.int32)
        if len(rows) != num_rows:
            raise ValueError(
                f"message must have the rows of the step, got {len(rows)} bits for {num_rows} rows"
            )
        row_sums = reader.read(num_rows * shape.dim, shape.dtype).view(num_rows, shape.dim)
        sums[Node(level, number)] = PartialSums(
            loss=loss, weight=weight, dense=dense, rows=RowSums(torch.from_numpy(rows), row_sums)
        )
    reader.check_end()
    return sums


class _FieldReader:
    def __init__(self, message: torch.Tensor) -> None:
        self._message = message
        self._offset = 0

    def read(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        size = count * dtype.itemsize
        field = self._message[self._offset : self._offset + size]
        if len(field) != size:
            raise ValueError(
                f"message must have {self._offset + size} bytes, got {len(self._message)}"
            )
        self._offset += -(-size // _WORD) * _WORD
        return field.view(dtype)

    def check_end(self) -> None:
        if self._offset != len(self._message):
            raise ValueError(f"message must have {self._offset} bytes, got {len(self._message)}")


def _padded_bytes(field: torch.Tensor) -> torch.Tensor:
    flat = field.contiguous().view(-1).view(torch.uint8)
    missing = -len(flat) % _WORD
    return torch.cat([flat, flat.new_zeros(missing)]) if missing else flat

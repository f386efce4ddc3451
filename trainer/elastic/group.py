"""Messages between all replicas over gloo, and their layout."""

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
from trainer.step import Node, Partial

Payload = torch.Tensor
"""(n,) uint8."""


class LostPeerError(Exception):
    """A member did not answer: it died, or is not reached."""


class MeetingStore:
    """Where replicas find each other: a key-value store that this process serves."""

    def __init__(self, host: str, timeout_sec: float) -> None:
        """Listen on a free port.

        Args:
            host: address of an interface of this machine; others are not listened on.
            timeout_sec: longest wait for an answer.
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
            master_listen_fd=listening.detach(),  # it would listen everywhere by itself
        )


class GlooGroup:
    """The connections to all other members; `join` makes them, any failure ends them."""

    def __init__(self, host: str, timeout_sec: float, meet_sec: float) -> None:
        """Connect to nobody yet.

        Args:
            host: address of the interface that others reach.
            timeout_sec: longest wait for a message.
            meet_sec: longest wait for a member to come where all meet; it may have died since.
        """
        self._host = host
        self._meet = timedelta(seconds=meet_sec)
        self._timeout = timedelta(seconds=timeout_sec)
        self._key: str | None = None
        self._group: Any = None
        self._rank = 0
        self._size = 1
        self._waiting = ThreadPoolExecutor(1, "gather")  # gloo's own waits cannot be ended

    @property
    def key(self) -> str | None:
        """Which agreement the connections are of; None where there are none."""
        return self._key

    def join(self, key: str, meeting: str, rank: int, size: int) -> None:
        """Connect to all other members, which do the same.

        Args:
            key: names the agreement; never used twice.
            meeting: address of the first member's `Meeting`.
            rank: of this process.
            size: number of members.

        Raises:
            LostPeerError: a member is not there.
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
                store = TCPStore(host, int(port), is_master=False, timeout=self._meet)
                met = PrefixStore(key, store)
                met.set(f"here/{rank}", "")
                # gloo would wait for a member that has died meanwhile as long as for a message
                met.wait([f"here/{other}" for other in range(size)], self._meet)
                self._group = gloo(met, rank, size, options)
            except RuntimeError as error:
                raise LostPeerError(f"members must meet at {meeting}, got {error}") from error
        self._key = key

    def leave(self) -> None:
        """Close all connections; who waits for this process learns of it."""
        if self._group is not None:
            self._group.abort()
        self._group, self._key = None, None

    def gather(
        self, mine: Payload, look_sec: float, others_live: Callable[[], bool]
    ) -> list[Payload]:
        """Send a message to all members and return those of all, by rank.

        Args:
            mine: of any size.
            look_sec: time after which it is asked, again and again, whether to wait on.
            others_live: asked then.

        Raises:
            LostPeerError: a member did not answer in time or does not live; connections are closed.
        """
        if self._group is None:
            return [mine]
        gathering = self._waiting.submit(self._gather, self._group, mine)
        try:
            while True:
                try:
                    return gathering.result(look_sec)
                except TimeoutError:
                    if not gathering.done() and not others_live():
                        self._waiting.shutdown(wait=False)
                        self._waiting = ThreadPoolExecutor(1, "gather")
                        raise RuntimeError("a member that does not say that it lives") from None
        except RuntimeError as error:
            self.leave()
            raise LostPeerError(f"all members must answer, got {error}") from error

    def _gather(self, group: Any, mine: Payload) -> list[Payload]:
        sizes = [torch.empty(1, dtype=torch.int64) for _ in range(self._size)]
        group.allgather([sizes], [torch.tensor([len(mine)])]).wait()
        found = [
            mine if rank == self._rank else torch.empty(int(size), dtype=torch.uint8)
            for rank, size in enumerate(sizes)
        ]
        others = [rank for rank in range(self._size) if rank != self._rank]
        works = [group.recv([found[rank]], rank, 0) for rank in others]
        works += [group.send([mine], rank, 0) for rank in others]
        for work in works:
            work.wait()
        return found


# Partial sums as one message: without row ids, for all replicas have the rows of a step.
#
#     int64     number of nodes
#     per node  int64 level, number, rows; float64 loss, weight
#     per node  dense gradient; a bit per row of the step; the sums of the rows whose bit is set
#
# Each piece begins at a multiple of 8 bytes.

_HEAD, _WORD = 5, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class SumsShape:
    """What all replicas know of a step's sums.

    Attributes:
        num_parameters: dense ones.
        num_rows: of the step, all tables together.
        dim: of a row.
        dtype: of sums.
    """

    num_parameters: int
    num_rows: int
    dim: int
    dtype: torch.dtype


def pack_sums(held: Mapping[Node, Partial], shape: SumsShape) -> torch.Tensor:
    """Return sums as (n,) uint8.

    Args:
        held: sums by node of the tree.
        shape: of the step.
    """
    head = np.zeros((len(held), _HEAD), np.int64)
    pieces: list[torch.Tensor] = []
    for place, (node, value) in zip(head, held.items(), strict=True):
        place[:3] = node.level, node.number, len(value.rows.rows)
        place[3:] = np.array([value.loss, value.weight]).view(np.int64)
        bits = np.zeros(shape.num_rows, bool)
        bits[value.rows.rows.numpy()] = True
        pieces += [value.dense, torch.from_numpy(np.packbits(bits)), value.rows.sums]
    count = torch.tensor([len(held)])
    return torch.cat([_bytes(piece) for piece in (count, torch.from_numpy(head), *pieces)])


def unpack_sums(message: torch.Tensor, shape: SumsShape) -> dict[Node, Partial]:
    """Return the sums of a message; they share its memory.

    Args:
        message: what `pack` returned.
        shape: of the step.

    Raises:
        ValueError: the message is of another step or model.
    """
    pieces = _Pieces(message)
    [count] = pieces.take(1, torch.int64).tolist()
    head = pieces.take(count * _HEAD, torch.int64).view(count, _HEAD).numpy()
    found: dict[Node, Partial] = {}
    for level, number, num_rows, *_ in head.tolist():
        loss, weight = head[len(found), 3:].copy().view(np.float64).tolist()
        dense = pieces.take(shape.num_parameters, shape.dtype)
        bits = pieces.take(-(-shape.num_rows // 8), torch.uint8).numpy()
        rows = np.flatnonzero(np.unpackbits(bits, count=shape.num_rows)).astype(np.int32)
        if len(rows) != num_rows:
            raise ValueError(
                f"message must have the rows of the step, got {len(rows)} bits for {num_rows} rows"
            )
        sums = pieces.take(num_rows * shape.dim, shape.dtype).view(num_rows, shape.dim)
        found[Node(level, number)] = Partial(
            loss=loss, weight=weight, dense=dense, rows=RowSums(torch.from_numpy(rows), sums)
        )
    pieces.end()
    return found


class _Pieces:
    """Cuts a message."""

    def __init__(self, message: torch.Tensor) -> None:
        self._message = message
        self._at = 0

    def take(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        size = count * dtype.itemsize
        piece = self._message[self._at : self._at + size]
        if len(piece) != size:
            raise ValueError(f"message must have {self._at + size} bytes, got {len(self._message)}")
        self._at += -(-size // _WORD) * _WORD
        return piece.view(dtype)

    def end(self) -> None:
        if self._at != len(self._message):
            raise ValueError(f"message must have {self._at} bytes, got {len(self._message)}")


def _bytes(piece: torch.Tensor) -> torch.Tensor:
    flat = piece.contiguous().view(-1).view(torch.uint8)
    missing = -len(flat) % _WORD
    return torch.cat([flat, flat.new_zeros(missing)]) if missing else flat

"""The sums of a step over all replicas: who computes which microbatches, and their exchange.

1. `SplitPlanner` assigns microbatches.
2. `GlooGroup` sends messages between all replicas; `pack_sums` and `unpack_sums` define them.
3. `SumsExchange` adds the sums of all replicas.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import ProcessGroupGloo

from presage.schemas.dataset.order import split_by_work
from presage.trainer.agreement import Agreement
from presage.trainer.elastic.membership import ReplicaOptions
from presage.trainer.elastic.peer_state import PeerClient, PeerError
from presage.trainer.embedding.kernels.interface import RowSums
from presage.trainer.step import Node, PartialSums, Tree
from presage.trainer.steps import NO_MICROBATCHES
from presage.trainer.stores.remote.wire import check_address

SPLIT_AHEAD_STEPS = 2
"""Steps that splits are fixed in advance."""


def split_microbatches(work: Sequence[float], speeds: Mapping[str, float]) -> dict[str, range]:
    """Split the microbatches of a step into one range per replica, in proportion to speed.

    Ranges follow the order of names. The time of the step, the maximum of work over speed, is
    minimal.

    Args:
        work: of each microbatch of the step.
        speeds: by replica, work per second, positive.

    Example:
        >>> split_microbatches([1] * 8, {"a": 2.0, "b": 1.0, "c": 1.0})
        {'a': range(0, 4), 'b': range(4, 6), 'c': range(6, 8)}
    """
    if not speeds or min(speeds.values()) <= 0:
        raise ValueError(f"speeds must be positive, got {dict(speeds)}; leave others out")
    names = sorted(speeds)
    runs = split_by_work(work, [speeds[name] for name in names])
    return {name: range(run.start, run.stop) for name, run in zip(names, runs, strict=True)}


def fill_missing_speeds(speeds: Mapping[str, float | None]) -> dict[str, float]:
    """Replace the speed of replicas that have none yet by the median of the others."""
    measured: Sequence[float] = sorted(s for s in speeds.values() if s is not None)
    median = measured[len(measured) // 2] if measured else 1.0
    return {name: median if speed is None else speed for name, speed in speeds.items()}


class SplitPlanner:
    """Splits of the next steps; the same on all replicas that take part in them."""

    def __init__(self, name: str) -> None:
        """Start without a split; the first agreement fixes one."""
        self._name = name
        self._splits: dict[int, dict[str, range]] = {}
        self._staying: tuple[str, ...] = ()

    def own_range(self, step: int) -> range | None:
        """Return the microbatches of a step that this replica computes, None if not yet fixed."""
        split = self._splits.get(step)
        return None if split is None else split.get(self._name, NO_MICROBATCHES)

    def reset(self) -> None:
        """Drop all splits, after the others have continued without this replica."""
        self._splits, self._staying = {}, ()

    def assign(
        self, agreement: Agreement, work: Callable[[int], Sequence[float]]
    ) -> dict[str, range]:
        """Return the microbatches of a step by ready replica, and fix the split of a later one.

        They are those that the replicas have computed. If one is missing, because a replica was
        lost, or was computed twice, the step is split anew, and computed again.

        Args:
            agreement: of the step that this replica is at.
            work: of each microbatch of any step; empty where it is not known yet.
        """
        step, ready = agreement.step, agreement.ready
        speeds = fill_missing_speeds({name: m.status.speed for name, m in ready.items()})
        owners = {name: range(*m.status.microbatches) for name, m in ready.items()}
        of_step = work(step)
        if sorted(chain(*owners.values())) != list(range(len(of_step))):
            owners = split_microbatches(of_step, speeds)
        self._plan(step, {name: speeds[name] for name in agreement.staying}, work)
        return owners

    def _plan(
        self,
        step: int,
        speeds: Mapping[str, float],
        work: Callable[[int], Sequence[float]],
    ) -> None:
        staying = tuple(speeds)
        changed = staying != self._staying
        self._staying = staying
        self._splits = {s: split for s, split in self._splits.items() if s > step and not changed}
        for later in range(step + 1, step + SPLIT_AHEAD_STEPS + 1) if staying else ():
            if later not in self._splits and (of_step := work(later)):
                self._splits[later] = split_microbatches(of_step, speeds)


# ---- Messages between all replicas ----

Payload = torch.Tensor
"""(n,) uint8."""


class LostPeerError(Exception):
    """A member did not answer: it died or cannot be reached."""


class MeetingStore:
    """The key-value store through which replicas connect; served by this process."""

    def __init__(self, host: str, timeout_sec: float) -> None:
        check_address(host, 0)
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
        self.key: str | None = None
        """Key of the agreement that the connections are of; None without connections."""
        self._group: Any = None
        self._rank = 0
        self._size = 1
        self._pool = ThreadPoolExecutor(1, "gather")  # gloo's waits cannot be interrupted

    def join(self, key: str, meeting: str, rank: int, size: int) -> None:
        """Connect to all other members, which call this, too, with a key that is never reused.

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
                raise LostPeerError(f"members could not connect at {meeting}: {error}") from error
        self.key = key

    def leave(self) -> None:
        """Close all connections; peers that wait for this process get an error."""
        if self._group is not None:
            self._group.abort()
        self._group, self.key = None, None

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
            while not wait([gathering], ping_sec).done:
                if not others_alive():
                    self._pool.shutdown(wait=False)
                    self._pool = ThreadPoolExecutor(1, "gather")
                    raise RuntimeError("a member does not answer pings")
            return gathering.result()
        except (RuntimeError, TimeoutError) as error:  # `gathering` may raise either
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
#     int64     bytes of the header, a multiple of 8
#     header    JSON: [level, number, loss, weight, rows] of each node
#     per node  dense gradient; the sums of its rows
#     per node  a bit per row of the step, which is set if it has a sum


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
    nodes = [[*node, v.loss, v.weight, len(v.rows.rows)] for node, v in held.items()]
    header = json.dumps(nodes).encode()
    header += b" " * (-len(header) % 8)
    bits = np.zeros((len(held), shape.num_rows), bool)
    for has_sum, value in zip(bits, held.values(), strict=True):
        has_sum[value.rows.rows.numpy()] = True
    parts = [
        torch.tensor([len(header)]),
        torch.frombuffer(bytearray(header), dtype=torch.uint8),
        *(part for value in held.values() for part in (value.dense, value.rows.sums)),
        torch.from_numpy(np.packbits(bits, axis=1)),
    ]
    return torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in parts])


def unpack_sums(message: torch.Tensor, shape: SumsShape) -> dict[Node, PartialSums]:
    """Return the sums of a message of `pack_sums`; they share its memory.

    Raises:
        ValueError: the message is of another step or model.
    """
    start = 8 + int(message[:8].view(torch.int64))
    nodes = json.loads(message[8:start].numpy().tobytes())
    sizes = [n for *_, rows in nodes for n in (shape.num_parameters, rows * shape.dim)]
    end, row_bytes = start + sum(sizes) * shape.dtype.itemsize, -(-shape.num_rows // 8)
    if len(message) != end + len(nodes) * row_bytes:
        raise ValueError(
            f"message must have {end + len(nodes) * row_bytes} bytes, got {len(message)}"
        )
    bits = message[end:].numpy().reshape(len(nodes), row_bytes)
    parts = iter(message[start:end].view(shape.dtype).split(sizes))
    sums: dict[Node, PartialSums] = {}
    for (level, number, loss, weight, num_rows), packed in zip(nodes, bits, strict=True):
        rows = np.flatnonzero(np.unpackbits(packed, count=shape.num_rows)).astype(np.int32)
        dense, row_sums = next(parts), next(parts).view(num_rows, shape.dim)
        sums[Node(level, number)] = PartialSums(
            loss=loss, weight=weight, dense=dense, rows=RowSums(torch.from_numpy(rows), row_sums)
        )
    return sums


# ---- The exchange of a step ----

JOIN_HEARTBEATS = 5
"""Heartbeat time-outs after which a member that does not join is dropped."""
PING_HEARTBEATS = 2
"""Heartbeat time-outs after which a member is pinged, and in which it must answer."""


class SumsExchange:
    """Exchange of partial sums with the other replicas; connections close with the context."""

    def __init__(self, options: ReplicaOptions) -> None:
        """Start to listen; `total` connects."""
        self._name = options.name
        self._ping_sec = PING_HEARTBEATS * options.heartbeat_sec
        self._ping_access = replace(options.access, timeout_sec=self._ping_sec)
        self._meeting = MeetingStore(options.host, options.access.timeout_sec)
        join_sec = min(options.access.timeout_sec, JOIN_HEARTBEATS * options.heartbeat_sec)
        self._group = GlooGroup(options.host, options.access.timeout_sec, join_sec)

    @property
    def meeting(self) -> str:
        """Address of this replica's `MeetingStore`."""
        return self._meeting.address

    def __enter__(self) -> SumsExchange:
        return self

    def __exit__(self, *error: object) -> None:
        self._group.leave()

    def total(
        self, agreement: Agreement, tree: Tree[PartialSums], shape: SumsShape
    ) -> tuple[PartialSums, torch.Tensor]:
        """Return the sum over all microbatches of a step, and its message.

        Raises:
            LostPeerError: a member did not answer.
        """
        names = list(agreement.ready)
        if self._group.key != agreement.key:
            meeting = agreement.ready[names[0]].status.meeting
            rank = names.index(self._name)
            self._group.join(agreement.key, meeting, rank, len(names))
        messages = self._group.all_gather(
            pack_sums(tree.held, shape), self._ping_sec, lambda: self._others_alive(agreement)
        )
        for name, message in zip(names, messages, strict=True):
            if name != self._name:
                for node, value in unpack_sums(message, shape).items():
                    tree.add(node, value)
        total = tree.total()
        [node] = tree.held
        return total, pack_sums({node: total}, shape)

    def _others_alive(self, agreement: Agreement) -> bool:
        """Return whether all others answer a ping: a stopped process keeps its connections."""
        for name, member in agreement.ready.items():
            if name != self._name:
                try:
                    with PeerClient(member.status.state, self._ping_access) as peer:
                        peer.ping()
                except PeerError:
                    return False
        return True

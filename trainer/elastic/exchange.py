"""PartialSums sums between replicas, and which microbatches each replica computes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from schemas.run_log import StepSplit
from trainer.elastic.group import GlooGroup, MeetingStore, SumsShape, pack_sums, unpack_sums
from trainer.elastic.membership import Agreement, Member
from trainer.elastic.options import ReplicaOptions
from trainer.elastic.peer_state import PeerClient, PeerError
from trainer.gradient_sums import PartialSums, Tree

SPLIT_AHEAD_STEPS = 2
"""Steps that splits are fixed in advance."""
NO_MICROBATCHES = range(0)
JOIN_HEARTBEATS = 5
"""Heartbeat time-outs after which a member that does not join is dropped."""
PING_HEARTBEATS = 2
"""Heartbeat time-outs after which a member is pinged, and in which it must answer."""


def split_microbatches(num_microbatches: int, speeds: Mapping[str, float]) -> dict[str, range]:
    """StepSplit the microbatches of a step into one range per replica, in proportion to speed.

    Ranges follow the order of names. The time of the step, the maximum of range lengths over
    speeds, is minimal; ties are broken towards longer ranges for earlier names.

    Args:
        num_microbatches: of the step.
        speeds: by replica, microbatches per second, positive.

    Example:
        >>> split_microbatches(8, {"a": 2.0, "b": 1.0, "c": 1.0})
        {'a': range(0, 4), 'b': range(4, 6), 'c': range(6, 8)}
    """
    if not speeds or min(speeds.values()) <= 0:
        raise ValueError(f"speeds must be positive, got {dict(speeds)}; leave others out")
    counts = dict.fromkeys(sorted(speeds), 0)
    for _ in range(num_microbatches):
        # one more for the replica that would finish it first
        soonest = min(counts, key=lambda name: ((counts[name] + 1) / speeds[name], name))
        counts[soonest] += 1
    ranges: dict[str, range] = {}
    first = 0
    for name, count in counts.items():
        ranges[name] = range(first, first + count)
        first += count
    return ranges


def reassign_missing(
    num_microbatches: int, held: Mapping[str, Collection[int]], speeds: Mapping[str, float]
) -> dict[str, list[int]]:
    """Assign the microbatches of a step that no living replica computes.

    Args:
        num_microbatches: of the step.
        held: by living replica, the microbatches that it computes already.
        speeds: by living replica, microbatches per second.

    Returns:
        By replica the additional microbatches.

    Example:
        >>> reassign_missing(4, {"a": [0], "c": [3]}, {"a": 1.0, "c": 1.0})
        {'a': [1], 'c': [2]}
    """
    missing = sorted(set(range(num_microbatches)) - {n for own in held.values() for n in own})
    ranges = split_microbatches(len(missing), speeds)
    return {name: [missing[i] for i in chosen] for name, chosen in ranges.items()}


def smooth_speed(before: float | None, measured: float, weight: float = 0.3) -> float:
    """Return the exponential moving average of a speed; `before` is None for the first."""
    return measured if before is None else before + weight * (measured - before)


def fill_missing_speeds(speeds: Mapping[str, float | None]) -> dict[str, float]:
    """Replace the speed of replicas that have none yet by the median of the others."""
    measured: Sequence[float] = sorted(s for s in speeds.values() if s is not None)
    median = measured[len(measured) // 2] if measured else 1.0
    return {name: median if speed is None else speed for name, speed in speeds.items()}


def contiguous_ranges(numbers: list[int]) -> list[range]:
    """Return ascending numbers as maximal ranges.

    Example:
        >>> contiguous_ranges([1, 2, 5])
        [range(1, 3), range(5, 6)]
    """
    ranges: list[range] = []
    for number in numbers:
        if ranges and ranges[-1].stop == number:
            ranges[-1] = range(ranges[-1].start, number + 1)
        else:
            ranges.append(range(number, number + 1))
    return ranges


@dataclass(frozen=True, slots=True, kw_only=True)
class StepAssignment:
    """Remaining work of the step in flight.

    Attributes:
        owners: by ready replica its microbatches, all of the step in total.
        ranges: microbatches that this replica computes in addition.
        dropped: whether the results of this replica so far are discarded, because another one
            computes the same microbatches.
    """

    owners: Mapping[str, list[int]]
    ranges: list[range]
    dropped: bool


class SplitPlanner:
    """Splits of the next steps; the same on all replicas that take part in them."""

    def __init__(self, name: str) -> None:
        """Start without a split; the first agreement fixes one.

        Args:
            name: of this replica.
        """
        self._name = name
        self._splits: dict[int, dict[str, range]] = {}
        self._staying: tuple[str, ...] = ()
        self._new_splits: list[StepSplit] = []

    def own_range(self, step: int) -> range:
        """Return the microbatches of a step that this replica computes."""
        return self._splits.get(step, {}).get(self._name, NO_MICROBATCHES)

    def reset(self) -> None:
        """Drop all splits, after the others have continued without this replica."""
        self._splits, self._staying, self._new_splits = {}, (), []

    def take_new_splits(self) -> list[StepSplit]:
        """Return the splits fixed since the last call that differ from the step before."""
        splits, self._new_splits = self._new_splits, []
        return splits

    def assign(
        self, agreement: Agreement, num_microbatches: Callable[[int], int]
    ) -> StepAssignment:
        """Assign the remaining microbatches of a step, and fix the split of a later one.

        Args:
            agreement: of the step that this replica is at.
            num_microbatches: of any step; 0 where it is not known yet.
        """
        step, ready = agreement.step, agreement.ready
        speeds = fill_missing_speeds({name: m.status.speed for name, m in ready.items()})
        held = _without_duplicates(ready)
        add_partial_sums = reassign_missing(num_microbatches(step), held, speeds)
        self._plan(step, {name: speeds[name] for name in agreement.staying}, num_microbatches)
        return StepAssignment(
            owners={name: sorted([*held[name], *add_partial_sums[name]]) for name in ready},
            ranges=contiguous_ranges(add_partial_sums[self._name]),
            dropped=len(held[self._name]) < len(ready[self._name].status.leaves),
        )

    def _plan(
        self,
        step: int,
        speeds: Mapping[str, float],
        num_microbatches: Callable[[int], int],
    ) -> None:
        staying = tuple(speeds)
        changed = staying != self._staying
        self._staying = staying
        self._splits = {s: split for s, split in self._splits.items() if s > step and not changed}
        for later in range(step + 1, step + SPLIT_AHEAD_STEPS + 1) if staying else ():
            if later not in self._splits and num_microbatches(later):
                self._splits[later] = split_microbatches(num_microbatches(later), speeds)
                if self._splits[later] != self._splits.get(later - 1):
                    leaves = {n: (own.start, own.stop) for n, own in self._splits[later].items()}
                    self._new_splits.append(StepSplit(step=later, fixed_at=step, leaves=leaves))


def _without_duplicates(ready: Mapping[str, Member]) -> dict[str, tuple[int, ...]]:
    """Return each replica's microbatches, none for one that overlaps with an older replica."""
    assigned: set[int] = set()
    held: dict[str, tuple[int, ...]] = {}
    for name in sorted(ready, key=lambda name: (ready[name].status.since, name)):
        own = ready[name].status.leaves
        held[name] = () if assigned.intersection(own) else own
        assigned.update(held[name])
    return held


class Exchange:
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

    def __enter__(self) -> Exchange:
        """Return the exchange."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close the connections."""
        self._group.leave()

    def total(
        self, agreement: Agreement, tree: Tree[PartialSums], shape: SumsShape
    ) -> tuple[PartialSums, torch.Tensor]:
        """Return the sum over all microbatches of a step, and its message.

        Args:
            agreement: of the step.
            tree: sums of this replica's microbatches; those of others are add_partial_sums.
            shape: of the step.

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

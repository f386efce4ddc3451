"""Partial sums between replicas, and which microbatches each replica computes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from schemas.run_log import StepSplit
from trainer.elastic.group import GlooGroup, MeetingStore, SumsShape, pack_sums, unpack_sums
from trainer.elastic.membership import Agreement, Member
from trainer.elastic.options import ReplicaOptions
from trainer.elastic.peer_state import PeerClient, PeerError
from trainer.step import Partial, Tree


def split_microbatches(num_leaves: int, speeds: Mapping[str, float]) -> dict[str, range]:
    """Cut the leaves of a step into one run per replica, in proportion to speed.

    Runs lie in the order of the names. The largest of all runs over speeds, the time of the step,
    is the smallest that whole leaves allow; of equal cuts the one with earlier long runs is taken.

    Args:
        num_leaves: of the step.
        speeds: by replica, leaves per second, positive.

    Returns:
        by replica its leaves, some of them perhaps none.

    Example:
        >>> split(8, {"a": 2.0, "b": 1.0, "c": 1.0})
        {'a': range(0, 4), 'b': range(4, 6), 'c': range(6, 8)}
    """
    if not speeds or min(speeds.values()) <= 0:
        raise ValueError(f"speeds must be positive, got {dict(speeds)}; leave others out")
    counts = dict.fromkeys(sorted(speeds), 0)
    for _ in range(num_leaves):
        # one leaf more for whoever would be done with it first
        soonest = min(counts, key=lambda name: ((counts[name] + 1) / speeds[name], name))
        counts[soonest] += 1
    runs: dict[str, range] = {}
    first = 0
    for name, count in counts.items():
        runs[name] = range(first, first + count)
        first += count
    return runs


def reassign_missing(
    num_leaves: int, held: Mapping[str, Collection[int]], speeds: Mapping[str, float]
) -> dict[str, list[int]]:
    """Share out the leaves of a step in flight that no living replica has.

    Args:
        num_leaves: of the step.
        held: by living replica, the leaves that it computes already.
        speeds: by living replica, leaves per second.

    Returns:
        by replica the leaves that it computes besides.

    Example:
        >>> taken_over(4, {"a": [0], "c": [3]}, {"a": 1.0, "c": 1.0})
        {'a': [1], 'c': [2]}
    """
    missing = sorted(set(range(num_leaves)) - {leaf for run in held.values() for leaf in run})
    runs = split_microbatches(len(missing), speeds)
    return {name: [missing[i] for i in run] for name, run in runs.items()}


def smooth_speed(before: float | None, measured: float, weight: float = 0.3) -> float:
    """Return a speed that follows what was measured, and forgets.

    Args:
        before: None for the first.
        measured: leaves per second of one step.
        weight: of the newest.
    """
    return measured if before is None else before + weight * (measured - before)


def fill_missing_speeds(told: Mapping[str, float | None]) -> dict[str, float]:
    """Return a speed for every replica: one that has none yet is as fast as the middle of them.

    Args:
        told: by replica, leaves per second, None before its first step.
    """
    known: Sequence[float] = sorted(s for s in told.values() if s is not None)
    middle = known[len(known) // 2] if known else 1.0
    return {name: middle if speed is None else speed for name, speed in told.items()}


SPLIT_AHEAD_STEPS = 2
"""Steps that splits are fixed ahead."""
NO_MICROBATCHES = range(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepAssignment:
    """What an agreement leaves to do in the step in flight.

    Attributes:
        owners: by ready replica its leaves, all of the step together.
        runs: leaves that this replica computes besides.
        dropped: what this replica computed so far is another's, too, and does not count.
    """

    owners: Mapping[str, list[int]]
    runs: list[range]
    dropped: bool


class SplitPlanner:
    """Splits of the next steps; the same on all replicas that take part in them."""

    def __init__(self, name: str) -> None:
        """Begin without a share: an agreement gives one.

        Args:
            name: of this replica.
        """
        self._name = name
        self._splits: dict[int, dict[str, range]] = {}
        self._staying: tuple[str, ...] = ()
        self._fixed: list[StepSplit] = []

    def mine(self, step: int) -> range:
        """Return the leaves of a step that this replica is to compute."""
        return self._splits.get(step, {}).get(self._name, NO_MICROBATCHES)

    def forget(self) -> None:
        """Drop all splits: the others have gone on without this replica."""
        self._splits, self._staying, self._fixed = {}, (), []

    def fixed(self) -> list[StepSplit]:
        """Return the splits that were fixed since the last call and differ from the step before."""
        found, self._fixed = self._fixed, []
        return found

    def heed(self, agreement: Agreement, num_leaves: Callable[[int], int]) -> StepAssignment:
        """Share out what is left of a step, and fix the split of a later one.

        Args:
            agreement: of the step that this replica is at.
            num_leaves: of any step; none where it is not known yet.
        """
        step, ready = agreement.step, agreement.ready
        speeds = fill_missing_speeds({name: m.told.speed for name, m in ready.items()})
        held = _without_doubles(ready)
        added = reassign_missing(num_leaves(step), held, speeds)
        self._plan(step, {name: speeds[name] for name in agreement.staying}, num_leaves)
        return StepAssignment(
            owners={name: sorted([*held[name], *added[name]]) for name in ready},
            runs=contiguous_ranges(added[self._name]),
            dropped=len(held[self._name]) < len(ready[self._name].told.leaves),
        )

    def _plan(
        self,
        step: int,
        speeds: Mapping[str, float],
        num_leaves: Callable[[int], int],
    ) -> None:
        staying = tuple(speeds)
        changed = staying != self._staying
        self._staying = staying
        self._splits = {s: found for s, found in self._splits.items() if s > step and not changed}
        for later in range(step + 1, step + SPLIT_AHEAD_STEPS + 1) if staying else ():
            if later not in self._splits and num_leaves(later):
                self._splits[later] = split_microbatches(num_leaves(later), speeds)
                if self._splits[later] != self._splits.get(later - 1):
                    leaves = {n: (run.start, run.stop) for n, run in self._splits[later].items()}
                    self._fixed.append(StepSplit(step=later, fixed_at=step, leaves=leaves))


def contiguous_ranges(leaves: list[int]) -> list[range]:
    """Return ascending numbers as runs of neighbours.

    Example:
        >>> runs_of([1, 2, 5])
        [range(1, 3), range(5, 6)]
    """
    found: list[range] = []
    for leaf in leaves:
        if found and found[-1].stop == leaf:
            found[-1] = range(found[-1].start, leaf + 1)
        else:
            found.append(range(leaf, leaf + 1))
    return found


def _without_doubles(ready: Mapping[str, Member]) -> dict[str, tuple[int, ...]]:
    """Return each replica's leaves; one that tells another's leaves counts with none."""
    taken: set[int] = set()
    held: dict[str, tuple[int, ...]] = {}
    for name in sorted(ready, key=lambda name: (ready[name].told.since, name)):
        leaves = ready[name].told.leaves
        held[name] = () if taken.intersection(leaves) else leaves
        taken.update(held[name])
    return held


JOIN_HEARTBEATS = 5
"""Heartbeats after which a member that was agreed on and does not come is asked about again."""
PING_HEARTBEATS = 2
"""Heartbeats after which a member is asked whether it lives, and in which it has to say so."""


class Exchange:
    """The connections of one replica to the others; a context that closes them."""

    def __init__(self, options: ReplicaOptions) -> None:
        """Listen; connections are made when they are agreed on."""
        self._name = options.name
        self._look_sec = PING_HEARTBEATS * options.heartbeat_sec
        self._asking = replace(options.access, timeout_sec=self._look_sec)
        self._meeting = MeetingStore(options.host, options.access.timeout_sec)
        meet_sec = min(options.access.timeout_sec, JOIN_HEARTBEATS * options.heartbeat_sec)
        self._group = GlooGroup(options.host, options.access.timeout_sec, meet_sec)

    @property
    def meeting(self) -> str:
        """Address where others find each other."""
        return self._meeting.address

    def __enter__(self) -> Exchange:
        """Do nothing."""
        return self

    def __exit__(self, *error: object) -> None:
        """Leave the others."""
        self._group.leave()

    def total(
        self, agreement: Agreement, tree: Tree[Partial], shape: SumsShape
    ) -> tuple[Partial, torch.Tensor]:
        """Return the sum of all leaves of a step, and that as a message.

        Args:
            agreement: of the step.
            tree: sums of the leaves that this replica has; those of others are added.
            shape: of the step.

        Raises:
            LostPeerError: a member did not answer.
        """
        names = list(agreement.ready)
        if self._group.key != agreement.key:
            meeting = agreement.ready[names[0]].told.meeting
            rank = names.index(self._name)
            self._group.join(agreement.key, meeting, rank, len(names))
        found = self._group.gather(
            pack_sums(tree.held, shape), self._look_sec, lambda: self._others_live(agreement)
        )
        for name, message in zip(names, found, strict=True):
            if name != self._name:
                for node, value in unpack_sums(message, shape).items():
                    tree.add(node, value)
        total = tree.total()
        [node] = tree.held
        return total, pack_sums({node: total}, shape)

    def _others_live(self, agreement: Agreement) -> bool:
        """Tell whether all others answer: one that is held keeps its connections."""
        for name, member in agreement.ready.items():
            if name != self._name:
                try:
                    with PeerClient(member.told.state, self._asking) as peer:
                        peer.ask_if_it_lives()
                except PeerError:
                    return False
        return True

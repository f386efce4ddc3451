"""Who computes which leaves of the next steps, as each replica works it out by itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from schemas.events import Split
from trainer.replicas.membership import Agreement, Member
from trainer.replicas.splits import agreed_speeds, split, taken_over

AHEAD = 2
"""Steps that splits are fixed ahead."""
NONE = range(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class More:
    """What an agreement leaves to do in the step in flight.

    Attributes:
        owners: by ready replica its leaves, all of the step together.
        runs: leaves that this replica computes besides.
        dropped: what this replica computed so far is another's, too, and does not count.
    """

    owners: Mapping[str, list[int]]
    runs: list[range]
    dropped: bool


class Shares:
    """Splits of the next steps; the same on all replicas that take part in them."""

    def __init__(self, name: str) -> None:
        """Begin without a share: an agreement gives one.

        Args:
            name: of this replica.
        """
        self._name = name
        self._splits: dict[int, dict[str, range]] = {}
        self._staying: tuple[str, ...] = ()
        self._fixed: list[Split] = []

    def mine(self, step: int) -> range:
        """Return the leaves of a step that this replica is to compute."""
        return self._splits.get(step, {}).get(self._name, NONE)

    def forget(self) -> None:
        """Drop all splits: the others have gone on without this replica."""
        self._splits, self._staying, self._fixed = {}, (), []

    def fixed(self) -> list[Split]:
        """Return the splits that were fixed since the last call and differ from the step before."""
        found, self._fixed = self._fixed, []
        return found

    def heed(self, agreement: Agreement, num_leaves: Callable[[int], int]) -> More:
        """Share out what is left of a step, and fix the split of a later one.

        Args:
            agreement: of the step that this replica is at.
            num_leaves: of any step; none where it is not known yet.
        """
        step, ready = agreement.step, agreement.ready
        speeds = agreed_speeds({name: m.told.speed for name, m in ready.items()})
        held = _without_doubles(ready)
        added = taken_over(num_leaves(step), held, speeds)
        self._plan(step, {name: speeds[name] for name in agreement.staying}, num_leaves)
        return More(
            owners={name: sorted([*held[name], *added[name]]) for name in ready},
            runs=runs_of(added[self._name]),
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
        for later in range(step + 1, step + AHEAD + 1) if staying else ():
            if later not in self._splits and num_leaves(later):
                self._splits[later] = split(num_leaves(later), speeds)
                if self._splits[later] != self._splits.get(later - 1):
                    leaves = {n: (run.start, run.stop) for n, run in self._splits[later].items()}
                    self._fixed.append(Split(step=later, fixed_at=step, leaves=leaves))


def runs_of(leaves: list[int]) -> list[range]:
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

"""The user's sizes, whatever happens: what most users have today. A job begins once it fits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from scheduler.simulator.views import Capacity, Handling, JobView, Sizes, Snapshot

RESTART_SEC = 60.0
"""To start all processes of a job again, and to load its checkpoint."""


def admit(
    waiting: Iterable[tuple[JobView, Sizes]], given: Mapping[int, Sizes], capacity: Capacity
) -> dict[int, Sizes]:
    """Return what is given, and sizes of waiting jobs beside it.

    By priority and then by arrival; one that does not fit does not hold back those behind it.
    """
    found = dict(given)
    cpus = capacity.cpus - sum(sizes.cpus for sizes in given.values())
    memory = capacity.memory_bytes - sum(sizes.memory_bytes for sizes in given.values())
    for view, sizes in sorted(waiting, key=lambda pair: (-pair[0].priority, pair[0].job)):
        if sizes.cpus <= cpus + 1e-9 and sizes.memory_bytes <= memory + 1.0:
            found[view.job] = sizes
            cpus, memory = cpus - sizes.cpus, memory - sizes.memory_bytes
    return found


def give_back(
    kept: dict[int, Sizes],
    wanted: Mapping[int, Sizes],
    held: Sequence[tuple[float, int]],
    capacity: Capacity,
) -> None:
    """Give jobs what is wanted for them, not what they hold, until all fit; the largest part first.

    Args:
        kept: sizes of all jobs, changed in place.
        wanted: sizes of all jobs that fit together.
        held: cores beyond what is wanted, and job, of those that keep what they have.
        capacity: of the cluster.
    """
    cpus = sum(sizes.cpus for sizes in kept.values()) - capacity.cpus
    memory = sum(sizes.memory_bytes for sizes in kept.values()) - capacity.memory_bytes
    for _, job in sorted(held, reverse=True):
        if cpus <= 0.0 and memory <= 0.0:
            return
        cpus -= kept[job].cpus - wanted[job].cpus
        memory -= kept[job].memory_bytes - wanted[job].memory_bytes
        kept[job] = wanted[job]


class StaticPolicy:
    """The static user configuration."""

    name = "static"
    handling = Handling(RESTART_SEC, RESTART_SEC, keeps_steps=False, replaces_slow=False)
    interval_sec = float("inf")

    def decide(self, snapshot: Snapshot) -> dict[int, Sizes]:
        """Return the request of each job that fits."""
        given = {view.job: view.current for view in snapshot.jobs if view.current is not None}
        waiting = [(view, view.request) for view in snapshot.jobs if view.current is None]
        return admit(waiting, given, snapshot.capacity)

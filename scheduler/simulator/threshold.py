"""A threshold autoscaler, as the local optimizer of open DLRover.

A job begins with what its user asked for. While its stores keep fewer cores busy than
BUSY of what they have, it gets as many more replicas as would bring them there, at most
STEP at once; a step that did not make it FASTER is taken back and the job left alone.
After running out of memory it is started again with twice as much.

Source: the open repository of DLRover, whose local optimizer bounds the number of workers by
what the cores of parameter servers bear; the thresholds here are ours.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from scheduler.simulator.static import admit
from scheduler.simulator.views import Handling, JobView, Measured, Sizes, Snapshot

BUSY = 0.8
"""Share of a store's cores that may be busy."""
STEP = 4
"""Replicas that are added at once, at most."""
FASTER = 1.05
"""Speed after a step over that before it, at least."""
CHANGE_SEC = 15.0
"""Pause of a change, and of a recovery: processes come and go while others train, as ours."""
MORE_MEMORY = 2.0
"""Memory after running out of it, over that before."""


@dataclass(slots=True)
class _Climb:
    """How one job was scaled.

    Attributes:
        best: sizes at the highest speed.
        step_sec: of a step there.
        ended: whether no more is tried.
    """

    best: Sizes | None = None
    step_sec: float = float("inf")
    ended: bool = False


class ThresholdPolicy:
    """Replicas by thresholds on the cores of stores."""

    name = "threshold"
    handling = Handling(CHANGE_SEC, CHANGE_SEC, keeps_steps=True, replaces_slow=True)
    interval_sec = 180.0

    def __init__(self) -> None:
        """Begin with no job."""
        self.climbs: dict[int, _Climb] = {}

    def decide(self, snapshot: Snapshot) -> dict[int, Sizes]:
        """Return the sizes of running jobs, scaled by what was measured, and requests of others."""
        views = {view.job: view for view in snapshot.jobs}
        self.climbs = {job: self.climbs.get(job, _Climb()) for job in views}
        given = {job: view.current for job, view in views.items() if view.current is not None}
        waiting = [(view, _asked(view)) for view in snapshot.jobs if view.current is None]
        found = admit(waiting, given, snapshot.capacity)
        for measured in snapshot.measured:
            wanted = self._scaled(views[measured.job], measured, snapshot)
            others = {job: sizes for job, sizes in found.items() if job != measured.job}
            found = admit([(views[measured.job], wanted)], others, snapshot.capacity)
            found.setdefault(measured.job, given[measured.job])
        return found

    def _scaled(self, view: JobView, measured: Measured, snapshot: Snapshot) -> Sizes:
        climb, current = self.climbs[view.job], view.current
        assert current is not None, "what is measured runs"
        if climb.ended:
            return current
        if climb.best is not None and climb.step_sec < FASTER * measured.step_sec:
            climb.ended = True
            return replace(current, num_replicas=climb.best.num_replicas)
        climb.best, climb.step_sec = current, measured.step_sec
        bearable = BUSY * current.store_cpus / max(measured.store_busy, 1e-6)
        wanted = int(min(current.num_replicas * bearable, current.num_replicas + STEP))
        allowed = snapshot.allowed[view.kind][current.num_stores]
        while wanted > current.num_replicas and not (wanted < len(allowed) and allowed[wanted]):
            wanted -= 1
        climb.ended = wanted <= current.num_replicas
        return replace(current, num_replicas=max(wanted, current.num_replicas))


def _asked(view: JobView) -> Sizes:
    """Return the request, with more memory for each time that it ran out."""
    more, request = MORE_MEMORY**view.num_oom, view.request
    return replace(
        request,
        replica_memory=more * request.replica_memory,
        tables_memory=more * request.tables_memory,
    )

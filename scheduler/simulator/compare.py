"""Several policies on one trace: the same jobs, the same accidents, the same cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from scheduler.simulator.cluster import Cluster, Result
from scheduler.simulator.draw import JobSpec
from scheduler.simulator.goodput import GoodputPolicy
from scheduler.simulator.marginal import MarginalPolicy
from scheduler.simulator.parts import LIVE
from scheduler.simulator.presage import PresagePolicy
from scheduler.simulator.static import StaticPolicy
from scheduler.simulator.threshold import ThresholdPolicy
from scheduler.simulator.trace import TraceJob
from scheduler.simulator.views import Capacity, Policy
from schemas.errors import PlanError, nearest

POLICIES: Mapping[str, Callable[[], Policy]] = {
    "static": StaticPolicy,
    "threshold": ThresholdPolicy,
    "marginal": MarginalPolicy,
    "goodput": GoodputPolicy,
    "presage": PresagePolicy,
    "presage-live": lambda: PresagePolicy(LIVE, "presage-live"),
}
LOAD = 0.8
"""Share of the cluster that the requests of all jobs fill while jobs are submitted."""


def policies_of(text: str) -> tuple[str, ...]:
    """Return the policies of a text such as `static,presage`.

    Raises:
        ValueError: one is unknown, or named twice.
    """
    names = tuple(text.split(","))
    for name in names:
        if name not in POLICIES:
            raise ValueError(f"policy must be known, got {name!r}; {nearest(name, POLICIES)}")
        if names.count(name) > 1:
            raise ValueError(f"policy must be named once, got {name!r} again; leave it out")
    return names


def capacity_of(specs: Sequence[JobSpec], trace: Sequence[TraceJob], load: float) -> Capacity:
    """Return a cluster which the requests fill to this share, and in which the largest one fits.

    Raises:
        ValueError: the load is not positive.
    """
    if not 0.0 < load < float("inf"):
        raise ValueError(f"load must be positive, got {load}; use 0.8 for a usual cluster")
    lengths = [job.duration_sec for job in trace]
    span = trace[-1].submit_sec - trace[0].submit_sec + sum(lengths) / len(lengths)
    requests = [spec.request for spec in specs]
    cpus = sum(sec * r.cpus for sec, r in zip(lengths, requests, strict=True)) / span / load
    memory = sum(sec * r.memory_bytes for sec, r in zip(lengths, requests, strict=True))
    return Capacity(
        max(cpus, *(request.cpus for request in requests)) if requests else cpus,
        max(memory / span / load, max(request.memory_bytes for request in requests)),
    )


def simulate(specs: Sequence[JobSpec], policy: Policy, capacity: Capacity) -> Result:
    """Run all jobs under a policy that has decided nothing yet.

    Raises:
        PlanError: a request is larger than the cluster.
    """
    for spec in specs:
        request = spec.request
        if request.cpus > capacity.cpus + 1e-9 or request.memory_bytes > capacity.memory_bytes + 1:
            raise PlanError(
                f"cluster must hold every request, got cpus={capacity.cpus:g} and "
                f"memory={capacity.memory_bytes:.4g} for {spec.name!r} of "
                f"cpus={request.cpus:g} and memory={request.memory_bytes:.4g}; enlarge it"
            )
    return Cluster(specs, policy, capacity).simulate()

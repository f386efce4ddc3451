"""Sizes of both pools for one day: what `python -m scheduler plan` says, within this machine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from scheduler.explain import summary
from scheduler.machine_sizes import machine_budget, on_machine
from scheduler.policy import plan
from scheduler.retrain.root import Root, facts_of
from scheduler.snapshot import Snapshot, take_snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What the plan comes to."""

    workers: int
    """Workers of the build of a segment."""
    num_replicas: int
    """Trainer replicas."""
    words: str
    """The plan in one line."""


ALONE = Sizes(workers=1, num_replicas=1, words="")
"""Of a stage that has one process."""


def sizes_of(job_file: Path, root: Root, *, allow_outside: bool = False) -> Sizes:
    """Return the sizes of the best plan for a day like those of the dataset.

    Raises:
        SchemaError: a file is missing or damaged.
        PlanError: nothing fits.
    """
    dataset = root.dataset if root.has_dataset else None
    snapshot = _of_one_day(
        take_snapshot(job_file, dataset, root.folder, allow_outside=allow_outside), root
    )
    schedule, machine = snapshot.job.schedule, machine_budget()
    own = schedule.budget
    budget = replace(own, cpus=min(own.cpus, machine.cpus), memory=min(own.memory, machine.memory))
    training = replace(schedule.training, max_stores=0)
    alone = replace(snapshot.job, schedule=replace(schedule, training=training))
    snapshot = replace(snapshot, job=alone)
    config, changes = on_machine(snapshot, budget, shares_cores=machine.cpus < own.cpus)
    decision = plan(snapshot, config)
    chosen = decision.chosen
    return Sizes(
        workers=chosen.workers_per_job,
        num_replicas=chosen.num_replicas,
        words="; ".join([summary(decision), *changes]),
    )


def _of_one_day(snapshot: Snapshot, root: Root) -> Snapshot:
    """Return a snapshot whose samples are those of a mean day."""
    if not snapshot.facts.measured:
        return snapshot
    days = len(facts_of(root))
    facts = snapshot.facts
    return replace(
        snapshot,
        facts=replace(
            facts,
            num_samples=-(-facts.num_samples // days),
            num_train_samples=-(-facts.num_train_samples // days),
        ),
    )

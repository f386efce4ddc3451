"""A plan for humans and for scripts."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from scheduler.decision import PlanDecision, preprocessing_words, training_words
from scheduler.grid import mib
from scheduler.memory import store_bytes, trainer_memory, worker_bytes
from scheduler.reasons import confident, reasons
from scheduler.snapshot import Snapshot
from schemas.job_schedule import ScheduleConfig


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """Predicted peak of one process of each kind, in bytes; 0 for a kind that is not used."""

    worker_bytes: int
    replica_bytes: int
    store_bytes: int


def predicted_memory(snapshot: Snapshot, decision: PlanDecision) -> ProcessMemory:
    """Return the predicted peak of one process of each kind."""
    facts, train, chosen = snapshot.facts, snapshot.job.train, decision.chosen
    rows = facts.num_samples / decision.models.num_segments
    replica = trainer_memory(
        facts, train, chosen.num_replicas, chosen.num_stores, decision.models.base_bytes
    )
    stores = chosen.num_stores
    return ProcessMemory(
        worker_bytes(facts, rows, chosen.workers_per_job),
        replica.total_bytes,
        store_bytes(facts, train, stores) if stores else 0,
    )


def as_json(
    snapshot: Snapshot, config: ScheduleConfig, decision: PlanDecision
) -> dict[str, object]:
    """Return what `plan --json` prints."""
    chosen = decision.chosen
    memory = predicted_memory(snapshot, decision)
    return {
        "preprocessing": {
            "segment_jobs": chosen.segment_jobs,
            "workers_per_job": chosen.workers_per_job,
            "cpus": chosen.preprocessing_cpus,
            "memory_bytes": chosen.preprocessing_memory_bytes,
            "predicted_worker_bytes": memory.worker_bytes,
            "rows_per_sec": chosen.rows_per_sec,
        },
        "training": {
            "num_replicas": chosen.num_replicas,
            "num_stores": chosen.num_stores,
            "cpus": chosen.training_cpus,
            "memory_bytes": chosen.training_memory_bytes,
            "predicted_replica_bytes": memory.replica_bytes,
            "predicted_store_bytes": memory.store_bytes,
            "samples_per_sec": chosen.samples_per_sec,
        },
        "predicted_sec": chosen.predicted_sec,
        "cost": chosen.cost,
        "cost_per_hour": chosen.cost_per_hour,
        "confident": confident(snapshot, config, decision),
        "reasons": reasons(snapshot, config, decision),
    }


def summary(decision: PlanDecision) -> str:
    """Return the plan in one line."""
    c = decision.chosen
    return (
        f"{preprocessing_words(c)}, {training_words(c)}: "
        f"{c.predicted_sec:,.0f} s, cost {c.cost:.4g}"
    )


def explain(snapshot: Snapshot, config: ScheduleConfig, decision: PlanDecision) -> RenderableType:
    """Return the plan as a table of pools and a list of reasons."""
    chosen, memory = decision.chosen, predicted_memory(snapshot, decision)
    table = Table(title=snapshot.job.name, title_justify="left")
    for column in ("", "preprocessing", "training"):
        table.add_column(column)
    stores = f", store {mib(memory.store_bytes)}" if chosen.num_stores else ""
    for row in (
        (
            "processes",
            preprocessing_words(chosen),
            training_words(chosen),
        ),
        ("cores", f"{chosen.preprocessing_cpus:g}", f"{chosen.training_cpus:g}"),
        ("memory", mib(chosen.preprocessing_memory_bytes), mib(chosen.training_memory_bytes)),
        (
            "predicted",
            f"worker {mib(memory.worker_bytes)}",
            f"replica {mib(memory.replica_bytes)}{stores}",
        ),
        ("speed", f"{chosen.rows_per_sec:,.0f} rows/s", f"{chosen.samples_per_sec:,.0f} samples/s"),
    ):
        table.add_row(*row)
    prices = Text(
        f"{chosen.predicted_sec:,.0f} s from start to trained model, cost {chosen.cost:.4g} "
        f"({chosen.cost_per_hour:.4g} an hour while both pools are held)"
    )
    lines = [Text(f"- {reason}") for reason in reasons(snapshot, config, decision)]
    return Group(table, prices, *lines)

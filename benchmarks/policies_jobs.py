"""Traces and speeds for the comparison of policies, from published sets."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from datetime import datetime
from itertools import groupby
from pathlib import Path
from statistics import median

from scheduler.simulator.jobs import (
    GIB,
    REPLICA_BUSY,
    STORE_BUSY,
    Table,
    TraceJob,
    interpolate_table,
)

PHILLY = Path("philly") / "philly.csv"
ALIBABA = Path("alibaba_dlrm_v2025") / "disaggregated_DLRM_trace.csv"
DL2 = Path("dl2_ps_worker_speed") / "derived_flat.csv"
TOGETHER_SEC = 60.0
"""Instances of one service and role that are created within so much of each other are one job."""
WANTED = 2.0
"""Deadline of each job, in lengths of the trace after its submission, and SLACK_SEC more."""
SLACK_SEC = 600.0


def speeds(shared_data: Path) -> dict[str, Table]:
    """Return eight models measured over parameter servers and workers, with busy cores."""
    rows: dict[str, list[dict[str, str]]] = {}
    with (shared_data / DL2).open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if float(row["speed_sum"]) > 0:
                rows.setdefault(row["model"], []).append(
                    {
                        "num_replicas": row["num_worker"],
                        "num_stores": row["num_ps"],
                        "batch_size": row["total_batch"],
                        "samples_per_sec": row["speed_sum"],
                        REPLICA_BUSY: row["worker_cpu_mean"],
                        STORE_BUSY: row["ps_cpu_mean"],
                    }
                )
    return {kind: interpolate_table(kind, found) for kind, found in rows.items()}


def philly(shared_data: Path) -> list[TraceJob]:
    """Return all jobs of the training cluster by arrival: one replica for each GPU."""
    with (shared_data / PHILLY).open(encoding="utf-8", newline="") as file:
        rows = [
            (datetime.fromisoformat(row["timestamp"]).timestamp(), row)
            for row in csv.DictReader(file)
        ]
    rows.sort(key=lambda pair: pair[0])
    return [
        _job(number, at, float(row["duration"]), int(row["num_gpus"]))
        for number, (at, row) in enumerate(rows)
    ]


def alibaba(shared_data: Path) -> list[TraceJob]:
    """Return instances with a creation and a deletion, those created together as one job."""
    with (shared_data / ALIBABA).open(encoding="utf-8", newline="") as file:
        rows = [
            row for row in csv.DictReader(file) if row["creation_time"] and row["deletion_time"]
        ]
    rows.sort(key=lambda row: (row["app_name"], row["role"], float(row["creation_time"])))
    groups = [
        list(group)
        for _, service in groupby(rows, key=lambda row: (row["app_name"], row["role"]))
        for group in _together(list(service))
    ]
    groups.sort(key=lambda group: float(group[0]["creation_time"]))
    return [_of_group(number, group) for number, group in enumerate(groups)]


def _together(rows: list[dict[str, str]]) -> Iterator[list[dict[str, str]]]:
    group = [rows[0]]
    for row in rows[1:]:
        if float(row["creation_time"]) - float(group[0]["creation_time"]) > TOGETHER_SEC:
            yield group
            group = []
        group.append(row)
    yield group


def _of_group(number: int, group: list[dict[str, str]]) -> TraceJob:
    lives = [float(row["deletion_time"]) - float(row["creation_time"]) for row in group]
    return _job(
        number,
        float(group[0]["creation_time"]),
        max(1.0, median(lives)),
        len(group),
        median(float(row["cpu_request"]) for row in group),
        GIB * median(float(row["memory_request"]) for row in group),
    )


def _job(
    number: int,
    at: float,
    length: float,
    replicas: int,
    cpus: float | None = None,
    memory: float | None = None,
) -> TraceJob:
    return TraceJob(
        name=f"job-{number}",
        submit_sec=at,
        duration_sec=length,
        num_replicas=replicas,
        cpus=cpus,
        memory_bytes=memory,
        deadline_sec=WANTED * length + SLACK_SEC,
    )

"""Names and labels of Pods, from those of jobs and processes."""

from __future__ import annotations

import hashlib
import re

MAX_LABEL = 63
"""Bytes of a name in the DNS, and of a label's value."""
HASHED = 10
"""Hexadecimal digits that make a shortened name one of its own."""
MANAGER = "presage-scheduler"
"""Who owns the fields that we apply."""
CONTAINER = "main"
INSTANCE, JOB, POOL, PROCESS = (
    "app.kubernetes.io/instance",
    "presage/job",
    "presage/pool",
    "presage/process",
)
"""Labels; as annotations, the last three hold the names unshortened."""


def pod_name(instance: str, job: str, process: str) -> str:
    """Return the name of a process's Pod: one label of the DNS, different for different processes.

    Example:
        >>> pod_name("a1", "Clicks_2", "segment-0.1")
        'clicks-2-segment-0-1-bf1ee77c5f'
    """
    return _label(f"{job}-{process}", f"{instance}/{job}/{process}")


def secret_name(instance: str, job: str) -> str:
    """Return the name of a job's Secret, which no process's Pod has.

    Example:
        >>> secret_name("a1", "Clicks_2")
        'clicks-2-3e1e0d1d9f'
    """
    return _label(job, f"{instance}/{job}")


def labels_of(instance: str, job: str, process: str | None = None) -> dict[str, dict[str, str]]:
    """Return labels and annotations of what belongs to a job, or to one process of it."""
    names = {JOB: job}
    if process is not None:
        names |= {POOL: process.partition("-")[0], PROCESS: process}
    labels = {name: label_value(value) for name, value in names.items()}
    owner = {"app.kubernetes.io/managed-by": MANAGER, INSTANCE: instance}
    return {"labels": {**owner, **labels}, "annotations": names}


def label_value(text: str) -> str:
    """Return a text as the value of a label: itself where it is one.

    Example:
        >>> label_value("segment-0.1")
        'segment-0.1'
    """
    if re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?", text):
        return text
    return _label(text, text)


def _label(readable: str, whole: str) -> str:
    digest = hashlib.sha256(whole.encode()).hexdigest()[:HASHED]
    plain = re.sub(r"[^a-z0-9]+", "-", readable.lower()).strip("-")
    head = plain[: MAX_LABEL - HASHED - 1].strip("-")
    name = f"{head}-{digest}" if head else digest
    return name if name[0].isalpha() else f"p{name[: MAX_LABEL - 1]}"

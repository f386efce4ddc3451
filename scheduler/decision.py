"""A plan as plain numbers: what was chosen, what came next, and what predicted it."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.models import Models


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Sizes of both pools, what they are given, and what they are predicted to do."""

    segment_jobs: int
    """Segment jobs at once."""
    workers_per_job: int
    """Pipeline workers of each."""
    num_replicas: int
    """Trainer replicas."""
    num_stores: int
    """Embedding stores."""
    preprocessing_cpus: float
    """Cores of all workers."""
    preprocessing_memory_bytes: int
    """Memory given to all workers."""
    training_cpus: float
    """Cores of all replicas and stores."""
    training_memory_bytes: int
    """Memory given to all replicas and stores."""
    rows_per_sec: float
    """Samples prepared per second, start-up of the jobs included."""
    samples_per_sec: float
    """Samples trained per second while there are segments."""
    waiting_sec: float
    """Seconds after the first segment in which training has nothing to do."""
    predicted_sec: float
    """Seconds from start to trained model."""
    cost: float
    """Price of both pools, each while it is held."""
    cost_per_hour: float
    """Price of both pools for one hour."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanDecision:
    """What was chosen and what came next."""

    chosen: Candidate
    """The plan."""
    other_training: Candidate | None
    """Best plan with another training pool, None when there is no other."""
    other_preprocessing: Candidate | None
    """Best plan with the same training pool and another preprocessing pool."""
    thrifty: Candidate | None = None
    """What time x cost would choose, None where that is chosen or a deadline decides."""
    num_candidates: int
    """Plans that were compared."""
    models: Models
    """What predicted all this."""


def counted(number: int, noun: str) -> str:
    """Return a number with its noun.

    Example:
        >>> counted(1, "store"), counted(0, "store"), counted(1200, "plan")
        ('1 store', '0 stores', '1,200 plans')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def preprocessing_words(candidate: Candidate) -> str:
    """Return the size of the preprocessing pool."""
    jobs = counted(candidate.segment_jobs, "segment job")
    return f"{jobs} x {counted(candidate.workers_per_job, 'worker')}"


def training_words(candidate: Candidate) -> str:
    """Return the size of the training pool."""
    stores = counted(candidate.num_stores, "store")
    return f"{counted(candidate.num_replicas, 'replica')} and {stores}"

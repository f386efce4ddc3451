"""Whether there is room for the copies of checkpoints, known before the first step."""

from __future__ import annotations

from pathlib import Path

from schemas.job import Job
from schemas.job_train import CheckpointConfig
from trainer.decode import spec_of
from trainer.flash.memory import START, free_bytes, too_small
from trainer.flash.space import copy_bytes
from trainer.following import Span
from trainer.parts import build_parts, layouts_of, memory_stores
from trainer.saving import dense_bytes


def copy_bytes_of(job: Job, span: Span, first: int) -> int:
    """Return the bytes of the largest copy of a checkpoint of replicas; 0 where none is due.

    Args:
        job: of the run.
        span: what may be trained by now.
        first: step that is to be trained.
    """
    every = job.train.checkpoint.every_steps
    if every is None:
        return 0
    spec = spec_of(span.dataset, job.train.dtype)
    layouts = layouts_of(spec, job.train)
    parts = build_parts(spec, job.train, memory_stores(spec, job.train))
    steps = range(first, span.horizon.until)
    rows = copy_bytes(span.dataset, span.order, layouts, steps, every, None)
    return dense_bytes(parts) + rows


def check_room(config: CheckpointConfig, num_bytes: int) -> None:
    """Refuse a machine without room for a copy.

    Args:
        config: says where copies go.
        num_bytes: of the largest one; 0 where there is none.

    Raises:
        SchemaError: names the missing bytes.
    """
    directory = Path(config.copy_to)
    if num_bytes and START + num_bytes > free_bytes(directory):
        raise too_small(directory, START + num_bytes)

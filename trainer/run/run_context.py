"""A run as each of its processes has it: job, model, rows, and the steps of the dataset."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from schemas.config.job import Job
from trainer.components import Components
from trainer.options import TrainOptions
from trainer.run_rows import RunRows
from trainer.steps import Span, StepReader


@dataclass(frozen=True, slots=True)
class RunContext:
    """A run as each of its processes has it."""

    run: Path
    job: Job
    options: TrainOptions
    components: Components
    rows: RunRows
    reader: StepReader
    first_step: int
    """The first step that is trained here."""

    @property
    def span(self) -> Span:
        """What may be trained, agreed on by all processes."""
        return self.reader.span

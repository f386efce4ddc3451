"""A run as each of its processes has it: job, model, rows, and the steps of the dataset."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from presage.schemas.config.job import Job
from presage.trainer.components import Components
from presage.trainer.options import TrainOptions
from presage.trainer.run_rows import RunRows
from presage.trainer.steps import Span, StepReader


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

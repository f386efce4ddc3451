"""What a finished job leaves to later ones: its line in `jobs.jsonl`, once."""

from __future__ import annotations

import os
from pathlib import Path

from scheduler.lines import whole_bytes
from scheduler.machine.state import JobState
from scheduler.models import fit_models
from scheduler.past import PAST_JOBS, to_line
from scheduler.warm import remember


def teach(job: JobState, folder: Path) -> None:
    """Append what a job taught, unless none of its steps was measured or it stands there already.

    Args:
        job: that finished.
        folder: of the history.
    """
    models = fit_models(job.snapshot, job.snapshot.job.schedule, job.steps, job.builds)
    if not models.training.num_cells:
        return
    line = to_line(remember(job.snapshot, models.training, models.segments)).encode()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / PAST_JOBS).open("a+b") as file:
        file.seek(0)
        content = file.read()
        if line in content.splitlines():
            return
        whole, newline = whole_bytes(content)
        file.truncate(whole)
        file.write((b"\n" if newline else b"") + line + b"\n")
        file.flush()
        os.fsync(file.fileno())

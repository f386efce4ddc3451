"""From a job file to the event that submits it."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from scheduler.controller.events import Submitted
from scheduler.drivers.local.commands import environment, generate_command
from scheduler.drivers.local.job_files import Workplace, cut_input, matches
from scheduler.model.history import History, read_history
from scheduler.model.snapshot import Snapshot, facts_of_job
from scheduler.planner.machine_sizes import MachineSizes, machine_schedule
from schemas.config.job import GenerateConfig, Job, check_new_names, load_job
from schemas.config.schedule import BudgetConfig
from schemas.errors import SchemaError
from schemas.features import load_features
from schemas.paths import schema_path

HISTORY = "history"
"""Folder of what finished jobs taught, in the scheduler's folder."""
TRIED_FILES, TRIED_BYTES = 3, 1 << 20
"""Beginnings of text files that tell how long lines are."""
CODECS = {".gz": "gzip", ".zst": "zstd"}


def submit(
    job_file: Path,
    inputs: Mapping[str, Path],
    output: Path,
    time_sec: float,
    *,
    single_writer: bool = False,
    allow_outside: bool = False,
    budget: BudgetConfig | None = None,
    shares_cores: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> tuple[Submitted, Workplace]:
    """Prepare the folder of a job.

    Args:
        job_file: the job.
        inputs: folder of raw files by name of the job; where it lacks, the log that the job's
            `data.generate` says is written.
        output: folder of the scheduler.
        time_sec: the time.
        single_writer: as in `Workplace`.
        allow_outside: as in `Workplace`.
        budget: of all jobs together on this machine, None where Pods run.
        shares_cores: whether the budget is what the machine has, which processes may share.
        say: progress callback, called with a line for each size that differs from the declared one.

    Raises:
        SchemaError: the job file, or its input, is none.
    """
    job = load_job(job_file)
    check_new_names(job, job_file)
    schema = schema_path(job_file, job.data.schema, allow_outside=allow_outside)
    features = load_features(schema)
    folder = output / job.name
    source = inputs.get(job.name) or _generated(job, job_file, folder)
    cut = cut_input(job, source, folder)
    counted = _num_rows(job, [path for part in cut for path in part], source)
    if counted is not None:
        generate = replace(job.data.generate or GenerateConfig(), num_samples=counted)
        job = replace(job, data=replace(job.data, generate=generate))
    past = output / HISTORY
    snapshot = Snapshot(
        job=job,
        facts=facts_of_job(job, features),
        history=read_history(past) if past.is_dir() else History(),
    )
    sizes = None
    if budget is not None:
        own = job.schedule.budget
        least = replace(
            budget, cpus=min(own.cpus, budget.cpus), memory=min(own.memory, budget.memory)
        )
        shared = shares_cores and budget.cpus < own.cpus
        config, changes = machine_schedule(
            snapshot, least, shares_cores=shared, num_segments=len(cut)
        )
        sizes = MachineSizes.of(config)
        for line in changes:
            say(f"{job.name}: {line}")
    submitted = Submitted(
        time_sec=time_sec,
        job=job.name,
        document=job_file.read_text(encoding="utf-8"),
        facts=snapshot.facts,
        history=snapshot.history,
        num_segments=len(cut),
        sizes=sizes,
    )
    place = Workplace(
        job_file.resolve(),
        folder.resolve(),
        len(cut),
        single_writer=single_writer,
        allow_outside=allow_outside,
    )
    return submitted, place


def _generated(job: Job, job_file: Path, folder: Path) -> Path:
    """Return the synthetic log of a job, written on the first call."""
    if job.data.generate is None:
        raise SchemaError(
            "job must have an input, got neither --input nor data.generate; name its raw files",
            file=str(job_file),
        )
    log = folder / "log"
    if log.is_dir():
        return log
    partial = folder / ".log.partial"
    done = subprocess.run(
        generate_command(job_file.resolve(), partial),
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SchemaError(f"log must be generated, got {done.stderr.strip()[-300:]}")
    partial.rename(log)
    return log


def _num_rows(job: Job, files: Sequence[Path], source: Path) -> int | None:
    """Return the rows of the source of samples, None where they are not known without reading it.

    Lines of text are counted at the beginning of some files.
    """
    config = job.data.sources[job.data.sample_source]
    own = [path for path in files if matches(path.relative_to(source), config.files)]
    try:
        if config.format == "parquet":
            return sum(pq.read_metadata(path).num_rows for path in own) or None
        return _num_lines(own) if config.format in ("csv", "jsonl") else None
    except (OSError, pa.ArrowInvalid):
        return None  # the build rejects what is of another format, by name


def _num_lines(files: Sequence[Path]) -> int | None:
    """Return about how many lines text files have."""
    lines = stored = 0
    for path in files[:TRIED_FILES]:
        with pa.OSFile(str(path)) as file:
            codec = CODECS.get(path.suffix)
            text = file if codec is None else pa.CompressedInputStream(file, codec)
            lines += text.read(TRIED_BYTES).count(b"\n")
            stored += file.tell()
    total = sum(path.stat().st_size for path in files)
    return round(total * lines / stored) if lines else None

"""Prepare a job for the scheduler: from a job file to the event that submits it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from scheduler.controller.events import Submitted
from scheduler.drivers.job_files import (
    NO_FLAGS,
    CommandFlags,
    JobPaths,
    environment,
    generate_command,
    segment_folder,
)
from scheduler.model.history import History, read_history
from scheduler.model.snapshot import Snapshot, facts_of_job
from scheduler.planner.machine_sizes import MachineSizes, machine_schedule
from schemas.config.job import GenerateConfig, Job, check_new_names, load_job
from schemas.config.schedule import BudgetConfig
from schemas.errors import SchemaError
from schemas.features import load_features
from schemas.files import replace_bytes
from schemas.paths import schema_path
from schemas.storage import Location

HISTORY = "history"
"""Folder in the scheduler's folder with the measurements of finished jobs."""
SAMPLED_FILES, SAMPLED_BYTES = 3, 1 << 20
"""Text files, and bytes at the start of each, from which the number of lines is estimated."""
CODECS = {".gz": "gzip", ".zst": "zstd"}


def submit(
    job_file: Path | Location,
    inputs: Mapping[str, Path],
    output: Path,
    time_sec: float,
    *,
    flags: CommandFlags = NO_FLAGS,
    budget: BudgetConfig | None = None,
    shares_cores: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[Submitted, JobPaths]:
    """Prepare the folder of a job.

    Args:
        job_file: the job.
        inputs: folder of raw files by job name; for a job without one, a synthetic log is written
            as its `data.generate` describes.
        output: folder of the scheduler.
        time_sec: the current time.
        flags: of the commands of its processes.
        budget: of all jobs together on this machine; None for Pods.
        shares_cores: whether processes may share cores, as with a budget of the whole machine.
        progress: called with a line for each size that differs from the declared one.

    Raises:
        SchemaError: the job file or its input is invalid.
    """
    job = load_job(job_file)
    check_new_names(job, job_file)
    schema = schema_path(job_file, job.data.schema, allow_outside=flags.allow_outside)
    features = load_features(schema)
    folder = output / job.name
    source = inputs.get(job.name) or _generate_log(job, job_file, folder)
    segments = split_input(job, source, folder)
    num_samples = _num_rows(job, [path for files in segments for path in files], source)
    if num_samples is not None:
        generate = replace(job.data.generate or GenerateConfig(), num_samples=num_samples)
        job = replace(job, data=replace(job.data, generate=generate))
    history = output / HISTORY
    snapshot = Snapshot(
        job=job,
        facts=facts_of_job(job, features),
        history=read_history(history) if history.is_dir() else History(),
    )
    sizes = None
    if budget is not None:
        own = job.schedule.budget
        least = replace(
            budget, cpus=min(own.cpus, budget.cpus), memory=min(own.memory, budget.memory)
        )
        shared = shares_cores and budget.cpus < own.cpus
        config, changes = machine_schedule(
            snapshot, least, shares_cores=shared, num_segments=len(segments)
        )
        sizes = MachineSizes.of(config)
        for line in changes:
            progress(f"{job.name}: {line}")
    submitted = Submitted(
        time_sec=time_sec,
        job=job.name,
        document=job_file.read_bytes().decode(),
        facts=snapshot.facts,
        history=snapshot.history,
        num_segments=len(segments),
        sizes=sizes,
    )
    return submitted, JobPaths(job_file.resolve(), folder.resolve(), len(segments), flags)


def _generate_log(job: Job, job_file: Path | Location, folder: Path) -> Path:
    """Return the synthetic log of a job, written on the first call."""
    if job.data.generate is None:
        raise SchemaError(
            "job has neither --input nor data.generate; name its raw files", file=str(job_file)
        )
    log = folder / "log"
    if log.is_dir():
        return log
    partial = folder / ".log.partial"
    completed = subprocess.run(
        generate_command(job_file.resolve(), partial),
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    if completed.returncode:
        raise SchemaError(f"log cannot be generated: {completed.stderr.strip()[-300:]}")
    partial.rename(log)
    return log


def _num_rows(job: Job, files: Sequence[Path], source: Path) -> int | None:
    """Return the rows of the sample source: exact for Parquet, estimated for text, else None."""
    config = job.data.sources[job.data.sample_source]
    own = [path for path in files if matches_glob(path.relative_to(source), config.files)]
    try:
        if config.format == "parquet":
            return sum(pq.read_metadata(path).num_rows for path in own) or None
        return _estimate_lines(own) if config.format in ("csv", "jsonl") else None
    except (OSError, pa.ArrowInvalid):
        return None  # the build rejects files of another format by name


def _estimate_lines(files: Sequence[Path]) -> int | None:
    num_lines = num_bytes = 0
    for path in files[:SAMPLED_FILES]:
        with pa.OSFile(str(path)) as file:
            codec = CODECS.get(path.suffix)
            text = file if codec is None else pa.CompressedInputStream(file, codec)
            num_lines += text.read(SAMPLED_BYTES).count(b"\n")
            num_bytes += file.tell()
    total_bytes = sum(path.stat().st_size for path in files)
    return round(total_bytes * num_lines / num_bytes) if num_lines else None


# Segments of the input.


def split_input(job: Job, source: Path, folder: Path) -> list[list[Path]]:
    """Split a job's input into segments, always the same ones.

    A job with one source and no side tables has one segment per file, ordered by path; any other
    job has one segment.

    Args:
        job: the job.
        source: folder of the raw files.
        folder: of the job; receives a folder of links for each segment.

    Returns:
        The files of each segment.

    Raises:
        SchemaError: there are no files, or other ones than on the first call.
    """
    files = sorted(path for path in source.rglob("*") if path.is_file())
    data = job.data
    if len(data.sources) == 1 and not data.sides:
        (config,) = data.sources.values()
        files = [f for f in files if matches_glob(f.relative_to(source), config.files)]
        segments = [[path] for path in files]
    else:
        segments = [files]
    if not files:
        raise SchemaError(
            "input has no files of the job's sources; check the path and the glob",
            file=str(source),
        )
    names = [[str(path.relative_to(source)) for path in segment] for segment in segments]
    _check_unchanged(folder / "segments.json", names, source)
    for number, segment in enumerate(segments):
        for path in segment:
            _link(segment_folder(folder, number) / path.relative_to(source), path)
    return segments


def matches_glob(path: Path, pattern: str) -> bool:
    """Return whether a path matches a glob in which `**` stands for any number of folders."""
    parts = pattern.split("/")
    if "**" in parts:
        tail = parts[parts.index("**") + 1 :] or ["*"]
        return path.match("/".join(tail))
    return len(path.parts) == len(parts) and path.match(pattern)


def _check_unchanged(path: Path, names: Sequence[Sequence[str]], source: Path) -> None:
    text = json.dumps(names, indent=1) + "\n"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_bytes(path, text.encode())
    elif path.read_text(encoding="utf-8") != text:
        raise SchemaError(
            f"input files differ from those listed in {path}; restore them, or use another "
            "--output",
            file=str(source),
        )


def _link(link: Path, target: Path) -> None:
    if not link.is_symlink():
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(target.resolve())

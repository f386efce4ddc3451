"""Prepare a job for the scheduler: from a job file to the event that submits it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path, PurePosixPath

import pyarrow as pa
import pyarrow.parquet as pq

from presage.scheduler.controller.events import Submitted
from presage.scheduler.drivers.job_files import JobPaths, environment, generate_command
from presage.scheduler.model.past_runs import History, read_history
from presage.scheduler.model.plan_inputs import PlanInputs, facts_of_job
from presage.scheduler.planner.machine_sizes import machine_schedule
from presage.schemas.config.job import GenerateConfig, Job, parse_job
from presage.schemas.config.schedule import BudgetConfig
from presage.schemas.dataset.files import replace_bytes
from presage.schemas.errors import SchemaError
from presage.schemas.features import load_features
from presage.schemas.paths import schema_path
from presage.schemas.raw_files import check_committed, glob_regex, visible
from presage.schemas.storage.location import Entry, Location

HISTORY = "history"
"""Folder in the scheduler's folder with the measurements of finished jobs."""
SAMPLED_FILES, SAMPLED_BYTES = 3, 1 << 20
"""Text files, and bytes at the start of each, from which the number of lines is estimated."""
CODECS = {".gz": "gzip", ".zst": "zstd"}
SEGMENTS = "segments.json"
"""File in the scheduler's folder of a job with the files of each segment."""
PART_BYTES = 28 << 20
"""Bytes of input for each part of a segment that `pipelines` makes; one worker writes a part."""
_READS = 16
"""Footers of Parquet files that are read at once."""


def submit(
    job_file: Path | Location,
    inputs: Mapping[str, Location],
    output: Path,
    time_sec: float,
    *,
    storage: Location | None = None,
    allow_outside: bool = False,
    budget: BudgetConfig | None = None,
    allow_oversubscription: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[Submitted, JobPaths]:
    """Prepare the folder of a job.

    Args:
        job_file: the job.
        inputs: raw files by job name; for a job without them, a synthetic log is written as its
            `data.generate` describes.
        output: folder of the scheduler.
        time_sec: the current time.
        storage: where the job's files are; None for the folder of the scheduler.
        allow_outside: whether the job's schema may be outside the folder of the job file.
        budget: of all jobs together on this machine; None for Pods.
        allow_oversubscription: whether processes may share cores, as with the whole machine.
        progress: called with a line for each size that differs from the declared one.

    Raises:
        SchemaError: the job file or its input is invalid.
    """
    document = job_file.read_bytes().decode()
    job = parse_job(document, str(job_file))
    schema = schema_path(job_file, job.data.schema, allow_outside=allow_outside)
    features = load_features(schema)
    storage = Location.parse(output.resolve()) if storage is None else storage
    folder, storage = (output / job.name).resolve(), storage / job.name
    source = inputs.get(job.name) or _generate_log(job, job_file, folder, storage)
    segments = split_input(job, source, folder)
    num_samples = _num_rows(job, [entry for files in segments for entry in files], source)
    if num_samples is not None:
        generate = replace(job.data.generate or GenerateConfig(), num_samples=num_samples)
        job = replace(job, data=replace(job.data, generate=generate))
    history = output / HISTORY
    facts = facts_of_job(job, features)
    parts = sum(-(-sum(entry.num_bytes for entry in files) // PART_BYTES) for files in segments)
    snapshot = PlanInputs(
        job=job,
        facts=replace(facts, part_rows=facts.num_samples / max(1, parts)),
        history=read_history(history) if history.is_dir() else History(),
    )
    config = None
    if budget is not None:
        config, changes = machine_schedule(
            snapshot,
            budget,
            allow_oversubscription=allow_oversubscription,
            num_segments=len(segments),
        )
        for line in changes:
            progress(f"{job.name}: {line}")
    submitted = Submitted(
        time_sec=time_sec,
        job=job.name,
        document=document,
        facts=snapshot.facts,
        history=snapshot.history,
        num_segments=len(segments),
        schedule=config,
    )
    paths = JobPaths(
        source=job_file.resolve(),
        folder=folder,
        storage=storage,
        input=source,
        segments=tuple(
            tuple(entry.path for entry in files) if has_segment_per_file(job) else ()
            for files in segments
        ),
        allow_outside=allow_outside,
    )
    return submitted, paths


def _generate_log(job: Job, job_file: Path | Location, folder: Path, storage: Location) -> Location:
    if job.data.generate is None:
        raise SchemaError(
            "job has neither --input nor data.generate; name its raw files", file=str(job_file)
        )
    log = storage / "log"
    if (folder / SEGMENTS).exists() if log.local is None else log.local.is_dir():
        return log
    partial = log if log.local is None else log.local.with_name(".log.partial")
    completed = subprocess.run(
        generate_command(job_file.resolve(), partial),
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    if completed.returncode:
        raise SchemaError(f"log cannot be generated: {completed.stderr.strip()[-300:]}")
    if isinstance(partial, Path):
        partial.rename(log)
    return log


def _num_rows(job: Job, files: Sequence[Entry], source: Location) -> int | None:
    """Return the rows of the sample source: exact for Parquet, estimated for text, else None."""
    config = job.data.sources[job.data.sample_source]
    own = _matching(files, config.files)
    try:
        if config.format == "parquet":
            with ThreadPoolExecutor(_READS) as pool:
                return sum(pool.map(_parquet_rows, [source / entry.path for entry in own])) or None
        return _estimate_lines(own, source) if config.format in ("csv", "jsonl") else None
    except (OSError, pa.ArrowInvalid):
        return None  # the build rejects files of another format by name


def _parquet_rows(location: Location) -> int:
    with location.open() as file:
        return pq.read_metadata(file).num_rows


def _estimate_lines(files: Sequence[Entry], source: Location) -> int | None:
    num_lines = num_bytes = 0
    for entry in files[:SAMPLED_FILES]:
        with pa.PythonFile((source / entry.path).open(), "r") as file:
            codec = CODECS.get(PurePosixPath(entry.path).suffix)
            text = file if codec is None else pa.CompressedInputStream(file, codec)
            num_lines += text.read(SAMPLED_BYTES).count(b"\n")
            num_bytes += file.tell()
    total_bytes = sum(entry.num_bytes for entry in files)
    return round(total_bytes * num_lines / num_bytes) if num_lines else None


# Segments of the input.


def has_segment_per_file(job: Job) -> bool:
    """Return whether each file is a segment: with one source and no side tables."""
    return len(job.data.sources) == 1 and not job.data.sides


def split_input(job: Job, source: Location, folder: Path) -> list[list[Entry]]:
    """Split a job's input into segments, always the same ones.

    Returns:
        The files of each segment, ordered by path.

    Raises:
        SchemaError: there are no files, or other ones than on the first call, or some are of an
            unfinished job or of a table format.
    """
    files = sorted(source.entries(), key=lambda entry: PurePosixPath(entry.path))
    everything = [entry.path for entry in files]
    of_sources = [_matching(files, config.files) for config in job.data.sources.values()]
    for config, own in zip(job.data.sources.values(), of_sources, strict=True):
        paths = [entry.path for entry in own]  # builds of listed files do not check them
        check_committed(str(source), paths, everything, config.files)
    if has_segment_per_file(job):
        (files,) = of_sources
        segments = [[entry] for entry in files]
    else:
        segments = [files]
    if not files:
        raise SchemaError(
            "input has no files of the job's sources; check the path and the glob",
            file=str(source),
        )
    names = [[entry.path for entry in segment] for segment in segments]
    _check_unchanged(folder / SEGMENTS, names, source)
    return segments


def _matching(files: Iterable[Entry], pattern: str) -> list[Entry]:
    shown, regex = visible({entry.path: entry for entry in files}), glob_regex(pattern)
    return [entry for entry in files if entry.path in shown and regex.fullmatch(entry.path)]


def _check_unchanged(path: Path, names: Sequence[Sequence[str]], source: Location) -> None:
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

"""The files of a job: segments of its input, folders, addresses and tokens of its stores."""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from scheduler.controller.events import LoadKnown
from scheduler.drivers.base import Endpoint
from scheduler.model.snapshot import compute_lookahead
from schemas.accesses import index_load
from schemas.config.job import Job, load_job
from schemas.dataset import open_dataset
from schemas.errors import SchemaError
from schemas.files import replace_bytes
from schemas.paths import ALLOW_OUTSIDE, SINGLE_WRITER
from schemas.run_log import STORE_ADDRESS


@dataclass(frozen=True, slots=True)
class JobPaths:
    """Paths of one job.

    Attributes:
        job_file: the job file.
        folder: of everything else.
        num_segments: segments of its input.
        single_writer: whether nothing else writes there.
        allow_outside: whether the job's schema may be outside the folder of the job file.
    """

    job_file: Path
    folder: Path
    num_segments: int
    single_writer: bool = False
    allow_outside: bool = False

    @property
    def build_flags(self) -> list[str]:
        """Flags of commands that build, besides paths."""
        return [*self.write_flags, *([ALLOW_OUTSIDE] if self.allow_outside else [])]

    @property
    def write_flags(self) -> list[str]:
        """Flags of commands that write, besides paths."""
        return [SINGLE_WRITER] if self.single_writer else []

    @property
    def dataset(self) -> Path:
        """The dataset."""
        return self.folder / "dataset"

    @property
    def run(self) -> Path:
        """The training run."""
        return self.folder / "run"

    @property
    def processes(self) -> Path:
        """Folder of pids and output of processes."""
        return self.folder / "processes"

    @property
    def stores(self) -> Path:
        """Folder of the stores, their token and the job file with their addresses."""
        return self.folder / "stores"

    @property
    def served_job(self) -> Path:
        """Job file with the addresses of the stores."""
        return self.stores / "job.yaml"

    @property
    def token(self) -> Path:
        """Token of stores that share one loopback."""
        return self.stores / "token"

    def store(self, number: int) -> Path:
        """Return the folder of a store."""
        return self.stores / str(number)

    def store_address(self, number: int) -> str:
        """Return the address of a store, which stays the same across restarts."""
        return f"file://{self.store(number) / STORE_ADDRESS}"

    def segment(self, number: int) -> Path:
        """Return the input folder of one segment."""
        return segment_folder(self.folder, number)


def segment_folder(folder: Path, number: int) -> Path:
    """Return the input folder of one segment below the folder of its job."""
    return folder / "segments" / f"{number:05d}"


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


def prepare_stores(
    paths: JobPaths, numbers: Sequence[int], endpoint: Endpoint | None = None
) -> None:
    """Write the job file with the addresses of stores; nothing if it is unchanged.

    Each address is a file in which the store publishes its current network address.

    Args:
        paths: of the job.
        numbers: of the stores that own slots.
        endpoint: how processes connect; None if all share one loopback.
    """
    paths.stores.mkdir(parents=True, exist_ok=True)
    stores: dict[str, object] = {"addresses": [paths.store_address(number) for number in numbers]}
    if endpoint is None:
        _write_token(paths.token)
        stores["token_file"] = str(paths.token)
    else:
        stores["token_file"] = endpoint.token_file
        stores["certificates"] = endpoint.certificate_file
        stores["certificate_name"] = endpoint.name
    body: Any = yaml.safe_load(paths.job_file.read_text(encoding="utf-8"))
    schema = load_job(paths.job_file).data.schema
    body["data"]["schema"] = str((paths.job_file.parent / schema).resolve())
    train = body["train"] = body.get("train") or {}
    kept = {k: v for k, v in (train.get("stores") or {}).items() if k in ("timeout", "replicas")}
    train["stores"] = {**kept, **stores, "elastic": True}
    text = yaml.safe_dump(body, sort_keys=False).encode()
    if not paths.served_job.exists() or paths.served_job.read_bytes() != text:
        replace_bytes(paths.served_job, text)


def _write_token(path: Path) -> None:
    if not path.exists():
        new = path.with_suffix(".new")
        new.touch(mode=0o600)
        new.write_text(secrets.token_hex(32) + "\n")
        new.replace(path)


def discard_stores(paths: JobPaths, numbers: Collection[int]) -> None:
    """Remove the folders of all stores except these.

    The address goes first: another store may come to listen there.
    """
    for folder in paths.stores.iterdir() if paths.stores.is_dir() else ():
        if folder.is_dir() and folder.name.isdigit() and int(folder.name) not in numbers:
            (folder / STORE_ADDRESS).unlink(missing_ok=True)
            shutil.rmtree(folder, ignore_errors=True)  # the store may still be writing


def read_load(paths: JobPaths, job: str, time_sec: float) -> LoadKnown | None:
    """Return the load of the indexed steps, None without an index for the job's batch size."""
    train = load_job(paths.job_file).train
    try:
        dataset = open_dataset(paths.dataset)
    except SchemaError:
        return None  # damaged: the trainer reports it in full
    ids = tuple(segment.manifest.id for segment in dataset.segments)
    matching = (
        index
        for index in dataset.indexes
        if index.manifest.batch_samples == train.batch_samples and index.manifest.segments == ids
    )
    index = next(matching, None)
    if index is None:
        return None
    manifest = index.manifest
    order = dataset.order(train.batch_samples, manifest.epochs, manifest.shuffle, manifest.seed)
    slots = sum(index_load(dataset, table, order).slots for table in dataset.job.data.tables)
    assert not isinstance(slots, int), "a job has a table"
    distances = (
        (steps[step] for step in range(len(steps)))
        for steps in map(index.steps, dataset.job.data.tables)
    )
    touched = compute_lookahead(distances, train.cache).touched_rows
    ends = [(period + 1) * len(touched) // len(slots) - 1 for period in range(len(slots))]
    return LoadKnown(
        time_sec=time_sec,
        job=job,
        num_steps=order.num_steps,
        slots=tuple(tuple(row) for row in slots.tolist()),
        touched_rows=tuple(touched[ends].tolist()),
    )

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
from scheduler.drivers.base import Reach
from scheduler.model.snapshot import compute_lookahead
from schemas.accesses import index_load
from schemas.config.job import Job, load_job
from schemas.dataset import open_dataset
from schemas.errors import SchemaError
from schemas.manifest import replace_bytes
from schemas.paths import ALLOW_OUTSIDE, SINGLE_WRITER
from schemas.run_log import STORE_ADDRESS


@dataclass(frozen=True, slots=True)
class Workplace:
    """Paths of one job.

    Attributes:
        job_file: the job file.
        folder: everything else.
        num_segments: segments of its input.
        single_writer: whether nothing else writes there.
        allow_outside: whether the job's schema may lie outside the folder of the job file.
    """

    job_file: Path
    folder: Path
    num_segments: int
    single_writer: bool = False
    allow_outside: bool = False

    @property
    def build_flags(self) -> list[str]:
        """Return the options of commands that build, besides paths."""
        return [*self.write_flags, *([ALLOW_OUTSIDE] if self.allow_outside else [])]

    @property
    def write_flags(self) -> list[str]:
        """Return the options of commands that write, besides paths."""
        return [SINGLE_WRITER] if self.single_writer else []

    @property
    def dataset(self) -> Path:
        """Return the dataset that is built."""
        return self.folder / "dataset"

    @property
    def run(self) -> Path:
        """Return the run that trains on it."""
        return self.folder / "run"

    @property
    def stores(self) -> Path:
        """Return the folder of its stores, their token and the job file that names them."""
        return self.folder / "stores"

    @property
    def served_job(self) -> Path:
        """Return the job file with the addresses of its stores."""
        return self.stores / "job.yaml"

    @property
    def processes(self) -> Path:
        """Return what processes leave: pids, output."""
        return self.folder / "processes"

    def segment(self, number: int) -> Path:
        """Return the input of one segment."""
        return segment_folder(self.folder, number)


def segment_folder(folder: Path, number: int) -> Path:
    """Return where the input of one segment lies."""
    return folder / "segments" / f"{number:05d}"


def cut_input(job: Job, source: Path, folder: Path) -> list[list[Path]]:
    """Cut a job's input into segments, once: later calls return the same cut.

    A job with one source and no side tables has a segment for each of its files, in order
    of their paths; any other has one segment.

    Args:
        job: whose it is.
        source: folder of the raw files.
        folder: of the job; gets a folder of links for each segment.

    Returns:
        The files of each segment.

    Raises:
        SchemaError: there is no file, or the input was cut before and has other files now.
    """
    files = sorted(path for path in source.rglob("*") if path.is_file())
    data = job.data
    if len(data.sources) == 1 and not data.sides:
        (wanted,) = data.sources.values()
        files = [f for f in files if matches(f.relative_to(source), wanted.files)]
        cut = [[path] for path in files]
    else:
        cut = [files]
    if not files:
        raise SchemaError(
            "input must hold files of the job's sources, got none; check the path and the glob",
            file=str(source),
        )
    names = [[str(path.relative_to(source)) for path in part] for part in cut]
    _check_same(folder / "segments.json", names, source)
    for number, part in enumerate(cut):
        for path in part:
            _link(segment_folder(folder, number) / path.relative_to(source), path)
    return cut


def matches(path: Path, pattern: str) -> bool:
    """Tell whether a path fits a glob in which `**` stands for any folders."""
    parts = pattern.split("/")
    if "**" in parts:
        tail = parts[parts.index("**") + 1 :] or ["*"]
        return path.match("/".join(tail))
    return len(path.parts) == len(parts) and path.match(pattern)


def _check_same(path: Path, names: Sequence[Sequence[str]], source: Path) -> None:
    text = json.dumps(names, indent=1) + "\n"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_bytes(path, text.encode())
    elif path.read_text(encoding="utf-8") != text:
        raise SchemaError(
            f"input must stay as it was cut, got other files than {path} lists; restore them, or "
            "begin with another --output",
            file=str(source),
        )


def _link(place: Path, target: Path) -> None:
    if place.is_symlink():
        return
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(target.resolve())


def prepare_stores(place: Workplace, numbers: Sequence[int], reach: Reach | None = None) -> None:
    """Write the job file with the addresses of stores, unless it says the same already.

    Each address is a file in which its store says where it listens, wherever it is started again.

    Args:
        place: of the job.
        numbers: of the stores that have slots.
        reach: how processes reach each other; None where all share one loopback.
    """
    place.stores.mkdir(parents=True, exist_ok=True)
    found: dict[str, object] = {"addresses": [address_of(place, number) for number in numbers]}
    if reach is None:
        found["token_file"] = str(_with_token(place))
    else:
        found |= {"token_file": reach.token, "certificates": reach.chain}
        found["certificate_name"] = reach.name
    body: Any = yaml.safe_load(place.job_file.read_text(encoding="utf-8"))
    schema = load_job(place.job_file).data.schema
    body["data"]["schema"] = str((place.job_file.parent / schema).resolve())
    train = body["train"] = body.get("train") or {}
    kept = {k: v for k, v in (train.get("stores") or {}).items() if k in ("timeout", "replicas")}
    train["stores"] = {**kept, **found, "elastic": True}
    text = yaml.safe_dump(body, sort_keys=False).encode()
    if not place.served_job.exists() or place.served_job.read_bytes() != text:
        replace_bytes(place.served_job, text)


def _with_token(place: Workplace) -> Path:
    """Return the file of the token that stores of one loopback ask for; written once."""
    token = token_of(place)
    if not token.exists():
        new = token.with_suffix(".new")
        new.touch(mode=0o600)
        new.write_text(secrets.token_hex(32) + "\n")
        new.replace(token)
    return token


def discard_stores(place: Workplace, numbers: Collection[int]) -> None:
    """Remove what stores left that have no slots any more and run no more.

    Above all their addresses, which another store may come to listen at.

    Args:
        place: of the job.
        numbers: of the stores that belong to it.
    """
    for folder in place.stores.iterdir() if place.stores.is_dir() else ():
        if folder.is_dir() and folder.name.isdigit() and int(folder.name) not in numbers:
            (folder / STORE_ADDRESS).unlink(missing_ok=True)
            shutil.rmtree(folder, ignore_errors=True)  # it may be written yet


def store_folder(place: Workplace, number: int) -> Path:
    """Return where the log of a store lies."""
    return place.stores / str(number)


def token_of(place: Workplace) -> Path:
    """Return the file with what stores of one loopback ask for."""
    return place.stores / "token"


def address_of(place: Workplace, number: int) -> str:
    """Return the address of a store; it stays when the store is started again."""
    return f"file://{store_folder(place, number) / STORE_ADDRESS}"


def load_known(place: Workplace, job: str, time_sec: float) -> LoadKnown | None:
    """Return what the oracle tells of the steps that are known, None without an index of the job.

    Args:
        place: of the job.
        job: its name.
        time_sec: the time.
    """
    batch = load_job(place.job_file).train.batch_samples
    try:
        dataset = open_dataset(place.dataset)
    except SchemaError:
        return None  # damaged: the trainer says so, with all that it knows
    ids = tuple(segment.manifest.id for segment in dataset.segments)
    same = [
        index
        for index in dataset.indexes
        if index.manifest.batch_samples == batch and index.manifest.segments == ids
    ]
    if not same:
        return None
    index, found = same[0], same[0].manifest
    order = dataset.order(batch, found.epochs, found.shuffle, found.seed)
    loads = [index_load(dataset, table, order) for table in dataset.job.data.tables]
    slots = sum(load.slots for load in loads)
    assert not isinstance(slots, int), "a job has a table"
    distances = (
        (steps[step] for step in range(len(steps)))
        for steps in map(index.steps, dataset.job.data.tables)
    )
    touched = compute_lookahead(distances, load_job(place.job_file).train.cache).touched_rows
    ends = [(period + 1) * len(touched) // len(slots) - 1 for period in range(len(slots))]
    return LoadKnown(
        time_sec=time_sec,
        job=job,
        num_steps=order.num_steps,
        slots=tuple(tuple(row) for row in slots.tolist()),
        touched_rows=tuple(touched[ends].tolist()),
    )

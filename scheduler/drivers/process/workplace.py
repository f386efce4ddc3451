"""Where a job's things lie, and how its input is cut into segments."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from schemas.errors import SchemaError
from schemas.job import Job
from schemas.manifest import replace_bytes
from schemas.paths import ALLOW_OUTSIDE, SINGLE_WRITER


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

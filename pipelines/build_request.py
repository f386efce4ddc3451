"""The request of a build: its input, its target and its options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pipelines.table.target import SegmentTarget
from schemas.config.job import Job
from schemas.dataset.manifest import InputFile
from schemas.storage.location import Location


@dataclass(frozen=True, slots=True)
class BuildInput:
    """What a segment is built from.

    Attributes:
        job_path: the job file, or its URL.
        root: directory of raw files, or its URL.
        only: paths below `root` of the files to read; all when empty.
        listing: input files; listed when None.
        allow_outside: whether the job's schema may be outside the folder of the job file.
    """

    job_path: Path | Location
    root: Path | str
    only: tuple[str, ...] = ()
    listing: tuple[InputFile, ...] | None = None
    allow_outside: bool = False


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """How a segment is built.

    Attributes:
        beam_args: Beam options.
        check_sql: map all rows twice, in other chunks, and compare the samples.
        progress: called with each progress message, one line.
        check: called with the complete segment and its job before it is committed; raises to
            refuse it.
    """

    beam_args: list[str]
    check_sql: bool = False
    progress: Callable[[str], None] = lambda _: None
    check: Callable[[Location, Job], None] = lambda *_: None


@dataclass(frozen=True, slots=True)
class BuildRequest:
    """The arguments of a build."""

    input: BuildInput
    target: SegmentTarget
    options: BuildOptions

"""Files of what transforms learned: staged for workers, placed in the dataset, kept in one line.

Segments share them. Each names those that it used, and one that adds to a
vocabulary must have started from all that are there: two builds that add at
once cannot both be right, and the second is refused by name.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from schemas.errors import SchemaError
from schemas.job import DataConfig
from schemas.layout import MANIFEST, SEGMENTS
from schemas.learned import Learned, load_learned, read_verified
from schemas.manifest import read_dataset, read_segment, replace_bytes

LEARNED = "learned"
"""Directory below a segment being built, laid out like the dataset; gone before the commit."""


def learned_so_far(dataset: Path) -> dict[str, str]:
    """Return the files that the segments of a dataset name, path to sha256; none without one."""
    if not (dataset / MANIFEST).exists():
        return {}
    found: dict[str, str] = {}
    for reference in read_dataset(dataset).segments:
        found |= read_segment(dataset / SEGMENTS / reference.id, reference).learned
    return dict(sorted(found.items()))


def load_building(root: Path, files: Mapping[str, str], data: DataConfig) -> Learned:
    """Read what was learned for a segment that is being built."""
    return load_learned(root / LEARNED, files, data)


def stage_learned(dataset: Path, files: Mapping[str, str], building: Path) -> None:
    """Copy the files of the segments before, verified, to where workers look."""
    for path, digest in files.items():
        target = building / LEARNED / path
        target.parent.mkdir(parents=True, exist_ok=True)
        replace_bytes(target, read_verified(dataset, path, digest))


def place_learned(building: Path, dataset: Path, files: Mapping[str, str]) -> None:
    """Move what was learned into the dataset; a name stands for one content, so no one is hurt."""
    for path, digest in files.items():
        if not (dataset / path).exists():
            (dataset / path).parent.mkdir(parents=True, exist_ok=True)
            replace_bytes(dataset / path, read_verified(building / LEARNED, path, digest))
    shutil.rmtree(building / LEARNED, ignore_errors=True)


def returned_files(values: Mapping[str, Sequence[Any]], base: Mapping[str, str]) -> dict[str, str]:
    """Return the files that a finished pipeline brought back; `base` when nothing is learned."""
    (files,) = values.get("learned") or (base,)
    return dict(files)


def fits(files: Mapping[str, str], dataset: Path) -> bool:
    """Tell whether a segment's files can stand beside those that the dataset has now."""
    there = learned_so_far(dataset).items()
    return files.items() <= there or there <= files.items()


def check_fits(files: Mapping[str, str], dataset: Path) -> None:
    """Refuse a segment that learned something while another did.

    Raises:
        SchemaError: the dataset has files that the segment did not start from.
    """
    if not fits(files, dataset):
        missing = sorted(set(learned_so_far(dataset)) - set(files))
        raise SchemaError(
            f"segment must start from what the dataset has learned, got one without {missing[0]}, "
            "which another segment added meanwhile; run it again",
            file=str(dataset),
        )

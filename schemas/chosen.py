"""Some segments of a dataset, as a dataset of their own: what training day by day is given.

Nothing is copied and no file is made. An order, an index, a plan and a ledger over the chosen
segments are those of a dataset that has no others, so each keeps its meaning: steps count from 0,
and an index counts when it was made for exactly these segments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from schemas.dataset import Dataset, Segment
from schemas.errors import SchemaError
from schemas.forgotten import names_before
from schemas.layout import MANIFEST


def choose(dataset: Dataset, wanted: Sequence[str]) -> Dataset:
    """Return a dataset of the segments of some names, in dataset order.

    Args:
        dataset: open dataset.
        wanted: ids of segments, or their days; each at least once.

    Raises:
        SchemaError: the dataset has no segment of a name; names those it has.
    """
    for name in wanted:
        if not any(name in _names_of(segment) for segment in dataset.segments):
            known = ", ".join(_names_of(segment)[-1] for segment in dataset.segments[-3:])
            raise SchemaError(
                f"segment must be of the dataset, got {name!r}; the last are {known}",
                file=str(dataset.directory / MANIFEST),
            )
    return _where(dataset, lambda segment: not set(_names_of(segment)).isdisjoint(wanted))


def choose_hashes(dataset: Dataset, wanted: Sequence[str]) -> Dataset:
    """Return a dataset of the segments whose manifests have these hashes.

    Raises:
        SchemaError: one is not there any more.
    """
    hashes = hashes_of(dataset)
    for sha256 in wanted:
        if sha256 not in hashes.values():
            raise SchemaError(
                f"dataset must hold the segments of the run, got none with sha256 {sha256[:12]}; "
                "a new version has replaced it: train a new run",
                file=str(dataset.directory / MANIFEST),
            )
    return _where(dataset, lambda segment: hashes[segment.manifest.id] in wanted)


def hashes_of(dataset: Dataset) -> dict[str, str]:
    """Return the hash of the manifest of each segment, by id."""
    return {reference.id: reference.manifest_sha256 for reference in dataset.manifest.segments}


def all_hashes_of(dataset: Dataset) -> dict[str, frozenset[str]]:
    """Return by id those hashes, and the ones from before ids were forgotten in a segment."""
    lineage = dataset.manifest.lineage
    return {
        name: names_before(lineage, name) | {sha256} for name, sha256 in hashes_of(dataset).items()
    }


def _names_of(segment: Segment) -> tuple[str, ...]:
    """Return what a segment is called: its id, and its day if it has one."""
    manifest = segment.manifest
    return (manifest.id,) if manifest.day is None else (manifest.id, manifest.day)


def _where(dataset: Dataset, wanted: Callable[[Segment], bool]) -> Dataset:
    chosen = tuple(segment for segment in dataset.segments if wanted(segment))
    left = tuple(segment for segment in dataset.segments if not wanted(segment))
    ids = _ids(chosen)
    root = dataset.manifest
    segments = tuple(reference for reference in root.segments if reference.id in ids)
    return replace(
        dataset,
        manifest=replace(root, segments=segments),
        segments=chosen,
        others=(*dataset.others, *left),
    )


def _ids(segments: Iterable[Segment]) -> frozenset[str]:
    return frozenset(segment.manifest.id for segment in segments)

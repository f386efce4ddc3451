"""Remove what no readable version of the root manifest names: `pipelines vacuum`.

Kept is what the newest version names, or one that was superseded less than the given time ago, and
what a lease of a reader names. Files that no version has named may be of a build, so only their age
counts: they are removed once they are `MIN_AGE` old. Times are those of the store, so clocks of
hosts do not matter. Copies of jobs and schemas are small and stay.

Before anything is removed, a version of the root without changes is committed, so a writer that has
checked its files before (`root.commit_manifest`) cannot commit any more; on the new version it
finds that they are too old.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Container, Iterator
from contextlib import nullcontext, suppress
from datetime import datetime, timedelta
from typing import Any

from presage.pipelines.table.indexes import INDEX_PREFIX, segment_of_part
from presage.pipelines.table.root import MIN_AGE, directories_in, files_in, until_committed
from presage.schemas.dataset.fitted import FITTED_DIRECTORY, VOCABULARIES
from presage.schemas.dataset.manifest import (
    DatasetManifest,
    Root,
    commit_root,
    parse_root,
    read_root,
)
from presage.schemas.errors import SchemaError
from presage.schemas.layout import SEGMENTS, TOMBSTONES
from presage.schemas.storage.leases import LEASES, live_leases, remove_expired
from presage.schemas.storage.local_files import remove_incomplete
from presage.schemas.storage.location import MANIFESTS, Entry, Location
from presage.schemas.storage.probes import store_time
from presage.schemas.storage.versions import Versions

REFUSED_PREFIX = ".refused-"
"""Names of the directories with the rejects of refused segments begin with it."""
_HEX = "[0-9a-f]"
_PLACES = re.compile(
    rf"({SEGMENTS}/(?:{_HEX}{{12}}|erase)(?:-{_HEX}{{4,}})*(?=/)"
    rf"|{INDEX_PREFIX}{_HEX}+/(?:erase-)?{_HEX}{{12}}[0-9a-f-]*_{_HEX}{{6}}(?=/)"
    rf"|{re.escape(REFUSED_PREFIX)}{_HEX}+(?=/)"
    rf"|(?:{TOMBSTONES}|{FITTED_DIRECTORY})/{_HEX}{{12}}(?:-{_HEX}{{6}})?\.(?:json|parquet)$"
    rf"|{VOCABULARIES}/[^/]+/[0-9]{{5}}-{_HEX}{{12}}(?:-{_HEX}{{6}})?\.parquet$"
    rf"|{MANIFESTS}/probe-[^/]+$)"
)
"""Places that commands make: directories of one attempt, and single files. Others are not ours."""
_FILES = re.compile(
    r"/(MANIFEST\.json|(blocks|events|files)\.parquet|(anomalies|statistics|job|schema)[^/]*"
    r"|(samples|rejects)/[0-9][^/]*\.parquet"
    r"|(access|buffers|edges|groups|lookups|tuples)/[^/]+/[0-9][^/]*\.parquet"
    r"|(fitted|results|rows|schemas|shards|shuffle|vocabularies)/.+"
    r"|[^/]+/((reuse|uses-[0-9]+)/)?[0-9]{5}\.parquet)"  # of an index
)
"""Files in directories of an attempt; others stay, with their directories."""
_FILE_DIRECTORIES = (TOMBSTONES, VOCABULARIES, FITTED_DIRECTORY)


def vacuum(
    dataset: Location, older_than: timedelta = MIN_AGE, now: datetime | None = None
) -> dict[str, Any]:
    """Remove segments, indexes and other files that no manifest names any more.

    `older_than` is the time for which replaced versions are kept, `now` that of the store's clock,
    read if None.

    Returns:
        `segments` and `indexes`, the names of what was removed, `num_files` and `num_bytes`.

    Raises:
        ValueError: the time is shorter than `MIN_AGE`.
        SchemaError: there is no dataset.
    """
    if older_than < MIN_AGE:
        raise ValueError(
            f"--older-than must be at least {MIN_AGE.days}d, got {older_than}: younger files may "
            "be of a build that has not ended; raise it or leave it out"
        )
    removed = _remove_unnamed(dataset, older_than, now)
    return {
        "segments": [p.partition("/")[2] for p in removed if p.startswith(f"{SEGMENTS}/")],
        "indexes": [p for p in removed if p.startswith(INDEX_PREFIX)],
        "num_files": sum(map(len, removed.values())),
        "num_bytes": sum(entry.num_bytes for entries in removed.values() for entry in entries),
    }


def remove_replaced(dataset: Location) -> int:
    """Remove at once what superseded versions name and the newest does not: no build can use it.

    Rejects of refused segments are removed as well.

    Returns:
        The number of removed directories and files.
    """
    return len(_remove_unnamed(dataset, timedelta()))


def _remove_unnamed(
    dataset: Location, replaced_for: timedelta, now: datetime | None = None
) -> dict[str, list[Entry]]:
    """Remove what was replaced so long ago; return the directories and files with their entries."""
    read_root(dataset)  # raises if there is no dataset, before anything is written
    now = now or store_time(dataset)
    superseded, removed = _supersede_unnamed(dataset, replaced_for, now)
    # Files first: while a directory of a version is there, so is the list of its files.
    for place in sorted(removed, key=lambda place: place.startswith(f"{SEGMENTS}/")):
        dataset.remove([entry.path for entry in removed[place]])
        (dataset / place).remove_all(lambda path: False)  # incomplete files, directories
    if dataset.local is not None:  # and those of processes that were killed in their first write
        limit = now - max(replaced_for, MIN_AGE)
        remove_incomplete(dataset.local, lambda path: False, limit.timestamp())
    Versions(dataset).retire(superseded)
    remove_expired(dataset, now)
    return removed


def _supersede_unnamed(
    dataset: Location, replaced_for: timedelta, now: datetime
) -> tuple[list[int], dict[str, list[Entry]]]:
    """Find what to remove, and commit a version: a suspended writer cannot commit it any more.

    Superseded versions are read only if they decide about something.

    Returns:
        The versions to retire afterwards, none while a lease keeps what they name; and the
        directories and files to remove, with their entries.
    """
    limit = now - replaced_for

    def attempt(root: Root) -> tuple[list[int], dict[str, list[Entry]]] | None:
        superseded = Versions(dataset).superseded()
        places = _without_named(dataset, root.manifest, dict(_places(dataset)))
        earlier = [number for number, time in superseded.items() if time <= limit]
        for number in superseded:
            if places and number not in earlier:
                places = _without_named(dataset, _read_version(dataset, number), places)
        leased = {name for lease in live_leases(dataset, now) for name in lease.directories}
        unnamed = {p: entries for p, entries in places.items() if not _is_leased(p, leased)}
        young = {p: e for p, e in unnamed.items() if not _is_old(p, e, replaced_for, now)}
        for number in earlier:
            if young:
                manifest = _read_version(dataset, number)
                young = _without_named(dataset, manifest, young, is_complete=False)
        removed = _without(unnamed, young)
        if removed and commit_root(dataset, root, root.manifest) is None:
            return None
        return [] if len(unnamed) < len(places) else sorted(earlier), removed

    return until_committed(dataset, read_root, attempt)


def _without(places: dict[str, list[Entry]], names: Container[str]) -> dict[str, list[Entry]]:
    return {place: entries for place, entries in places.items() if place not in names}


def _is_leased(place: str, leased: set[str]) -> bool:
    directory = place.partition("/")[2]
    return not leased.isdisjoint((directory, segment_of_part(directory)))


def _is_old(place: str, entries: list[Entry], replaced_for: timedelta, now: datetime) -> bool:
    is_refused = place.startswith(REFUSED_PREFIX)  # not of a running build
    limit = now - (replaced_for if is_refused else max(replaced_for, MIN_AGE))
    return all(entry.modified <= limit for entry in entries)


def _read_version(dataset: Location, number: int) -> DatasetManifest | None:
    """Return the manifest of a version; None if another `vacuum` has retired it."""
    versions = Versions(dataset)
    version = versions.read(number)
    return version and parse_root(version, versions.path(number))


def _without_named(
    dataset: Location,
    manifest: DatasetManifest | None,
    places: dict[str, list[Entry]],
    *,
    is_complete: bool = True,
) -> dict[str, list[Entry]]:
    """Return the places that a version does not name.

    `is_complete` is False if a `vacuum` that was killed may have removed files of the version.
    """
    if manifest is None:
        return places
    places = _without(places, directories_in(dataset, manifest))
    if any(place.startswith(_FILE_DIRECTORIES) for place in places):
        with nullcontext() if is_complete else suppress(SchemaError):
            places = _without(places, files_in(dataset, manifest))
    return places


def _places(dataset: Location) -> Iterator[tuple[str, list[Entry]]]:
    """Yield each removable directory or file with its entries."""
    places: defaultdict[str, list[Entry]] = defaultdict(list)
    for entry in dataset.entries():
        match = _PLACES.match(entry.path)
        if match and (match.end() == len(entry.path) or _FILES.fullmatch(entry.path, match.end())):
            places[match[1]].append(entry)
    yield from sorted(places.items())


def check_unused(dataset: Location) -> None:
    """Raise SchemaError if a reader holds a lease on the dataset."""
    for lease in live_leases(dataset):
        raise SchemaError(
            f"dataset is in use by {lease.holder}; stop it, or try again when it has ended",
            file=str(dataset / LEASES),
        )

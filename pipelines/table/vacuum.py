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

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from pipelines.table.indexes import INDEX_PREFIX, segment_of_part
from pipelines.table.root import MIN_AGE, directories_in, files_in
from schemas.errors import SchemaError
from schemas.fitted import FITTED_DIRECTORY, VOCABULARIES
from schemas.layout import SEGMENTS, TOMBSTONES
from schemas.leases import LEASES, live_leases, remove_expired
from schemas.manifest import commit_root, parse_root, read_root
from schemas.storage import MANIFESTS, Entry, Location, store_time
from schemas.versions import Versions, backoff

REFUSED_PREFIX = ".refused-"
"""Names of the directories with the rejects of refused segments begin with it."""
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
        if "/" in place:
            (dataset / place).remove_all()
    Versions(dataset).retire(superseded)
    remove_expired(dataset, now)
    return removed


def _supersede_unnamed(
    dataset: Location, replaced_for: timedelta, now: datetime
) -> tuple[list[int], dict[str, list[Entry]]]:
    """Find what to remove, and commit a version: a suspended writer cannot commit it any more.

    Returns:
        The versions to retire afterwards, none while a lease keeps what they name; and the
        directories and files to remove, with their entries.
    """
    for _ in backoff():
        root = read_root(dataset)
        versions = _versions_by_age(dataset, now - replaced_for)
        leased = {name for lease in live_leases(dataset, now) for name in lease.directories}
        places = dict(_places(dataset))
        unnamed = {
            place: entries
            for place, entries in places.items()
            if place not in versions.kept
            and not _is_leased(place, leased)
            and (place in versions.replaced or _is_old(place, entries, replaced_for, now))
        }
        if not unnamed or commit_root(dataset, root, root.manifest) is not None:
            held = versions.replaced & (places.keys() - versions.kept - unnamed.keys())
            return [] if held else versions.superseded, unnamed
    raise AssertionError("`backoff` does not end")


def _is_leased(place: str, leased: set[str]) -> bool:
    directory = place.partition("/")[2]
    return not leased.isdisjoint((directory, segment_of_part(directory)))


def _is_old(place: str, entries: list[Entry], replaced_for: timedelta, now: datetime) -> bool:
    is_refused = place.startswith(REFUSED_PREFIX)  # not of a build that goes on
    limit = now - (replaced_for if is_refused else max(replaced_for, MIN_AGE))
    return all(entry.modified <= limit for entry in entries)


@dataclass(frozen=True, slots=True)
class _VersionNames:
    """What versions of the root name, relative to the dataset.

    Attributes:
        kept: by the newest version, and by those superseded a short time ago.
        replaced: by the others that are not retired.
        superseded: numbers of the others, ascending, so that none is left behind a retired one.
    """

    kept: set[str]
    replaced: set[str]
    superseded: list[int]


def _versions_by_age(dataset: Location, limit: datetime) -> _VersionNames:
    """Return what versions name that were superseded after a time, and before it."""
    versions, found = Versions(dataset), _VersionNames(set(), set(), [])
    is_kept = True  # the newest one
    for number in reversed(versions.all_numbers()):
        entry, version = versions.path(number).stat(), versions.read(number)
        if entry is None or version is None:
            break  # this one and all before it are retired
        manifest = parse_root(version, versions.path(number))
        names = found.kept if is_kept else found.replaced
        names |= directories_in(dataset, manifest)
        try:
            names |= files_in(dataset, manifest)
        except SchemaError:  # removed before, with its files, by a `vacuum` that was killed
            if is_kept:
                raise
        if not is_kept:
            found.superseded.insert(0, number)
        is_kept = is_kept and entry.modified > limit
    return found


def _places(dataset: Location) -> Iterator[tuple[str, list[Entry]]]:
    """Yield what is removed as a whole with its files: directories, and single files."""
    places: defaultdict[str, list[Entry]] = defaultdict(list)
    for entry in dataset.entries():
        parts = entry.path.split("/")
        top = parts[0]
        if top == SEGMENTS or top.startswith(INDEX_PREFIX):
            places["/".join(parts[:2])].append(entry)
        elif top.startswith(REFUSED_PREFIX):
            places[top].append(entry)
        elif top in _FILE_DIRECTORIES or _is_probe(parts):
            places[entry.path].append(entry)
    yield from sorted(places.items())


def _is_probe(parts: list[str]) -> bool:
    return parts[0] == MANIFESTS and parts[-1].startswith("probe-")


def check_unused(dataset: Location) -> None:
    """Raise SchemaError if a reader holds a lease on the dataset."""
    for lease in live_leases(dataset):
        raise SchemaError(
            f"dataset is in use by {lease.holder}; stop it, or try again when it has ended",
            file=str(dataset / LEASES),
        )

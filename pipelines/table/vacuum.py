"""Remove what no readable version of the root manifest names: `pipelines vacuum`.

A file is kept if the newest version names it, or one that was superseded less than the given time
ago; if a lease names it or its directory; and if it was written less than that time ago. Times are
those of the store, so clocks of hosts do not matter. Copies of jobs and schemas are small and stay.

Before anything is removed, directories of segments are claimed, and a version of the root without
changes is committed. A process whose lease has expired can neither claim its directory any more,
nor commit on the root before; on the new one it finds that its lease has expired (`Lease.check`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from pipelines.context import INCOMING
from pipelines.table.commit import CLAIM
from pipelines.table.indexes import INDEX_PREFIX
from schemas.dataset import committed_segment
from schemas.errors import SchemaError
from schemas.fitted import FITTED_DIRECTORY, VOCABULARIES
from schemas.layout import SEGMENTS, TOMBSTONES, tombstones_path
from schemas.leases import LEASES, live_leases, remove_expired
from schemas.manifest import DatasetManifest, commit_root, parse_root, read_root
from schemas.storage import MANIFESTS, Entry, Location, store_time
from schemas.versions import Versions, backoff, writer_id

KEEP = timedelta(days=1)
"""Time for which `vacuum` keeps what is not named, unless the command says another."""
REFUSED_PREFIX = ".refused-"
"""Names of the directories with the rejects of refused segments begin with it."""
_FILE_DIRECTORIES = (TOMBSTONES, VOCABULARIES, FITTED_DIRECTORY)


@dataclass(slots=True)
class _Named:
    """What versions of the root name, relative to the dataset."""

    directories: set[str] = field(default_factory=set[str])
    files: set[str] = field(default_factory=set[str])

    def add(self, dataset: Location, manifest: DatasetManifest) -> None:
        for reference in manifest.segments:
            self.directories.add(f"{SEGMENTS}/{reference.directory}")
            self.files |= committed_segment(
                dataset / SEGMENTS / reference.directory, reference
            ).fitted.keys()
        for index in manifest.indexes:
            self.directories |= {f"{index.id}/{p.directory}" for p in index.parts.values()}
        if manifest.tombstones_sha256:
            self.files.add(tombstones_path(manifest.tombstones_sha256))


def vacuum(dataset: Location, older_than: timedelta = KEEP) -> dict[str, Any]:
    """Remove segments, indexes and other files that no manifest names any more.

    Args:
        dataset: directory of the dataset.
        older_than: time for which replaced versions and unfinished builds are kept.

    Returns:
        `segments` and `indexes`, the names of what was removed, `num_files` and `num_bytes`.

    Raises:
        SchemaError: there is no dataset.
    """
    removed = remove_unnamed(dataset, older_than)
    return {
        "segments": [p.partition("/")[2] for p in removed if p.startswith(f"{SEGMENTS}/")],
        "indexes": [p for p in removed if p.startswith(INDEX_PREFIX)],
        "num_files": sum(map(len, removed.values())),
        "num_bytes": sum(entry.num_bytes for entries in removed.values() for entry in entries),
    }


def remove_unnamed(dataset: Location, older_than: timedelta) -> dict[str, list[Entry]]:
    """Remove as `vacuum`; return the removed directories and files with their entries."""
    read_root(dataset)  # raises if there is no dataset, before anything is written
    now = store_time(dataset)
    unnamed = _claim_unnamed(dataset, now - older_than, now)
    _remove(dataset, unnamed)
    remove_expired(dataset, now)
    return unnamed


def _remove(dataset: Location, unnamed: Mapping[str, list[Entry]]) -> None:
    for place, entries in unnamed.items():
        # The claim is the last: whoever can create it finds that the rest is missing.
        dataset.remove([entry.path for entry in entries if entry.path != f"{place}/{CLAIM}"])
        if "/" in place:
            (dataset / place).remove_all()


def _claim_unnamed(dataset: Location, limit: datetime, now: datetime) -> dict[str, list[Entry]]:
    """Return the directories and files to remove, which no build can commit any more."""
    owner = f"vacuum {writer_id()}".encode()
    for _ in backoff():
        root = read_root(dataset)
        unnamed = _find_unnamed(dataset, limit, now)
        segments = [place for place in unnamed if place.startswith(f"{SEGMENTS}/")]
        for place in segments:
            (dataset / place / CLAIM).write_bytes(owner)
        # A process that was suspended since it read the old root cannot commit on it.
        if not unnamed or commit_root(dataset, root, root.manifest) is not None:
            return unnamed
    raise AssertionError("`backoff` does not end")


def _find_unnamed(dataset: Location, limit: datetime, now: datetime) -> dict[str, list[Entry]]:
    """Return the directories and files to remove, with their entries.

    What is written is leased before, and the lease ends after its commit: so places are listed
    first, then leases are read, then the root. Pipelines of users hold no lease: their parts are
    kept for a day.
    """
    places = list(_places(dataset))
    leased = {name for lease in live_leases(dataset, now) for name in lease.directories}
    named = _named_since(dataset, limit)
    unnamed: dict[str, list[Entry]] = {}
    for place, entries in places:
        directory = place.partition("/")[2]
        segment, _, builder = directory.rpartition("_")  # of a part of an index
        kept_since = min(limit, now - KEEP) if place.startswith(f"{INCOMING}/") else limit
        files = [entry for entry in entries if entry.path != f"{place}/{CLAIM}"] or entries
        if place in named.directories or place in named.files:
            continue
        if not leased.isdisjoint((place, directory, segment, builder)):
            continue
        if all(entry.modified <= kept_since for entry in files):
            unnamed[place] = entries
    return unnamed


def _named_since(dataset: Location, limit: datetime) -> _Named:
    """Return what is named by the newest version and by those superseded after a time.

    Older versions are retired, the oldest first, so that none is left behind a retired one.
    """
    versions, named = Versions(dataset), _Named()
    superseded: list[int] = []
    written_after = True  # the version after the one at hand
    for number in reversed(versions.all_numbers()):
        entry = versions.path(number).stat()
        if entry is None or not entry.num_bytes:
            break  # this one and all before it are retired
        version = versions.read(number) if written_after else None
        if version is not None:
            named.add(dataset, parse_root(version, versions.path(number)))
        else:
            superseded.append(number)
        written_after = entry.modified > limit
    versions.retire(reversed(superseded))
    return named


def _places(dataset: Location) -> Iterator[tuple[str, list[Entry]]]:
    """Yield what is removed as a whole with its files: directories, and single files."""
    places: defaultdict[str, list[Entry]] = defaultdict(list)
    for entry in dataset.entries():
        parts = entry.path.split("/")
        top = parts[0]
        if top in (SEGMENTS, INCOMING) or top.startswith(INDEX_PREFIX):
            places["/".join(parts[:2])].append(entry)
        elif top.startswith(REFUSED_PREFIX):
            places[top].append(entry)
        elif top in _FILE_DIRECTORIES or _is_probe(parts):
            places[entry.path].append(entry)
    yield from sorted(places.items())


def _is_probe(parts: list[str]) -> bool:
    return parts[0] == MANIFESTS and parts[-1].startswith("probe-")


def check_unused(dataset: Location) -> None:
    """Raise SchemaError if a run or a loader holds a lease on the dataset.

    Builds do not matter: their commits notice what was replaced.
    """
    for lease in live_leases(dataset):
        if lease.holder.startswith(("run ", "loader ")):
            raise SchemaError(
                f"dataset is in use by {lease.holder}; stop it, or try again when it has ended",
                file=str(dataset / LEASES),
            )

"""Numbered versions of a manifest: how a dataset, a run or a root of days is committed.

A version is a file `_manifests/<number>.json` that is created on condition that it does not exist.
Of several writers that continue from the same version one succeeds; the others read what it wrote
and try again. Numbers are never used again: `retire` empties old versions and leaves their names,
so a writer that was suspended for days cannot commit after a version that is long superseded.
`latest` is a hint, from which newer versions are searched.
"""

from __future__ import annotations

import hashlib
import random
import re
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise, takewhile

from presage.schemas.errors import SchemaError
from presage.schemas.storage.location import MANIFESTS, Entry, Location, StorageError
from presage.schemas.storage.probes import check_conditional_put

HINT = "latest"
"""File with the number of a recent version."""
DIGITS = 8
"""Digits of a number, so that names have the order of numbers."""
_NAME = re.compile(rf"([0-9]{{{DIGITS}}})\.json")


@dataclass(frozen=True, slots=True)
class Version:
    """The number of a version, from 1, and the content of its file."""

    number: int
    data: bytes

    @property
    def sha256(self) -> str:
        """Hash of the content, hex."""
        return hashlib.sha256(self.data).hexdigest()


class Versions:
    """The versions of the manifest of one directory."""

    def __init__(self, directory: Location) -> None:
        """Store the directory; nothing is read yet."""
        self.directory = directory
        self._folder = directory / MANIFESTS
        self._newest = 0  # known number

    def path(self, number: int) -> Location:
        """Return the file of a version."""
        return self._folder / f"{number:0{DIGITS}d}.json"

    def newest_number(self) -> int:
        """Return the number of the newest version, 0 if there is none; one or two requests."""
        if not self._newest:
            self._newest = self._hint()
        newer = self._numbers(self._newest)
        self._newest = newer[-1] if newer else self._newest
        return self._newest

    def newest(self) -> Version | None:
        """Return the newest version; None if there is none.

        Raises:
            SchemaError: the hint names a version that is missing.
        """
        while number := self.newest_number():
            data = self._read(number)
            if data:
                return Version(number, data)
            if not self._numbers(number):  # the newest one is never retired
                raise SchemaError("manifest is missing; restore it", file=str(self.path(number)))
        return None

    def commit(self, previous: Version | None, data: bytes) -> Version | None:
        """Write the version after `previous`.

        Args:
            previous: newest version that the writer has read; None to write the first one.
            data: must differ from that of all other writers, for instance by `writer_id`.

        Returns:
            The version; None if another writer was faster.

        Raises:
            StorageError: the store failed, or ignores the condition.
        """
        if previous is None:
            check_conditional_put(self.directory)
        version = Version(1 if previous is None else previous.number + 1, data)
        if not self.path(version.number).create(data):
            return None
        self._newest = version.number
        with suppress(StorageError):
            (self._folder / HINT).write_bytes(str(version.number).encode())
        return version

    def retire(self, numbers: Iterable[int]) -> None:
        """Empty superseded versions, which keep their names."""
        for number in numbers:
            self.path(number).write_bytes(b"")

    def all_numbers(self) -> list[int]:
        """Return the numbers of all versions, retired ones included, in ascending order."""
        return self._numbers(0)

    def superseded(self) -> dict[int, datetime]:
        """Return when each superseded version was, the newest first; without retired ones."""
        entries = self._entries(0)
        pairs = pairwise(reversed(entries))
        live = takewhile(lambda pair: entries[pair[1]].num_bytes, pairs)
        return {number: entries[newer].modified for newer, number in live}

    def read(self, number: int) -> Version | None:
        """Return a version; None if it does not exist or is retired."""
        data = self._read(number)
        return Version(number, data) if data else None

    def _read(self, number: int) -> bytes:
        try:
            return self.path(number).read_bytes()
        except FileNotFoundError:
            return b""

    def _hint(self) -> int:
        try:
            text = (self._folder / HINT).read_bytes()
        except FileNotFoundError:
            return 0
        return int(text) if text.isdigit() else 0

    def _numbers(self, after: int) -> list[int]:
        return list(self._entries(after))

    def _entries(self, after: int) -> dict[int, Entry]:
        entries = self._folder.entries(after=self.path(after).name)
        matches = ((_NAME.fullmatch(entry.path), entry) for entry in entries)
        return {int(match[1]): entry for match, entry in matches if match}


def writer_id() -> str:
    """Return a new id of a writer."""
    return uuid.uuid4().hex


def backoff() -> Iterator[int]:
    """Yield the number of each attempt to commit, after a random pause that grows to 5 seconds."""
    attempt = 0
    while True:
        yield attempt
        time.sleep(random.uniform(0, min(5.0, 0.05 * 2**attempt)))
        attempt += 1

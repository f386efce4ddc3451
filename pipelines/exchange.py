"""Rows that the tasks of a stage send to those of a later one, in memory or in files.

A task sends elements, samples or raw rows, to the partitions of named streams. In files, a task
writes one file for each stream; the result of the task, which is stored after its files, names the
bytes of each element. A build that is killed continues with the tasks that have no stored result.
"""

from __future__ import annotations

import json
import os
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from pipelines.samples.tuples import Tuples
from pipelines.scratch import atomic_write
from pipelines.shuffle import decode_tables, encode_tables, with_references, without_references
from pipelines.workers import Worker, Workers

SourceRows = tuple[str, pa.Table]
"""Name of a source or side table, and raw rows of it."""
Element = Tuples | SourceRows


@dataclass(frozen=True, slots=True)
class FileRange:
    """The bytes of an element in a file."""

    path: Path
    offset: int
    num_bytes: int

    def read(self) -> Element:
        """Read the element."""
        with self.path.open("rb") as file:
            file.seek(self.offset)
            return decode_element(file.read(self.num_bytes))


Sent = Element | FileRange


@dataclass(slots=True)
class TaskResult:
    """Result of a task.

    Attributes:
        value: for the launcher; small.
        sent: elements by stream and partition.
    """

    value: Any = None
    sent: defaultdict[str, defaultdict[int, list[Sent]]] = field(
        default_factory=lambda: defaultdict(_lists)
    )

    def send(self, stream: str, partition: int, element: Element) -> None:
        """Send an element to a partition of a stream."""
        self.sent[stream][partition].append(element)


def _lists() -> defaultdict[int, list[Sent]]:
    return defaultdict(list)


class Received:
    """The elements of a partition; they are read again in each iteration."""

    def __init__(self, sent: Sequence[Sent]) -> None:
        """Read nothing yet."""
        self._sent = sent

    def __iter__(self) -> Iterator[Any]:
        return (each.read() if isinstance(each, FileRange) else each for each in self._sent)


def encode_element(element: Element) -> bytes:
    """Return an element as bytes."""
    if isinstance(element, Tuples):
        names, tables = {"groups": list(element.uniques)}, element.uniques.values()
        first = with_references(element)
    else:
        names, tables = {"source": element[0]}, ()
        first = element[1]
    return encode_tables(first.replace_schema_metadata({"names": json.dumps(names)}), *tables)


def decode_element(data: bytes) -> Element:
    """Undo `encode_element`."""
    first, *tables = decode_tables(data)
    names = json.loads(first.schema.metadata[b"names"])
    first = first.replace_schema_metadata()
    if "source" in names:
        return names["source"], first
    return without_references(first, dict(zip(names["groups"], tables, strict=True)))


_IDENTITY = "identity"


def can_continue(scratch: Path, identity: str | None = None) -> bool:
    """Return whether a directory holds an exchange; with an identity, one of the same build."""
    try:
        stored = (scratch / _IDENTITY).read_text(encoding="utf-8")
    except OSError:
        return False
    return identity in (None, stored)


class Exchange:
    """Runs the stages of a build, and holds what their tasks have sent."""

    def __init__(self, workers: Workers, scratch: Path | None, identity: str = "") -> None:
        """Begin an exchange, or continue the one in `scratch`.

        Args:
            workers: run the tasks.
            scratch: directory of the files; None keeps elements in memory.
            identity: of the build, see `can_continue`.
        """
        self._workers = workers
        self._scratch = scratch
        self._streams: defaultdict[str, defaultdict[int, list[Sent]]] = defaultdict(_lists)
        if scratch is not None:
            scratch.mkdir(parents=True, exist_ok=True)
            (scratch / _IDENTITY).write_text(identity, encoding="utf-8")

    @property
    def in_memory(self) -> bool:
        """Whether elements stay in the memory of this process."""
        return self._scratch is None

    def run(
        self, stage: str, function: Callable[..., TaskResult], tasks: Iterable[Any], *arguments: Any
    ) -> list[Any]:
        """Run the tasks of a stage; return their values in order.

        Args:
            stage: name, unique in the build.
            function: called with worker, task and arguments; defined in a module.
            tasks: the tasks, the same ones when a build continues.
            arguments: of all tasks.
        """
        run = partial(_run_task, self._scratch, stage, function, arguments)
        values: list[Any] = []
        for result in self._workers.map(run, enumerate(tasks)):
            values.append(result.value)
            for stream, partitions in result.sent.items():
                for partition, sent in partitions.items():
                    self._streams[stream][partition] += sent
        return values

    def take(self, stream: str) -> dict[int, list[Sent]]:
        """Remove a stream; return what was sent to each of its partitions, ascending."""
        return dict(sorted(self._streams.pop(stream, {}).items()))


def _run_task(
    scratch: Path | None,
    stage: str,
    function: Callable[..., TaskResult],
    arguments: Sequence[Any],
    worker: Worker,
    numbered: tuple[int, Any],
) -> TaskResult:
    """Run a task, unless its result is stored."""
    number, task = numbered
    if scratch is None:
        return function(worker, task, *arguments)
    stored = scratch / f"{stage}-{number}.result"
    if _is_own(stored):
        return pickle.loads(stored.read_bytes())
    result = function(worker, task, *arguments)
    for stream, partitions in result.sent.items():
        _write_stream(scratch / f"{stage}-{number}-{stream}.rows", partitions)
    with atomic_write(stored) as file:
        file.touch(mode=0o600)
        file.write_bytes(pickle.dumps(result))
    return result


def _is_own(path: Path) -> bool:
    """Return whether a file exists that only this user has written: a pickle may hold code."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return False
    return status.st_uid == os.geteuid() and not status.st_mode & 0o022


def _write_stream(path: Path, partitions: Mapping[int, list[Sent]]) -> None:
    """Write the elements of a stream; replace them by the ranges of their bytes."""
    with atomic_write(path) as partial_file, partial_file.open("wb") as file:
        for partition in sorted(partitions):
            sent = partitions[partition]
            for index, element in enumerate(sent):
                assert not isinstance(element, FileRange), "tasks send elements"
                data = encode_element(element)
                sent[index] = FileRange(path, file.tell(), len(data))
                file.write(data)

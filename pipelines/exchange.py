"""Rows that the tasks of a stage send to those of a later one, in memory or in files.

A task sends elements, samples or raw rows, to the partitions of named streams. In files, a task
writes one file for each stream, and the result of the task names the bytes of each element.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from pipelines.progress import Counts, Progress
from pipelines.shuffle import Element, from_ipc, to_ipc
from pipelines.workers import Worker, Workers


@dataclass(frozen=True, slots=True)
class FileRange:
    """The bytes of an element in a file."""

    path: Path
    offset: int
    num_bytes: int

    def read(self) -> Element:
        """Read and decode the element."""
        with self.path.open("rb") as file:
            file.seek(self.offset)
            return from_ipc(file.read(self.num_bytes))


ElementRef = Element | FileRange
"""An element in memory, or its bytes in a file."""


@dataclass(slots=True)
class TaskResult:
    """Result of a task.

    `value` is for the launcher, and small; `outputs` has the elements by stream and partition.
    """

    value: Any = None
    counts: Counts = field(default_factory=Counts)
    outputs: defaultdict[str, defaultdict[int, list[ElementRef]]] = field(
        default_factory=lambda: defaultdict(_lists)
    )

    def send(self, stream: str, partition: int, element: Element) -> None:
        """Send an element to a partition of a stream."""
        self.outputs[stream][partition].append(element)


def _lists() -> defaultdict[int, list[ElementRef]]:
    return defaultdict(list)


class ReadElements:
    """The elements of a partition; they are read again in each iteration."""

    def __init__(self, references: Sequence[ElementRef]) -> None:
        self._references = references

    def __iter__(self) -> Iterator[Any]:
        return (each.read() if isinstance(each, FileRange) else each for each in self._references)


class Exchange:
    """Runs the stages of a build, and holds what their tasks have sent."""

    def __init__(
        self, workers: Workers, scratch: Path | None, progress: Progress | None = None
    ) -> None:
        """Begin an exchange.

        `scratch` is a new directory for the files; None keeps elements in memory.
        """
        self.progress = progress or Progress()
        self._workers = workers
        self._scratch = scratch
        self._streams: defaultdict[str, defaultdict[int, list[ElementRef]]] = defaultdict(_lists)
        if scratch is not None:
            scratch.mkdir(parents=True)

    @property
    def in_memory(self) -> bool:
        """Whether elements stay in the memory of this process."""
        return self._scratch is None

    def run(
        self, stage: str, function: Callable[..., TaskResult], tasks: Iterable[Any], *arguments: Any
    ) -> list[Any]:
        """Run the tasks of a stage, until the build is stopped; return their values in order.

        `stage` is unique in the build; `function` is called with worker, task and `arguments`, and
        defined in a module.
        """
        return list(self.values(stage, function, tasks, *arguments))

    def values(
        self, stage: str, function: Callable[..., TaskResult], tasks: Iterable[Any], *arguments: Any
    ) -> Iterator[Any]:
        """Yield the values of `run`, each as soon as its task and all before it have run."""
        run = partial(_run_task, self._scratch, stage, function, arguments)
        for result in self._workers.map(run, enumerate(tasks)):
            for stream, partitions in result.outputs.items():
                for partition, sent in partitions.items():
                    self._streams[stream][partition] += sent
            is_stopped = self.progress.add(result.counts)
            yield result.value
            if is_stopped:
                break

    def take(self, stream: str) -> dict[int, list[ElementRef]]:
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
    """Run a task; write what it sends to files, if there is a directory for them."""
    number, task = numbered
    result = function(worker, task, *arguments)
    if scratch is not None:
        for stream, partitions in result.outputs.items():
            _write_stream(scratch / f"{stage}-{number}-{stream}.rows", partitions)
    return result


def _write_stream(path: Path, partitions: Mapping[int, list[ElementRef]]) -> None:
    """Write the elements of a stream; replace them by the ranges of their bytes."""
    with path.open("xb") as file:
        for partition in sorted(partitions):
            sent = partitions[partition]
            for index, element in enumerate(sent):
                assert not isinstance(element, FileRange), "tasks send elements"
                data = to_ipc(element)
                sent[index] = FileRange(path, file.tell(), len(data))
                file.write(data)

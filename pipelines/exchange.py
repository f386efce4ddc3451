"""Tasks of a local build: their workers, what they send to later tasks, and their progress.

A task sends elements, samples or raw rows, to the partitions of named streams. A small input stays
in memory, and its workers are threads. Processes write one file for each stream of a task, and the
result of the task names the bytes of each element. Results have the counts of rows: on a runner of
Beam, its own counters show the progress.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, fields
from functools import cache, cached_property, partial
from multiprocessing import connection
from pathlib import Path
from typing import Any

from presage.pipelines.shuffle import Element, from_ipc, to_ipc
from presage.pipelines.sources.raw_rows import SPLIT_BYTES
from presage.pipelines.stages import BuildContext, SampleStage, load_sides
from presage.pipelines.transforms.fit import FITTED
from presage.schemas.dataset.fitted import FittedValues, load_fitted
from presage.schemas.errors import SchemaError
from presage.schemas.machine import machine_budget, num_cores

# Progress: counts of rows from the results of tasks, and the early stop.

STOP_AFTER_REJECTS = 50_000
"""A build stops after so many rejected rows without one good row."""
_INTERVAL_SEC = 2.0
_READING, _WRITING = 0.4, 0.5
"""Shares of reading and of writing parts in the time of a build; the rest is the oracle."""
_SOME_SEC = 10.0
"""Time after which the rate and the remaining time are reported."""


@dataclass(slots=True)
class Counts:
    """Rows that were read and rejected, samples, and parts.

    Attributes:
        read: rows read, including rejected ones.
        rejected: rows rejected.
        example: the first rejected row, as one line.
        good: rows of the sample source that were read.
        unread: rows of the sample source that could not be read.
        unused: rows of the sample source that were read and rejected later.
        samples: samples made.
        parts: parts written.
        num_bytes: bytes of the files, or parts of files, that were opened.
    """

    read: int = 0
    rejected: int = 0
    example: str = ""
    good: int = 0
    unread: int = 0
    unused: int = 0
    samples: int = 0
    parts: int = 0
    num_bytes: int = 0

    def add(self, more: Counts) -> None:
        """Add other counts; the example stays the first."""
        example = self.example or more.example
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(more, each.name))
        self.example = example

    def __str__(self) -> str:
        """Return the counts as one line."""
        share = self.rejected / max(1, self.read, self.rejected)
        example = f" ({share:.2%}), such as {self.example}" if self.rejected else ""
        return f"rows read: {self.read:,}, rejected: {self.rejected:,}{example}"

    @property
    def is_all_rejected(self) -> bool:
        """Whether a stage, reading or making samples, has rejected all of its rows.

        Rows that were read but not yet made into samples do not count.
        """
        read_none = self.unread >= STOP_AFTER_REJECTS and not self.good
        used_none = self.unused >= STOP_AFTER_REJECTS and not self.samples
        return read_none or used_none


class Progress:
    """Adds up the counts of a build's tasks, reports them, and determines when to stop.

    Attributes:
        report: called with each line.
        counts: of the tasks that have ended.
        stopped: whether the quality gate would refuse the segment anyway: `STOP_AFTER_REJECTS` rows
            were rejected and none is good, and the files opened so far hold the allowed share of
            the input's bytes, or 32 MiB.
    """

    def __init__(
        self,
        report: Callable[[str], None] = lambda _: None,
        num_parts: int = 1,
        num_bytes: int = 0,
        max_reject_fraction: float | None = None,
    ) -> None:
        """Start the clock.

        The build never stops if `max_reject_fraction`, the share of rows that may be rejected, is
        None or 1.
        """
        self.report, self.counts, self.stopped = report, Counts(), False
        self._num_parts, self._num_bytes = num_parts, num_bytes
        self._max_reject_fraction = max_reject_fraction
        self._started_sec = self._reported_sec = time.perf_counter()

    def add(self, more: Counts) -> bool:
        """Add the counts of a task; report them, if the last line is some seconds old.

        Returns:
            Whether the build has to stop because of them.
        """
        self.counts.add(more)
        limit, stops = self._max_reject_fraction, False
        if limit is not None and limit < 1 and self.counts.is_all_rejected and not self.stopped:
            stops = self.counts.num_bytes >= min(SPLIT_BYTES, limit * self._num_bytes)
            self.stopped = stops
        now_sec = time.perf_counter()
        if now_sec - self._reported_sec >= _INTERVAL_SEC:
            self._reported_sec = now_sec
            rate = self._rate(now_sec - self._started_sec)
            written = f"parts written: {self.counts.parts} of {self._num_parts}"
            self.report(f"{self.counts}; {written}{rate}")
        return stops

    def _rate(self, elapsed_sec: float) -> str:
        share = _READING * self.counts.num_bytes / max(1, self._num_bytes)
        share += _WRITING * self.counts.parts / self._num_parts
        if elapsed_sec < _SOME_SEC or not share:
            return ""
        remaining_sec = elapsed_sec * max(0.0, 1 - share) / share
        left = f"{remaining_sec:.0f} s" if remaining_sec < 120 else f"{remaining_sec / 60:.0f} min"
        return f"; {self.counts.read / elapsed_sec:,.0f} rows/s, about {left} left"


# Elements, in memory or in files.


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


# Workers.

PROCESS_BYTES = 2 << 30
"""Memory reserved for a worker process."""


def num_processes() -> int:
    """Return the number of worker processes that fit the processors and the memory."""
    return max(1, min(num_cores(), machine_budget().memory // PROCESS_BYTES))


class Worker:
    """What the tasks of one worker share."""

    def __init__(self, context: BuildContext) -> None:
        self.context = context
        self._fitted: tuple[Mapping[str, str], FittedValues] | None = None

    @cached_property
    def _stage(self) -> SampleStage:
        return SampleStage(self.context)

    def sample_stage(self, sides: Mapping[str, str]) -> SampleStage:
        """Return the stage that makes samples; `sides` are the files of the small side tables."""
        if not self._stage.sides:
            self._stage.use_sides(load_sides(sides, self.context))
        return self._stage

    def fitted(self, files: Mapping[str, str]) -> FittedValues:
        """Return the fitted values of the build's transforms; `files` are path to sha256."""
        if self._fitted is None or self._fitted[0] != files:
            context = self.context
            self._fitted = files, load_fitted(context.segment_root / FITTED, files, context.data)
        return self._fitted[1]


class Exchange:
    """Runs the tasks of a build on its workers, and holds what they have sent; a context.

    Most of a task is compiled code, which other threads do not wait for.
    """

    def __init__(
        self,
        context: BuildContext,
        num_workers: int,
        scratch: Path | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Start no worker yet.

        `num_workers` are threads; with one, a task runs when its result is read. With `scratch`, a
        new directory for the files, they are processes.
        """
        self.progress = progress or Progress()
        self._context, self._scratch = context, scratch
        self._of_thread = threading.local()
        self._streams: defaultdict[str, defaultdict[int, list[ElementRef]]] = defaultdict(_lists)
        self._pool: Executor | None = None
        if scratch is not None:
            scratch.mkdir(parents=True)
            self._pool = ProcessPoolExecutor(
                num_workers, _process_context(), _start_process, (context,)
            )
        elif num_workers > 1:
            self._pool = ThreadPoolExecutor(num_workers)

    def __enter__(self) -> Exchange:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

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

        Raises:
            SchemaError: a worker process died.
        """
        return list(self.values(stage, function, tasks, *arguments))

    def values(
        self, stage: str, function: Callable[..., TaskResult], tasks: Iterable[Any], *arguments: Any
    ) -> Iterator[Any]:
        """Yield the values of `run`, each as soon as its task and all before it have run."""
        run = partial(_run_task, self._scratch, stage, function, arguments)
        for result in self._results(run, enumerate(tasks)):
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

    def _results(
        self, run: Callable[[Worker, Any], TaskResult], tasks: Iterable[Any]
    ) -> Iterator[TaskResult]:
        if self._pool is None:
            return (run(self._worker(), task) for task in tasks)
        if isinstance(self._pool, ProcessPoolExecutor):
            return _of_processes(self._pool, partial(_run_in_process, run), tasks)
        return self._pool.map(lambda task: run(self._worker(), task), tasks)

    def _worker(self) -> Worker:
        """Return the worker of this thread."""
        if not hasattr(self._of_thread, "worker"):
            self._of_thread.worker = Worker(self._context)
        return self._of_thread.worker


def _of_processes(
    pool: ProcessPoolExecutor, run: Callable[[Any], TaskResult], tasks: Iterable[Any]
) -> Iterator[TaskResult]:
    try:
        yield from pool.map(run, tasks)  # raises if a process was killed between two stages
    except (BrokenProcessPool, EOFError) as error:  # EOFError: while a process starts
        raise SchemaError(
            "a worker process was killed, perhaps for lack of memory; run the command again, "
            "with fewer workers (--direct_num_workers) if it lacked memory"
        ) from error


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


_worker: Worker | None = None
"""The worker of this process."""


def _process_context() -> multiprocessing.context.BaseContext:
    """Return a context whose processes start from a server, which imports this module once.

    A fork of this process would copy locks that its other threads hold.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def _start_process(context: BuildContext) -> None:
    global _worker
    _worker = Worker(context)
    keep_freed_memory()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher receives it, too, and ends
    threading.Thread(target=_end_with_launcher, daemon=True).start()


def _end_with_launcher() -> None:
    launcher = multiprocessing.parent_process()
    assert launcher is not None, "called in worker processes only"
    connection.wait([launcher.sentinel])
    os._exit(1)


def _run_in_process(run: Callable[[Worker, Any], TaskResult], task: Any) -> TaskResult:
    assert _worker is not None, "called in worker processes only"
    return run(_worker, task)


# Keep freed memory in the process. By default glibc maps arrays above 128 KiB and unmaps them when
# they are freed, and the kernel clears every page again. A build creates millions of short-lived
# arrays: a fifth of its time.

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
"""Parameters of `mallopt`, from malloc.h."""
_MAX_HEAP_BLOCK_BYTES = 32 << 20
"""Largest block that is kept after it is freed; the maximum that glibc accepts."""
_MAX_FREE_BYTES = 256 << 20
"""Free memory that stays at the end of the heap."""


@cache
def keep_freed_memory() -> bool:
    """Configure the C library to keep freed blocks; return whether it supports this (glibc)."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    settings = (
        (_MMAP_THRESHOLD, _MAX_HEAP_BLOCK_BYTES),
        (_TRIM_THRESHOLD, _MAX_FREE_BYTES),
        (_ARENA_MAX, 1),  # heaps of additional threads hold no block above 64 MiB
    )
    return all(mallopt(name, value) for name, value in settings)

"""Workers of a local build: threads, or processes for inputs that exceed the memory of one.

Also the settings of memory that every process of a build needs, `keep_freed_memory`.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import cache, cached_property, partial
from multiprocessing import connection
from typing import TypeVar

from pipelines.build_context import BuildContext
from pipelines.stages import SampleStage, load_sides
from pipelines.transforms.fit import load_staged
from schemas.dataset.fitted import FittedValues
from schemas.errors import SchemaError
from schemas.machine import machine_budget, num_cores

Task = TypeVar("Task")
Result = TypeVar("Result")

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
            self._fitted = files, load_staged(context.segment_root, files, context.data)
        return self._fitted[1]


class Workers:
    """Workers of one build; a context.

    Most of a task is compiled code, which other threads do not wait for.
    """

    def __init__(
        self, context: BuildContext, num_workers: int, *, use_processes: bool = False
    ) -> None:
        """Start no worker yet.

        `num_workers` are threads or processes; with one thread, a task runs when its result is
        read.
        """
        self._context = context
        self._of_thread = threading.local()
        self._pool: Executor | None = None
        self.use_processes = use_processes
        if use_processes:
            self._pool = ProcessPoolExecutor(
                num_workers, _process_context(), _start_process, (context,)
            )
        elif num_workers > 1:
            self._pool = ThreadPoolExecutor(num_workers)

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def map(self, run: Callable[[Worker, Task], Result], tasks: Iterable[Task]) -> Iterator[Result]:
        """Return the results of tasks in their order.

        Raises:
            SchemaError: a worker process died.
        """
        if self._pool is None:
            return (run(self._worker(), task) for task in tasks)
        if not self.use_processes:
            return self._pool.map(lambda task: run(self._worker(), task), tasks)
        return self._results(partial(_run_in_process, run), tasks)

    def _results(self, run: Callable[[Task], Result], tasks: Iterable[Task]) -> Iterator[Result]:
        assert self._pool is not None, "called with processes only"
        try:
            yield from self._pool.map(run, tasks)
        except (BrokenProcessPool, EOFError) as error:  # EOFError: while a process starts
            raise SchemaError(
                "a worker process was killed, perhaps for lack of memory; run the command again, "
                "with fewer workers (--direct_num_workers) if it lacked memory"
            ) from error

    def _worker(self) -> Worker:
        """Return the worker of this thread."""
        if not hasattr(self._of_thread, "worker"):
            self._of_thread.worker = Worker(self._context)
        return self._of_thread.worker


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


def _run_in_process(run: Callable[[Worker, Task], Result], task: Task) -> Result:
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

"""Build a segment in one process without Beam: the stages of `stages.py` on threads.

The result has the same bytes as a build on any runner. Also the settings of memory that every
process of a build needs, `keep_freed_memory`.
"""

from __future__ import annotations

import ctypes
import threading
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, TypeVar

import pyarrow as pa

from pipelines.clustering.part import PartResult, serialize_result
from pipelines.context import BuildContext
from pipelines.oracle.files import run_stages
from pipelines.oracle.numbering import NUMBERING_STAGES, WORKER_ENTRIES, number_blocks
from pipelines.samples.event_join import add_counts
from pipelines.shuffle import group_rows
from pipelines.sources.rejects import RejectCounts, range_keys, write_rejects
from pipelines.sources.rows import InputSplit
from pipelines.stages import (
    EVENTS,
    REJECTS,
    SAMPLES,
    Output,
    SampleStage,
    good_side_rows,
    keyed_rows,
    layout_of,
    look_up_broadcast,
    look_up_partition,
    read_rows,
    sides_in_memory,
    split_file,
    write_part,
)
from pipelines.transforms.apply import fit_inputs
from pipelines.transforms.fit import (
    LEARNED,
    Partial,
    add_partial,
    load_staged,
    merge_partials,
    write_fitted,
    write_shard,
)
from schemas.machine import machine_budget

SourceRows = tuple[str, pa.Table]
"""Name of a source or side table, and raw rows of it."""

LookupRows = Callable[[int, list[pa.Table]], Iterable[pa.Table]]
"""Takes the index of a look-up and its samples; returns all rows of its side table with a key of
the samples."""


Task = TypeVar("Task")
Result = TypeVar("Result")


class Workers:
    """Threads that run the tasks of a build; a context.

    Most of a task is compiled code, which other threads do not wait for.
    """

    def __init__(self, num_threads: int) -> None:
        """Start no thread yet; with one thread, a task runs when its result is read."""
        self._pool = ThreadPoolExecutor(num_threads) if num_threads > 1 else None

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def map(self, run: Callable[[Task], Result], tasks: Iterable[Task]) -> Iterator[Result]:
        """Return the results of tasks in their order."""
        return map(run, tasks) if self._pool is None else self._pool.map(run, tasks)


def num_threads() -> int:
    """Return the number of processors that this process may use, within its control groups."""
    return max(1, int(machine_budget().cpus))


class OutputCollector:
    """Collects the other outputs of stages: rejects, counts, and inputs of transforms to fit."""

    def __init__(self, keep: bool = True) -> None:
        """Start empty.

        Args:
            keep: False discards everything but the main output, to save memory.
        """
        self.keep = keep
        self.values: defaultdict[str, list[Any]] = defaultdict(list)
        self.partials: defaultdict[str, list[Partial]] = defaultdict(list)

    def main_output(self, outputs: Iterable[Output]) -> Iterator[Any]:
        """Yield the main output of a stage; collect the others."""
        for name, value in outputs:
            if name == SAMPLES:
                yield value
            elif not self.keep:
                continue
            elif name == LEARNED:
                key, partial = value
                self.partials[key] = add_partial(self.partials[key], partial)
            else:
                self.values[name].append(value)

    def add(self, other: OutputCollector) -> None:
        """Add what another one has collected."""
        for name, values in other.values.items():
            self.values[name] += values
        for key, partials in other.partials.items():
            for each in partials:
                self.partials[key] = add_partial(self.partials[key], each)


def run_segment(context: BuildContext) -> dict[str, list[Any]]:
    """Build a segment: read, make samples, fit transforms, write parts, number accesses.

    Args:
        context: with `shuffle_by="memory"`.

    Returns:
        The values of each output: `parts, tables, rejects, events`, and `learned` if the job has
        transforms to fit.
    """
    keep_freed_memory()
    collected = OutputCollector()
    with Workers(num_threads()) as workers:
        if context.data.sides or context.shard is not None:
            samples = make_samples(context, read_all(context, collected), collected)
        else:
            samples = samples_of_splits(context, collected, workers)
        learned = fit_transforms(context, collected)
        parts = write_parts(context, samples, learned or {}, workers)
        tables = number_tables(context, parts, workers)
    return {
        **({} if learned is None else {"learned": [learned]}),
        "parts": [serialize_result(part) for part in parts],
        "tables": tables,
        "rejects": reject_counts(context, collected.values[REJECTS]),
        "events": [add_counts(collected.values[EVENTS])],
    }


def samples_of_splits(
    context: BuildContext, collected: OutputCollector, workers: Workers
) -> dict[int, list[Any]]:
    """Return `make_samples` of a job without side tables whose rows are not grouped by key."""
    of_thread = threading.local()

    def run(split: InputSplit) -> tuple[list[tuple[int, Any]], OutputCollector]:
        if not hasattr(of_thread, "stage"):
            of_thread.stage = SampleStage(context)
        outputs, sent = OutputCollector(), list[tuple[int, Any]]()
        for table in outputs.main_output(read_rows(context, split)):
            sent += outputs.main_output(of_thread.stage.from_rows(split.source, table))
        return sent, outputs

    splits = [
        each
        for file in context.files()
        for each in collected.main_output(split_file(context, file))
    ]
    partitions: defaultdict[int, list[Any]] = defaultdict(list)
    for sent, outputs in workers.map(run, splits):
        collected.add(outputs)
        for index, samples in sent:
            partitions[index].append(samples)
    return dict(sorted(partitions.items()))


def read_all(
    context: BuildContext, collected: OutputCollector, sources: Container[str] | None = None
) -> Iterator[SourceRows]:
    """Yield the raw rows of all files, side tables first.

    Args:
        context: of the build.
        collected: receives the rejects.
        sources: names of the sources and side tables to read; None for all.
    """
    sides = context.data.sides
    for file in sorted(context.files(), key=lambda f: f.source not in sides):
        if sources is not None and file.source not in sources:
            continue
        for input_split in collected.main_output(split_file(context, file)):
            for table in collected.main_output(read_rows(context, input_split)):
                yield input_split.source, table


def make_samples(
    context: BuildContext, rows: Iterable[SourceRows], collected: OutputCollector
) -> dict[int, list[Any]]:
    """Return the samples of each partition, as `context.transport` sends them."""
    partitions: defaultdict[int, list[Any]] = defaultdict(list)
    for index, sent in iter_samples(context, rows, collected):
        partitions[index].append(sent)
    return dict(sorted(partitions.items()))


def iter_samples(
    context: BuildContext,
    rows: Iterable[SourceRows],
    collected: OutputCollector,
    lookup_rows: LookupRows | None = None,
) -> Iterator[tuple[int, Any]]:
    """Yield (partition, samples as `context.transport` sends them).

    Args:
        context: of the build.
        rows: raw rows, those of side tables first.
        collected: receives the other outputs.
        lookup_rows: returns rows of large side tables, if they are not in `rows`.
    """
    side_rows: defaultdict[str, list[pa.Table]] = defaultdict(list)
    stage = SampleStage(context)
    samples = collected.main_output(_sql_outputs(context, stage, rows, side_rows, collected))
    if context.lookups_are_broadcast:
        yield from samples
        return
    joins = context.data.samples.joins
    lookup_rows = lookup_rows or (lambda index, _: side_rows[joins[index].side])
    for table in _join_by_key(context, stage, list(samples), lookup_rows):
        yield from collected.main_output(stage.finish(table))


def _sql_outputs(
    context: BuildContext,
    stage: SampleStage,
    rows: Iterable[SourceRows],
    side_rows: defaultdict[str, list[pa.Table]],
    collected: OutputCollector,
) -> Iterator[Output]:
    """Yield the outputs of the SQL over source rows; move rows of side tables to `side_rows`."""
    keyed: defaultdict[int, defaultdict[str, list[pa.Table]]] = defaultdict(
        lambda: defaultdict(list)
    )
    sides_ready = False
    for source, table in rows:
        if source in context.data.sides:
            side_rows[source].extend(collected.main_output(good_side_rows(context, source, table)))
            continue
        if not sides_ready:
            stage.use_sides(sides_in_memory(context, side_rows))
            sides_ready = True
        if context.shard is None:
            yield from stage.from_rows(source, table)
            continue
        for partition_of_row, good in collected.main_output(keyed_rows(context, source, table)):
            for partition, partition_rows in group_rows(good, partition_of_row):
                keyed[partition][source].append(partition_rows)
    for partition in sorted(keyed):
        yield from stage.from_keys(partition, keyed.pop(partition))


def _join_by_key(
    context: BuildContext,
    stage: SampleStage,
    samples: list[pa.Table],
    lookup_rows: LookupRows,
) -> list[pa.Table]:
    for index, join in enumerate(context.data.samples.joins):
        if join.side in context.broadcast:
            samples = [look_up_broadcast(table, stage.sides, context, index) for table in samples]
        else:
            samples = list(look_up_partition(context, index, samples, lookup_rows(index, samples)))
    return samples


def fit_transforms(context: BuildContext, collected: OutputCollector) -> dict[str, str] | None:
    """Fit transforms; return their files, path to sha256, or None without transforms to fit."""
    root, data = context.segment_root, context.data
    if not fit_inputs(data):
        return None
    sums = {
        k: write_shard(root, data, k, merge_partials(p)[0]) for k, p in collected.partials.items()
    }
    collected.partials.clear()
    return write_fitted(root / LEARNED, sums, data, context.learned)


def write_parts(
    context: BuildContext,
    samples: dict[int, list[Any]],
    files: dict[str, str],
    workers: Workers | None = None,
) -> list[PartResult]:
    """Write all parts of the segment.

    Args:
        context: of the build.
        samples: by partition; emptied. Those of one chunk share memory.
        files: from `fit_transforms`.
        workers: run the tasks; this thread by default.
    """
    if not samples:
        return []
    workers = workers or Workers(1)
    layout = layout_of(context, samples[min(samples)], files, workers.map)
    learned = load_staged(context.segment_root, files, context.data)

    def run(part: int) -> PartResult:
        return write_part(context, part, samples.pop(part), layout, learned)

    return list(workers.map(run, sorted(samples)))


def reject_counts(context: BuildContext, tables: list[pa.Table]) -> list[RejectCounts]:
    """Write the rejects, a file for each range of the input; return their counts."""
    ranges: defaultdict[int, list[pa.Table]] = defaultdict(list)
    for table in tables:
        for index, rows in group_rows(table, range_keys(table, context.listing)):
            ranges[index].append(rows)
    return [write_rejects(context.segment_root, i, ranges[i]) for i in sorted(ranges)]


def number_tables(
    context: BuildContext, parts: list[PartResult], workers: Workers | None = None
) -> list[tuple[str, int]]:
    """Number the rows of every table; return (table, number of distinct rows)."""
    blocks = [part.blocks for part in parts]

    def run(table: str) -> tuple[str, int]:
        numbered = number_blocks(context.segment_root, table, blocks, WORKER_ENTRIES)
        if not isinstance(numbered, int):
            numbered = sum(run_stages(numbered, NUMBERING_STAGES))
        return table, numbered

    tables = sorted(context.data.tables) if blocks else []
    return list((workers or Workers(1)).map(run, tables))


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

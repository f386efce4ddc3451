"""Build a segment on this machine without Beam: the stages of `stages.py` on local workers.

    split files -> read side tables -> make samples -> SQL per key -> look up by key
    -> fit transforms -> write parts -> write rejects -> number accesses

A small input is held in memory, and its workers are threads. A larger one is exchanged in files
between processes. The result has the same bytes as a build on any runner.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from presage.pipelines.clustering.part import PartResult, build_part, sum_statistics
from presage.pipelines.clustering.storage_layout import SegmentLayout, choose_segment_layout
from presage.pipelines.exchange import (
    Counts,
    ElementRef,
    Exchange,
    Progress,
    ReadElements,
    TaskResult,
    Worker,
    keep_freed_memory,
    num_processes,
)
from presage.pipelines.histories.parts import (
    BuiltPart,
    PartHistories,
    build_part_with_histories,
)
from presage.pipelines.oracle.numbering import NumberedTable, number_table, training_blocks
from presage.pipelines.prepare import holds_in_memory
from presage.pipelines.runner_options import LocalOptions
from presage.pipelines.samples.event_join import add_counts
from presage.pipelines.samples.tuples import (
    Tuples,
    batches_by_size,
    concat_tuples,
    partition_of_session,
    partition_tuples,
)
from presage.pipelines.shuffle import SHUFFLE, Element, group_rows
from presage.pipelines.sources.raw_rows import InputSplit
from presage.pipelines.sources.rejects import range_keys, rejects_from_table, write_rejects
from presage.pipelines.stages import (
    REJECTS,
    SAMPLES,
    BuildContext,
    MadeSamples,
    SampleStage,
    good_side_rows,
    keyed_rows,
    look_up_partition,
    partition_events,
    partition_samples,
    partition_side,
    pending_events,
    read_rows,
    split_file,
    write_side,
)
from presage.pipelines.transforms.apply import fit_inputs
from presage.pipelines.transforms.fit import (
    FITTED,
    Partial,
    add_partial,
    merge_partials,
    write_fitted,
    write_shard,
)
from presage.schemas.dataset.fitted import FittedValues, load_fitted
from presage.schemas.machine import num_cores

BUNDLE_BYTES = 128 << 20
"""Input bytes of a task that makes samples: each task writes the rows of a partition once."""
MEMORY_BUNDLE_BYTES = 4 << 20
"""The same if samples stay in memory."""
SENT_BYTES = 160 << 20
"""Bytes of samples after which a task sends them before its end."""
DISK_FACTOR = 2.0
"""Bytes on disk for each byte of the input: exchanged rows and the segment (docs/operations.md)."""
FILES_PER_TASK = 64
"""Files that a task divides into splits."""


def run_segment(
    context: BuildContext, options: LocalOptions, progress: Progress
) -> dict[str, list[Any]]:
    """Build a segment.

    Returns:
        The values of each output: `parts, tables, rejects, events, histories`, and `fitted` if the
        job has transforms to fit.
    """
    num_bytes = sum(f.num_bytes for f in context.listing)
    in_memory = holds_in_memory(options, num_bytes)
    if not in_memory:
        progress.report(disk_line(context.local_root, num_bytes))
    with open_exchange(context, options.num_workers, in_memory, progress) as exchange:
        sources, sides = split_inputs(context, exchange)
        partials, events = make_samples(context, exchange, sources, sides)
        exchange.run("pending", send_pending, [None] if context.before else [])
        fitted = fit_transforms(context, partials)
        parts, histories = write_parts(context, exchange, exchange.take(SAMPLES), fitted or {})
        rejects = exchange.run("rejects", write_reject_range, exchange.take(REJECTS).items())
        numbers = number_tables(context, exchange, parts)
    return {
        **({} if fitted is None else {"fitted": [fitted]}),
        "parts": parts,
        "tables": numbers,
        "rejects": rejects,
        "events": [add_counts(events)],
        "histories": histories,
    }


def disk_line(directory: Path, num_bytes: int) -> str:
    """Return a line about the disk that a build with files needs; `num_bytes` are of its input."""
    free = shutil.disk_usage(directory).free
    needed = f"about {DISK_FACTOR * num_bytes / 1e9:.1f} GB until the commit"
    return f"disk: {needed} below {directory}, {free / 1e9:.1f} GB are free"


def open_exchange(
    context: BuildContext, num_workers: int, in_memory: bool, progress: Progress | None = None
) -> Exchange:
    """Return the exchange of a build, of at most `num_workers`; 0 for all that fit the machine."""
    keep_freed_memory()
    num_workers = num_workers or (num_cores() if in_memory else num_processes())
    scratch = None if in_memory else context.local_root / SHUFFLE
    return Exchange(context, num_workers, scratch, progress)


# Divide the input into bundles of splits.

Bundle = tuple[InputSplit, ...]


def split_inputs(context: BuildContext, exchange: Exchange) -> tuple[list[Bundle], list[Bundle]]:
    """Return the bundles of the sources, and those of the side tables."""
    splits, sides = list_splits(context, exchange), context.data.sides
    return (
        bundles_of((s for s in splits if s[0].source not in sides), exchange),
        bundles_of((s for s in splits if s[0].source in sides), exchange),
    )


def list_splits(context: BuildContext, exchange: Exchange) -> list[tuple[InputSplit, int]]:
    """Return the (split, bytes) of all files."""
    files = context.files()
    tasks = [files[i : i + FILES_PER_TASK] for i in range(0, len(files), FILES_PER_TASK)]
    return [split for value in exchange.run("split", split_files, tasks) for split in value]


def bundles_of(splits: Iterable[tuple[InputSplit, int]], exchange: Exchange) -> list[Bundle]:
    """Return bundles of some (split, bytes)."""
    limit = MEMORY_BUNDLE_BYTES if exchange.in_memory else BUNDLE_BYTES
    return [tuple(bundle) for bundle in batches_by_size(splits, limit)]


def split_files(worker: Worker, files: Sequence[InputSplit]) -> TaskResult:
    """Return the (split, bytes) of some files."""
    outputs, sizes = TaskOutputs(worker), list[tuple[InputSplit, int]]()
    for file in files:
        splits, rejects = split_file(worker.context, file)
        outputs.reject(file.source, rejects, by_reader=True)
        sizes += [(split, (file.num_bytes or 0) // len(splits)) for split in splits]
    return outputs.result(sizes)


SidePaths = Mapping[str, str]
"""Small side tables to the paths of their files."""


class TaskOutputs:
    """What a task sends to later ones, counts, and reports to the launcher."""

    def __init__(self, worker: Worker, sides: SidePaths | None = None) -> None:
        """Begin a task that reads small side tables, or makes no samples."""
        self.context, self.counts = worker.context, Counts()
        self._worker, self._sides = worker, sides or {}
        self._source = worker.context.data.sample_source
        self._result = TaskResult(counts=self.counts)
        self._rejects: list[pa.Table] = []
        self._partials: dict[str, list[Partial]] = {}
        self._events: list[Mapping[str, int]] = []
        self._samples: list[Tuples] = []
        self._num_bytes = 0

    def send(self, stream: str, partition: int, element: Element) -> None:
        """Send samples or rows."""
        self._result.send(stream, partition, element)

    @property
    def stage(self) -> SampleStage:
        """The stage that makes samples."""
        return self._worker.sample_stage(self._sides)

    def read(self, split: InputSplit) -> Iterator[pa.Table]:
        """Yield the raw rows of a split; keep its rejects."""
        self.counts.num_bytes += _num_bytes(self.context, split)
        for rows in read_rows(self.context, split):
            for rejects in rows.all_rejects():
                self.reject(split.source, rejects, by_reader=True)
            if rows.table is not None and rows.table.num_rows:
                self.counts.read += rows.table.num_rows
                self.counts.good += rows.table.num_rows * (split.source == self._source)
                yield rows.table

    def reject(self, source: str, rejects: pa.Table, *, by_reader: bool = False) -> None:
        """Keep rejects of a source; `by_reader` if it could not read the rows."""
        if not rejects.num_rows:
            return
        counts = self.counts
        counts.example = counts.example or str(next(rejects_from_table(rejects.slice(0, 1))))
        num = rejects.num_rows - pc.sum(rejects["rows_unknown"].cast(pa.int64())).as_py()
        counts.rejected += num
        counts.read += num * by_reader
        if source == self._source:
            counts.unread += num * by_reader
            counts.unused += num * (not by_reader)
        self._rejects.append(rejects)

    def add_rows(self, source: str, table: pa.Table) -> None:
        """Send the samples of raw rows, or the rows to the SQL per key."""
        if source in self.context.data.history_sources:
            return
        if self.context.shard is None:
            self.add_samples(self.stage.from_rows(source, table))
            return
        partition_of_row, good, rejects = keyed_rows(self.context, source, table)
        self.reject(source, rejects)
        for partition, rows in group_rows(good, partition_of_row):
            self.send(_KEYED, partition, (source, rows))

    def add_events(self, source: str, table: pa.Table) -> None:
        """Send the events of raw rows to their parts."""
        for name, events, rejects in self.stage.events_of(source, table):
            self.reject(source, rejects)
            if events is not None:
                self.send_events(name, events)

    def send_events(self, history: str, events: pa.Table) -> None:
        """Send events to their parts."""
        for part, rows in partition_events(self.context, events):
            self.send(_events_of(history), part, rows)

    def add_samples(self, made: Iterable[MadeSamples]) -> None:
        """Send samples to their part, or to the next look-up by key."""
        for each in made:
            self.reject(self._source, each.rejects)
            for key, partial in each.partials:
                self._partials[key] = add_partial(self._partials.get(key, []), partial)
            if each.events:
                self._events.append(each.events)
            if isinstance(each.samples, Tuples):
                self.counts.samples += each.samples.num_samples
                self.add_tuples(each.samples)
            elif each.join is not None:
                for partition, rows in partition_samples(self.context, each.join, each.samples):
                    self.send(_samples_of(each.join), partition, rows)

    def add_tuples(self, samples: Tuples) -> None:
        """Send finished samples to their parts."""
        self._samples.append(samples)
        self._num_bytes += samples.num_bytes
        if self._num_bytes >= SENT_BYTES:
            self._send_samples()

    def _send_samples(self) -> None:
        """Send the samples, those of each part together."""
        if not self._samples:
            return
        samples, count = concat_tuples(self._samples), self.context.num_parts
        self._samples, self._num_bytes = [], 0
        part_of_sample = partition_of_session(samples, self.context.data.session.key, count)
        for part, rows in enumerate(partition_tuples(samples, part_of_sample, count)):
            if rows is not None:
                self.send(SAMPLES, part, rows)

    def result(self, value: Any = None) -> TaskResult:
        """Return the result of the task; its value is partial aggregates and events by default."""
        self._send_samples()
        for table in self._rejects:
            for key, rows in group_rows(table, range_keys(table, self.context.listing)):
                self.send(REJECTS, key, rows)
        self._result.value = (self._partials, self._events) if value is None else value
        return self._result


def _num_bytes(context: BuildContext, split: InputSplit) -> int:
    """Return the bytes of a split; the first row group counts for the whole file."""
    size = context.listing[split.file_index].num_bytes
    if split.row_group is not None:
        return 0 if split.row_group else size
    return size - split.offset if split.num_bytes is None else split.num_bytes


# Make samples.

_KEYED = "raw-rows"


def _events_of(history: str) -> str:
    return f"history-{history}"


def _samples_of(index: int) -> str:
    return f"lookup-{index}-samples"


def _side_of(index: int) -> str:
    return f"lookup-{index}-side"


def read_sides(context: BuildContext, exchange: Exchange, bundles: Sequence[Bundle]) -> SidePaths:
    """Read all side tables; return the small ones.

    Rows of a large one are sent to the partition of their key.
    """
    exchange.run("sides", read_side_rows, bundles)
    small = exchange.take(SIDES)
    names = list(context.data.sides)
    rows = {names[number]: list(ReadElements(sent)) for number, sent in small.items()}
    return {name: str(write_side(context, name, tables)) for name, tables in rows.items()}


SIDES = "sides"


def read_side_rows(worker: Worker, bundle: Bundle) -> TaskResult:
    """Read rows of side tables; send those of a large one to the partitions of its look-ups."""
    context, outputs = worker.context, TaskOutputs(worker)
    numbers = {name: number for number, name in enumerate(context.data.sides)}
    for split in bundle:
        name = split.source
        for table in outputs.read(split):
            rows, rejects = good_side_rows(context, name, table)
            outputs.reject(name, rejects)
            if name in context.broadcast:
                outputs.send(SIDES, numbers[name], rows)
                continue
            for index, join in enumerate(context.data.samples.joins):
                if join.side == name:
                    for partition, part in partition_side(context, name, rows):
                        outputs.send(_side_of(index), partition, part)
    return outputs.result()


def map_rows(worker: Worker, bundle: Bundle, side_tables: SidePaths) -> TaskResult:
    """Send the samples of the raw rows of some splits."""
    outputs = TaskOutputs(worker, side_tables)
    for split in bundle:
        for table in outputs.read(split):
            if worker.context.data.histories:
                outputs.add_events(split.source, table)
            outputs.add_rows(split.source, table)
    return outputs.result()


def send_pending(worker: Worker, _: None) -> TaskResult:
    """Send the events that the segment before has for later ones."""
    outputs = TaskOutputs(worker)
    for name, events in pending_events(worker.context):
        outputs.send_events(name, events)
    return outputs.result()


def map_keys(
    worker: Worker, keyed: tuple[int, Sequence[ElementRef]], side_tables: SidePaths
) -> TaskResult:
    """Send the samples of all rows of some keys."""
    outputs = TaskOutputs(worker, side_tables)
    partition, sent = keyed
    rows: dict[str, list[pa.Table]] = {}
    for source, table in ReadElements(sent):
        rows.setdefault(source, []).append(table)
    outputs.add_samples(outputs.stage.from_keys(partition, rows))
    return outputs.result()


def look_up_by_key(
    worker: Worker,
    task: tuple[int, Sequence[ElementRef], Sequence[ElementRef]],
    side_tables: SidePaths,
) -> TaskResult:
    """Send the samples of some keys after a look-up in a large side table."""
    outputs = TaskOutputs(worker, side_tables)
    index, samples, side = task
    tables, rows = list(ReadElements(samples)), ReadElements(side)
    for table in look_up_partition(worker.context, index, tables, rows):
        outputs.add_samples([outputs.stage.look_up(table, index + 1)])
    return outputs.result()


def make_samples(
    context: BuildContext,
    exchange: Exchange,
    tasks: Iterable[Any],
    side_bundles: Sequence[Bundle],
    map_task: Callable[..., TaskResult] = map_rows,
) -> tuple[dict[str, list[Partial]], list[Mapping[str, int]]]:
    """Send the samples of all rows to their parts; `tasks` are those of `map_task`.

    Returns:
        The partial aggregates of transforms to fit, by key, and the counts of joined events.
    """
    sides = read_sides(context, exchange, side_bundles)
    values = exchange.run("map", map_task, tasks, sides)
    values += exchange.run("keys", map_keys, exchange.take(_KEYED).items(), sides)
    for index in context.joins_by_key:
        samples, side = exchange.take(_samples_of(index)), exchange.take(_side_of(index))
        tasks = ((index, sent, side.get(number, [])) for number, sent in samples.items())
        values += exchange.run(f"join-{index}", look_up_by_key, tasks, sides)
    partials: dict[str, list[Partial]] = {}
    for more, _ in values:
        for key, several in more.items():
            for partial in several:
                partials[key] = add_partial(partials.get(key, []), partial)
    return partials, [counts for _, events in values for counts in events]


# Fit transforms, write parts and rejects, number accesses.


def fit_transforms(
    context: BuildContext, partials: Mapping[str, list[Partial]]
) -> dict[str, str] | None:
    """Fit transforms; return their files, path to sha256, or None without transforms to fit."""
    root, data = context.segment_root, context.data
    if not fit_inputs(data):
        return None
    sums = {key: write_shard(root, data, key, merge_partials(p)[0]) for key, p in partials.items()}
    return write_fitted(root / FITTED, sums, data, context.fitted)


def write_parts(
    context: BuildContext,
    exchange: Exchange,
    samples: dict[int, list[ElementRef]],
    files: Mapping[str, str],
) -> tuple[list[PartResult], list[PartHistories]]:
    """Write all parts of the segment from their samples, which are emptied, and their events.

    `files` are from `fit_transforms`.

    Returns:
        The parts with samples, and the histories of all.
    """
    if not samples:
        return [], []
    fitted = load_fitted(context.segment_root / FITTED, files, context.data)
    first = ReadElements(samples[min(samples)])
    events = {name: exchange.take(_events_of(name)) for name in context.data.histories}
    numbers = sorted({*samples, *(part for of_parts in events.values() for part in of_parts)})
    tasks = (  # frees memory part by part
        (part, samples.pop(part, []), {name: of.pop(part, []) for name, of in events.items()})
        for part in numbers
    )
    histories: list[PartHistories] = []

    def results(values: Iterable[BuiltPart]) -> Iterator[PartResult]:
        for built in values:
            histories.append(built.histories)
            if built.result is not None:
                yield built.result

    with ThreadPoolExecutor(1) as chooser:
        layout = chooser.submit(
            choose_segment_layout, first, context.data, fitted, context.num_parts
        )
        del first
        # Processes receive no future, and each reads the fitted values itself.
        shared = (layout, fitted) if exchange.in_memory else (layout.result(), files)
        values = exchange.values("part", write_part, tasks, *shared)
        return list(sum_statistics(results(values))), histories


def write_part(
    worker: Worker,
    task: tuple[int, Sequence[ElementRef], Mapping[str, Sequence[ElementRef]]],
    layout: SegmentLayout | Future[SegmentLayout],
    fitted: FittedValues | Mapping[str, str],
) -> TaskResult:
    """Build a part from its samples and events; the value of the result is a `BuiltPart`.

    `fitted` are the values of the build's transforms, or their files.
    """
    (part, sent, events), context = task, worker.context
    root, data, features = context.segment_root, context.data, context.features
    values = fitted if isinstance(fitted, FittedValues) else worker.fitted(fitted)
    samples = ReadElements(sent)
    if not data.histories:
        built = BuiltPart(build_part(root, part, samples, data, layout, features, values))
    else:
        tables = {name: list(ReadElements(of_part)) for name, of_part in events.items()}
        built = build_part_with_histories(
            root, part, samples, tables, data, layout, features, values, context.end
        )
    return TaskResult(built, Counts(parts=1))


def write_reject_range(worker: Worker, rejects: tuple[int, Sequence[ElementRef]]) -> TaskResult:
    """Write the rejects of a range of the input; return their counts."""
    key, sent = rejects
    return TaskResult(write_rejects(worker.context.segment_root, key, ReadElements(sent)))


def number_tables(
    context: BuildContext, exchange: Exchange, parts: Sequence[PartResult]
) -> list[tuple[str, NumberedTable]]:
    """Number the rows of every table.

    Tables with more look-ups come first, so that no worker waits for the last one.
    """
    if not parts:
        return []

    def num_lookups(table: str) -> int:
        return sum(part.lookups[table][1] for part in parts)

    tables = sorted(context.data.tables, key=num_lookups, reverse=True)
    return exchange.run("number", number_rows, tables, training_blocks(p.blocks for p in parts))


def number_rows(worker: Worker, table: str, blocks: NDArray[np.int64]) -> TaskResult:
    """Number the rows of a table; `blocks` are the ids of all training blocks in their order."""
    return TaskResult((table, number_table(worker.context.segment_root, table, blocks)))

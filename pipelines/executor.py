"""Build a segment in this process, without Beam: the same stages, over Python lists."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any

import pyarrow as pa

from pipelines.clustering.part import PartResult, serialize_result
from pipelines.context import BuildContext
from pipelines.lookup_stages import look_up_broadcast, look_up_partition, sides_in_memory
from pipelines.memory import keep_freed_memory
from pipelines.oracle.files import run_stages
from pipelines.oracle.numbering import NUMBERING_STAGES, WORKER_ENTRIES, number_blocks
from pipelines.samples.event_join import add_counts
from pipelines.shuffle import group_rows
from pipelines.sources.rejects import RejectCounts, range_keys, write_rejects
from pipelines.stages import (
    EVENTS,
    REJECTS,
    SAMPLES,
    Output,
    SampleStage,
    cut_file,
    good_side_rows,
    keyed_rows,
    pins_of,
    read_rows,
    write_part,
)
from pipelines.transforms.apply import learned_inputs
from pipelines.transforms.fit import (
    LEARNED,
    Partial,
    load_building,
    merged,
    settle,
    shrink,
    with_partial,
)

SourceRows = tuple[str, pa.Table]
"""Source, and raw rows of it."""

LookupRows = Callable[[int, list[pa.Table]], Iterable[pa.Table]]
"""From the index of a look-up, and its samples, to rows of its side table: all with their keys."""


class OutputCollector:
    """What the stages give beside samples: rejects, counts, and what transforms learn from."""

    def __init__(self, keep: bool = True) -> None:
        """Start with nothing.

        Args:
            keep: whether to keep it; a caller that needs the samples alone saves the memory.
        """
        self.keep = keep
        self.values: defaultdict[str, list[Any]] = defaultdict(list)
        self.partials: defaultdict[str, list[Partial]] = defaultdict(list)

    def samples(self, outputs: Iterable[Output]) -> Iterator[Any]:
        """Yield the main output of a stage; keep the others."""
        for name, value in outputs:
            if name == SAMPLES:
                yield value
            elif not self.keep:
                continue
            elif name == LEARNED:
                key, partial = value
                self.partials[key] = with_partial(self.partials[key], partial)
            else:
                self.values[name].append(value)


def run_segment(context: BuildContext) -> dict[str, list[Any]]:
    """Build a segment: read, make samples, learn, write parts, number accesses.

    Args:
        context: of a build whose samples cross in memory.

    Returns:
        The values of each output: `parts, tables, rejects, events`, and `learned` where
        transforms learn.
    """
    keep_freed_memory()
    collected = OutputCollector()
    samples = make_samples(context, read_all(context, collected), collected)
    learned = learn(context, collected)
    parts = write_parts(context, samples, learned[0] if learned else {})
    return {
        **({"learned": learned} if learned else {}),
        "parts": [serialize_result(part) for part in parts],
        "tables": number_tables(context, parts),
        "rejects": reject_counts(context, collected.values[REJECTS]),
        "events": [add_counts(collected.values[EVENTS])],
    }


def read_all(
    context: BuildContext, collected: OutputCollector, sources: Container[str] | None = None
) -> Iterator[SourceRows]:
    """Yield the raw rows of all files, side tables first.

    Args:
        context: of the build.
        collected: rejects are added to it.
        sources: the sources and side tables to read; all when None.
    """
    sides = context.data.sides
    for file in sorted(context.files(), key=lambda f: f.source not in sides):
        if sources is not None and file.source not in sources:
            continue
        for part in collected.samples(cut_file(context, file)):
            for table in collected.samples(read_rows(context, part)):
                yield part.source, table


def make_samples(
    context: BuildContext, rows: Iterable[SourceRows], collected: OutputCollector
) -> dict[int, list[Any]]:
    """Return the samples of each part, as `context.crossing` sends them.

    Args:
        context: of the build.
        rows: raw rows, those of side tables first.
        collected: what else comes out, added to.
    """
    parts: defaultdict[int, list[Any]] = defaultdict(list)
    for part, sent in iter_samples(context, rows, collected):
        parts[part].append(sent)
    return dict(sorted(parts.items()))


def iter_samples(
    context: BuildContext,
    rows: Iterable[SourceRows],
    collected: OutputCollector,
    rows_of_look_up: LookupRows | None = None,
) -> Iterator[tuple[int, Any]]:
    """Yield samples with the numbers of their parts, as `context.crossing` sends them.

    Args:
        context: of the build.
        rows: raw rows, those of side tables first.
        collected: what else comes out, added to.
        rows_of_look_up: where the rows of large side tables come from, if they are not in `rows`.
    """
    side_rows: defaultdict[str, list[pa.Table]] = defaultdict(list)
    stage = SampleStage(context)
    made = collected.samples(_from_sources(context, stage, rows, side_rows, collected))
    if context.lookups_are_broadcast:
        yield from made
        return
    joins = context.data.samples.joins
    rows_of_look_up = rows_of_look_up or (lambda index, _: side_rows[joins[index].side])
    for table in _joined_by_key(context, stage, list(made), rows_of_look_up):
        yield from collected.samples(stage.finish(table))


def _from_sources(
    context: BuildContext,
    stage: SampleStage,
    rows: Iterable[SourceRows],
    side_rows: defaultdict[str, list[pa.Table]],
    collected: OutputCollector,
) -> Iterator[Output]:
    """Yield what SQL makes of the rows of sources; those of side tables are put aside."""
    keyed: defaultdict[int, defaultdict[str, list[pa.Table]]] = defaultdict(
        lambda: defaultdict(list)
    )
    opened = False
    for source, table in rows:
        if source in context.data.sides:
            side_rows[source].extend(collected.samples(good_side_rows(context, source, table)))
            continue
        if not opened:
            stage.use_sides(sides_in_memory(context, side_rows))
            opened = True
        if context.shard is None:
            yield from stage.from_rows(source, table)
            continue
        for target, good in collected.samples(keyed_rows(context, source, table)):
            for part, mine in group_rows(good, target):
                keyed[part][source].append(mine)
    for part in sorted(keyed):
        yield from stage.from_keys(part, keyed.pop(part))


def _joined_by_key(
    context: BuildContext,
    stage: SampleStage,
    samples: list[pa.Table],
    rows_of_look_up: LookupRows,
) -> list[pa.Table]:
    """Return samples after all look-ups, one after the other."""
    for index, join in enumerate(context.data.samples.joins):
        if join.side in context.broadcast:
            samples = [look_up_broadcast(table, stage.sides, context, index) for table in samples]
        else:
            samples = list(
                look_up_partition(context, index, samples, rows_of_look_up(index, samples))
            )
    return samples


def learn(context: BuildContext, collected: OutputCollector) -> list[dict[str, str]]:
    """Write what transforms learn; return its files, path to sha256, none where nothing learns."""
    root, data = context.segment_root, context.data
    if not learned_inputs(data):
        return []
    sums = {k: shrink(root, data, k, merged(p)[0]) for k, p in collected.partials.items()}
    collected.partials.clear()
    return [settle(root / LEARNED, sums, data, context.learned)]


def write_parts(
    context: BuildContext, samples: dict[int, list[Any]], files: dict[str, str]
) -> list[PartResult]:
    """Write all parts of the segment.

    Args:
        context: of the build.
        samples: by part, ascending; each is let go of when it is written.
        files: what was learned, path to sha256.
    """
    if not samples:
        return []
    pins = pins_of(context, samples[min(samples)], files)
    learned = load_building(context.segment_root, files, context.data)
    return [write_part(context, part, samples.pop(part), pins, learned) for part in sorted(samples)]


def reject_counts(context: BuildContext, tables: list[pa.Table]) -> list[RejectCounts]:
    """Write the rejects; return their counts by range of places."""
    places: defaultdict[int, list[pa.Table]] = defaultdict(list)
    for table in tables:
        for place, rows in group_rows(table, range_keys(table, context.listing)):
            places[place].append(rows)
    return [write_rejects(context.segment_root, p, places[p]) for p in sorted(places)]


def number_tables(context: BuildContext, parts: list[PartResult]) -> list[tuple[str, int]]:
    """Number the rows of every table; return (table, distinct rows)."""
    blocks = [part.blocks for part in parts]
    counts: list[tuple[str, int]] = []
    for table in sorted(context.data.tables) if blocks else []:
        numbered = number_blocks(context.segment_root, table, blocks, WORKER_ENTRIES)
        if not isinstance(numbered, int):
            numbered = sum(run_stages(numbered, NUMBERING_STAGES))
        counts.append((table, numbered))
    return counts

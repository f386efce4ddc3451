"""Write a segment again without its erased samples, old rejects and late events."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from presage.pipelines.clustering.part import build_part, sum_statistics
from presage.pipelines.clustering.storage_layout import SegmentLayout, choose_segment_layout
from presage.pipelines.histories.stored_events import check_no_events_left, copy_histories
from presage.pipelines.oracle.numbering import number_table, training_blocks
from presage.pipelines.runner_options import beam_build, local_options
from presage.pipelines.samples.event_join import write_late
from presage.pipelines.samples.sql import LIST_INDEX
from presage.pipelines.samples.tuples import Tuples, distinct_rows, drop_unused_tuples
from presage.pipelines.sources.raw_rows import ORIGIN
from presage.pipelines.sources.rejects import (
    Reject,
    RejectCounts,
    merge_counts,
    rejects_from_table,
    rejects_table,
    write_rejects,
)
from presage.pipelines.table.delete import REJECT_PREFIXES
from presage.pipelines.table.segment import directories_of, finish_segment, segment_directory
from presage.schemas.config.job import DataConfig, Job
from presage.schemas.dataset.files import write_files
from presage.schemas.dataset.group_files import group_schema, read_group
from presage.schemas.dataset.manifest import write_manifest
from presage.schemas.dataset.opened import OpenDataset, Segment
from presage.schemas.dataset.samples import blocks_of_row_group, row_groups, tuples_of_samples
from presage.schemas.features import FeatureSet
from presage.schemas.layout import (
    BLOCK,
    BLOCKS,
    EVENTS,
    FILES,
    inverse_column,
    part_path,
)
from presage.schemas.machine import num_cores
from presage.schemas.storage.location import Location

# One segment


def compact_segment(
    dataset: OpenDataset,
    segment: Segment,
    directory: Location,
    texts: frozenset[str] | None,
    deleted: frozenset[str],
    fitted: Mapping[str, str],
    beam_args: Sequence[str],
) -> bool:
    """Write a segment without its deleted samples.

    `texts` are ids; lines of `rejects/` and `late/` that contain one are removed; None removes all
    lines. `deleted` are ids, too; their events are removed. `fitted` is path to sha256.

    Returns:
        Whether a sample is left; otherwise nothing is written.

    Raises:
        SchemaError: no sample is left, but events of other keys are.
    """
    data = stored_data(dataset.job, segment)
    parts = remaining_parts(segment, data)
    if not parts:
        check_no_events_left(segment, deleted)
        return False
    features = stored_features(dataset.features, segment)
    layout = choose_segment_layout(parts[0], data, num_parts=len(parts))
    old = segment.manifest
    with segment_directory(directory, in_place=True) as building:
        results = _rewrite_parts(beam_args, building, parts, layout, features, data)
        rejects = _copy_rejects(segment, building, texts)
        _copy_late_events(segment, building, texts)
        histories = copy_histories(segment, building, deleted)
        finish_segment(
            building,
            results["parts"],
            rejects,
            dict(results["tables"]),
            old.listing,
            (old.job_sha256, old.schema_sha256),
            data,
            features,
            fitted,
            old.num_parts,
            histories,
        )
    return True


def _rewrite_parts(
    beam_args: Sequence[str],
    building: Location,
    parts: Sequence[StoredPart],
    layout: SegmentLayout,
    features: FeatureSet,
    data: DataConfig,
) -> Mapping[str, Any]:
    """Write the parts of a segment and number its accesses; return `parts` and `tables`."""
    options = local_options(beam_args)
    if options is None:
        run = beam_build().rewrite_parts
        return run(building, parts, layout, features, data.tables, beam_args)
    with ThreadPoolExecutor(options.num_workers or num_cores()) as pool:
        written = pool.map(
            lambda p: build_part(building, p.file_index, p, p.data, layout, features), parts
        )
        results = list(sum_statistics(written))
        blocks = training_blocks(result.blocks for result in results)
        numbers = pool.map(
            lambda table: (table, number_table(building, table, blocks)), sorted(data.tables)
        )
        return {"parts": results, "tables": list(numbers)}


def _copy_rejects(
    segment: Segment, building: Location, texts: frozenset[str] | None
) -> RejectCounts:
    paths = sorted(path for path in segment.files if path.startswith("rejects/"))
    tables = (rejects_table(remaining_lines(segment, path, texts)) for path in paths)
    return merge_counts(write_rejects(building, n, [table]) for n, table in enumerate(tables))


def remaining_lines(segment: Segment, path: str, texts: frozenset[str] | None) -> list[Reject]:
    """Return the lines of a file of rejects or late events that contain none of the ids."""
    if texts is None:
        return []
    phrases = [text for text in texts if not _WORD.fullmatch(text)]
    rows = rejects_from_table(segment.file(path).read())
    return [row for row in rows if not has_id(f"{row.value}\n{row.reason}", texts, phrases)]


_WORD = re.compile(r"[\w.@+-]+(?:(?<=\d):\d[\w.]*)*")
"""A number, date, time or word of a line, at the ends of which an id begins and ends."""


def has_id(line: str, ids: frozenset[str], phrases: Sequence[str]) -> bool:
    """Return whether a line contains an id as a whole; `phrases` are those that are not one word.

    Example:
        >>> lines = "{'user': 7, 'x': 1}", '{"user":7.0}', "got 7.", "17,0.75,2026-07-07 10:07"
        >>> [has_id(line, frozenset({"7"}), []) for line in lines]
        [True, True, True, False]
    """
    for match in _WORD.finditer(line):
        word = match[0].rstrip(".")
        if word in ids or (word.endswith(".0") and word[:-2] in ids):
            return True
    return any(re.search(rf"(?<!\w){re.escape(phrase)}(?!\w)", line) for phrase in phrases)


def _copy_late_events(segment: Segment, building: Location, texts: frozenset[str] | None) -> None:
    if EVENTS in segment.files:
        with (building / EVENTS).new_file() as partial:
            pq.write_table(segment.file(EVENTS).read(), partial)
    for path in segment.files:
        number = path.removeprefix("late/").removesuffix(".parquet")
        if path.startswith("late/") and path == part_path(int(number), "late"):
            write_late(building, int(number), remaining_lines(segment, path, texts))


def copy_segment(
    segment: Segment, directory: Location, fitted: Mapping[str, str], *, with_rejects: bool
) -> None:
    """Copy the files of a segment, with or without its rejects and late events."""
    entries = {
        path: entry
        for path, entry in segment.files.items()
        if with_rejects or not path.startswith(REJECT_PREFIXES)
    }
    # A new file first: links are as old as their files, and `vacuum` goes by age.
    files_sha256 = write_files(directory / FILES, entries.values())
    for path in (BLOCKS, *entries):
        (directory / path).copy_from(segment.directory / path)
    changed: dict[str, Any] = {} if with_rejects else {"num_rejects": 0}
    manifest = replace(
        segment.manifest,
        **changed,
        directories=directories_of(entries.values()),
        files_sha256=files_sha256,
        fitted=dict(fitted),
    )
    write_manifest(directory, manifest)


def stored_data(job: Job, segment: Segment) -> DataConfig:
    """Return a data section under which the stored columns are the input.

    It has no transforms and vocabularies: their results are stored columns. Columns that were
    declared after the segment was built are left out.
    """
    columns = segment.manifest.columns
    file_index = int(segment.column("file")[0])
    groups = {
        group: tuple(
            f.name for f in group_schema(lambda p: segment.file(p).schema, group, file_index)
        )
        for group in job.data.groups
    }
    tables = {
        name: replace(table, features=tuple(f for f in table.features if f in columns))
        for name, table in job.data.tables.items()
        if name in segment.manifest.tables
    }
    return replace(job.data, groups=groups, tables=tables, transforms={}, vocabularies={})


def stored_features(features: FeatureSet, segment: Segment) -> FeatureSet:
    """Return the declared columns that a segment stores."""
    columns = segment.manifest.columns
    return FeatureSet(tuple(f for f in features.features if f.name in columns))


@dataclass(frozen=True)
class StoredPart:
    """The remaining samples of one part of a segment, as a reiterable.

    `data` is from `stored_data`.
    """

    segment: Segment
    file_index: int
    data: DataConfig

    def __iter__(self) -> Iterator[Tuples]:
        """Yield the remaining samples of each row group that has some."""
        for file_index, row_group in row_groups(self.segment):
            if file_index == self.file_index:
                rows = self._remaining_rows(row_group)
                if len(rows):
                    yield drop_unused_tuples(self._tuples(row_group).take(rows))

    def _remaining_rows(self, row_group: int) -> NDArray[np.int64]:
        samples = self.segment.column("num_samples")
        blocks = blocks_of_row_group(self.segment, self.file_index, row_group)
        count = int(samples[blocks].sum())
        deleted = self.segment.deleted_rows(self.file_index, row_group)
        return np.setdiff1d(np.arange(count), deleted)

    def _tuples(self, row_group: int) -> Tuples:
        segment, blocks = (
            self.segment,
            blocks_of_row_group(self.segment, self.file_index, row_group),
        )
        samples = segment.file(part_path(self.file_index, "samples")).read_row_group(row_group)
        references: dict[str, NDArray[np.int64]] = {}
        uniques: dict[str, pa.Table] = {}
        hidden = [BLOCK]
        for group, members in self.data.groups.items():
            table = read_group(segment.file, group, self.file_index, row_group).select(members)
            rows = tuples_of_samples(segment, group, blocks, samples)
            codes, uniques[group] = distinct_rows(table)
            references[group] = codes[rows]
            hidden.append(inverse_column(group))
        origin = np.arange(samples.num_rows) + (row_group << 32)  # keeps the stored order
        own = samples.drop_columns(hidden).append_column(ORIGIN, pa.array(origin))
        index = np.zeros(samples.num_rows, np.int64)
        return Tuples(own.append_column(LIST_INDEX, pa.array(index)), references, uniques)


def remaining_parts(segment: Segment, data: DataConfig) -> list[StoredPart]:
    """Return the parts of a segment with at least one remaining sample, in order."""
    numbers = sorted(set(segment.column("file").tolist()))
    parts = [StoredPart(segment, number, data) for number in numbers]
    return [part for part in parts if any(True for _ in part)]

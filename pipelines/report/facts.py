"""Facts of the report: what a dataset and its runs contain, as plain data."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf import text_format
from tensorflow_metadata.proto.v0 import anomalies_pb2

from presage.pipelines.report.sizes import (
    FlatRows,
    bytes_by_table,
    column_bytes,
    dataset_bytes,
    derived_bytes,
    file_metadata,
    flat_bytes,
    flat_rows,
    folder_bytes,
    oracle_bytes,
)
from presage.pipelines.table.commit import anomalies_text_of
from presage.pipelines.table.indexes import (
    PolicyReport,
    TableReport,
    default_order,
    policy_reports,
    table_reports,
)
from presage.schemas.dataset.accesses import TableAccesses
from presage.schemas.dataset.manifest import GroupCounts
from presage.schemas.dataset.opened import OpenDataset, Segment, reading_histories
from presage.schemas.dataset.run_next_uses import open_table
from presage.schemas.dataset.samples import row_groups
from presage.schemas.errors import SchemaError
from presage.schemas.layout import count_column, part_path
from presage.schemas.oracle.miss_ratio import EXACT_OPTIMAL, HitRateCurve, lru_curve, optimal_curve
from presage.schemas.run.records import SUMMARY, RunSummary, read_summary
from presage.schemas.run.run_manifest import local_runs
from presage.schemas.storage.location import Location

PLAN, BUILD = "plan.json", "build.json"
PLAN_NUMBERS = (
    "preprocessing.segment_jobs", "preprocessing.workers_per_job", "preprocessing.cpus",
    "preprocessing.memory_bytes", "preprocessing.rows_per_sec", "training.num_replicas",
    "training.num_stores", "training.cpus", "training.memory_bytes", "training.samples_per_sec",
    "predicted_sec", "cost",
)  # fmt: skip
BUILD_NUMBERS = ("input_bytes", "num_samples", "startup_sec", "wall_sec", "rows_per_sec")
MOST_SEGMENTS = 10
"""Segments whose statistics are shown, the last ones."""
OPTIMAL_WORK = 12_000_000
"""Accesses times capacities for the curve of the optimal cache: about 10 seconds."""


def read_facts(dataset: OpenDataset, runs: Path | Location | None) -> dict[str, Any]:
    """Read everything that the page shows, one value per section.

    `runs` is a finished run, or a directory of runs, optionally with `plan.json` and `build.json`.

    Raises:
        SchemaError: the dataset or a run is damaged, or `runs` contains nothing to show.
    """
    shown = read_runs(runs)
    return shown | {
        "dataset": dataset,
        "counts": count_samples(dataset),
        "storage": storage_facts(dataset, flat_rows(dataset)),
        "groups": group_totals(dataset),
        "shared": shared_rows(dataset),
        "histories": history_facts(dataset),
        "events_of_blocks": events_of_blocks(dataset),
        "quality": quality_facts(dataset),
        "oracle": oracle_facts(dataset),
    }


# Totals and bytes.


def count_samples(dataset: OpenDataset) -> dict[str, Any]:
    """Return totals over all segments; `deleted` samples have a tombstone and are still stored."""
    manifests = [s.manifest for s in dataset.segments]
    blocks = {split: 0 for m in manifests for split in sorted(m.splits, reverse=True)}
    for manifest in manifests:
        for split, (_, num_blocks) in manifest.splits.items():
            blocks[split] += num_blocks
    deleted = sum(
        len(segment.deleted_rows(file_index, row_group))
        for segment in dataset.segments
        if segment.tombstones.num_rows
        for file_index, row_group in row_groups(segment)
    )
    sums = {
        name: sum(getattr(m, f"num_{name}") for m in manifests)
        for name in ("samples", "sessions", "rejects")
    }
    input_bytes = sum(m.input_bytes for m in manifests)
    return sums | {"blocks": blocks, "deleted": deleted, "input_bytes": input_bytes}


@dataclass(frozen=True, slots=True)
class StorageFacts:
    """Bytes of a dataset and of plain Parquet files with the same samples."""

    plain: Mapping[str, float]  # by the order of the rows
    written_rows: int  # rows from which the plain bytes were extrapolated
    columns: int  # samples and groups without derived columns
    derived: int  # columns that transforms added
    other: int  # statistics, manifests and the like
    oracle: int  # access lists, edges and indexes
    tables: Mapping[str, int]  # samples and each group, derived columns included

    @property
    def folder(self) -> int:
        """Bytes of all files except the oracle's."""
        return self.columns + self.derived + self.other


def storage_facts(dataset: OpenDataset, rows: FlatRows) -> StorageFacts:
    """Return the bytes of a dataset and of its expanded rows."""
    data, derived = dataset_bytes(dataset), derived_bytes(dataset)
    return StorageFacts(
        plain=flat_bytes(rows, dataset.job.data.session.time),
        written_rows=rows.num_rows,
        columns=data - derived,
        derived=derived,
        other=folder_bytes(dataset) - data,
        oracle=oracle_bytes(dataset),
        tables=bytes_by_table(dataset),
    )


# Deduplication.


@dataclass(frozen=True, slots=True)
class SharedTables:
    """Tuples of a group, or values of list features, that are stored once for several blocks."""

    name: str  # of the group or the list features
    kind: str  # `tuples` or `list values`
    per_block: int  # their number if each block had its own
    stored: int  # their number in the files


def shared_rows(dataset: OpenDataset) -> list[SharedTables]:
    """Return what is shared beyond blocks, over all segments: groups first, then lists."""
    totals = group_totals(dataset)
    tuples = {g: sum(m.num_rows for m in file_metadata(dataset, f"tuples/{g}/")) for g in totals}
    shared = [
        SharedTables(group, "tuples", totals[group].num_unique, stored)
        for group, stored in tuples.items()
        if stored
    ]
    return shared + [
        SharedTables(
            ", ".join(features),
            "list values",
            totals[group].num_values_dedup,
            sum(buffer_values(dataset, f) for f in features),
        )
        for group, features in windowed_features(dataset).items()
    ]


def windowed_features(dataset: OpenDataset) -> dict[str, list[str]]:
    """Return the groups all of whose lists are windows in every segment, with these lists."""
    lists = {f.name for f in dataset.features.features if f.is_list}
    lists_of_group: dict[str, list[str]] = {}
    for feature, group in dataset.job.data.group_of_column.items():
        if feature in lists:
            lists_of_group.setdefault(group, []).append(feature)
    return {
        group: features
        for group, features in lists_of_group.items()
        if all(f"buffers/{f}/{part_path(0)}" in s.files for f in features for s in dataset.segments)
    }


def buffer_values(dataset: OpenDataset, feature: str) -> int:
    """Return the number of values in a feature's buffers; an empty list counts as one."""
    return sum(
        m.row_group(i).column(1).num_values
        for m in file_metadata(dataset, f"buffers/{feature}/")
        for i in range(m.num_row_groups)
    )


def group_totals(dataset: OpenDataset) -> dict[str, GroupCounts]:
    """Return the counts of each group over all segments."""
    num_samples = sum(s.manifest.num_samples for s in dataset.segments)
    totals: dict[str, GroupCounts] = {}
    for group in dataset.job.data.groups:
        counts = [s.manifest.groups[group] for s in dataset.segments]
        num_unique = sum(c.num_unique for c in counts)
        totals[group] = GroupCounts(
            num_unique=num_unique,
            dedup_factor=num_samples / num_unique if num_unique else 0.0,
            num_values=sum(c.num_values for c in counts),
            num_values_dedup=sum(c.num_values_dedup for c in counts),
        )
    return totals


# Statistics and the gate.


@dataclass(frozen=True, slots=True)
class HistoryFacts:
    """Events of a history that are stored once.

    Attributes:
        num_events: in all segments.
        num_pending: those that are available after the last segment.
        num_bytes: of their files.
        count_bytes: of the counts of all samples.
    """

    num_events: int
    num_pending: int
    num_bytes: int
    count_bytes: int


def history_facts(dataset: OpenDataset) -> dict[str, HistoryFacts]:
    """Return the sizes of each history over all segments."""
    facts: dict[str, HistoryFacts] = {}
    for name in dataset.job.data.histories:
        histories = [segment.manifest.histories for segment in dataset.segments]
        counts = [each[name] for each in histories if name in each]
        facts[name] = HistoryFacts(
            sum(each.num_events for each in counts),
            counts[-1].num_pending if counts else 0,
            sum(each.num_bytes for each in counts),
            column_bytes(dataset, "samples/", [count_column(name)]),
        )
    return facts


def events_of_blocks(dataset: OpenDataset) -> tuple[int, int] | None:
    """Return the look-ups of the windows of `train.histories`, by sample, and once a block.

    None without these windows, or without an index that has them.
    """
    reading = reading_histories(dataset, dataset.job.train.windows)
    pairs = [
        (counts, segment.manifest.tables.get(table))
        for segment, with_events in zip(dataset.segments, reading.segments, strict=True)
        if with_events.lists is not None
        for table, counts in with_events.manifest.tables.items()
    ]
    if not pairs:
        return None
    expanded = sum(c.num_lookups - (own.num_lookups if own else 0) for c, own in pairs)
    return expanded, sum(
        c.num_lookups_dedup - (own.num_lookups_dedup if own else 0) for c, own in pairs
    )


@dataclass(frozen=True, slots=True)
class QualityFacts:
    """Anomalies of the last segments."""

    segments: Sequence[str]  # `segment 3`
    findings: Sequence[tuple[str, ...]]  # (segment, feature, severity, text)
    distances: Sequence[tuple[str, str, str, str, float, float]]
    """(segment, feature, `drift` or `skew`, measure, distance, threshold)"""

    @property
    def num_beyond(self) -> int:
        """Distances beyond their threshold."""
        return sum(distance > threshold for *_, distance, threshold in self.distances)


def quality_facts(dataset: OpenDataset) -> QualityFacts:
    """Read the anomalies of the last segments.

    Raises:
        SchemaError: a file is missing or changed.
    """
    segments: list[str] = []
    findings: list[tuple[str, ...]] = []
    distances: list[tuple[str, str, str, str, float, float]] = []
    for segment in dataset.segments[-MOST_SEGMENTS:]:
        name = f"segment {segment.reference.position}"
        anomalies = _read_anomalies(segment)
        segments.append(name)
        findings += [(name, *finding) for finding in _findings(anomalies)]
        distances += [(name, *distance) for distance in _distances(anomalies)]
    return QualityFacts(segments, findings, distances)


def _read_anomalies(segment: Segment) -> anomalies_pb2.Anomalies:
    return text_format.Parse(anomalies_text_of(segment), anomalies_pb2.Anomalies())


def _findings(anomalies: anomalies_pb2.Anomalies) -> Iterator[tuple[str, str, str]]:
    infos = [anomalies.anomaly_info[k] for k in sorted(anomalies.anomaly_info)]
    for info in [*infos, anomalies.dataset_anomaly_info]:
        feature = info.path.step[0] if info.path.step else "segment"
        severity = anomalies_pb2.AnomalyInfo.Severity.Name(info.severity).lower()
        for reason in info.reason:  # rejects have none
            text = reason.description.partition(": ")[2] or reason.description
            yield feature, severity, text


def _distances(
    anomalies: anomalies_pb2.Anomalies,
) -> Iterator[tuple[str, str, str, float, float]]:
    names = anomalies_pb2.DriftSkewInfo.Measurement.Type
    for info in anomalies.drift_skew_info:
        kinds = {"drift": info.drift_measurements, "skew": info.skew_measurements}
        for kind, measurements in kinds.items():
            for m in measurements:
                yield info.path.step[0], kind, names.Name(m.type), m.value, m.threshold


# Oracle and cache.


@dataclass(frozen=True, slots=True)
class OracleFacts:
    """Accesses of a training run in the default order, and what caches make of them."""

    tables: Mapping[str, TableReport]  # under the job's plan, most accesses first
    policies: Mapping[str, Mapping[str, PolicyReport]]  # policy to table to its result
    num_steps: int
    lookahead: int  # steps
    largest: str  # table with the most accesses; the other attributes are of this one
    lru: HitRateCurve
    optimal: HitRateCurve
    policy: str  # the job's

    @property
    def total(self) -> TableReport:
        """Sums over all tables; those of `ttl` need the most rows at one step together."""
        names = [f.name for f in fields(TableReport)]
        reports = self.tables.values()
        sums: dict[str, Any] = {name: sum(getattr(r, name) for r in reports) for name in names}
        sums["hit_rate"] = 1 - sums["fetched_rows"] / sums["num_accesses"]
        if self.policy == "ttl":
            sums["peak_cache_rows"] = self.policies["ttl"][self.largest].required_rows
        return TableReport(**sums)


def oracle_facts(dataset: OpenDataset) -> OracleFacts | None:
    """Run the job's plan over every table, and the curves over the largest.

    Returns:
        The facts, or None if training has no look-ups.
    """
    index = dataset.index_for(default_order(dataset))
    order, cache = index.order, replace(dataset.job.train.cache, rows=None)
    opened = {name: open_table(dataset, index, name) for name in dataset.job.data.tables}
    policies = policy_reports(opened, cache)
    tables = table_reports(dataset, index, opened, cache, policies)
    tables = dict(sorted(tables.items(), key=lambda t: (-t[1].num_accesses, t[0])))
    largest = next((name for name, report in tables.items() if report.num_accesses), None)
    if largest is None:
        return None
    report, accesses = tables[largest], TableAccesses(dataset, largest, order)
    work = max(1, min(report.num_accesses, EXACT_OPTIMAL))
    points = int(np.clip(OPTIMAL_WORK // work, 8, 64))
    return OracleFacts(
        tables=tables,
        policies=policies,
        num_steps=order.num_steps,
        lookahead=cache.lookahead,
        largest=largest,
        lru=lru_curve(accesses.steps(), report.num_accesses, report.num_unique_rows),
        optimal=optimal_curve(accesses.steps(), report.num_accesses, points),
        policy=cache.policy,
    )


# Training runs, plan and build.


@dataclass(frozen=True, slots=True)
class Run:
    """A finished run."""

    name: str  # of its directory
    summary: RunSummary


def read_runs(directory: Path | Location | None) -> dict[str, Any]:
    """Read the finished runs of a directory, and the plan and build beside them.

    Returns:
        `runs`, and the output of `scheduler plan --json` and `build --json` as `plan` and `build`,
        or None.

    Raises:
        SchemaError: a file is damaged, or there is nothing to read.
    """
    if directory is None:
        return {"runs": [], "plan": None, "build": None}
    if isinstance(directory, Path) and not directory.is_dir():
        raise SchemaError(
            f"no such directory of runs: {directory}; train with --output below it, or omit --runs"
        )
    with local_runs(directory, (SUMMARY,), (PLAN, BUILD)) as folder:
        return _read_runs(folder)


def _read_runs(directory: Path) -> dict[str, Any]:
    runs = find_runs(directory)
    plan = _read_output(directory / PLAN, PLAN_NUMBERS, ("confident", "reasons"))
    build = _read_output(directory / BUILD, BUILD_NUMBERS)
    if not (runs or plan or build):
        raise SchemaError(
            f"no finished run: {directory} contains no {SUMMARY}; pass the --output of "
            "trainer train, or omit --runs"
        )
    return {"runs": runs, "plan": plan, "build": build}


def find_runs(directory: Path) -> list[Run]:
    """Read a run, or every subdirectory that is one: deduplicated before expanded, then by name.

    Raises:
        SchemaError: a summary is damaged.
    """
    is_run = (directory / SUMMARY).exists()
    folders = [directory] if is_run else sorted(p.parent for p in directory.glob(f"*/{SUMMARY}"))
    runs = [Run(folder.resolve().name, read_summary(folder / SUMMARY)) for folder in folders]
    return sorted(runs, key=lambda r: (r.summary.embedding != "plain", r.summary.expanded, r.name))


def find_speed_up(runs: Sequence[Run]) -> tuple[Run, Run] | None:
    """Return a deduplicated run and an expanded one with the same embedding mode, if any."""
    for expanded in (r for r in runs if r.summary.expanded):
        for run in runs:
            if not run.summary.expanded and run.summary.embedding == expanded.summary.embedding:
                return run, expanded
    return None


def _read_output(path: Path, numbers: Sequence[str], others: Sequence[str] = ()) -> Any:
    """Read the JSON object that a command printed; None if there is no such file.

    `numbers` are keys of numbers, those of nested objects with dots; `others` are keys of other
    values.

    Raises:
        SchemaError: the file is not JSON, or lacks a key.
    """
    if not path.exists():
        return None
    try:
        output = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(output, dict) and output.get("built") is False:
            return None  # the segment existed, so nothing was measured
        for key in (*numbers, *others):
            value = reduce(getitem, key.split("."), output)
            if key in numbers and not isinstance(value, int | float):
                raise TypeError(key)
    except (ValueError, KeyError, TypeError) as error:
        raise SchemaError(
            f"not the output of its command: {error!r}; print it again with --json", file=str(path)
        ) from error
    return output

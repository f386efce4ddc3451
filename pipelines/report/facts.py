"""Facts of the report: what a dataset and its runs contain, as plain data."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from google.protobuf import text_format
from numpy.typing import NDArray
from tensorflow_metadata.proto.v0 import anomalies_pb2, statistics_pb2

from pipelines.autogroup.search import expected_factor
from pipelines.quality.gate import (
    Features,
    features_by_slice,
    histogram_counts,
    jensen_shannon,
    to_shares,
)
from pipelines.quality.segment_statistics import (
    DEDUP_FACTOR,
    LABEL_DELAY_SEC,
    SAMPLES_PER_SESSION,
    segment_statistics,
)
from pipelines.report.sizes import (
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
    write_best,
)
from pipelines.samples.event_join import add_counts, read_counts
from pipelines.sources.rows import microseconds
from pipelines.table.commit import anomalies_text_of
from pipelines.table.indexes import (
    PolicyReport,
    TableReport,
    default_order,
    policy_reports,
    table_report,
)
from pipelines.table.rows import session_lengths
from schemas.accesses import TableAccesses, TableLoad, index_load, indexed_steps
from schemas.arrays import comparable, comparable_tuple, one_chunk, unique_tuples
from schemas.cache_plan import Plan
from schemas.config.job import SessionConfig
from schemas.dataset import Dataset, Segment
from schemas.errors import SchemaError
from schemas.group_files import read_group
from schemas.layout import BLOCK, inverse_column, part_name
from schemas.manifest import GroupCounts
from schemas.miss_ratio import EXACT_OPTIMAL, HitRateCurve, lru_curve, optimal_curve
from schemas.run_log import (
    METRICS,
    PHASES,
    SUMMARY,
    RunSummary,
    StepMetric,
    read_metrics,
    read_summary,
)
from schemas.run_manifest import local_runs
from schemas.samples import row_groups
from schemas.storage import Location

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
SHOWN_LOSSES = 0.95
"""Share of the losses below the end of the axis."""


def read_facts(dataset: Dataset, runs: Path | Location | None) -> dict[str, Any]:
    """Read everything that the page shows, one value per section.

    Args:
        dataset: an open dataset.
        runs: a finished run, or a directory of runs, optionally with `plan.json` and `build.json`.

    Raises:
        SchemaError: the dataset or a run is damaged, or `runs` contains nothing to show.
    """
    shown = read_runs(runs)
    rows = flat_rows(dataset)
    groups, rates = group_facts(dataset, rows)
    return shown | {
        "dataset": dataset,
        "counts": count_samples(dataset),
        "storage": storage_facts(dataset, rows),
        "groups": groups,
        "change_rates": rates,
        "shared": shared_rows(dataset),
        "session_lengths": session_lengths(dataset),
        "events": add_counts(read_counts(segment) for segment in dataset.segments),
        "quality": quality_facts(dataset),
        "oracle": oracle_facts(dataset),
    }


# Totals and bytes.


def count_samples(dataset: Dataset) -> dict[str, Any]:
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


def storage_facts(dataset: Dataset, rows: FlatRows) -> StorageFacts:
    """Return the bytes of a dataset and of its expanded rows."""
    data, derived = dataset_bytes(dataset), derived_bytes(dataset)
    return StorageFacts(
        plain=flat_bytes(rows, dataset.job.data.session.time),
        written_rows=rows.table.num_rows,
        columns=data - derived,
        derived=derived,
        other=folder_bytes(dataset) - data,
        oracle=oracle_bytes(dataset),
        tables=bytes_by_table(dataset),
    )


# Deduplication.


@dataclass(frozen=True, slots=True)
class SharedRows:
    """Tuples of a group, or values of list features, that are stored once for several blocks."""

    name: str  # of the group or the list features
    kind: str  # `tuples` or `list values`
    per_block: int  # their number if each block had its own
    stored: int  # their number in the files


def shared_rows(dataset: Dataset) -> list[SharedRows]:
    """Return what is shared beyond blocks, over all segments: groups first, then lists."""
    totals = group_totals(dataset)
    tuples = {g: sum(m.num_rows for m in file_metadata(dataset, f"tuples/{g}/")) for g in totals}
    shared = [
        SharedRows(group, "tuples", totals[group].num_unique, stored)
        for group, stored in tuples.items()
        if stored
    ]
    return shared + [
        SharedRows(
            ", ".join(features),
            "list values",
            totals[group].num_values_dedup,
            sum(buffer_values(dataset, f) for f in features),
        )
        for group, features in windowed_features(dataset).items()
    ]


def windowed_features(dataset: Dataset) -> dict[str, list[str]]:
    """Return the groups all of whose lists are windows in every segment, with these lists."""
    lists = {f.name for f in dataset.features.features if f.is_list}
    lists_of_group: dict[str, list[str]] = {}
    for feature, group in dataset.job.data.group_of_column.items():
        if feature in lists:
            lists_of_group.setdefault(group, []).append(feature)
    return {
        group: features
        for group, features in lists_of_group.items()
        if all(f"buffers/{f}/{part_name(0)}" in s.files for f in features for s in dataset.segments)
    }


def buffer_values(dataset: Dataset, feature: str) -> int:
    """Return the number of values in a feature's buffers; an empty list counts as one."""
    return sum(
        m.row_group(i).column(1).num_values
        for m in file_metadata(dataset, f"buffers/{feature}/")
        for i in range(m.num_row_groups)
    )


def group_totals(dataset: Dataset) -> dict[str, GroupCounts]:
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


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """One dedup group."""

    counts: GroupCounts  # over all segments
    change_rate: float  # share of samples with another tuple than the one before in their session
    expected_factor: float  # samples per tuple that RecD expects at this rate
    plain_bytes: float  # of its columns as a file of one row per sample, best encodings
    stored_bytes: int  # of its files and inverse indices, derived columns included
    edge_tuples: int  # stored again after the edge of a block
    window_tuples: int  # stored again in another window or split


def group_facts(
    dataset: Dataset, rows: FlatRows
) -> tuple[dict[str, GroupFacts], list[tuple[str, str, float]]]:
    """Return the facts of each group, and (feature, group or `samples`, change rate) of features.

    Args:
        dataset: an open dataset.
        rows: its expanded rows.
    """
    starts = session_starts(rows.table, dataset.job.data.session)
    totals, stored = group_totals(dataset), bytes_by_table(dataset)
    groups: dict[str, GroupFacts] = {}
    rates: list[tuple[str, str, float]] = []
    for group, names in dataset.job.data.groups.items():
        *each, together = change_rates(rows.table, names, starts)
        rates += [(name, group, rate) for name, rate in zip(names, each, strict=True)]
        per_part, per_window = unique_counts(dataset, group)
        inverse_bytes = column_bytes(dataset, "samples/", [inverse_column(group)])
        groups[group] = GroupFacts(
            counts=totals[group],
            change_rate=together,
            expected_factor=expected_factor(together, len(starts) / int(starts.sum())),
            plain_bytes=plain_bytes(rows, names),
            stored_bytes=stored[group] + inverse_bytes,
            edge_tuples=totals[group].num_unique - per_window,
            window_tuples=per_window - per_part,
        )
    grouped = dataset.job.data.group_of_column
    others = [c for c in rows.table.column_names if groups and c not in grouped]
    each = change_rates(rows.table, others, starts)[:-1] if others else []
    return groups, rates + [(c, "samples", r) for c, r in zip(others, each, strict=True)]


def session_starts(rows: pa.Table, session: SessionConfig) -> NDArray[np.bool_]:
    """Return which rows, in the dataset's order, are the first of their session."""
    key, time = one_chunk(rows[session.key]), pc.cast(one_chunk(rows[session.time]), pa.int64())
    starts = changes(key)
    if session.gap is not None:
        starts[1:] |= np.diff(time.to_numpy()) > microseconds(session.gap)
    return starts


def changes(column: pa.Array | pa.ChunkedArray) -> NDArray[np.bool_]:
    """Return which rows differ from the row before; the first one does."""
    _, codes = unique_tuples(comparable(column))
    return np.diff(codes, prepend=-1) != 0


def change_rates(rows: pa.Table, columns: Sequence[str], starts: NDArray[np.bool_]) -> list[float]:
    """Return how often each column changes within sessions, then how often any of them does.

    Args:
        rows: in the dataset's order.
        columns: names.
        starts: (num_rows,) bool, first row of a session.
    """
    follows = ~starts
    changed = [changes(rows[c])[follows] for c in columns]
    changed.append(np.logical_or.reduce(changed))
    return [float(c.mean()) if len(c) else 1.0 for c in changed]


def plain_bytes(rows: FlatRows, columns: Sequence[str]) -> float:
    """Return the bytes of some columns as a file of one row per sample, best encodings."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "plain.parquet"
        return write_best(rows.table.select(list(columns)), path) / rows.share


def unique_counts(dataset: Dataset, group: str) -> tuple[int, int]:
    """Return the unique tuples if each part were one block, and if each window of a part were."""
    per_part = per_window = 0
    for segment in dataset.segments:
        for file_index in np.unique(segment.column("file")).tolist():
            codes, windows = _tuples_of_part(segment, file_index, group, dataset)
            per_part += len(np.unique(codes))
            per_window += len(np.unique(codes * (int(windows.max()) + 1) + windows))
    return per_part, per_window


def _tuples_of_part(
    segment: Segment, file_index: int, group: str, dataset: Dataset
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return codes of the tuple and of the (split, window) of each stored row of a part."""
    names = list(dataset.job.data.groups[group])
    stored = pa.concat_tables(
        [
            read_group(segment.file, group, file, row_group, [BLOCK, *names])
            for file, row_group in row_groups(segment)
            if file == file_index
        ]
    )
    order = np.argsort(segment.block_ids)
    pairs = [segment.blocks["split"].combine_chunks(), segment.blocks["window"].combine_chunks()]
    _, window = unique_tuples([array for column in pairs for array in comparable(column)])
    block = order[np.searchsorted(segment.block_ids[order], stored[BLOCK].to_numpy())]
    _, codes = unique_tuples(comparable_tuple(stored, names))
    return codes.astype(np.int64), window[block].astype(np.int64)


# Statistics and the gate.


@dataclass(frozen=True, slots=True)
class SliceFacts:
    """Statistics of a segment, or of one of its splits."""

    name: str  # `segment 3`, or `segment 3, train`
    num_samples: int
    samples_per_session: float
    label_means: Mapping[str, float | None]  # None for a label without statistics
    label_delay: tuple[float, float] | None  # bucket of the median, in seconds
    dedup_factors: Mapping[str, float]  # by group
    drift: float | None  # of the samples per session, from the segment before


@dataclass(frozen=True, slots=True)
class QualityFacts:
    """Statistics and anomalies of the last segments."""

    segments: Sequence[str]  # `segment 3`
    findings: Sequence[tuple[str, ...]]  # (segment, feature, severity, text)
    distances: Sequence[tuple[str, str, str, str, float, float]]
    """(segment, feature, `drift` or `skew`, measure, distance, threshold)"""
    slices: Sequence[SliceFacts]

    @property
    def num_beyond(self) -> int:
        """Distances beyond their threshold."""
        return sum(distance > threshold for *_, distance, threshold in self.distances)


def quality_facts(dataset: Dataset) -> QualityFacts:
    """Read statistics and anomalies of the last segments.

    Raises:
        SchemaError: a file is missing or changed.
    """
    segments: list[str] = []
    findings: list[tuple[str, ...]] = []
    distances: list[tuple[str, str, str, str, float, float]] = []
    slices: list[SliceFacts] = []
    labels = dataset.features.with_role("label")
    previous: Features | None = None
    for segment in dataset.segments[-MOST_SEGMENTS:]:
        name = f"segment {segment.reference.position}"
        anomalies, statistics = _read_anomalies(segment), segment_statistics(segment)
        features = features_by_slice(statistics)
        segments.append(name)
        findings += [(name, *finding) for finding in _findings(anomalies)]
        distances += [(name, *distance) for distance in _distances(anomalies)]
        slices += [
            _slice_facts(name, d.name, d.num_examples, features[d.name], labels, previous)
            for d in statistics.datasets
        ]
        previous = features["segment"]
    return QualityFacts(segments, findings, distances, slices)


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


def _slice_facts(
    segment: str,
    split: str,
    num_samples: int,
    features: Features,
    labels: Sequence[str],
    previous: Features | None,
) -> SliceFacts:
    """Return the facts of one slice; `previous` is the whole segment before, if there is one."""
    custom, lengths = _custom_statistics(features), _session_lengths(features)
    drift = None
    if split == "segment" and previous is not None:
        drift = jensen_shannon(to_shares(lengths), to_shares(_session_lengths(previous)))
    return SliceFacts(
        name=segment if split == "segment" else f"{segment}, {split}",
        num_samples=num_samples,
        samples_per_session=num_samples / max(1, sum(lengths.values())),
        label_means={x: features[x].num_stats.mean if x in features else None for x in labels},
        label_delay=_median_bucket(custom.get(LABEL_DELAY_SEC)),
        dedup_factors={
            name.removeprefix(DEDUP_FACTOR): statistic.num
            for name, statistic in sorted(custom.items())
            if name.startswith(DEDUP_FACTOR)
        },
        drift=drift,
    )


def _custom_statistics(features: Features) -> dict[str, statistics_pb2.CustomStatistic]:
    return {c.name: c for f in features.values() for c in f.custom_stats}


def _session_lengths(features: Features) -> dict[float, float]:
    return histogram_counts(_custom_statistics(features)[SAMPLES_PER_SESSION].histogram)


def _median_bucket(delays: statistics_pb2.CustomStatistic | None) -> tuple[float, float] | None:
    if delays is None or not delays.histogram.buckets:
        return None
    buckets = delays.histogram.buckets
    counts = np.cumsum([b.sample_count for b in buckets])
    median = buckets[int(np.searchsorted(counts, counts[-1] / 2))]
    return median.low_value, median.high_value


# Oracle and cache.


@dataclass(frozen=True, slots=True)
class OracleFacts:
    """Accesses of a training run in the default order, and what caches make of them."""

    tables: Mapping[str, TableReport]  # under the job's plan, most accesses first
    policies: Mapping[str, Mapping[str, PolicyReport]]  # table to policy to its result
    num_steps: int
    lookahead: int  # steps
    largest: str  # table with the most accesses; the other attributes are of this one
    lru: HitRateCurve
    optimal: HitRateCurve
    plan: NDArray[np.int64]  # (3, num_steps): rows accessed, fetched, and in the cache
    load: TableLoad

    @property
    def total(self) -> TableReport:
        """Sums over all tables."""
        names = [f.name for f in fields(TableReport)]
        reports = self.tables.values()
        sums: dict[str, Any] = {name: sum(getattr(r, name) for r in reports) for name in names}
        sums["hit_rate"] = 1 - sums["fetched_rows"] / sums["num_accesses"]
        return TableReport(**sums)


def oracle_facts(dataset: Dataset) -> OracleFacts | None:
    """Run the job's plan over every table, and the curves over the largest.

    Returns:
        The facts, or None if training looks nothing up.
    """
    order, cache = default_order(dataset), replace(dataset.job.train.cache, rows=None)
    names = dataset.job.data.tables
    policies = {name: policy_reports(dataset, name, order, cache) for name in names}
    tables = {name: table_report(dataset, name, order, cache, policies[name]) for name in names}
    tables = dict(sorted(tables.items(), key=lambda t: (-t[1].num_accesses, t[0])))
    largest = next((name for name, report in tables.items() if report.num_accesses), None)
    if largest is None:
        return None
    report, accesses = tables[largest], TableAccesses(dataset, largest, order)
    work = max(1, min(report.num_accesses, EXACT_OPTIMAL))
    points = int(np.clip(OPTIMAL_WORK // work, 8, 64))
    steps = indexed_steps(dataset, dataset.index_for(order), largest)
    plan = [(len(s.numbers), int(s.fetch.sum()), s.resident_rows) for s in Plan(steps, cache)]
    return OracleFacts(
        tables=tables,
        policies=policies,
        num_steps=order.num_steps,
        lookahead=cache.lookahead,
        largest=largest,
        lru=lru_curve(accesses.steps(), report.num_accesses, report.num_unique_rows),
        optimal=optimal_curve(accesses.steps(), report.num_accesses, points),
        plan=np.array(plan, np.int64).T,
        load=index_load(dataset, largest, order),
    )


# Training runs, plan and build.


@dataclass(frozen=True, slots=True)
class Run:
    """A finished run."""

    name: str  # of its directory
    summary: RunSummary
    metrics: Sequence[StepMetric]

    @property
    def losses(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Samples trained after each step, and the loss of each step."""
        samples = np.cumsum([m.num_samples for m in self.metrics])
        return samples, np.array([m.loss for m in self.metrics])

    @property
    def phases(self) -> dict[str, float]:
        """Mean milliseconds of each phase and of the `rest`, without the first step.

        Phases that overlap may add up to more than the wall time; then the rest is 0.
        """
        steps = self.metrics[1:] or self.metrics
        wall = float(np.mean([m.num_samples / m.samples_per_sec for m in steps]))
        phases = {p: float(np.mean([m.phases.get(p, 0.0) for m in steps])) for p in PHASES}
        phases["rest"] = max(0.0, wall - sum(phases.values()))
        return {phase: 1000 * seconds for phase, seconds in phases.items()}


@dataclass(frozen=True, slots=True)
class LossFacts:
    """Losses of the runs that have step metrics."""

    runs: Sequence[Run]
    span: int  # steps on either side over which a smoothed loss is a mean
    axis_end: float  # a little above most losses: the first ones can be many times larger
    num_steps: int
    num_beyond: int  # steps above the end of the axis
    highest: float


def loss_facts(runs: Sequence[Run]) -> LossFacts | None:
    """Return the losses of some runs; None if no run has step metrics."""
    runs = [run for run in runs if run.metrics]
    if not runs:
        return None
    losses = np.concatenate([run.losses[1] for run in runs])
    axis_end = 1.1 * float(np.quantile(losses, SHOWN_LOSSES))
    return LossFacts(
        runs=runs,
        span=max(1, max(len(run.metrics) for run in runs) // 25),
        axis_end=axis_end,
        num_steps=len(losses),
        num_beyond=int((losses > axis_end).sum()),
        highest=float(losses.max()),
    )


def read_runs(directory: Path | Location | None) -> dict[str, Any]:
    """Read the finished runs of a directory, and the plan and build beside them.

    Returns:
        `runs`, `losses`, and the output of `scheduler plan --json` and `build --json` as `plan` and
        `build`, or None.

    Raises:
        SchemaError: a file is damaged, or there is nothing to read.
    """
    if directory is None:
        return {"runs": [], "losses": None, "plan": None, "build": None}
    if isinstance(directory, Path) and not directory.is_dir():
        raise SchemaError(
            f"no such directory of runs: {directory}; train with --output below it, or omit --runs"
        )
    with local_runs(directory, (SUMMARY, METRICS), (PLAN, BUILD)) as folder:
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
    return {"runs": runs, "losses": loss_facts(runs), "plan": plan, "build": build}


def find_runs(directory: Path) -> list[Run]:
    """Read a run, or every subdirectory that is one: deduplicated before expanded, then by name.

    Raises:
        SchemaError: a summary or a step metric is damaged.
    """
    is_run = (directory / SUMMARY).exists()
    folders = [directory] if is_run else sorted(p.parent for p in directory.glob(f"*/{SUMMARY}"))
    runs = [
        Run(
            folder.resolve().name,
            read_summary(folder / SUMMARY),
            read_metrics(folder / METRICS) if (folder / METRICS).exists() else [],
        )
        for folder in folders
    ]
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

    Args:
        path: the file.
        numbers: keys of numbers, those of nested objects with dots.
        others: keys of other values.

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

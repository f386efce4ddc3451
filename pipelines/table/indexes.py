"""Indexes of a dataset: build, commit, report on cache policies: `pipelines oracle`."""

from __future__ import annotations

import argparse
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import count
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from presage.pipelines.oracle.history_lists import write_history_lists
from presage.pipelines.oracle.index import TableTotals, index_table
from presage.pipelines.quality.segment_statistics import segment_statistics
from presage.pipelines.runner_options import beam_build, local_options
from presage.pipelines.table.root import until_committed, update_root
from presage.pipelines.table.segment import describe_files, publish, remove_partial
from presage.schemas.config.job import DataConfig, Job, OrderConfig
from presage.schemas.config.train import CacheConfig, HistoryWindowConfig
from presage.schemas.dataset.accesses import TableAccesses, count_distances, slot_accesses
from presage.schemas.dataset.files import write_files
from presage.schemas.dataset.hints import TableHints, write_hints
from presage.schemas.dataset.manifest import (
    DatasetManifest,
    IndexEntry,
    IndexManifest,
    Reference,
    Root,
    new_index,
    read_dataset,
    read_index,
    read_root,
    shuffle_key_of,
    write_manifest,
)
from presage.schemas.dataset.opened import (
    Index,
    OpenDataset,
    Segment,
    hash_of_earlier,
    open_dataset,
    reading_histories,
    select_segments,
)
from presage.schemas.dataset.order import Order
from presage.schemas.dataset.run_next_uses import NextUses, open_table
from presage.schemas.layout import FILES, TRAIN
from presage.schemas.machine import num_cores
from presage.schemas.oracle.cache_plan import (
    CachePlan,
    cache_too_small,
    required_rows,
    summarize_tables,
)
from presage.schemas.oracle.miss_ratio import lru_curve
from presage.schemas.storage.location import Location

INDEX_PREFIX = "index-"
"""Names of the directories of indexes begin with it."""


@dataclass(frozen=True, slots=True)
class PartRequest:
    """A part of an index to build.

    `root` is the directory to build it in, `order` that of the segment alone, `segments` are those
    of the dataset.
    """

    root: Location
    index: IndexEntry
    segment: Segment
    order: Order
    data: DataConfig
    segments: Sequence[Segment]


def default_order(dataset: OpenDataset) -> Order:
    """Return the order of the job's `data.oracle`."""
    oracle = dataset.job.data.oracle
    return dataset.order(
        oracle.batch_samples, oracle.epochs, oracle.order.shuffle, oracle.order.seed
    )


def segment_of_part(part: str) -> str:
    """Return the directory name of the segment that a part's directory name begins with.

    Example:
        >>> segment_of_part("0123456789ab-cdef01234567_89abcd")
        '0123456789ab-cdef01234567'
    """
    return part.rpartition("_")[0]


class PartBuilder:
    """Builds parts of indexes, each once, in directories that no other process uses.

    A commit that is repeated takes the parts that were built before.
    """

    def __init__(self, dataset: Location, beam_args: list[str]) -> None:
        """Build nothing yet."""
        self._dataset = dataset
        self._beam_args = beam_args
        self._suffix = uuid.uuid4().hex[:6]  # of the names of the parts
        self._built: dict[tuple[str, str, str], Reference] = {}

    def updated_indexes(
        self, dataset: OpenDataset | None, job: Job, segments: Sequence[Segment]
    ) -> tuple[IndexEntry, ...]:
        """Return the indexes of a new root, after building the parts that they lack.

        The default index, that with the windows of `train.histories`, and each index that has parts
        of all present segments get parts of all new ones; the others keep the parts of the segments
        that stay. With histories, the parts of segments after one that changed are built again.

        `dataset` is None if it does not exist yet, `job` is the new one, `segments` are of the new
        root.
        """
        oracle = job.data.oracle
        windows = job.train.windows
        settings = (oracle.batch_samples, oracle.epochs, oracle.order.shuffle, oracle.order.seed)
        defaults = [new_index(*settings), *([new_index(*settings, windows)] if windows else ())]
        indexes = {default.settings: default for default in defaults}
        complete = set(indexes)
        if dataset is not None:
            complete |= {index.settings for index in dataset.all_complete_indexes()}
            indexes |= {index.settings: index for index in dataset.manifest.indexes}
        by_id = {segment.id: segment for segment in segments}
        for settings, index in indexes.items():
            parts = {
                name: part
                for name, part in index.parts.items()
                if name in by_id and self._is_current(index, part, by_id[name], segments)
            }
            indexes[settings] = replace(index, parts=parts)
        to_extend = [index for settings, index in indexes.items() if settings in complete]
        extended = self.add_missing(to_extend, segments, job.data)
        indexes |= {index.settings: index for index in extended}
        return tuple(index for index in indexes.values() if index.parts)

    def _is_current(
        self, index: IndexEntry, part: Reference, segment: Segment, segments: Sequence[Segment]
    ) -> bool:
        if not index.histories:
            return True
        manifest = read_index(self._dataset / index.id / part.directory, part)
        return manifest.earlier_sha256 == hash_of_earlier(segment.reference, segments)

    def add_missing(
        self,
        indexes: Sequence[IndexEntry],
        segments: Sequence[Segment],
        data: DataConfig,
        unselected: Sequence[Segment] = (),
    ) -> list[IndexEntry]:
        """Build the parts that indexes lack, and return the indexes with them.

        Existing parts are neither read nor changed; arguments as for `updated_indexes`, and
        segments that get no parts.
        """
        every = (*unselected, *segments)
        missing = [(i, s) for i in indexes for s in segments if s.id not in i.parts]
        new = [(i, s) for i, s in missing if self._key(i, s, every) not in self._built]
        self._build(new, data, every)
        parts = {index.id: dict(index.parts) for index in indexes}
        for index, segment in missing:
            parts[index.id][segment.id] = self._built[self._key(index, segment, every)]
        return [replace(index, parts=parts[index.id]) for index in indexes]

    @staticmethod
    def _key(
        index: IndexEntry, segment: Segment, segments: Sequence[Segment]
    ) -> tuple[str, str, str]:
        earlier = hash_of_earlier(segment.reference, segments) if index.histories else ""
        return index.id, segment.directory.name, earlier[:6]

    def _build(
        self,
        missing: Sequence[tuple[IndexEntry, Segment]],
        data: DataConfig,
        segments: Sequence[Segment],
    ) -> None:
        if not missing:
            return
        with ExitStack() as stack:
            directory = self._dataset
            if directory.local is None and local_options(self._beam_args) is not None:
                scratch = TemporaryDirectory(prefix="presage-index-")
                directory = Location.parse(stack.enter_context(scratch))
            requests = [
                PartRequest(
                    directory / index.id / self._name_of(self._key(index, segment, segments)),
                    index,
                    segment,
                    order_of_part(index, segment, data),
                    data,
                    segments,
                )
                for index, segment in missing
            ]
            requests = list(map(_with_histories, requests))
            totals = index_tables(requests, self._beam_args)
            for request in requests:
                part = _finish_part(request, [t for t in totals if t.root == request.root])
                target = self._dataset / request.index.id / request.root.name
                publish(request.root, target)
                self._built[self._key(request.index, request.segment, segments)] = part

    def _name_of(self, key: tuple[str, str, str]) -> str:
        """Return the name of the directory of a part."""
        return f"{key[1]}_{self._suffix}{key[2]}"

    def discard_unused(self) -> None:
        """Remove the parts that were built and that the root does not name."""
        named = {
            (index.id, part.directory)
            for index in read_dataset(self._dataset).indexes
            for part in index.parts.values()
        }
        for (index, *_), part in self._built.items():
            if (index, part.directory) not in named:
                (self._dataset / index / part.directory).remove_all()


def order_of_part(index: IndexEntry, segment: Segment, data: DataConfig) -> Order:
    """Return the order of a segment alone under the settings of an index."""
    return Order(
        num_blocks=(len(segment.positions(TRAIN)),),
        blocks_per_batch=index.batch_samples // data.block_samples,
        epochs=index.epochs,
        config=_order_config(index),
        shuffle_keys=(shuffle_key_of(segment.reference),),
        row_groups=(segment.row_groups(TRAIN),),
    ).of_segment(0)


def _order_config(index: IndexEntry) -> OrderConfig:
    return OrderConfig(shuffle="none" if index.shuffle == "none" else "blocks", seed=index.seed)


def _finish_part(request: PartRequest, totals: Sequence[TableTotals]) -> Reference:
    """Write the manifest of a part whose tables are written."""
    root, index, order = request.root, request.index, request.order
    remove_partial(root)
    files = [entry for table in totals for entry in table.files]
    if request.segment.lists is not None:
        files += request.segment.lists.files.values()
    entries = describe_files(root, files)
    changed = {
        table: counts
        for table, counts in request.segment.manifest.tables.items()
        if request.segment.lists is not None and request.segment.lists.of("access", table)
    }
    earlier = hash_of_earlier(request.segment.reference, request.segments)
    manifest = IndexManifest(
        segment_sha256=request.segment.reference.manifest_sha256,
        shuffle_key=None if index.shuffle == "none" else order.shuffle_keys[0],
        batch_samples=index.batch_samples,
        epochs=index.epochs,
        shuffle=index.shuffle,
        seed=index.seed,
        histories=index.histories,
        earlier_sha256=earlier if index.histories else None,
        tables=changed,
        num_steps=order.steps_per_epoch,
        num_accesses={t.table: t.num_entries for t in totals},
        oracle_bytes=sum(e.num_bytes for e in entries),
        files_sha256=write_files(root / FILES, entries),
    )
    return Reference(id=root.name, manifest_sha256=write_manifest(root, manifest))


def _with_histories(request: PartRequest) -> PartRequest:
    """Write the accesses of histories to a part; return it with a segment that has them."""
    index = request.index
    if not index.histories:
        return request
    if request.root.local is not None:
        request.root.local.mkdir(parents=True, exist_ok=True)
    segment = write_history_lists(
        request.root, request.segment, request.segments, request.data, index.histories
    )
    return replace(request, segment=segment)


def index_tables(requests: Sequence[PartRequest], beam_args: list[str]) -> list[TableTotals]:
    """Write every table of the parts, on Beam or in this process."""
    tables = [(r, t) for r in requests for t in r.segment.manifest.tables]
    if not tables:
        return []
    options = local_options(beam_args)
    if options is None and all(request.segment.lists is None for request in requests):
        tasks = [(r.root, r.segment.directory, r.segment.reference, r.order, t) for r, t in tables]
        return beam_build().run_index(tasks, beam_args)

    def num_lookups(task: tuple[PartRequest, str]) -> int:
        request, table = task
        return request.order.epochs * request.segment.manifest.tables[table].num_lookups_dedup

    def run(task: tuple[PartRequest, str]) -> TableTotals:
        request, table = task
        return index_table(request.root, request.segment, table, request.order)

    tables.sort(key=num_lookups, reverse=True)  # so that no thread waits for the last one
    num_workers = None if options is None else options.num_workers
    with ThreadPoolExecutor(num_workers or num_cores()) as pool:
        return list(pool.map(run, tables))


def oracle(arguments: argparse.Namespace, beam_args: list[str]) -> dict[str, Any]:
    """Run the command `oracle`: report, after building an index with `--reindex`."""
    dataset = open_segments(arguments.dataset, arguments.segments)
    windows = windows_of(dataset.job, arguments.history)
    dataset = reading_histories(dataset, windows)
    config = dataset.job.data.oracle
    cache = dataset.job.train.cache
    batch_samples = at_least_one(arguments.batch_samples, config.batch_samples, "batch-samples")
    lookahead = at_least_one(arguments.lookahead, cache.lookahead, "lookahead")
    at_least_one(arguments.cache_rows, 1, "cache-rows")
    order = dataset.order(
        batch_samples,
        at_least_one(arguments.epochs, config.epochs, "epochs"),
        arguments.shuffle or config.order.shuffle,
        config.order.seed if arguments.seed is None else arguments.seed,
    )
    if arguments.reindex:
        dataset = add_index(dataset, order, PartBuilder(dataset.directory, beam_args))
        dataset = reading_histories(dataset, windows)
    if arguments.hints is not None:
        write_hints(arguments.hints, sharding_hints(dataset, dataset.index_for(order)))
    cache = replace(
        cache,
        lookahead=lookahead,
        prefetch_steps=min(cache.prefetch_steps, lookahead),
        rows=cache.rows if arguments.cache_rows is None else arguments.cache_rows,
    )
    index, names = dataset.index_for(order), sorted(dataset.job.data.tables)
    opened = {name: open_table(dataset, index, name) for name in names}
    policies = policy_reports(opened, cache)
    reports = table_reports(dataset, index, opened, cache, policies)
    return {
        "num_steps": order.num_steps,
        "lookahead": lookahead,
        "tables": {
            name: asdict(reports[name])
            | {"policies": {policy: asdict(of[name]) for policy, of in policies.items()}}
            | {"load": _load(*opened[name])}
            for name in names
        },
    }


def open_segments(path: Location, segments: Sequence[str] | None) -> OpenDataset:
    """Open a dataset, or some of its segments."""
    dataset = open_dataset(path)
    return dataset if segments is None else select_segments(dataset, segments)


def windows_of(job: Job, chosen: Sequence[str] | None) -> dict[str, tuple[int, int]]:
    """Return the windows of histories of the options `NAME=LENGTH[:STEP]`.

    Raises:
        ValueError: an option is not of this form, or names no history of the job.
    """
    windows: dict[str, tuple[int, int]] = {}
    for text in chosen or ():
        name, _, window = text.partition("=")
        length, _, step = window.partition(":")
        if (
            name not in job.data.histories
            or not length.isdecimal()
            or not (step or "1").isdecimal()
        ):
            raise ValueError(
                f"--history must be NAME=LENGTH or NAME=LENGTH:STEP, got {text!r}; histories are "
                f"{', '.join(job.data.histories) or 'none'}"
            )
        config = HistoryWindowConfig(length=int(length), step=int(step or "1"))  # checks them
        windows[name] = config.length, config.step
    return windows


def _load(accesses: TableAccesses, next_uses: NextUses) -> dict[str, Any]:
    reuse, never = count_distances(next_uses)
    slots = slot_accesses(accesses.steps(), accesses.rows, len(next_uses))
    return {
        "most_rows_per_step": int(next_uses.reuse(1).num_rows.max(initial=0)),
        "slots": slots.tolist(),
        "reuse": reuse[: int(np.flatnonzero(reuse).max(initial=-1)) + 1].tolist(),
        "never": never,
    }


def at_least_one(value: int | None, default: int, option: str) -> int:
    """Return the value of an option, or its default; raise ValueError if it is below 1."""
    if value is not None and value < 1:
        raise ValueError(f"--{option} must be at least 1, got {value}; raise it or leave it out")
    return default if value is None else value


def add_index(dataset: OpenDataset, order: Order, builder: PartBuilder) -> OpenDataset:
    """Build the parts of an index that segments lack; return the dataset with them.

    A segment that is committed in the meantime gets its part, too, unless segments are selected.
    """
    path = dataset.directory
    ids = [s.id for s in dataset.segments] if dataset.unselected else None

    def attempt(_: Root) -> OpenDataset | None:
        opened = replace(open_segments(path, ids), histories=dataset.histories)
        index = opened.index_entry(order)
        if index not in opened.complete_indexes():
            (extended,) = builder.add_missing(
                [index], opened.segments, opened.job.data, opened.unselected
            )
            update_root(path, partial(_with_parts, extended=extended, segments=opened.segments))
            opened = replace(open_segments(path, ids), histories=dataset.histories)
        return opened if opened.index_entry(order) in opened.complete_indexes() else None

    dataset = until_committed(path, read_root, attempt)
    builder.discard_unused()
    return dataset


def _with_parts(
    manifest: DatasetManifest, extended: IndexEntry, segments: Sequence[Segment]
) -> DatasetManifest:
    """Return the root manifest with the parts that it still lacks."""
    indexes = {index.settings: index for index in manifest.indexes}
    index = indexes.get(extended.settings, replace(extended, parts={}))
    built = {
        segment.id: extended.parts[segment.id]
        for segment in segments
        if segment.reference in manifest.segments and segment.id not in index.parts
    }
    if not built:
        return manifest
    indexes[index.settings] = replace(index, parts={**index.parts, **built})
    return replace(manifest, indexes=tuple(indexes.values()))


HOT_SHARES = (0.0001, 0.001, 0.01, 0.1, 0.5)
"""Shares of the distinct rows for which `hot_rows` returns the share of accesses."""
MISS_POINTS = 64
"""Points of the miss curve."""


def sharding_hints(dataset: OpenDataset, index: Index) -> dict[str, TableHints]:
    """Return the hints of every table."""
    order = index.order
    values, bags, samples = _bags(dataset)
    hints: dict[str, TableHints] = {}
    for name, table in dataset.job.data.tables.items():
        accesses = TableAccesses(dataset, name, order)
        num_accesses, num_unique = index.num_accesses(name), len(accesses.rows)
        hints[name] = TableHints(
            feature_names=tuple(table.features),
            pooling_factors=tuple(
                values.get(f, 0) / max(1, bags.get(f, 0)) for f in table.features
            ),
            num_poolings=tuple(bags.get(f, 0) / max(1, samples) for f in table.features),
            batch_sizes=(order.blocks_per_batch * dataset.job.data.block_samples,)
            * len(table.features),
            num_rows=table.num_rows,
            num_unique_rows=num_unique,
            unique_rows_per_step=num_accesses / max(1, order.num_steps),
            hot_rows=hot_rows(accesses.steps(), num_unique),
            lru_misses=lru_misses(accesses.steps(), num_accesses, num_unique, table.num_rows),
        )
    return hints


def hot_rows(
    steps: Iterator[NDArray[np.int64]], num_unique: int
) -> tuple[tuple[float, float], ...]:
    """Return (share of rows, share of accesses) for the hottest rows; a row counts once per step.

    Example:
        >>> hot_rows(iter([np.array([0, 1]), np.array([0])]), 2)[-1]
        (0.5, 0.6666666666666666)
    """
    counts = np.zeros(num_unique, np.int64)
    for numbers in steps:
        counts[numbers] += 1
    hottest = np.cumsum(np.sort(counts)[::-1])
    if not num_unique:
        return ()
    sizes = [max(1, round(share * num_unique)) for share in HOT_SHARES]
    return tuple(
        (share, float(hottest[size - 1] / hottest[-1]))
        for share, size in zip(HOT_SHARES, sizes, strict=True)
    )


def lru_misses(
    steps: Iterator[NDArray[np.int64]], num_accesses: int, num_unique: int, num_rows: int
) -> tuple[tuple[float, float], ...]:
    """Return (cache size as a share of the table, misses as a share of repeated accesses)."""
    repeated = num_accesses - num_unique
    if repeated <= 0:
        return ((0.0, 1.0),)
    curve = lru_curve(steps, num_accesses, num_unique)
    indices = np.unique(np.geomspace(1, len(curve.capacities), MISS_POINTS).astype(np.int64)) - 1
    misses = 1 - curve.hit_rates[indices] * num_accesses / repeated
    shares = np.minimum(1.0, curve.capacities[indices] / num_rows)
    points = zip(shares.tolist(), np.clip(misses, 0.0, 1.0).tolist(), strict=True)
    return ((0.0, 1.0), *points)


def _bags(dataset: OpenDataset) -> tuple[dict[str, float], dict[str, float], int]:
    """Return the values and bags of each feature over all segments, and the number of samples."""
    values: dict[str, float] = {}
    bags: dict[str, float] = {}
    num_samples = 0
    for segment in dataset.segments:
        statistics = segment_statistics(segment).datasets[0]
        num_samples += statistics.num_examples
        for feature in statistics.features:
            stats = getattr(feature, feature.WhichOneof("stats") or "num_stats")
            common, name = stats.common_stats, feature.path.step[0]
            values[name] = values.get(name, 0) + common.tot_num_values
            bags[name] = bags.get(name, 0) + common.num_non_missing + common.num_missing
    return values, bags, num_samples


@dataclass(frozen=True, slots=True)
class TableReport:
    """Fields of `oracle --json` for one table under the job's plan."""

    num_lookups: int
    num_lookups_dedup: int
    num_accesses: int
    num_unique_rows: int
    fetched_rows: int
    hit_rate: float
    peak_cache_rows: int


@dataclass(frozen=True, slots=True)
class PolicyReport:
    """Results of one policy with one cache size, for one table.

    Attributes:
        required_rows: smallest cache size that the plan fits, of all tables.
        cache_rows: cache size, of all tables; None for no limit.
        fetched_rows: rows read, first uses included; None, like the next three, if the plan does
            not fit the cache.
        written_rows: rows written back on eviction.
        hit_rate: share of accesses that need no read.
        peak_cache_rows: most rows of the table in the cache, including those in flight.
    """

    required_rows: int
    cache_rows: int | None
    fetched_rows: int | None
    written_rows: int | None
    hit_rate: float | None
    peak_cache_rows: int | None


TableIndex = tuple[TableAccesses, NextUses]


def policy_reports(
    tables: Mapping[str, TableIndex], cache: CacheConfig
) -> dict[str, dict[str, PolicyReport]]:
    """Run both policies with `cache.rows`, or what `ttl` takes if that is unset.

    Returns:
        policy to table to its report.
    """
    ttl = policy_report(tables, replace(cache, policy="ttl"))
    rows = cache.rows or max((report.required_rows for report in ttl.values()), default=0) or 1
    best = policy_report(tables, replace(cache, policy="belady", rows=rows))
    return {"ttl": ttl, "belady": best}


def policy_report(tables: Mapping[str, TableIndex], cache: CacheConfig) -> dict[str, PolicyReport]:
    """Run one policy; return the report of each table."""
    required = required_rows((next_uses for _, next_uses in tables.values()), cache)
    if cache.rows is not None and required > cache.rows:
        return dict.fromkeys(tables, PolicyReport(required, cache.rows, None, None, None, None))
    steps = {t: map(accesses.entries, count(), uses) for t, (accesses, uses) in tables.items()}
    return {
        table: PolicyReport(
            required_rows=required,
            cache_rows=cache.rows,
            fetched_rows=summary.fetched_rows,
            written_rows=summary.written_rows,
            hit_rate=summary.hit_rate,
            peak_cache_rows=summary.peak_cache_rows,
        )
        for table, summary in summarize_tables(CachePlan(steps, cache)).items()
    }


def table_reports(
    dataset: OpenDataset,
    index: Index,
    tables: Mapping[str, TableIndex],
    cache: CacheConfig,
    policies: Mapping[str, Mapping[str, PolicyReport]],
) -> dict[str, TableReport]:
    """Return the report of each table under the job's policy.

    Raises:
        PlanError: the cache is too small.
    """
    chosen = policies[cache.policy]
    return {
        name: _table_report(dataset, index, name, len(accesses.rows), cache, chosen[name])
        for name, (accesses, _) in tables.items()
    }


def _table_report(
    dataset: OpenDataset,
    index: Index,
    table: str,
    num_unique_rows: int,
    cache: CacheConfig,
    chosen: PolicyReport,
) -> TableReport:
    if chosen.fetched_rows is None or chosen.hit_rate is None or chosen.peak_cache_rows is None:
        raise cache_too_small(cache, chosen.required_rows)
    manifests = [s.manifest for s in dataset.segments]  # older ones may lack a table
    counts = [m.tables[table] for m in manifests if table in m.tables]
    return TableReport(
        num_lookups=index.order.epochs * sum(c.num_lookups for c in counts),
        num_lookups_dedup=index.order.epochs * sum(c.num_lookups_dedup for c in counts),
        num_accesses=index.num_accesses(table),
        num_unique_rows=num_unique_rows,
        fetched_rows=chosen.fetched_rows,
        hit_rate=chosen.hit_rate,
        peak_cache_rows=chosen.peak_cache_rows,
    )

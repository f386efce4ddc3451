"""Samples that refer to the unique tuples of their dedup groups; checks and downsampling of them.

The job's SQL yields one row per sample with its lists. `separate_tuples` keeps one copy of each
group's tuples and a reference per sample; later stages move references only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Literal, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from presage.pipelines.samples.sql import LIST_INDEX
from presage.pipelines.samples.sql_rejects import BAD_ROWS_SCHEMA, bad_rows
from presage.pipelines.sources.raw_rows import ORIGIN, microseconds
from presage.schemas.arrays import (
    combine_hashes,
    comparable,
    comparable_tuple,
    hash_keys,
    hash_values,
    is_list,
    numpy_of,
    one_chunk,
    take_rows,
    take_values,
    unique_tuples,
)
from presage.schemas.config.job import DataConfig
from presage.schemas.features import Feature, FeatureSet
from presage.schemas.hashing import partition_of_key, salt_of, splitmix64
from presage.schemas.kernels import arrays as kernels
from presage.schemas.layout import SAMPLE_WEIGHT, weights_column

Item = TypeVar("Item")
NUMBERS = ("dense", "label", "weight")
"""Roles of one number for each sample."""


def hash_session_keys(keys: pa.Array | pa.ChunkedArray) -> NDArray[np.uint64]:
    """Return the hash that partitions session keys; it never changes between releases."""
    return hash_keys(comparable(keys))


def partition_of_session(samples: Tuples, key: str, num_partitions: int) -> NDArray[np.int64]:
    """Return the partition of each sample by the hash of its session key, the column `key`."""
    return partition_of_key(hash_session_keys(samples.column(key)), num_partitions)


def with_one_zero(keys: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """Return keys in which equal numbers have equal bits: 0.0 for -0.0."""
    return pc.add(keys, pa.scalar(0, keys.type)) if pa.types.is_floating(keys.type) else keys


@dataclass(frozen=True, slots=True)
class Tuples:
    """Samples of one chunk or one partition.

    Attributes:
        samples: one row per sample, with the columns that are in no group.
        references: group to (num_samples,) int64, rows in `uniques`.
        uniques: group to its tuples; those to which samples refer are distinct.
    """

    samples: pa.Table
    references: Mapping[str, NDArray[np.int64]]
    uniques: Mapping[str, pa.Table]

    @property
    def num_samples(self) -> int:
        """Number of samples."""
        return self.samples.num_rows

    @property
    def num_bytes(self) -> int:
        """Bytes of all columns and references in memory."""
        tables = (self.samples, *self.uniques.values())
        return sum(t.nbytes for t in tables) + sum(r.nbytes for r in self.references.values())

    def column(self, name: str) -> pa.Array:
        """Return a column of samples or of a group, with one row per sample."""
        if self.samples.schema.get_field_index(name) >= 0:
            return one_chunk(self.samples[name])
        for group, table in self.uniques.items():
            if table.schema.get_field_index(name) >= 0:
                return take_values(one_chunk(table[name]), self.references[group])
        raise KeyError(name)

    def take(self, rows: NDArray[np.integer]) -> Tuples:
        """Return some samples, with all unique tuples."""
        references = {g: r[rows] for g, r in self.references.items()}
        return Tuples(take_rows(self.samples, rows), references, self.uniques)


def separate_tuples(samples: pa.Table, groups: Mapping[str, Sequence[str]]) -> Tuples:
    """Separate samples from the distinct tuples of their groups; both are copies.

    A result of DuckDB stays in memory as long as one of its columns is referred to.
    """
    grouped = {c for columns in groups.values() for c in columns}
    ungrouped = [c for c in samples.column_names if c not in grouped]
    references: dict[str, NDArray[np.int64]] = {}
    uniques: dict[str, pa.Table] = {}
    for group, columns in groups.items():
        references[group], uniques[group] = distinct_rows(samples.select(list(columns)))
    rows = np.arange(samples.num_rows)
    return Tuples(take_rows(samples.select(ungrouped), rows), references, uniques)


def distinct_rows(table: pa.Table) -> tuple[NDArray[np.int64], pa.Table]:
    """Return the distinct rows of a table.

    Returns:
        (num_rows,) int64 references, and a copy of the distinct rows in order of first appearance.
    """
    first, references = unique_tuples(comparable_tuple(table, table.column_names))
    return references.astype(np.int64), take_rows(table, first)


def unique_in_ranges(
    ranges: NDArray[np.int64], references: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Find the first sample of each distinct (range, tuple), in order.

    Args:
        ranges: (num_samples,) ascending, such as blocks or partitions.
        references: (num_samples,) the tuple of each sample.

    Returns:
        first: (num_distinct,) ascending positions of samples.
        inverse: (num_samples,) the position in `first` of each sample's tuple.

    Example:
        >>> first, inverse = unique_in_ranges(np.array([0, 0, 0, 1]), np.array([5, 2, 5, 5]))
        >>> first.tolist(), inverse.tolist()
        ([0, 1, 3], [0, 1, 0, 2])
    """
    num_tuples = int(references.max()) + 1 if len(references) else 1
    ranges, references = (np.ascontiguousarray(a, np.int64) for a in (ranges, references))
    return kernels.unique_in_ranges(ranges, references, num_tuples)


def concat_tuples(chunks: Sequence[Tuples]) -> Tuples:
    """Concatenate samples of the same columns; samples of equal tuples refer to the same one.

    The tuples to which no sample refers any more stay, as removing them would copy the others.
    """
    if len(chunks) == 1:
        return chunks[0]
    samples = pa.concat_tables([c.samples for c in chunks]).combine_chunks()
    references: dict[str, NDArray[np.int64]] = {}
    uniques: dict[str, pa.Table] = {}
    for group in chunks[0].uniques:
        tables = [c.uniques[group] for c in chunks]
        starts = np.cumsum([0, *(t.num_rows for t in tables)])
        uniques[group] = pa.concat_tables(tables).combine_chunks()
        first, numbers = unique_tuples(comparable_tuple(uniques[group], tables[0].column_names))
        kept = first[numbers]
        references[group] = np.concatenate(
            [kept[c.references[group] + s] for c, s in zip(chunks, starts, strict=False)]
        )
    return Tuples(samples, references, uniques)


def batches_by_size(items: Iterable[tuple[Item, int]], num_bytes: int) -> Iterator[list[Item]]:
    """Yield consecutive items in lists of at least `num_bytes`, except for the last one.

    Items come with their bytes.
    """
    batch, batch_bytes = list[Item](), 0
    for item, item_bytes in items:
        batch.append(item)
        batch_bytes += item_bytes
        if batch_bytes >= num_bytes:
            yield batch
            batch, batch_bytes = [], 0
    if batch:
        yield batch


def concat_batches(chunks: Iterable[Tuples], num_bytes: int) -> Iterator[Tuples]:
    """Yield samples in concatenations of at least `num_bytes`, except for the last one."""
    return map(concat_tuples, batches_by_size(((c, c.num_bytes) for c in chunks), num_bytes))


def drop_unused_tuples(tuples: Tuples) -> Tuples:
    """Remove the tuples that no sample refers to."""
    references: dict[str, NDArray[np.int64]] = {}
    uniques: dict[str, pa.Table] = {}
    for group, table in tuples.uniques.items():
        old = tuples.references[group]
        first, references[group] = unique_in_ranges(np.zeros_like(old), old)
        uniques[group] = take_rows(table, old[first])
    return Tuples(tuples.samples, references, uniques)


def partition_tuples(
    tuples: Tuples, partition: NDArray[np.int64], num_partitions: int
) -> list[Tuples | None]:
    """Return the samples of each partition with their own tuples only; None for an empty partition.

    `partition` is (num_samples,) int64 in [0, num_partitions).
    """
    small = np.uint16 if num_partitions <= 1 << 16 else np.int64  # numpy sorts 16 bits by counting
    order = np.argsort(partition.astype(small), kind="stable")
    ordered, by_partition = tuples.take(order), partition[order]
    cuts = np.searchsorted(by_partition, np.arange(num_partitions + 1))
    tables: dict[str, tuple[NDArray[np.int64], NDArray[np.int64], pa.Table]] = {}
    for group, table in tuples.uniques.items():
        sorted_references = ordered.references[group]
        first, numbers = unique_in_ranges(by_partition, sorted_references)
        starts = np.searchsorted(by_partition[first], np.arange(num_partitions + 1))
        local = numbers - starts[by_partition]
        tables[group] = local, starts, take_rows(table, sorted_references[first])
    partitions: list[Tuples | None] = [None] * num_partitions
    for index, (start, end) in enumerate(pairwise(cuts.tolist())):
        if end > start:
            partitions[index] = Tuples(
                ordered.samples.slice(start, end - start),
                {g: local[start:end] for g, (local, _, _) in tables.items()},
                {
                    g: table.slice(starts[index], starts[index + 1] - starts[index])
                    for g, (_, starts, table) in tables.items()
                },
            )
    return partitions


# Checks of values.

_FIRST_TIME, _LAST_TIME = (
    int((time - np.datetime64(0, "us")).astype(np.int64))
    for time in (np.datetime64("0001-01-01", "us"), np.datetime64("9999-12-31T23:59:59.999999"))
)

BadRows = Callable[..., "NDArray[np.bool_] | None"]
"""Returns which rows of some columns are bad; None for none."""
Check = tuple[tuple[str, ...], BadRows, str]
"""Columns, which of their rows are bad, and the reason."""


def usable_samples(
    samples: Tuples, names: Sequence[str], checks: Sequence[Check]
) -> tuple[Tuples, pa.Table]:
    """Split samples into those that pass all checks, and bad rows with the columns of `names`."""
    usable = np.ones(samples.num_samples, bool)
    bad = [BAD_ROWS_SCHEMA.empty_table()]
    for checked, check, reason in checks:
        failed = _failed_samples(samples, checked, check)
        if failed is None:
            continue
        rows = np.flatnonzero(failed & usable)
        usable[rows] = False
        rejected = samples.take(rows)
        tables = (samples.samples, *samples.uniques.values())
        present = {n for table in tables for n in table.column_names}
        shown = [n for n in names if n in present]
        columns = {n: rejected.column(n) for n in (*shown, ORIGIN)}
        bad.append(bad_rows(pa.table(columns), reason))
    good = samples if usable.all() else samples.take(np.flatnonzero(usable))
    return good, pa.concat_tables(bad)


def _failed_samples(
    samples: Tuples, names: Sequence[str], check: BadRows
) -> NDArray[np.bool_] | None:
    """Return which samples fail a check of some columns, None for none."""
    for group, table in ((None, samples.samples), *samples.uniques.items()):
        if all(table.schema.get_field_index(name) >= 0 for name in names):
            failed = check(*(one_chunk(table[name]) for name in names))
            if failed is None or not failed.any():
                return None
            return failed if group is None else failed[samples.references[group]]
    return None  # a transform will add a column


def value_checks(features: FeatureSet, data: DataConfig) -> list[Check]:
    """Return the checks of samples, in their order.

    They include what training refuses, where file and row are unknown.
    """
    return [*_checks(features, data)]


def _checks(features: FeatureSet, data: DataConfig) -> Iterator[Check]:
    for role, name in (("session key", data.session.key), ("session time", data.session.time)):
        yield (name,), is_missing, f"{role} {name!r} must not be null"
    reason = f"session time {data.session.time!r} must be in the years 1 to 9999"
    yield (data.session.time,), outside_calendar, reason
    labels = features.with_role("label")
    entry_weights = {
        weights_column(name): name
        for name in features.with_role("sparse")
        if weights_column(name) in features
    }
    for feature in features.features:
        name = feature.name
        if feature.required or feature.role in ("label", "weight"):
            yield (name,), is_missing, f"feature {name!r} must not be null"
        if feature.role in NUMBERS or name in entry_weights:
            yield (name,), not_finite, f"feature {name!r} must be finite in float32"
        if feature.is_list:
            yield (name,), _holds_null, f"feature {name!r} must hold no nulls"
        if name in entry_weights:
            of = entry_weights[name]
            yield (name, of), _unequal_lengths, f"lists {name!r} and {of!r} must be equally long"
        low, high = _limits(feature, labels == (name,), data)
        yield from limit_checks(name, f"feature {name!r}", low, high)


def limit_checks(name: str, subject: str, low: float | None, high: float | None) -> Iterator[Check]:
    """Yield the checks of the limits of a column, which their reasons call `subject`."""
    if low is not None:
        reason = f"{subject} must be at least {low}"
        yield (name,), partial(_outside, comparison="less", limit=low), reason
    if high is not None:
        reason = f"{subject} must be at most {high}"
        yield (name,), partial(_outside, comparison="greater", limit=high), reason


def is_missing(column: pa.Array) -> NDArray[np.bool_] | None:
    """Return which values are null or not a number; None for none."""
    if not column.null_count and not pa.types.is_floating(column.type):
        return None
    return _mask(pc.is_null(column, nan_is_null=True))


def not_finite(column: pa.Array) -> NDArray[np.bool_] | None:
    """Return which values, or lists with a value, are not finite in float32; None for none."""
    values = column.flatten() if is_list(column.type) else column
    if not pa.types.is_floating(values.type):
        return None
    failed = _mask(pc.invert(pc.is_finite(values.cast(pa.float32()))))
    return _rows_of_values(column, failed) if is_list(column.type) else failed


def _unequal_lengths(column: pa.Array, other: pa.Array) -> NDArray[np.bool_] | None:
    if not (is_list(column.type) and is_list(other.type)):
        return None
    lengths = (pc.fill_null(pc.list_value_length(each), 0) for each in (column, other))
    return _mask(pc.not_equal(*lengths))


def outside_calendar(column: pa.Array) -> NDArray[np.bool_] | None:
    """Return which times are outside the years 1 to 9999; None for none."""
    if not pa.types.is_timestamp(column.type):
        return None
    microseconds = column.cast(pa.int64())
    early, late = pc.less(microseconds, _FIRST_TIME), pc.greater(microseconds, _LAST_TIME)
    return _mask(pc.or_(early, late))


def _holds_null(column: pa.Array) -> NDArray[np.bool_] | None:
    values = column.flatten()
    if not values.null_count:
        return None
    return _rows_of_values(column, _mask(values.is_null()))


def _limits(
    feature: Feature, is_trained: bool, data: DataConfig
) -> tuple[float | None, float | None]:
    """Return the limits of a feature; `is_trained` of the only label, which training reads."""
    low, high = feature.minimum, feature.maximum
    if feature.role == "weight" or is_trained:
        low = 0 if low is None else max(low, 0)
    if is_trained:
        high = 1 if high is None else min(high, 1)
    table = data.tables.get(data.table_of_feature.get(feature.name, ""))
    if table is not None and table.rows == "identity":
        low = 0 if low is None else max(low, 0)
        high = table.num_rows - 1 if high is None else min(high, table.num_rows - 1)
    return low, high


def _outside(column: pa.Array, comparison: str, limit: float) -> NDArray[np.bool_] | None:
    values = column.flatten() if is_list(column.type) else column
    if pa.types.is_timestamp(values.type):
        values = values.cast(pa.int64())
    extremes = pc.min_max(values)
    extreme = extremes["min" if comparison == "less" else "max"].as_py()
    if extreme is None or not (extreme < limit if comparison == "less" else extreme > limit):
        return None
    # Arrow compares unsigned 64-bit values as signed ones.
    unsigned = pa.types.is_uint64(values.type)
    bound = pa.scalar(max(0, int(limit)), pa.uint64()) if unsigned else pa.scalar(limit)
    outside = _mask(pc.call_function(comparison, [values, bound]))
    return _rows_of_values(column, outside) if is_list(column.type) else outside


def _rows_of_values(column: pa.Array, chosen: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return which lists of a column have a chosen value."""
    rows = np.zeros(len(column), bool)
    rows[pc.list_parent_indices(column).to_numpy()[chosen]] = True
    return rows


def _mask(column: pa.Array) -> NDArray[np.bool_]:
    return pc.fill_null(column, False).to_numpy(zero_copy_only=False)


# Downsampling of negatives by a hash of their content, with weights for those that are kept.
#
# A draw depends only on the seed and on the session key (unit `session`) or on all columns of the
# sample (unit `sample`), not on the runner, the order of files, or the segment. Positives and
# evaluation samples are always kept with weight 1 (times the job's own weight), so that metrics
# mean the same with and without sampling.

Unit = Literal["session", "sample"]


def sql_weights(features: FeatureSet) -> tuple[str, ...]:
    """Return the weight columns of the SQL's result."""
    return tuple(n for n in features.with_role("weight") if n != SAMPLE_WEIGHT)


def sample_negatives(samples: Tuples, features: FeatureSet, data: DataConfig) -> Tuples:
    """Drop negatives by their draws, and add the weights of the samples that are kept.

    Without `data.sampling` the samples are returned as they are.
    """
    config = data.sampling
    if config is None:
        return samples
    # Positives and samples of the evaluation range are always kept.
    positive = numpy_of(samples.column(features.label)) == 1
    kept = positive | in_evaluation(samples, data)
    drawn = draws(samples, config.unit, config.seed, data.session.key) < config.negatives
    weights = np.where(kept, 1.0, 1.0 / config.negatives)
    for name in sql_weights(features):
        weights = weights * numpy_of(samples.column(name)).astype(np.float64)
    rows = np.flatnonzero(kept | drawn)
    chosen = samples.take(rows)
    column = pa.array(weights[rows].astype(np.float32))
    table = chosen.samples.append_column(SAMPLE_WEIGHT, column)
    return Tuples(table, chosen.references, chosen.uniques)


def in_evaluation(samples: Tuples, data: DataConfig) -> NDArray[np.bool_]:
    """Return which samples are in the evaluation range."""
    if data.split.evaluation_from is None:
        return np.zeros(samples.num_samples, bool)
    time = samples.column(data.session.time).cast(pa.int64()).to_numpy()
    return time >= microseconds(data.split.evaluation_from)


def draws(samples: Tuples, unit: Unit, seed: int, session_key: str) -> NDArray[np.float64]:
    """Return a draw in [0, 1) for each sample.

    Samples of a session key share a draw if `unit` is `session`; different seeds give independent
    draws.
    """
    if unit == "session":
        hashes = hash_session_keys(samples.column(session_key))
    else:
        hashes = hash_samples(samples)
    salt = splitmix64(np.array([seed])) ^ salt_of(f"sampling {unit}")
    return (splitmix64(hashes ^ salt) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def hash_samples(samples: Tuples) -> NDArray[np.uint64]:
    """Return a hash of all columns of each sample, the same in any chunk and with any groups."""
    columns = set(samples.samples.column_names) - {ORIGIN, LIST_INDEX}
    hashes = {name: hash_values(samples.samples[name]) for name in columns}
    for group, table in samples.uniques.items():
        for name in table.column_names:
            hashes[name] = hash_values(table[name])[samples.references[group]]
    return combine_hashes([hashes[name] for name in sorted(hashes)])

"""Fit transforms on the training samples: vocabularies, quantiles, moments.

The stage that makes samples also computes a partial result of each chunk; partial results are
merged by key and finished before the partitions of a segment are written. Merging does not depend
on order or grouping: counts and sums are exact, and quantiles are those of
the values with the smallest hashes. A vocabulary is merged in `NUM_SHARDS` ranges of the value's
hash, so that a worker holds one shard; the final sort takes about 50 bytes per entry (half a
gigabyte for ten million), look-ups in workers about 30.

Segments share the files of fitted transforms, and each names those that it used. A segment that
adds a file must have started from all files of the dataset; of two concurrent builds that add
files, the second one is refused.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from presage.pipelines.quality.column_statistics import exact_sums, mean_and_deviation
from presage.pipelines.samples.sql import LIST_INDEX
from presage.pipelines.samples.tuples import Tuples, in_evaluation
from presage.pipelines.sources.raw_rows import ORIGIN
from presage.pipelines.transforms.apply import FitInput, apply_transforms, fit_inputs
from presage.schemas.arrays import is_list, numpy_of, one_chunk
from presage.schemas.config.job import SAMPLES, DataConfig
from presage.schemas.dataset.files import read_verified
from presage.schemas.dataset.fitted import (
    FittedStats,
    FittedValues,
    encode_stats,
    encode_version,
    load_fitted,
    load_vocabulary_versions,
    merge_versions,
    new_entries,
    shards_of,
    stats_path,
    value_type,
    version_path,
)
from presage.schemas.dataset.manifest import find_root
from presage.schemas.dataset.opened import committed_segment
from presage.schemas.errors import SchemaError
from presage.schemas.hashing import splitmix64
from presage.schemas.layout import SEGMENTS
from presage.schemas.storage.location import Location

SAMPLE_SIZE = 1 << 16
"""Values from which quantiles are computed: all of a smaller log; of a larger one a rank is off by
0.2 % (one standard deviation), for a megabyte."""

NUM_SHARDS = 16
MERGE_SIZE = 8
"""Partial results of one key that are merged at once."""
FITTED = "fitted"
"""Directory in a segment being built, with the layout of the dataset; deleted before the commit."""


# Partial results.


@dataclass(frozen=True, slots=True)
class ValueCounts:
    """Counts of values.

    Attributes:
        table: `value`, distinct, and `count` int64; in any order.
    """

    table: pa.Table

    def merged(self, others: Sequence[Partial]) -> ValueCounts:
        """Add the counts of equal values."""
        tables = [o.table for o in others if isinstance(o, ValueCounts)]
        return ValueCounts(_sum_counts(pa.concat_tables([self.table, *tables])))


def _sum_counts(counts: pa.Table) -> pa.Table:
    grouped = counts.group_by("value", use_threads=False).aggregate([("count", "sum")])
    return grouped.rename_columns({"count_sum": "count"}).select(["value", "count"])


@dataclass(frozen=True, slots=True)
class Moments:
    """Exact sums over the finite values of a column, each counted once per sample.

    Attributes:
        num_values: number of values.
        total: sum, as from `exact_sums`.
        squares: sum of squares, the same.
        minimum: infinite without values.
        maximum: minus infinite without values.
    """

    num_values: int
    total: int
    squares: int
    minimum: float
    maximum: float

    def merged(self, others: Sequence[Partial]) -> Moments:
        """Return the moments of all values."""
        all_moments = [self, *(o for o in others if isinstance(o, Moments))]
        return Moments(
            sum(m.num_values for m in all_moments),
            sum(m.total for m in all_moments),
            sum(m.squares for m in all_moments),
            min(m.minimum for m in all_moments),
            max(m.maximum for m in all_moments),
        )

    def stats(self, by: str, key: str) -> FittedStats:
        """Return center and scale for `normalize`.

        Raises:
            SchemaError: there are no values.
        """
        _check_not_empty(self.num_values, key)
        if by == "min_max":
            return FittedStats(self.minimum, (self.maximum - self.minimum) or 1.0)
        mean, deviation = mean_and_deviation(self.total, self.squares, self.num_values)
        return FittedStats(mean, deviation or 1.0)


def moments(values: NDArray[np.generic], counts: NDArray[np.int64]) -> Moments:
    """Return the moments of values with their counts.

    Args:
        values: (num_values,) numbers; those that are not finite are ignored.
        counts: (num_values,) not negative.
    """
    used = counts > 0
    if values.dtype.kind == "f":
        used &= np.isfinite(values)
    values, counts = values[used], counts[used]
    total = squares = 0
    for bit in range(int(counts.max()).bit_length() if len(counts) else 0):
        sums = exact_sums(values[counts >> bit & 1 == 1])
        total, squares = total + (sums[0] << bit), squares + (sums[1] << bit)
    return Moments(
        int(counts.sum()),
        total,
        squares,
        float(values.min()) + 0.0 if len(values) else float("inf"),  # + 0.0: -0.0 becomes 0.0
        float(values.max()) + 0.0 if len(values) else float("-inf"),
    )


@dataclass(frozen=True, slots=True)
class BottomKSample:
    """The values of the samples with the smallest hashes.

    Attributes:
        keys: (n,) uint64, ascending, at most `SAMPLE_SIZE`.
        values: (n,) float64, finite.
    """

    keys: NDArray[np.uint64]
    values: NDArray[np.float64]

    def merged(self, others: Sequence[Partial]) -> BottomKSample:
        """Return the sample of all values."""
        samples = [self, *(o for o in others if isinstance(o, BottomKSample))]
        return bottom_k_sample(
            np.concatenate([s.keys for s in samples]), np.concatenate([s.values for s in samples])
        )

    def stats(self, quantiles: int, key: str) -> FittedStats:
        """Return the distinct boundaries that divide the sample into buckets of equal size.

        Raises:
            SchemaError: there are no values.
        """
        _check_not_empty(len(self.values), key)
        ordered = np.sort(self.values)
        cuts = ordered[np.arange(1, quantiles) * len(ordered) // quantiles]
        return FittedStats(boundaries=tuple(np.unique(cuts).tolist()))


def bottom_k_sample(keys: NDArray[np.uint64], values: NDArray[np.float64]) -> BottomKSample:
    """Return the values with the smallest keys, sorted by (key, value), with -0.0 as 0.0."""
    values = values + 0.0
    order = np.lexsort((values, keys))[:SAMPLE_SIZE]
    return BottomKSample(keys[order], values[order])


def _check_not_empty(num_values: int, key: str) -> None:
    if not num_values:
        raise SchemaError(
            f"transforms.{key} has no numbers in the training range; "
            "remove it, or move data.split.evaluation_from"
        )


Partial = ValueCounts | Moments | BottomKSample
"""A partial result; `merged` does not depend on order or grouping."""


def add_partial(pending: list[Partial], element: Partial) -> list[Partial]:
    """Append a partial result of a key; merge them when there are `MERGE_SIZE`."""
    pending.append(element)
    return pending if len(pending) < MERGE_SIZE else merge_partials(pending)


def merge_partials(partials: Sequence[Partial]) -> list[Partial]:
    """Merge the partial results of one key into one; the result is empty if there are none."""
    return [partials[0].merged(partials[1:])] if partials else []


def partial_fits(
    samples: Tuples, inputs: Sequence[FitInput], data: DataConfig
) -> Iterator[tuple[str, Partial]]:
    """Yield the partial results of one chunk of samples by key.

    Samples of the evaluation range are ignored.
    """
    training = ~in_evaluation(samples, data)
    if not training.any():
        return
    for item in inputs:
        column, counts = counted_column(samples, item, training)
        if item.vocabulary is not None:
            for shard, table in _count_by_shard(column, counts):
                yield f"{item.vocabulary}/{shard}", ValueCounts(table)
        elif item.quantiles is None:
            values, value_counts = _flatten(column, counts)
            yield item.stats_key or "", moments(numpy_of(values), value_counts)
        else:
            yield item.stats_key or "", _sample_column(samples, item, column, training)


def counted_column(
    samples: Tuples, item: FitInput, training: NDArray[np.bool_]
) -> tuple[pa.Array, NDArray[np.int64]]:
    """Return a column over its unique tuples, and the number of training samples of each."""
    if item.group == SAMPLES:
        table, counts = samples.samples, training.astype(np.int64)
    else:
        table = samples.uniques[item.group]
        references = samples.references[item.group][training]
        counts = np.bincount(references, minlength=table.num_rows).astype(np.int64)
    table = apply_transforms(table, item.group, item.before, FittedValues())
    return one_chunk(table[item.column]), counts


def _flatten(column: pa.Array, counts: NDArray[np.int64]) -> tuple[pa.Array, NDArray[np.int64]]:
    """Return the values of a column or of its lists, without nulls, with their counts."""
    if is_list(column.type):
        lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
        column, counts = column.flatten(), np.repeat(counts, lengths)
    if column.null_count:
        valid = column.is_valid()
        counts = counts[valid.to_numpy(zero_copy_only=False)]
        column = column.drop_null()
    return column, counts


def _count_by_shard(column: pa.Array, counts: NDArray[np.int64]) -> Iterator[tuple[int, pa.Table]]:
    values, value_counts = _flatten(column, counts)
    values = values.cast(value_type(values.type))
    table = pa.table({"value": values, "count": pa.array(value_counts)})
    table = _sum_counts(table.filter(pa.array(value_counts > 0)))
    shard = shards_of(one_chunk(table["value"]), NUM_SHARDS)
    for index in np.unique(shard).tolist():
        yield index, table.filter(pa.array(shard == index))


def _sample_column(
    samples: Tuples, item: FitInput, column: pa.Array, training: NDArray[np.bool_]
) -> BottomKSample:
    rows = np.flatnonzero(training)
    if item.group != SAMPLES:
        column = column.take(pa.array(samples.references[item.group]))
    values = pc.fill_null(column.cast(pa.float64(), safe=False), float("nan"))
    numbers = values.to_numpy(zero_copy_only=False)[rows]
    origins, indices = (samples.samples[c].to_numpy()[rows] for c in (ORIGIN, LIST_INDEX))
    keys = splitmix64(splitmix64(origins) ^ splitmix64(indices))
    used = np.isfinite(numbers)
    return bottom_k_sample(keys[used], numbers[used])


# Final results.


def write_shard(root: Location, data: DataConfig, key: str, partial: Partial) -> Partial | str:
    """Write the possible entries of a vocabulary's shard to a file, and return its name.

    Partial results other than `ValueCounts` are returned as they are.
    """
    if not isinstance(partial, ValueCounts):
        return partial
    config = data.vocabularies[key.split("/")[0]]
    frequent = partial.table["count"].to_numpy() >= config.min_count
    name = f"{uuid.uuid4().hex}.arrow"  # a temporary file, never part of the dataset
    table = partial.table.filter(pa.array(frequent))
    with (
        (root / FITTED / "shards" / name).new_file() as temporary,
        pa.OSFile(str(temporary), "wb") as sink,
        pa.ipc.new_file(sink, table.schema) as writer,
    ):
        writer.write_table(table)
    return name


def write_fitted(
    root: Location, results: Mapping[str, Any], data: DataConfig, base: Mapping[str, str]
) -> dict[str, str]:
    """Write new versions of vocabularies, and the statistics that do not exist yet.

    `root` has the files of `base`, path to sha256. `results` is key to merged partial result, or to
    the file of a vocabulary's shard in `shards`.

    Returns:
        All files, old and new: path to sha256.
    """
    files = dict(base)
    for name in data.vocabularies:
        keys = [key for key in sorted(results) if key.startswith(f"{name}/")]
        if keys:
            shards = [root / "shards" / results[key] for key in keys]
            _append_version(root, name, shards, data, files)
    existing = load_fitted(root, base, data).stats
    stats = fit_stats(results, data, existing)
    if stats:
        content = encode_stats(stats)
        _write(root, stats_path(content), content, files)
    return files


def fit_stats(
    results: Mapping[str, Any], data: DataConfig, existing: Mapping[str, FittedStats]
) -> dict[str, FittedStats]:
    """Return the statistics of each fitted transform that has none yet.

    Raises:
        SchemaError: a column has no number in the training range.
    """
    stats: dict[str, FittedStats] = {}
    for item in fit_inputs(data):
        if (key := item.stats_key) is None or key in existing:
            continue
        if item.quantiles is not None:
            empty_sample = bottom_k_sample(np.zeros(0, np.uint64), np.zeros(0))
            stats[key] = results.get(key, empty_sample).stats(item.quantiles, key)
            continue
        group, column = key.split(".", 1)
        transform = data.transforms[group][column]
        assert not isinstance(transform, str), "SQL transforms are not fitted"
        no_moments = moments(np.zeros(0), np.zeros(0, np.int64))
        stats[key] = results.get(key, no_moments).stats(transform.config.by, key)
    return stats


def _append_version(
    root: Location, name: str, shards: Sequence[Location], data: DataConfig, files: dict[str, str]
) -> None:
    config = data.vocabularies[name]
    tables = [pa.ipc.open_file(pa.BufferReader(path.read_bytes())).read_all() for path in shards]
    counts = pa.concat_tables(tables)
    versions = load_vocabulary_versions(root, files, name)
    kind = counts.schema.field("value").type
    vocabulary = merge_versions(versions, config.oov_rows, kind)
    entries = new_entries(vocabulary, counts, config.min_count, config.num_rows)
    if entries.num_rows:
        content = encode_version(entries, len(versions))
        _write(root, version_path(name, len(versions), content), content, files)


def _write(root: Location, path: str, content: bytes, files: dict[str, str]) -> None:
    (root / path).write_bytes(content)
    files[path] = hashlib.sha256(content).hexdigest()


# Files in the dataset and in a segment being built.


def fitted_files(dataset: Location) -> dict[str, str]:
    """Return the files of fitted transforms of all segments of a dataset, path to sha256."""
    root = find_root(dataset)
    files: dict[str, str] = {}
    for reference in root.manifest.segments if root else ():
        files |= committed_segment(dataset / SEGMENTS / reference.directory, reference).fitted
    return dict(sorted(files.items()))


def stage_fitted(dataset: Location, files: Mapping[str, str], building: Location) -> None:
    """Copy files of earlier segments, verified, into the directory of a segment being built."""
    for path, digest in files.items():
        (building / FITTED / path).write_bytes(read_verified(dataset / path, digest))


def publish_fitted(
    building: Location, dataset: Location, files: Mapping[str, str]
) -> dict[str, str]:
    """Copy the new files of a segment into the dataset; return all files, path to sha256."""
    published = dict(files)
    for path in sorted(files.keys() - fitted_files(dataset).keys()):
        digest = published.pop(path)
        data = read_verified(building / FITTED / path, digest)
        target = free_path(dataset, path)
        (dataset / target).write_bytes(data)
        published[target] = digest
    (building / FITTED).remove_all()
    return dict(sorted(published.items()))


def free_path(dataset: Location, path: str) -> str:
    """Return the path for a file that has the hash of its content in its name.

    It has a random end if another attempt has left such a file: `vacuum` may be removing it.
    """
    if (dataset / path).stat() is None:
        return path
    name = PurePosixPath(path)
    return str(name.with_stem(f"{name.stem}-{uuid.uuid4().hex[:6]}"))


def returned_files(values: Mapping[str, Sequence[Any]], base: Mapping[str, str]) -> dict[str, str]:
    """Return the files in the results of a pipeline, `base` if nothing was fitted."""
    (files,) = values.get("fitted") or (base,)
    return dict(files)


def check_fitted_files(files: Mapping[str, str], dataset: Location) -> None:
    """Check that no concurrent build has added files.

    Raises:
        SchemaError: the dataset has files from which the segment did not start.
    """
    existing = fitted_files(dataset)
    if not (files.items() <= existing.items() or existing.items() <= files.items()):
        missing = sorted(existing.keys() - files.keys())
        raise SchemaError(
            f"segment was fitted without {missing[0]}, which another segment added meanwhile; "
            "run it again",
            file=str(dataset),
        )

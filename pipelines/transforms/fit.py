"""Fit transforms on the training samples: vocabularies, quantiles, moments."""

from __future__ import annotations

import hashlib
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import sqrt
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipelines.quality.statistics import exact_sum, exact_sum_of_squares
from pipelines.samples.sampling import in_evaluation
from pipelines.samples.sql import LIST_INDEX
from pipelines.samples.tuples import Tuples
from pipelines.sources.read import ORIGIN
from pipelines.transforms.apply import Input, learned_inputs, with_transforms
from schemas.arrays import is_list, numpy_of, one_chunk
from schemas.config.job import SAMPLES, DataConfig
from schemas.errors import SchemaError
from schemas.files import read_verified
from schemas.fitted import (
    FittedStats,
    FittedValues,
    encode_stats,
    load_fitted,
    load_vocabulary_versions,
    stats_path,
)
from schemas.hashing import splitmix64
from schemas.layout import MANIFEST, SEGMENTS
from schemas.manifest import read_dataset, read_segment, replace_bytes
from schemas.vocabulary import (
    encode_version,
    merge_versions,
    new_entries,
    shards_of,
    value_type,
    version_path,
)

# What one chunk of samples contributes to what is learned, and how contributions add up.
#
# All three kinds are free of order: counts and sums are whole numbers or exact fractions, and a
# quantile sample is the one with the smallest hashes.

SAMPLE_SIZE = 1 << 16
"""Values that quantiles are taken from: all of a smaller log; else a rank is off by 0.2 % (one
standard deviation), for a megabyte."""


class Partial(Protocol):
    """A contribution; `merged` does not depend on order or grouping."""

    def merged(self, others: Sequence[Partial]) -> Partial:
        """Return the sum of this and some others of its kind."""
        ...


@dataclass(frozen=True, slots=True)
class Counts:
    """How often each value occurs.

    Attributes:
        table: `value`, each once, and `count` int64; in any order.
    """

    table: pa.Table

    def merged(self, others: Sequence[Partial]) -> Counts:
        """Add the counts of equal values."""
        tables = [o.table for o in others if isinstance(o, Counts)]
        return Counts(summed(pa.concat_tables([self.table, *tables])))


def summed(counts: pa.Table) -> pa.Table:
    """Return each value once, with the sum of its counts."""
    grouped = counts.group_by("value", use_threads=False).aggregate([("count", "sum")])
    return grouped.rename_columns({"count_sum": "count"}).select(["value", "count"])


@dataclass(frozen=True, slots=True)
class Sums:
    """Exact sums over the finite values of a column, each counted once per sample.

    Attributes:
        num_values: values.
        total: sum.
        squares: sum of squares.
        minimum: smallest, infinite without values.
        maximum: largest, minus infinite without values.
    """

    num_values: int
    total: Fraction
    squares: Fraction
    minimum: float
    maximum: float

    def merged(self, others: Sequence[Partial]) -> Sums:
        """Add sums."""
        parts = [self, *(o for o in others if isinstance(o, Sums))]
        return Sums(
            sum(p.num_values for p in parts),
            sum((p.total for p in parts), Fraction(0)),
            sum((p.squares for p in parts), Fraction(0)),
            min(p.minimum for p in parts),
            max(p.maximum for p in parts),
        )

    def numbers(self, by: str, place: str) -> FittedStats:
        """Return what `normalize` needs.

        Raises:
            SchemaError: there was no value.
        """
        check_values(self.num_values, place)
        if by == "min_max":
            return FittedStats(self.minimum, (self.maximum - self.minimum) or 1.0)
        mean = self.total / self.num_values
        deviation = sqrt(float(max(Fraction(0), self.squares / self.num_values - mean**2)))
        return FittedStats(float(mean), deviation or 1.0)


def sums_of(values: NDArray[np.generic], counts: NDArray[np.int64]) -> Sums:
    """Return the sums of values that each occur some times.

    Args:
        values: (num_values,) numbers; what is not finite is left out.
        counts: (num_values,) not negative.
    """
    used = counts > 0
    if values.dtype.kind == "f":
        used &= np.isfinite(values)
    values, counts = values[used], counts[used]
    total, squares = Fraction(0), Fraction(0)
    for bit in range(int(counts.max()).bit_length() if len(counts) else 0):
        chosen = values[counts >> bit & 1 == 1]
        total += exact_sum(chosen) * (1 << bit)
        squares += exact_sum_of_squares(chosen) * (1 << bit)
    return Sums(
        int(counts.sum()),
        total,
        squares,
        float(values.min()) + 0.0 if len(values) else float("inf"),  # no -0.0, equal to 0.0
        float(values.max()) + 0.0 if len(values) else float("-inf"),
    )


@dataclass(frozen=True, slots=True)
class Drawn:
    """The values of the samples with the smallest hashes.

    Attributes:
        keys: (n,) uint64, ascending, at most `SAMPLE_SIZE`.
        values: (n,) float64, finite.
    """

    keys: NDArray[np.uint64]
    values: NDArray[np.float64]

    def merged(self, others: Sequence[Partial]) -> Drawn:
        """Keep the smallest of all."""
        parts = [self, *(o for o in others if isinstance(o, Drawn))]
        return drawn(
            np.concatenate([p.keys for p in parts]), np.concatenate([p.values for p in parts])
        )

    def numbers(self, quantiles: int, place: str) -> FittedStats:
        """Return the distinct values that cut the sample into parts of equal size.

        Raises:
            SchemaError: there was no value.
        """
        check_values(len(self.values), place)
        ordered = np.sort(self.values)
        cuts = ordered[np.arange(1, quantiles) * len(ordered) // quantiles]
        return FittedStats(boundaries=tuple(np.unique(cuts).tolist()))


def drawn(keys: NDArray[np.uint64], values: NDArray[np.float64]) -> Drawn:
    """Return the values with the smallest keys, in the order of (key, value), -0.0 as 0.0."""
    values = values + 0.0
    order = np.lexsort((values, keys))[:SAMPLE_SIZE]
    return Drawn(keys[order], values[order])


def check_values(num_values: int, place: str) -> None:
    """Refuse to learn from nothing.

    Raises:
        SchemaError: there was no value.
    """
    if not num_values:
        raise SchemaError(
            f"transforms.{place} must find numbers in the training range, got none; "
            "remove it, or move data.split.evaluation_from"
        )


# Files of what transforms learned: staged for workers, placed in the dataset, kept in one line.
#
# Segments share them. Each names those that it used, and one that adds to a vocabulary must have
# started from all that are there: two builds that add at once cannot both be right, and the
# second is refused by name.

LEARNED = "learned"
"""Directory below a segment being built, laid out like the dataset; gone before the commit."""


def learned_so_far(dataset: Path) -> dict[str, str]:
    """Return the files that the segments of a dataset name, path to sha256; none without one."""
    if not (dataset / MANIFEST).exists():
        return {}
    found: dict[str, str] = {}
    for reference in read_dataset(dataset).segments:
        found |= read_segment(dataset / SEGMENTS / reference.id, reference).learned
    return dict(sorted(found.items()))


def load_building(root: Path, files: Mapping[str, str], data: DataConfig) -> FittedValues:
    """Read what was learned for a segment that is being built."""
    return load_fitted(root / LEARNED, files, data)


def stage_learned(dataset: Path, files: Mapping[str, str], building: Path) -> None:
    """Copy the files of the segments before, verified, to where workers look."""
    for path, digest in files.items():
        target = building / LEARNED / path
        target.parent.mkdir(parents=True, exist_ok=True)
        replace_bytes(target, read_verified(dataset / path, digest))


def place_learned(building: Path, dataset: Path, files: Mapping[str, str]) -> None:
    """Move what was learned into the dataset; a name stands for one content, so no one is hurt."""
    for path, digest in files.items():
        if not (dataset / path).exists():
            (dataset / path).parent.mkdir(parents=True, exist_ok=True)
            replace_bytes(dataset / path, read_verified(building / LEARNED / path, digest))
    shutil.rmtree(building / LEARNED, ignore_errors=True)


def returned_files(values: Mapping[str, Sequence[Any]], base: Mapping[str, str]) -> dict[str, str]:
    """Return the files that a finished pipeline brought back; `base` when nothing is learned."""
    (files,) = values.get("learned") or (base,)
    return dict(files)


def fits(files: Mapping[str, str], dataset: Path) -> bool:
    """Tell whether a segment's files can stand beside those that the dataset has now."""
    there = learned_so_far(dataset).items()
    return files.items() <= there or there <= files.items()


def check_fits(files: Mapping[str, str], dataset: Path) -> None:
    """Refuse a segment that learned something while another did.

    Raises:
        SchemaError: the dataset has files that the segment did not start from.
    """
    if not fits(files, dataset):
        missing = sorted(set(learned_so_far(dataset)) - set(files))
        raise SchemaError(
            f"segment must start from what the dataset has learned, got one without {missing[0]}, "
            "which another segment added meanwhile; run it again",
            file=str(dataset),
        )


# Learn what transforms need from the training samples, before any part is built.
#
# Each chunk of samples counts its own, in the same stage that makes it; counts meet by key, a
# vocabulary's in `NUM_SHARDS` ranges of the value's hash. So no worker holds more than a shard
# until the entries are sorted once, at the end: that takes about 50 bytes an entry that is kept
# (half a gigabyte for ten million), and workers that look rows up about 30.

NUM_SHARDS = 16


def partials(
    samples: Tuples, inputs: Sequence[Input], data: DataConfig
) -> Iterator[tuple[str, Partial]]:
    """Yield what one chunk of samples contributes, by key.

    Args:
        samples: of one chunk, with origins; only its training range is looked at.
        inputs: of the job.
        data: the job's data section.
    """
    training = ~in_evaluation(samples, data) if inputs else np.zeros(0, bool)
    if not training.any():
        return
    for wanted in inputs:
        column, counts = counted_column(samples, wanted, training)
        if wanted.vocabulary is not None:
            for shard, table in _sharded(column, counts):
                yield f"{wanted.vocabulary}/{shard}", Counts(table)
        elif wanted.quantiles is None:
            values, times = _flat(column, counts)
            yield wanted.numbers or "", sums_of(numpy_of(values), times)
        else:
            yield wanted.numbers or "", _drawn_of(samples, wanted, column, training)


def counted_column(
    samples: Tuples, wanted: Input, training: NDArray[np.bool_]
) -> tuple[pa.Array, NDArray[np.int64]]:
    """Return a column over its distinct tuples, and how many training samples have each."""
    if wanted.group == SAMPLES:
        table, counts = samples.samples, training.astype(np.int64)
    else:
        table = samples.uniques[wanted.group]
        references = samples.references[wanted.group][training]
        counts = np.bincount(references, minlength=table.num_rows).astype(np.int64)
    table = with_transforms(table, wanted.group, wanted.before, FittedValues())
    return one_chunk(table[wanted.column]), counts


def _flat(column: pa.Array, counts: NDArray[np.int64]) -> tuple[pa.Array, NDArray[np.int64]]:
    """Return the values of a column or of its lists, without nulls, with their counts."""
    if is_list(column.type):
        lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
        column, counts = column.flatten(), np.repeat(counts, lengths)
    if column.null_count:
        valid = column.is_valid()
        counts = counts[valid.to_numpy(zero_copy_only=False)]
        column = column.drop_null()
    return column, counts


def _sharded(column: pa.Array, counts: NDArray[np.int64]) -> Iterator[tuple[int, pa.Table]]:
    values, times = _flat(column, counts)
    values = values.cast(value_type(values.type))
    table = pa.table({"value": values, "count": pa.array(times)}).filter(pa.array(times > 0))
    table = summed(table)
    shard = shards_of(one_chunk(table["value"]), NUM_SHARDS)
    for index in np.unique(shard).tolist():
        yield index, table.filter(pa.array(shard == index))


def _drawn_of(
    samples: Tuples, wanted: Input, column: pa.Array, training: NDArray[np.bool_]
) -> Drawn:
    rows = np.flatnonzero(training)
    if wanted.group != SAMPLES:
        column = column.take(pa.array(samples.references[wanted.group]))
    values = pc.fill_null(column.cast(pa.float64(), safe=False), float("nan"))
    numbers = values.to_numpy(zero_copy_only=False)[rows]
    origins, indices = (samples.samples[c].to_numpy()[rows] for c in (ORIGIN, LIST_INDEX))
    keys = splitmix64(splitmix64(origins) ^ splitmix64(indices))
    used = np.isfinite(numbers)
    return drawn(keys[used], numbers[used])


PENDING = 8
"""Contributions of one key that wait to be merged at once."""


def with_partial(pending: list[Partial], element: Partial) -> list[Partial]:
    """Add one contribution of a key to those that wait; merges them when they are many."""
    pending.append(element)
    return pending if len(pending) < PENDING else merged(pending)


def merged(parts: Sequence[Partial]) -> list[Partial]:
    """Merge contributions of one key; none stay none."""
    return [parts[0].merged(parts[1:])] if parts else []


def shrink(root: Path, data: DataConfig, key: str, partial: Partial) -> Partial | str:
    """Leave of a vocabulary's shard only what can become an entry, in a file; return its name.

    Args:
        root: directory of the segment being built.
        data: the job's data section.
        key: of the contribution.
        partial: all contributions of the key together.
    """
    if not isinstance(partial, Counts):
        return partial
    config = data.vocabularies[key.split("/")[0]]
    often = partial.table["count"].to_numpy() >= config.min_count
    name = f"{uuid.uuid4().hex}.arrow"  # never in the dataset
    folder = root / LEARNED / "shards"
    folder.mkdir(parents=True, exist_ok=True)
    table = partial.table.filter(pa.array(often))
    with (
        pa.OSFile(str(folder / name), "wb") as sink,
        pa.ipc.new_file(sink, table.schema) as writer,
    ):
        writer.write_table(table)
    return name


def settle(
    root: Path, found: Mapping[str, Any], data: DataConfig, base: Mapping[str, str]
) -> dict[str, str]:
    """Write the new versions of vocabularies, and the numbers where there are none yet.

    Args:
        root: directory to write below; holds the files of `base`.
        found: key to sums, or to the file of a vocabulary's shard below `shards`.
        data: the job's data section.
        base: files of the segments before, path to sha256.

    Returns:
        All files, old and new: path to sha256.
    """
    files = dict(base)
    for name in data.vocabularies:
        shards = [root / "shards" / found[k] for k in sorted(found) if k.startswith(f"{name}/")]
        if shards:
            _append(root, name, shards, data, files)
    known = load_fitted(root, base, data).numbers
    numbers = numbers_of(found, data, known)
    if numbers:
        content = encode_stats(numbers)
        _write(root, stats_path(content), content, files)
    return files


def numbers_of(
    found: Mapping[str, Any], data: DataConfig, known: Mapping[str, FittedStats]
) -> dict[str, FittedStats]:
    """Return the numbers of each transform that learns some and has none yet.

    Raises:
        SchemaError: a column has no number in the training range.
    """
    numbers: dict[str, FittedStats] = {}
    nothing = sums_of(np.zeros(0), np.zeros(0, np.int64))
    for wanted in learned_inputs(data):
        if (key := wanted.numbers) is None or key in known:
            continue
        if wanted.quantiles is not None:
            sample = found.get(key, drawn(np.zeros(0, np.uint64), np.zeros(0)))
            numbers[key] = sample.numbers(wanted.quantiles, key)
            continue
        sums: Sums = found.get(key, nothing)
        group, column = key.split(".", 1)
        transform = data.transforms[group][column]
        assert not isinstance(transform, str), "SQL learns nothing"
        numbers[key] = sums.numbers(transform.config.by, key)
    return numbers


def _append(
    root: Path, name: str, shards: Sequence[Path], data: DataConfig, files: dict[str, str]
) -> None:
    config = data.vocabularies[name]
    tables = [pa.ipc.open_file(pa.memory_map(str(path))).read_all() for path in shards]
    counts = pa.concat_tables(tables)
    versions = load_vocabulary_versions(root, files, name)
    kind = counts.schema.field("value").type
    vocabulary = merge_versions(versions, config.oov_rows, kind)
    entries = new_entries(vocabulary, counts, config.min_count, config.num_rows)
    if entries.num_rows:
        content = encode_version(entries, len(versions))
        _write(root, version_path(name, len(versions), content), content, files)


def _write(root: Path, path: str, content: bytes, files: dict[str, str]) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    replace_bytes(root / path, content)
    files[path] = hashlib.sha256(content).hexdigest()

"""Samples with the tuples of their groups apart: from here on a list is touched once per tuple.

The job's SQL gives one row per sample, each with its lists. `separate` keeps
one copy of each group's tuple and a reference per sample; everything after it
moves references. Tuples are found by a 64-bit hash and then compared, so the
result is exact whatever the hash does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipelines.samples.connection import quoted_name
from schemas.arrays import comparable_tuple, hash_keys, one_chunk

HASH_PREFIX = "_hash_"
"""SQL adds one column per group: a hash of its columns, used inside one build only."""


@dataclass(frozen=True, slots=True)
class Tuples:
    """Samples of one chunk or one part.

    Attributes:
        samples: one row per sample: the columns of no group.
        references: group to (num_samples,) int64, the row of each sample's tuple.
        uniques: group to its distinct tuples, with their hash in the first column.
    """

    samples: pa.Table
    references: Mapping[str, NDArray[np.int64]]
    uniques: Mapping[str, pa.Table]

    @property
    def num_samples(self) -> int:
        """Number of samples."""
        return self.samples.num_rows

    def column(self, name: str) -> pa.Array:
        """Return a column with one row per sample, wherever it is kept."""
        if name in self.samples.column_names:
            return one_chunk(self.samples[name])
        for group, table in self.uniques.items():
            if name in table.column_names:
                return one_chunk(table[name]).take(pa.array(self.references[group]))
        raise KeyError(name)

    def take(self, rows: NDArray[np.integer]) -> Tuples:
        """Return some samples; their tuples stay where they are."""
        references = {g: r[rows] for g, r in self.references.items()}
        return Tuples(self.samples.take(pa.array(rows)), references, self.uniques)


def hash_column(group: str) -> str:
    """Return the name of a group's hash column."""
    return f"{HASH_PREFIX}{group}"


def with_hashes(
    statement: str, groups: Mapping[str, Sequence[str]], left_out: Sequence[str] = ()
) -> str:
    """Return the statement with one hash column per group, and without some columns."""
    hashes = [
        f"hash({', '.join(quoted_name(c) for c in columns)}) AS {quoted_name(hash_column(group))}"
        for group, columns in groups.items()
    ]
    if not hashes and not left_out:
        return statement
    star = f"* EXCLUDE ({', '.join(map(quoted_name, left_out))})" if left_out else "*"
    return f"SELECT {', '.join([star, *hashes])} FROM ({statement.rstrip().rstrip(';')})"


def separate(samples: pa.Table, groups: Mapping[str, Sequence[str]]) -> Tuples:
    """Keep each distinct tuple of each group once.

    Args:
        samples: one row per sample, with the hash column of each group.
        groups: columns of each group.
    """
    grouped = {c for columns in groups.values() for c in columns}
    hidden = {hash_column(g) for g in groups}
    alone = [c for c in samples.column_names if c not in grouped and c not in hidden]
    references: dict[str, NDArray[np.int64]] = {}
    uniques: dict[str, pa.Table] = {}
    for group, columns in groups.items():
        table = samples.select([hash_column(group), *columns])
        references[group], uniques[group] = distinct(table)
    return Tuples(samples.select(alone), references, uniques)


def distinct(table: pa.Table) -> tuple[NDArray[np.int64], pa.Table]:
    """Return the distinct rows of a table, in order of first appearance, and who has which.

    Args:
        table: rows with their hash in the first column; equal rows have equal hashes.

    Returns:
        (num_rows,) int64 references, and the distinct rows.
    """
    hashes = table.column(0).to_numpy()
    references, first = first_appearances(hashes)
    if not _equal(table, first[references]):
        # SQL's hashes of lists do collide: [0, 7] and [7]. The column stays, so that equal rows of
        # other chunks, where nothing collided, still meet.
        strong = hash_keys(comparable_tuple(table, table.column_names[1:])) ^ hashes
        references, first = first_appearances(strong)
        assert _equal(table, first[references]), "two independent hashes cannot both collide"
    return references, table if len(first) == len(table) else table.take(pa.array(first))


def first_appearances(keys: NDArray[np.generic]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Number the distinct keys in the order in which they appear.

    Args:
        keys: (n,) whole numbers.

    Returns:
        (n,) the number of each key, and (num_distinct,) where each appears first.

    Example:
        >>> numbers, first = first_appearances(np.array([7, 3, 7, 9]))
        >>> numbers.tolist(), first.tolist()
        ([0, 1, 0, 2], [0, 1, 3])
    """
    encoded = pa.array(keys).dictionary_encode()  # by a hash table, five times as fast as sorting
    numbers = encoded.indices.to_numpy().astype(np.int64)
    first = np.flatnonzero(np.diff(np.maximum.accumulate(numbers), prepend=-1))
    return numbers, first


def _equal(table: pa.Table, same: NDArray[np.int64]) -> bool:
    """Compare every row with the row that it is said to equal, floats by their bits."""
    repeats = np.flatnonzero(same != np.arange(len(same)))
    if not len(repeats):
        return True
    these, those = pa.array(repeats), pa.array(same[repeats])
    columns = (_bits(table[name]) for name in table.column_names[1:])
    return all(column.take(these).equals(column.take(those)) for column in columns)


def _bits(column: pa.ChunkedArray) -> pa.Array:
    array = one_chunk(column)
    kind = array.type
    if pa.types.is_floating(kind):
        return array.view(pa.int32() if kind.bit_width == 32 else pa.int64())
    if pa.types.is_large_list(kind) and pa.types.is_floating(kind.value_type):
        return array.view(pa.large_list(pa.int32()))
    return array


def join(parts: Sequence[Tuples]) -> Tuples:
    """Return the samples of all parts, with equal tuples of different parts made one.

    Args:
        parts: at least one, all with the same columns.
    """
    samples = pa.concat_tables([p.samples for p in parts]).combine_chunks()
    references: dict[str, NDArray[np.int64]] = {}
    uniques: dict[str, pa.Table] = {}
    for group in parts[0].uniques:
        tables = [p.uniques[group] for p in parts]
        starts = np.cumsum([0, *(t.num_rows for t in tables)])
        merged, uniques[group] = distinct(pa.concat_tables(tables).combine_chunks())
        references[group] = np.concatenate(
            [merged[p.references[group] + s] for p, s in zip(parts, starts, strict=False)]
        )
    return Tuples(samples, references, uniques)


def compact(tuples: Tuples) -> Tuples:
    """Leave out the tuples that no sample refers to."""
    references: dict[str, NDArray[np.int64]] = {}
    uniques: dict[str, pa.Table] = {}
    for group, table in tuples.uniques.items():
        refers = tuples.references[group]
        references[group], first = first_appearances(refers)
        uniques[group] = table.take(pa.array(refers[first]))
    return Tuples(tuples.samples, references, uniques)


def split(tuples: Tuples, target: NDArray[np.int64], num_targets: int) -> list[Tuples | None]:
    """Return the samples of each target with only their own tuples; None where there are none.

    Args:
        tuples: samples of one chunk.
        target: (num_samples,) int64 in [0, num_targets).
        num_targets: number of targets.
    """
    order = np.argsort(target, kind="stable")
    ordered, by_target = tuples.take(order), target[order]
    cuts = np.searchsorted(by_target, np.arange(num_targets + 1))
    tables: dict[str, tuple[NDArray[np.int64], NDArray[np.int64], pa.Table]] = {}
    for group, table in tuples.uniques.items():
        size = max(1, table.num_rows)
        pairs = by_target * size + ordered.references[group]
        numbers, first = first_appearances(pairs)
        starts = np.searchsorted(by_target[first], np.arange(num_targets + 1))
        local = numbers - starts[by_target]
        tables[group] = local, starts, table.take(pa.array(pairs[first] % size))
    found: list[Tuples | None] = []
    for index, (start, end) in enumerate(pairwise(cuts.tolist())):
        found.append(
            Tuples(
                ordered.samples.slice(start, end - start),
                {g: local[start:end] for g, (local, _, _) in tables.items()},
                {
                    g: table.slice(starts[index], starts[index + 1] - starts[index])
                    for g, (_, starts, table) in tables.items()
                },
            )
            if end > start
            else None
        )
    return found

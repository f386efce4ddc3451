"""Accesses of a whole dataset, step by step over all segments; statistics for sharding planners.

Steps are decoded on demand. Memory per table: 8 bytes per row for the row of each number, with
several segments 4 bytes per row and segment for their numbers, and one or more decoded files.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from schemas.arrays import Array, Jagged
from schemas.dataset import Dataset, Index, Segment, access_lists, has_accesses
from schemas.errors import SchemaError
from schemas.files import CheckedFile, DecodedFileCache, ListFiles
from schemas.hashing import NUM_SLOTS, slot_of_row
from schemas.manifest import from_json
from schemas.oracle import NEVER, number_by_appearance, sort_each, union
from schemas.order import Order

REUSE_BINS = 32
"""Bin i counts next-use distances from 2**i to 2**(i + 1) - 1 steps."""


@dataclass(frozen=True, slots=True)
class TableLoad:
    """Accesses of one table under one order.

    Attributes:
        rows_per_step: (num_steps,) int64, distinct rows of each step.
        slots: (periods, slot ranges) int64, accesses by period of steps and slot range.
        reuse: (REUSE_BINS,) int64, entries by the power of two of their next-use distance.
        never: entries whose row is not used again.
    """

    rows_per_step: NDArray[np.int64]
    slots: NDArray[np.int64]
    reuse: NDArray[np.int64]
    never: int

    @property
    def imbalance(self) -> float:
        """Accesses of the busiest slot range over the mean, over the whole run."""
        total = self.slots.sum(axis=0)
        return float(total.max() / total.mean()) if total.any() else 1.0


def table_load(
    steps: Iterable[tuple[NDArray[np.integer], NDArray[np.integer]]],
    rows: NDArray[np.int64],
    num_steps: int,
    periods: int = 16,
    slot_ranges: int = 16,
) -> TableLoad:
    """Add up the accesses of a table.

    Args:
        steps: numbers and next-use distances of each step.
        rows: the row of each number.
        num_steps: number of steps.
        periods: number of equal periods of the run, at most num_steps.
        slot_ranges: number of equal slot ranges, at most NUM_SLOTS.
    """
    periods = max(1, min(periods, num_steps))
    slot_range = slot_of_row(rows) * slot_ranges // NUM_SLOTS
    rows_per_step = np.zeros(num_steps, np.int64)
    slots = np.zeros((periods, slot_ranges), np.int64)
    reuse, never = np.zeros(REUSE_BINS, np.int64), 0
    for train_step, (numbers, distances) in enumerate(steps):
        rows_per_step[train_step] = len(numbers)
        period = train_step * periods // num_steps
        slots[period] += np.bincount(slot_range[numbers], minlength=slot_ranges)
        reused = distances[distances != NEVER]
        never += len(distances) - len(reused)
        reuse += np.bincount(np.frexp(reused)[1] - 1, minlength=REUSE_BINS)
    return TableLoad(rows_per_step, slots, reuse, never)


DECODED_CACHE_BYTES = 256 << 20
"""Cache of decoded access lists of one table, for shuffled blocks."""
MERGE_CHUNK_ROWS = 1 << 21
"""Rows that `merge_dictionaries` processes at once."""


def merge_dictionaries(rows: Sequence[NDArray[np.int64]]) -> tuple[list[Array], NDArray[np.int64]]:
    """Merge the numberings of several segments by first use, one slot range at a time.

    Args:
        rows: for each segment the row of each number.

    Returns:
        numbers: for each segment the dataset's number of each of its numbers, int32 if they fit.
        all_rows: the row of each number of the dataset.

    Example:
        >>> numbers, all_rows = merge_dictionaries([np.array([7, 3]), np.array([5, 7])])
        >>> [n.tolist() for n in numbers], all_rows.tolist()
        ([[0, 1], [2, 0]], [7, 3, 5])
    """
    joined = np.concatenate(rows)
    first = np.empty(len(joined), smallest_int_type(len(joined)))  # first position of each row
    for positions in _split_by_slot(joined):
        codes, distinct = number_by_appearance(joined[positions])
        first_of_code = np.empty(len(distinct), np.int64)
        first_of_code[codes[::-1]] = positions[::-1]
        first[positions] = first_of_code[codes]
    new = first == np.arange(len(first), dtype=first.dtype)
    numbers = np.cumsum(new, dtype=first.dtype)
    numbers -= 1
    boundaries = np.cumsum([len(r) for r in rows])[:-1]
    return np.split(numbers[first], boundaries), joined[new]


def smallest_int_type(count: int) -> type[np.signedinteger]:
    """Return int32 if it can hold `count`, int64 otherwise."""
    return np.int32 if count <= np.iinfo(np.int32).max else np.int64


def _split_by_slot(rows: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """Yield the ascending positions of the rows of each slot range."""
    num_ranges = min(NUM_SLOTS, -(-len(rows) // MERGE_CHUNK_ROWS))
    if num_ranges <= 1:
        yield np.arange(len(rows))
        return
    slot_range = np.empty(len(rows), np.int16)
    for start in range(0, len(rows), MERGE_CHUNK_ROWS):
        chunk = slice(start, start + MERGE_CHUNK_ROWS)
        slot_range[chunk] = slot_of_row(rows[chunk]) * num_ranges // NUM_SLOTS
    for index in range(num_ranges):
        yield np.flatnonzero(slot_range == index)


def decoded_cache_for(order: Order, max_bytes: int) -> DecodedFileCache:
    """Return a cache of decoded files; an empty one suffices if blocks are not shuffled."""
    return DecodedFileCache(0 if order.config.shuffle == "none" else max_bytes)


class TableAccesses:
    """Accesses of one table under one order. Not thread-safe.

    Attributes:
        rows: (num_unique_rows,) int64, the table row of each number.
    """

    def __init__(
        self, dataset: Dataset, table: str, order: Order, cache: DecodedFileCache | None = None
    ) -> None:
        """Read the row of each number; access lists are read on demand.

        Args:
            dataset: open dataset.
            table: table name.
            order: global order of the run.
            cache: cache of decoded files, which tables may share.
        """
        used = [has_accesses(dataset, segment, table) for segment in dataset.segments]
        rows = [
            segment.rows(table) if uses else np.empty(0, np.int64)
            for segment, uses in zip(dataset.segments, used, strict=True)
        ]
        maps: list[Array | None] = [None]
        if len(rows) > 1:
            maps[:], self.rows = merge_dictionaries(rows)
        else:
            self.rows = rows[0]
        if cache is None:
            cache = decoded_cache_for(order, DECODED_CACHE_BYTES)
        self._lists = [
            _lists_of(segment, table, numbers, len(self.rows), cache) if uses else None
            for segment, numbers, uses in zip(dataset.segments, maps, used, strict=True)
        ]
        self._order = order

    @property
    def list_lengths(self) -> list[NDArray[np.int64]]:
        """For each segment the number of distinct rows of each training block."""
        return [
            np.zeros(num_blocks, np.int64) if lists is None else lists.lengths()
            for lists, num_blocks in zip(self._lists, self._order.num_blocks, strict=True)
        ]

    def numbers(self, train_step: int) -> NDArray[np.int64]:
        """Return the ascending numbers of a step's rows, its entries."""
        step = self._order.step(train_step)
        lists = self._lists[step.segment]
        if lists is None:
            return np.empty(0, np.int64)
        return union([lists[p] for p in np.sort(step.positions).tolist()]).astype(np.int64)

    def steps(self) -> Iterator[NDArray[np.int64]]:
        """Yield the entries of each step of the run."""
        for train_step in range(self._order.num_steps):
            yield self.numbers(train_step)


def _lists_of(
    segment: Segment, table: str, numbers: Array | None, num_rows: int, cache: DecodedFileCache
) -> ListFiles:
    """Return a segment's access lists in the dataset's numbers."""

    def decode(file: CheckedFile) -> Jagged:
        lists = access_lists(file)
        if numbers is None:
            return Jagged(
                lists.values.astype(smallest_int_type(num_rows), copy=False), lists.offsets
            )
        # the order of first use in the dataset differs from that in the segment
        return sort_each(Jagged(numbers[lists.values], lists.offsets))

    return ListFiles(segment.access_files(table), decode, cache)


def indexed_steps(
    dataset: Dataset, index: Index, table: str, order: Order
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int32]]]:
    """Yield each step's ascending numbers and next-use distances; `index` is that of `order`."""
    distances = index.steps(table)
    for train_step, numbers in enumerate(TableAccesses(dataset, table, order).steps()):
        yield numbers, distances[train_step]


def index_load(dataset: Dataset, table: str, order: Order) -> TableLoad:
    """Return the load of a table; raise SchemaError if the dataset has no index of the order."""
    accesses = TableAccesses(dataset, table, order)
    distances = map(dataset.index_for(order).steps(table).__getitem__, range(order.num_steps))
    return table_load(zip(accesses.steps(), distances, strict=True), accesses.rows, order.num_steps)


# Statistics of tables for TorchRec's sharding planner: a JSON file written by `pipelines`.
#
# Keys are those of TorchRec's `ParameterConstraints` if it has them, with one entry per feature of
# the table in the order of the job. A bag is the lookup of one unique tuple, as in the trainer's
# batches: `pooling_factors` are values per bag and `num_poolings` bags per sample.


HINTS_FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TableHints:
    """Lookup statistics of one table."""

    feature_names: tuple[str, ...]
    """Features of the table."""
    pooling_factors: tuple[float, ...]
    """Mean number of values of a bag, by feature."""
    num_poolings: tuple[float, ...]
    """Bags per sample, by feature; below 1 if samples share them."""
    batch_sizes: tuple[int, ...]
    """Samples of a batch, by feature."""
    num_rows: int
    """Rows of the table."""
    num_unique_rows: int
    """Distinct rows of the whole run."""
    unique_rows_per_step: float
    """Mean number of distinct rows of a step."""
    hot_rows: tuple[tuple[float, float], ...]
    """(fraction of the distinct rows, fraction of all accesses), hottest rows first."""
    lru_misses: tuple[tuple[float, float], ...]
    """(fraction of the table's rows that a cache holds, fraction of repeated accesses that an LRU
    cache of this size misses), ascending, from (0, 1)."""


def write_hints(path: Path, tables: Mapping[str, TableHints]) -> None:
    """Write hints, sorted by table."""
    hints = {name: asdict(tables[name]) for name in sorted(tables)}
    body = {"format": HINTS_FORMAT, "tables": hints}
    path.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")


def read_hints(path: Path) -> Mapping[str, TableHints]:
    """Read hints; raise SchemaError if the file is invalid."""
    try:
        body: Any = json.loads(path.read_text(encoding="utf-8"))
        if body["format"] != HINTS_FORMAT:
            raise ValueError(f"format must be {HINTS_FORMAT}, got {body['format']!r}")
        return from_json(Mapping[str, TableHints], body["tables"])
    except (ValueError, KeyError, TypeError) as error:
        raise SchemaError(
            f"file does not hold sharding hints: {error}; write it with "
            "`python -m pipelines oracle DATASET --hints FILE`",
            file=str(path),
        ) from error

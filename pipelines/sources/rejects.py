"""Rejected rows: their reasons, positions and texts, their counts, and the files in `rejects/`.

The stages of a build pass rejects on as tables of `BUILD_REJECTS_SCHEMA`. A worker writes those of
one range of input positions (`range_keys`), so that the files have the same bytes for any number of
workers and any order. The launcher gets counts by kind of reason and a few examples.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import reduce
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from presage.schemas.dataset.files import decode_parquet
from presage.schemas.dataset.manifest import InputFile
from presage.schemas.layout import REJECTS_SCHEMA
from presage.schemas.storage.location import Entry, Location

T = TypeVar("T")

BUILD_REJECTS_SCHEMA = REJECTS_SCHEMA.append(pa.field("rows_unknown", pa.bool_()))
"""Columns of `rejects/*.parquet`, and whether a reject stands for an unknown number of rows."""
MAX_TEXT = 1000
"""Characters kept of a rejected row."""


@dataclass(frozen=True, slots=True)
class Reject:
    """One row that cannot be used, or a file or the rest of a file that cannot be read.

    Attributes:
        file: relative to the input directory.
        position: row in the file from 0; None for a file.
        reason: one line, with the value after `, got `.
        value: the row as text.
        rows_unknown: whether it stands for an unknown number of rows that could not be read.
    """

    file: str
    position: int | None
    reason: str
    value: str = ""
    rows_unknown: bool = False

    @property
    def location(self) -> str:
        """File and position."""
        return self.file if self.position is None else f"{self.file}:{self.position}"

    def __str__(self) -> str:
        """Return the reason and the location."""
        return f"{self.reason} in {self.location}"


def file_reject(file: str, reason: str) -> Reject:
    """Return the reject of a file, or of a range of its rows, that cannot be read."""
    return Reject(file, None, reason, rows_unknown=True)


def rest_of_file_reject(file: str, row: int, problem: str) -> Reject:
    """Return the reject of the rows of a file from `row` on, which cannot be read."""
    return file_reject(file, f"file could not be read from row {row} on: {problem}")


def sort_key(reject: Reject) -> tuple[str, int, str, str]:
    """Order rejects by file, position, reason and value."""
    position = -1 if reject.position is None else reject.position
    return reject.file, position, reject.reason, reject.value


def rejects_table(rejects: Iterable[Reject]) -> pa.Table:
    """Return rejects as a table, in their order."""
    rows = [{**asdict(reject), "value": reject.value[:MAX_TEXT]} for reject in rejects]
    return pa.Table.from_pylist(rows, schema=BUILD_REJECTS_SCHEMA)


def rejects_from_table(table: pa.Table) -> Iterator[Reject]:
    """Yield the rejects of a table from `rejects_table`."""
    for row in table.to_pylist():
        yield Reject(**row)


def sorted_rejects(tables: Iterable[pa.Table]) -> pa.Table:
    """Return rejects sorted by file and position, without duplicates."""
    table = pa.concat_tables([BUILD_REJECTS_SCHEMA.empty_table(), *tables]).combine_chunks()
    keys = [(name, "ascending", "at_start") for name in table.column_names]
    table = table.take(pc.sort_indices(table, sort_keys=keys))
    if table.num_rows < 2:
        return table
    new = np.zeros(table.num_rows - 1, bool)
    for name in table.column_names:
        column = table[name].combine_chunks()
        column = column.fill_null(-1) if name == "position" else column
        new |= pc.not_equal(column[1:], column[:-1]).to_numpy(zero_copy_only=False)
    return table.filter(pa.array(np.concatenate([[True], new])))


class TooManyRunsError(Exception):
    """Raised when `max_runs` runs do not isolate the bad rows.

    `start` and `end` are the largest range that raises, `cause` an error that it raised.
    """

    def __init__(self, start: int, end: int, cause: Exception) -> None:
        """Store the range and the error."""
        super().__init__(str(cause))
        self.start, self.end, self.cause = start, end, cause


def isolate_bad(
    num_rows: int,
    run: Callable[[int, int], T],
    errors: tuple[type[Exception], ...],
    max_runs: float = math.inf,
) -> tuple[list[tuple[int, T]], list[tuple[int, Exception]]]:
    """Run over ranges of rows, bisected until those on which it raises are isolated.

    Args:
        num_rows: number of rows.
        run: takes the start and the end of a range.
        errors: those that a bad row causes.
        max_runs: largest number of runs.

    Returns:
        The results by the first row of their range, and the errors by row, both ascending.

    Raises:
        TooManyRunsError: the runs do not suffice.

    Example:
        >>> isolate_bad(4, lambda start, end: [1 / x for x in (1, 2, 0, 4)[start:end]],
        ...             (ZeroDivisionError,))
        ([(0, [1.0, 0.5]), (3, [0.25])], [(2, ZeroDivisionError('division by zero'))])
    """
    good: list[tuple[int, T]] = []
    bad: list[tuple[int, Exception]] = []
    ranges = deque([(0, num_rows, Exception())] if num_rows else [])
    num_runs = 0
    while ranges:
        start, end, cause = ranges.popleft()
        if num_runs >= max_runs:
            raise TooManyRunsError(start, end, cause)
        num_runs += 1
        try:
            good.append((start, run(start, end)))
        except errors as error:
            middle = (start + end) // 2
            if middle == start:
                bad.append((start, error))
            else:
                ranges.extend([(start, middle, error), (middle, end, error)])
    return sorted(good, key=itemgetter(0)), sorted(bad, key=itemgetter(0))


def row_texts(rows: pa.Table) -> pa.Array:
    """Return the first `MAX_TEXT` characters of each row as text."""
    return pa.array([str(row)[:MAX_TEXT] for row in python_rows(rows)], pa.string())


def python_rows(table: pa.Table) -> list[dict[str, Any]]:
    """Return rows as Python values; times outside of Python's range become integers.

    Example:
        >>> python_rows(pa.table({"time": pa.array([2**62], pa.timestamp("us"))}))
        [{'time': 4611686018427387904}]
    """
    for index, name in enumerate(table.column_names):
        kind = table[name].type
        if pa.types.is_timestamp(kind) and kind.unit == "ns":  # pandas, if installed, changes these
            try:
                times = table[name].cast(pa.timestamp("us", kind.tz))
            except pa.ArrowInvalid:
                times = table[name].cast(pa.int64())
            table = table.set_column(index, name, times)
    try:
        return table.to_pylist()
    except (OverflowError, ValueError):  # before year 1, or after year 9999
        for index, name in enumerate(table.column_names):
            if pa.types.is_timestamp(table[name].type):
                table = table.set_column(index, name, table[name].cast(pa.int64()))
        return table.to_pylist()


# Counts of rejects by kind of reason.

SHOWN_ROWS = 3
"""Examples kept for each kind of reason."""
MAX_KINDS = 100
"""Kinds of reasons with their own count; rarer ones share the count of `OTHERS`."""
OTHERS = "other reasons"
SHOWN_REASONS = 3
"""Reasons printed at the end of a build."""
SHOWN_CHARACTERS = 200
"""Characters printed of a row."""
WARNING_SHARE = 0.01
"""Share of rejected rows above which the summary is a warning."""
_GROUP_BYTES = 32 << 20
"""Input bytes of the small files whose rejects share one file."""
_RANGE_ROWS = 1 << 18
"""Input rows of a larger file whose rejects go into one file."""
_DIRECTORY = "rejects"


@dataclass(frozen=True, slots=True)
class KindCount:
    """Count of the rejects whose reasons are equal except for the values in them.

    `first` are the first ones by position, at most `SHOWN_ROWS`; `reason` is None if they have
    several.
    """

    count: int
    first: tuple[Reject, ...]
    reason: str | None

    def __add__(self, other: KindCount) -> KindCount:
        first = sorted((*self.first, *other.first), key=sort_key)[:SHOWN_ROWS]
        reason = self.reason if self.reason == other.reason else None
        return KindCount(self.count + other.count, tuple(first), reason)


@dataclass(frozen=True, slots=True)
class RejectCounts:
    """Counts of rejects by kind of reason."""

    num_rejects: int = 0
    """Rejected rows, and rejected samples of rows that yield several."""
    num_rows: int = 0
    """Raw rows that the rejects come from."""
    kinds: Mapping[str, KindCount] = field(default_factory=dict[str, KindCount])
    unread: KindCount | None = None
    """Files and rests of files that could not be read; `rejects/*.parquet` does not record it."""

    def __add__(self, other: RejectCounts) -> RejectCounts:
        kinds = dict(self.kinds)
        for kind, count in other.kinds.items():
            kinds[kind] = kinds[kind] + count if kind in kinds else count
        both = self.unread + other.unread if self.unread and other.unread else None
        return RejectCounts(
            self.num_rejects + other.num_rejects,
            self.num_rows + other.num_rows,
            kinds,
            both or self.unread or other.unread,
        )

    def share(self, num_rows: int) -> float:
        """Return the share of rejected rows, where `num_rows` others yielded samples."""
        return self.num_rows / max(1, self.num_rows + num_rows)

    def by_count(self) -> list[tuple[str, KindCount]]:
        """Return (reason, or kind where reasons differ; count), the most frequent first."""
        pairs = [(count.reason or kind, count) for kind, count in self.kinds.items()]
        return sorted(pairs, key=lambda pair: (-pair[1].count, pair[0]))

    @property
    def first(self) -> tuple[Reject, ...]:
        """The first rejects by position."""
        examples = (reject for count in self.kinds.values() for reject in count.first)
        return tuple(sorted(examples, key=sort_key)[:SHOWN_ROWS])


def rejects_summary(counts: RejectCounts, num_rows: int, path: str) -> dict[str, Any]:
    """Return share, most frequent reasons and path; `num_rows` other rows yielded samples."""
    reasons = [
        {
            "reason": reason,
            "count": kind.count,
            "file": kind.first[0].file,
            "row": kind.first[0].position,
            "value": kind.first[0].value[:SHOWN_CHARACTERS],
        }
        for reason, kind in counts.by_count()[:SHOWN_REASONS]
    ]
    return {"share": round(counts.share(num_rows), 6), "reasons": reasons, "path": path}


def summary_lines(counts: RejectCounts, num_rows: int, path: str) -> Iterator[str]:
    """Yield the summary as lines; it is a warning above `WARNING_SHARE`."""
    if not counts.num_rejects:
        return
    summary = rejects_summary(counts, num_rows, path)
    warning = "warning: " if summary["share"] > WARNING_SHARE else ""
    samples = "" if counts.num_rejects == counts.num_rows else f"{counts.num_rejects:,} samples of "
    rows = "1 row" if counts.num_rows == 1 else f"{counts.num_rows:,} rows"
    num_all = counts.num_rows + num_rows
    yield f"{warning}rejected: {samples}{rows} of {num_all:,} ({summary['share']:.2%}); see {path}"
    for reason in summary["reasons"]:
        location = reason["file"] if reason["row"] is None else f"{reason['file']}:{reason['row']}"
        text = f"  {reason['count']:,}: {reason['reason']}; such as {location} {reason['value']}"
        yield text.rstrip()


def count_rejects(table: pa.Table) -> RejectCounts:
    """Count rejects that are sorted by position."""
    if not table.num_rows:
        return RejectCounts()
    reasons = table["reason"].combine_chunks().dictionary_encode()
    kinds = reason_kinds(reasons.dictionary).dictionary_encode()
    codes = kinds.indices.to_numpy()[reasons.indices.to_numpy()]
    order = np.argsort(codes, kind="stable")
    starts = np.flatnonzero(np.diff(codes[order], prepend=-1))
    reasons_differ = np.bincount(kinds.indices.to_numpy()) > 1
    counts: dict[str, KindCount] = {}
    for start, end in zip(starts, [*starts[1:], len(codes)], strict=True):
        kind = int(codes[order[start]])
        rows = table.take(pa.array(order[start : min(end, start + SHOWN_ROWS)]))
        first = tuple(rejects_from_table(rows))
        reason = None if reasons_differ[kind] else first[0].reason
        counts[kinds.dictionary[kind].as_py()] = KindCount(int(end - start), first, reason)
    return _limit_kinds(RejectCounts(table.num_rows, _num_rows(table), counts, _unread(table)))


def _num_rows(table: pa.Table) -> int:
    """Count the distinct rows of rejects; a reject without a position counts as one."""
    positions = table["position"].combine_chunks()
    valid = positions.is_valid()
    files = table["file"].combine_chunks().filter(valid).dictionary_encode().indices
    files, rows = files.to_numpy(), positions.filter(valid).to_numpy()
    is_new = (np.diff(files, prepend=-1) != 0) | (np.diff(rows, prepend=-1) != 0)
    return positions.null_count + int(is_new.sum())


def _unread(table: pa.Table) -> KindCount | None:
    if "rows_unknown" not in table.column_names:
        return None
    rows = table.filter(table["rows_unknown"])
    if not rows.num_rows:
        return None
    return KindCount(rows.num_rows, tuple(rejects_from_table(rows.slice(0, SHOWN_ROWS))), None)


def _limit_kinds(counts: RejectCounts) -> RejectCounts:
    """Add the counts of all but the `MAX_KINDS` most frequent kinds to that of `OTHERS`."""
    ordered = sorted(
        counts.kinds.items(), key=lambda pair: (pair[0] == OTHERS, -pair[1].count, pair[0])
    )
    kinds, rest = dict(ordered[:MAX_KINDS]), [count for _, count in ordered[MAX_KINDS:]]
    if rest:
        total = reduce(KindCount.__add__, rest)
        kinds[OTHERS] = KindCount(total.count, total.first, None)
    return RejectCounts(counts.num_rejects, counts.num_rows, kinds, counts.unread)


def reason_kinds(reasons: pa.Array) -> pa.Array:
    """Return reasons with placeholders for the values after the first `, got ` or colon.

    Example:
        >>> reason_kinds(pa.array(["row must have 6 fields, got 5", "x must be int64, got 'a'"]))[1]
        <pyarrow.StringScalar: "x must be int64, got '...'">
    """
    parts = pc.extract_regex(reasons, r"(?s)^(?P<head>.*?(?:, got |: ))(?P<tail>.*)$")
    tails = pc.struct_field(parts, "tail")
    for pattern, text in ((r"(?s)'.*'", "'...'"), (r'(?s)".*"', '"..."'), (r"\b\d[\d.]*\b", "N")):
        tails = pc.replace_substring_regex(tails, pattern, text)
    heads = pc.struct_field(parts, "head")
    return pc.coalesce(pc.binary_join_element_wise(heads, tails, ""), reasons)


def merge_counts(counts: Iterable[RejectCounts]) -> RejectCounts:
    """Return the sum of counts; it does not depend on their order."""
    return _limit_kinds(reduce(RejectCounts.__add__, counts, RejectCounts()))


# Files in `rejects/`: written by range of positions.


def range_keys(table: pa.Table, listing: Sequence[InputFile]) -> np.ndarray:
    """Return the key of each reject's range of input positions; keys ascend by position.

    Consecutive small files share a range; a large file has one per `_RANGE_ROWS` rows.
    """
    files = table["file"].combine_chunks().dictionary_encode()
    groups = _file_groups(listing)
    names = files.dictionary.to_pylist()
    group, is_large = (np.array([groups[n][i] for n in names], np.int64) for i in (0, 1))
    codes = files.indices.to_numpy()
    rows = table["position"].combine_chunks().fill_null(0).to_numpy() // _RANGE_ROWS
    return (group[codes] << 32) + rows * is_large[codes]


def _file_groups(listing: Sequence[InputFile]) -> dict[str, tuple[int, bool]]:
    """Return the group of each file, and whether the file is large and has its own group."""
    groups: dict[str, tuple[int, bool]] = {}
    group, size = 0, 0
    for file in sorted(listing, key=lambda f: f.path):
        is_large = file.num_bytes > _GROUP_BYTES
        if groups and (is_large or size + file.num_bytes > _GROUP_BYTES):
            group, size = group + 1, 0
        groups[file.path] = group, is_large
        size += file.num_bytes
    return groups


def write_rejects(
    root: Location | Path, range_key: int, tables: Iterable[pa.Table]
) -> RejectCounts:
    """Write all rejects of one range, given in any order; a retry writes the same bytes."""
    rows = sorted_rejects(tables)
    if rows.num_rows:
        group, part = divmod(range_key, 1 << 32)
        path = f"{_DIRECTORY}/{group:05d}-{part:05d}.parquet"
        with (Location.parse(root) / path).new_file() as partial:
            stored = rows.select(REJECTS_SCHEMA.names)
            pq.write_table(stored, partial, compression="zstd", write_page_checksum=True)
    return count_rejects(rows)


def reject_files(root: Location) -> list[Entry]:
    """Return the files of a segment's rejects, sorted, with paths relative to the segment."""
    entries = (root / _DIRECTORY).entries()
    return [replace(e, path=f"{_DIRECTORY}/{e.path}") for e in entries]


def count_segment_rejects(root: Location) -> RejectCounts:
    """Count the rejects of a segment from its files."""
    contents = ((root / entry.path).read_bytes() for entry in reject_files(root))
    return merge_counts(count_rejects(decode_parquet(data)) for data in contents)

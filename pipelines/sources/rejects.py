"""Rejected rows: the reason, the place and the text of each, and the files of `rejects/`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipelines.atomic_files import whole
from schemas.layout import REJECTS_SCHEMA, rejects_path
from schemas.manifest import InputFile

# Rows that could not be used: what the build keeps of them instead of losing them.
#
# Stages hand them on as tables of `FOUND_SCHEMA`; `pipelines/sources/rejects.py` writes them.

FOUND_SCHEMA = REJECTS_SCHEMA.append(pa.field("rows_unknown", pa.bool_()))
"""Rejects on their way: the columns of the files, and whether a reject stands for unread rows."""

MAX_TEXT = 1000
"""Characters kept of a rejected row."""


@dataclass(frozen=True, slots=True)
class Reject:
    """One unusable row, or one unusable file.

    Attributes:
        file: relative to the input directory.
        position: row in the file from 0, or None when the file as a whole is unusable.
        reason: one line, what must hold and what was found.
        value: the row as text.
        rows_unknown: whether it stands for an unknown number of rows: those of a file, or of the
            rest of a file, that could not be read.
    """

    file: str
    position: int | None
    reason: str
    value: str = ""
    rows_unknown: bool = False

    def __str__(self) -> str:
        """Return the reject as one line of an error."""
        place = self.file if self.position is None else f"{self.file}:{self.position}"
        return f"{self.reason} in {place}"


def file_reject(file: str, reason: str) -> Reject:
    """Return the reject of a file, or of a part of one, of which no row can be read."""
    return Reject(file, None, reason, rows_unknown=True)


def unread(file: str, row: int, problem: str) -> Reject:
    """Return the reject of what stands in a file from some row on."""
    reason = f"file must be readable to its end, got none from row {row} on: {problem}"
    return file_reject(file, reason)


def sort_key(reject: Reject) -> tuple[str, int, str, str]:
    """Order rejects by place, whatever worker found them."""
    position = -1 if reject.position is None else reject.position
    return reject.file, position, reject.reason, reject.value


def as_table(rejects: Iterable[Reject]) -> pa.Table:
    """Return rejects as a table, in their order."""
    rows = [{**asdict(reject), "value": reject.value[:MAX_TEXT]} for reject in rejects]
    return pa.Table.from_pylist(rows, schema=FOUND_SCHEMA)


def from_table(table: pa.Table) -> Iterator[Reject]:
    """Undo `as_table`."""
    for row in table.to_pylist():
        yield Reject(**row)


def sorted_rejects(tables: Iterable[pa.Table]) -> pa.Table:
    """Return rejects sorted by place, without repetition."""
    table = pa.concat_tables([FOUND_SCHEMA.empty_table(), *tables]).combine_chunks()
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


def row_texts(rows: pa.Table) -> pa.Array:
    """Return each row as text, at most `MAX_TEXT` characters of it."""
    return pa.array([str(row)[:MAX_TEXT] for row in python_rows(rows)], pa.string())


def python_rows(table: pa.Table) -> list[dict[str, Any]]:
    """Return rows as Python values, times that Python cannot hold as their numbers.

    Example:
        >>> python_rows(pa.table({"time": pa.array([2**62], pa.timestamp("us"))}))
        [{'time': 4611686018427387904}]
    """
    for index, name in enumerate(table.column_names):
        kind = table[name].type
        if pa.types.is_timestamp(kind) and kind.unit == "ns":  # else another with pandas installed
            try:
                times = table[name].cast(pa.timestamp("us", kind.tz))
            except pa.ArrowInvalid:
                times = table[name].cast(pa.int64())
            table = table.set_column(index, name, times)
    try:
        return table.to_pylist()
    except (OverflowError, ValueError):  # before year 1, after 9999, or parts of a microsecond
        for index, name in enumerate(table.column_names):
            if pa.types.is_timestamp(table[name].type):
                table = table.set_column(index, name, table[name].cast(pa.int64()))
        return table.to_pylist()


# The files of `rejects/`: written by workers, counted by kind of reason, numbered at the end.
#
# A worker writes the rejects of one range of places (`places_of`), so that the files hold the
# same bytes whoever found them and in whatever order. The launcher gets counts and a few
# examples.

SHOWN_ROWS = 3
"""Rejects that are kept as examples of a kind of reason."""
MAX_KINDS = 100
"""Kinds of reasons that are counted apart; the rarest others together."""
OTHERS = "other reasons"
SHOWN_REASONS = 3
"""Reasons that are said at the end of a build."""
SHOWN_CHARACTERS = 200
"""Characters of a row that are shown."""
WARNING_SHARE = 0.01
"""Share of rejected rows above which their report is a warning."""

_GROUP_BYTES = 32 << 20
"""Input bytes of the files whose rejects go into one file."""
_RANGE_ROWS = 1 << 18
"""Rows of a larger file whose rejects go into one file."""
_DIRECTORY = "rejects"
_UNNUMBERED = "place-"


@dataclass(frozen=True, slots=True)
class KindCount:
    """Rejects of one kind: equal reasons but for the values in them.

    Attributes:
        count: how many.
        first: the first ones by place, at most `SHOWN_ROWS`.
        reason: of all of them, None when they differ.
    """

    count: int
    first: tuple[Reject, ...]
    reason: str | None

    def __add__(self, other: KindCount) -> KindCount:
        """Return both together."""
        first = sorted((*self.first, *other.first), key=sort_key)[:SHOWN_ROWS]
        same = self.reason if self.reason == other.reason else None
        return KindCount(self.count + other.count, tuple(first), same)


@dataclass(frozen=True, slots=True)
class RejectCounts:
    """How many rejects there are, by kind of reason."""

    num_rejects: int = 0
    """Rows that could not be used, and single samples of rows that give several."""
    num_rows: int = 0
    """Rows of files that they come from."""
    kinds: Mapping[str, KindCount] = field(default_factory=dict[str, KindCount])
    unread: KindCount | None = None
    """Files, and ends of files, that were not read; the files of `rejects/` do not tell."""

    def __add__(self, other: RejectCounts) -> RejectCounts:
        """Return both together."""
        kinds = dict(self.kinds)
        for kind, count in other.kinds.items():
            kinds[kind] = kinds[kind] + count if kind in kinds else count
        unread = self.unread + other.unread if self.unread and other.unread else None
        unread = unread or self.unread or other.unread
        return RejectCounts(
            self.num_rejects + other.num_rejects, self.num_rows + other.num_rows, kinds, unread
        )

    def share(self, num_rows: int) -> float:
        """Return the share of rejected rows.

        Args:
            num_rows: rows that gave samples.
        """
        return self.num_rows / max(1, self.num_rows + num_rows)

    def by_count(self) -> list[tuple[str, KindCount]]:
        """Return (reason, or its kind where the values differ, count), the commonest first."""
        named = [(count.reason or kind, count) for kind, count in self.kinds.items()]
        return sorted(named, key=lambda pair: (-pair[1].count, pair[0]))

    @property
    def first(self) -> tuple[Reject, ...]:
        """The first rejects by place."""
        shown = (reject for count in self.kinds.values() for reject in count.first)
        return tuple(sorted(shown, key=sort_key)[:SHOWN_ROWS])


def shown(counts: RejectCounts, num_rows: int, path: str) -> dict[str, Any]:
    """Return what is said of rejects at the end of a build: share, commonest reasons, the path.

    Args:
        counts: of the rejects.
        num_rows: rows that gave samples.
        path: where the rejects are.
    """
    reasons = [
        {
            "reason": reason,
            "count": counted.count,
            "file": counted.first[0].file,
            "row": counted.first[0].position,
            "value": counted.first[0].value[:SHOWN_CHARACTERS],
        }
        for reason, counted in counts.by_count()[:SHOWN_REASONS]
    ]
    return {"share": round(counts.share(num_rows), 6), "reasons": reasons, "path": path}


def lines_of(counts: RejectCounts, num_rows: int, path: str) -> Iterator[str]:
    """Yield the same as lines; a warning above a share of `WARNING_SHARE`."""
    if not counts.num_rejects:
        return
    summary = shown(counts, num_rows, path)
    warning = "warning: " if summary["share"] > WARNING_SHARE else ""
    of = "" if counts.num_rejects == counts.num_rows else f"{counts.num_rejects:,} samples of "
    rows = "1 row" if counts.num_rows == 1 else f"{counts.num_rows:,} rows"
    yield (
        f"{warning}rejected: {of}{rows}, {summary['share']:.2%} of those that samples are made "
        f"from; see {path}"
    )
    for reason in summary["reasons"]:
        place = reason["file"] if reason["row"] is None else f"{reason['file']}:{reason['row']}"
        text = f"  {reason['count']:,}: {reason['reason']}; such as {place} {reason['value']}"
        yield text.rstrip()


def counted(table: pa.Table) -> RejectCounts:
    """Count rejects that are sorted by place."""
    if not table.num_rows:
        return RejectCounts()
    reasons = table["reason"].combine_chunks().dictionary_encode()
    kinds = kinds_of(reasons.dictionary).dictionary_encode()
    codes = kinds.indices.to_numpy()[reasons.indices.to_numpy()]
    order = np.argsort(codes, kind="stable")
    starts = np.flatnonzero(np.diff(codes[order], prepend=-1))
    several = np.bincount(kinds.indices.to_numpy()) > 1
    kinds_counted: dict[str, KindCount] = {}
    for start, end in zip(starts, [*starts[1:], len(codes)], strict=True):
        kind = int(codes[order[start]])
        rows = table.take(pa.array(order[start : min(end, start + SHOWN_ROWS)]))
        first = tuple(from_table(rows))
        reason = None if several[kind] else first[0].reason
        kinds_counted[kinds.dictionary[kind].as_py()] = KindCount(int(end - start), first, reason)
    return few(RejectCounts(table.num_rows, _num_rows(table), kinds_counted, _unread(table)))


def _num_rows(table: pa.Table) -> int:
    """Return the rows that rejects come from; one without a position is a row of its own."""
    positions = table["position"].combine_chunks()
    valid = positions.is_valid()
    files = table["file"].combine_chunks().filter(valid).dictionary_encode().indices
    files, rows = files.to_numpy(), positions.filter(valid).to_numpy()
    is_new = (np.diff(files, prepend=-1) != 0) | (np.diff(rows, prepend=-1) != 0)
    return positions.null_count + int(is_new.sum())


def _unread(table: pa.Table) -> KindCount | None:
    """Count the rejects that stand for rows that were not read."""
    rows = table.filter(table["rows_unknown"]) if "rows_unknown" in table.column_names else table
    if rows is table or not rows.num_rows:
        return None
    return KindCount(rows.num_rows, tuple(from_table(rows.slice(0, SHOWN_ROWS))), None)


def few(counts: RejectCounts) -> RejectCounts:
    """Return counts of `MAX_KINDS` kinds at most, the rarest ones together."""
    named = sorted(
        counts.kinds.items(), key=lambda pair: (pair[0] == OTHERS, -pair[1].count, pair[0])
    )
    kept, rest = dict(named[:MAX_KINDS]), [count for _, count in named[MAX_KINDS:]]
    if rest:
        together = reduce(KindCount.__add__, rest)
        kept[OTHERS] = KindCount(together.count, together.first, None)
    return RejectCounts(counts.num_rejects, counts.num_rows, kept, counts.unread)


def kinds_of(reasons: pa.Array) -> pa.Array:
    """Return reasons without the values that were found.

    Example:
        >>> kinds_of(pa.array(["row must have 6 fields, got 5", "x must be int64, got 'a'"]))[1]
        <pyarrow.StringScalar: "x must be int64, got '...'">
    """
    halves = pc.split_pattern(reasons, ", got ", max_splits=1)
    texts, starts = halves.flatten(), halves.offsets.to_numpy()
    has_value = pa.array(np.diff(starts) > 1)
    heads = texts.take(pa.array(starts[:-1]))
    tails = texts.take(pa.array(starts[1:] - 1))
    for pattern, text in ((r"(?s)'.*'", "'...'"), (r'(?s)".*"', '"..."'), (r"\b\d[\d.]*\b", "N")):
        tails = pc.replace_substring_regex(tails, pattern, text)
    return pc.if_else(has_value, pc.binary_join_element_wise(heads, tails, ", got "), heads)


def merged(counts: Iterable[RejectCounts]) -> RejectCounts:
    """Return the counts of several files together, in whatever order they come."""
    return few(reduce(RejectCounts.__add__, counts, RejectCounts()))


def places_of(table: pa.Table, listing: Sequence[InputFile]) -> np.ndarray:
    """Return for each reject the range of places that it belongs to, ascending by place.

    Neighbouring small files share a range; a large file has one for every `_RANGE_ROWS` rows.

    Args:
        table: of rejects.
        listing: all input files.
    """
    files = table["file"].combine_chunks().dictionary_encode()
    groups = _groups(listing)
    names = files.dictionary.to_pylist()
    group, is_large = (np.array([groups[n][i] for n in names], np.int64) for i in (0, 1))
    codes = files.indices.to_numpy()
    rows = table["position"].combine_chunks().fill_null(0).to_numpy() // _RANGE_ROWS
    return (group[codes] << 32) + rows * is_large[codes]


def _groups(listing: Sequence[InputFile]) -> dict[str, tuple[int, bool]]:
    """Return for each file the number of its group, and whether it is alone and large."""
    groups: dict[str, tuple[int, bool]] = {}
    group, size = 0, 0
    for file in sorted(listing, key=lambda f: f.path):
        is_large = file.num_bytes > _GROUP_BYTES
        if groups and (is_large or size + file.num_bytes > _GROUP_BYTES):
            group, size = group + 1, 0
        groups[file.path] = group, is_large
        size += file.num_bytes
    return groups


def write_rejects(root: Path, place: int, tables: Iterable[pa.Table]) -> RejectCounts:
    """Write the rejects of one range of places; done again, the file is the same.

    Args:
        root: directory of the segment being built.
        place: from `places_of`.
        tables: all its rejects, in any order.
    """
    rows = sorted_rejects(tables)
    if rows.num_rows:
        with whole(root / _DIRECTORY / f"{_UNNUMBERED}{place:020}.parquet") as partial:
            stored = rows.select(REJECTS_SCHEMA.names)
            pq.write_table(stored, partial, compression="zstd", write_page_checksum=True)
    return counted(rows)


def number_files(root: Path) -> None:
    """Number the files of `write_rejects`; after a crash, a second call completes the work."""
    files = list(reject_files(root))
    left = [path for path in files if path.name.startswith(_UNNUMBERED)]
    for number, path in enumerate(left, len(files) - len(left)):
        path.rename(root / rejects_path(number))


def reject_files(root: Path) -> Iterator[Path]:
    """Yield the files of a segment's rejects in order."""
    yield from sorted((root / _DIRECTORY).glob("*.parquet"))


def counts_of(root: Path) -> RejectCounts:
    """Count the rejects of a segment, file by file."""
    return merged(counted(pq.read_table(path)) for path in reject_files(root))

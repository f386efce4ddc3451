"""A model of a dataset as a table: a dictionary of its days, and what each command makes of it."""

from __future__ import annotations

from collections import Counter
from copy import deepcopy
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

Row = tuple[int, datetime, int, int, int]
COLUMNS = ("session", "time", "user", "item", "label")
DAYS = ("2026-01-01", "2026-01-02", "2026-01-03")
SESSIONS = [7_305_946_000 + number for number in range(5)]
USERS = [9_100_200_300 + number for number in range(3)]
"""Each has one or two sessions."""
NUM_ITEMS = 1000
"""Rows with other items are rejected."""
JOB = """
name: shop
data:
  sources:
    log:
      files: "*.parquet"
      format: parquet
      columns: {session: int64, time: timestamp, user: int64, item: int64, label: int8}
  samples: {map: SELECT * FROM log}
  session: {key: session, time: time}
  split: {evaluation_from: 2026-01-02 12:00:00}
  vocabularies: {users: {columns: [user], num_rows: 50}}
  transforms: {samples: {number: {vocabulary: {name: users, column: user}}}}
  block_samples: 16
  tables:
    items: {features: [item], rows: identity, num_rows: 1000}
    users: {features: [number], rows: identity, num_rows: 50}
  oracle: {batch_samples: 32}
  on_error: reject
train: {batch_samples: 32}
"""
SCHEMA = """
feature { name: "session" type: INT annotation { tag: "kept" } }
feature { name: "time" type: INT annotation { tag: "kept" } }
feature { name: "user" type: INT annotation { tag: "kept" } }
feature { name: "number" type: INT annotation { tag: "sparse" } }
feature { name: "item" type: INT annotation { tag: "sparse" } }
feature { name: "label" type: INT annotation { tag: "label" } }
"""


def _rows_of(day: str, seed: int, num_bad: int) -> list[Row]:
    rng, rows = np.random.default_rng(seed), list[Row]()
    for number in range(40):
        session, item, label = (int(rng.integers(n)) for n in (3, NUM_ITEMS, 2))
        session += DAYS.index(day)  # the third session is in each day
        item += NUM_ITEMS * (number < num_bad)
        time = datetime.fromisoformat(day) + timedelta(minutes=30 * number, seconds=seed)
        rows.append((SESSIONS[session], time, USERS[session // 2], item, label))
    return rows


LOGS = {
    f"{day} {'abc'[version]}": _rows_of(day, 10 * number + version, num_bad=1)
    for number, day in enumerate(DAYS)
    for version in range(3)
} | {f"{DAYS[2]} bad": _rows_of(DAYS[2], 99, num_bad=6)}  # more than the gate accepts
"""The day of a log and its version to its rows."""


def write_files(directory: Path) -> Path:
    """Write the job, its schema, and each log in a folder of its name; return the job."""
    (directory / "job.yaml").write_text(JOB)
    (directory / "schema.pbtxt").write_text(SCHEMA)
    for name, rows in LOGS.items():
        columns = dict(zip(COLUMNS, map(list, zip(*rows, strict=True)), strict=True))
        (directory / name).mkdir()
        pq.write_table(pa.table(columns), directory / name / "log.parquet", row_group_size=16)
    return directory / "job.yaml"


@dataclass
class Segment:
    """What is stored of a day.

    Attributes:
        rows: samples, deleted ones included.
        built: day of the model's clock.
        deleted: row to the columns for which it was deleted, each with the day.
        is_rewritten: whether the segment was written again since it was built.
    """

    log: str
    rows: list[Row]
    rejects: list[Row]
    built: int
    deleted: dict[Row, dict[str, int]] = field(default_factory=dict)
    is_rewritten: bool = False


@dataclass
class Table:
    """The model of a dataset.

    Attributes:
        days: its segments.
        erased: logs from which ids were erased, and whose segments are gone.
        epochs: those of its indexes.
    """

    days: dict[str, Segment] = field(default_factory=dict)
    erased: set[str] = field(default_factory=set)
    is_sealed: bool = False
    epochs: set[int] = field(default_factory=lambda: {1})

    def content(self) -> object:
        """Return what a reader of the dataset sees."""
        segments = {
            day: (
                sorted(row for row in segment.rows if row not in segment.deleted),
                len(segment.rows),
                sorted(LOGS[segment.log].index(row) for row in segment.rejects),
                Counter(column for times in segment.deleted.values() for column in times),
            )
            for day, segment in self.days.items()
        }
        return segments, self.is_sealed, self.epochs


class RefusedError(Exception):
    """A command is refused by an error that contains this text."""


@dataclass(frozen=True)
class Append:
    log: str
    day: str
    replaces: bool

    def apply(self, table: Table, now: int) -> None:
        days = {segment.log: day for day, segment in table.days.items()}
        old = table.days.get(self.day)
        rejects = [row for row in LOGS[self.log] if row[3] >= NUM_ITEMS]
        if self.log in days:
            if days[self.log] != self.day:
                raise RefusedError(f"already exists for day {days[self.log]}, not for")
            return
        if self.log in table.erased:
            raise RefusedError("from which ids were erased")
        if old is not None and not self.replaces:
            raise RefusedError("day already exists")
        if old is not None and old.deleted:
            raise RefusedError("segment with tombstones cannot be replaced")
        if table.is_sealed:
            raise RefusedError("dataset is sealed")
        if len(rejects) > 0.1 * len(LOGS[self.log]):
            raise RefusedError("segment is refused by the gate")
        if old is not None and old.is_rewritten:
            table.erased.add(old.log)
        rows = [row for row in LOGS[self.log] if row not in rejects]
        table.days[self.day] = Segment(self.log, rows, rejects, now)


@dataclass(frozen=True)
class Erase:
    column: str
    ids: frozenset[int]

    def apply(self, table: Table, now: int) -> None:
        for segment in table.days.values():
            for row in segment.rows:
                if row[COLUMNS.index(self.column)] in self.ids:
                    segment.deleted.setdefault(row, {}).setdefault(self.column, now)


@dataclass(frozen=True)
class Compact:
    """`erase --rewrite`, with ids that are removed from rejects as well; ages are in days."""

    ids: Erase | None
    older_than: int | None
    rejects_older_than: int | None

    def apply(self, table: Table, now: int) -> None:
        ids = self.ids.ids if self.ids else frozenset[int]()
        remaining = dict[str, Segment]()
        for day, old in table.days.items():
            times = [time for each in old.deleted.values() for time in each.values()]
            has_ids = not ids.isdisjoint(value for row in old.rejects for value in row)
            is_due, is_expired = False, False
            if self.older_than is not None:
                is_due = has_ids or now - min(times, default=now + 1) >= self.older_than
            if self.rejects_older_than is not None:
                is_expired = bool(old.rejects) and now - old.built >= self.rejects_older_than
            remaining[day] = new = deepcopy(old)
            new.is_rewritten |= is_due or is_expired
            if is_due:
                columns = {
                    COLUMNS.index(column) for each in old.deleted.values() for column in each
                }
                texts = ids | {row[column] for row in old.deleted for column in columns}
                new.rows = [row for row in old.rows if row not in old.deleted]
                new.rejects = [row for row in old.rejects if texts.isdisjoint(row)]
                new.deleted = {}
            if is_expired:
                new.rejects = []
            if not new.rows:
                del remaining[day]
        if not remaining:
            raise RefusedError("all samples of the dataset are deleted")
        table.erased |= {old.log for day, old in table.days.items() if day not in remaining}
        table.days = remaining


@dataclass(frozen=True)
class Vacuum:
    """`vacuum` after some days."""

    days: int

    def apply(self, table: Table, now: int) -> None:
        pass


@dataclass(frozen=True)
class Seal:
    is_sealed: bool

    def apply(self, table: Table, now: int) -> None:
        table.is_sealed = self.is_sealed


@dataclass(frozen=True)
class Reindex:
    """Build an index of two epochs."""

    def apply(self, table: Table, now: int) -> None:
        table.epochs = {1, 2}


Command = Append | Erase | Compact | Vacuum | Seal | Reindex

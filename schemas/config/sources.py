"""Sections `data.sources`, `data.sides` and `data.samples` of the job file."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal

from presage.schemas.errors import check_positive, suggest_name

ROW_COLUMNS = {"_file": "string", "_line": "int64", "_day": "date"}
"""Columns that partitions may declare, with their types: path of the file below the input, position
in the file, and day of the segment."""

FormatName = Literal["parquet", "csv", "jsonl", "avro"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceConfig:
    r"""Input files of one format; the keys from `delimiter` on apply to `csv`.

    Example:
        data:
          sources:
            users:
              files: users.tsv
              format: csv
              columns: {user_id: int64, age: float32, name: string}
              delimiter: "\t"
              quote: null
              escape: null
              header: false
              null_values: ["", NA]
    """

    files: str
    """Glob over the paths below the input directory: `*` and `?` match within one folder, `**`
    matches any folders; a file that is reached again through links counts once."""
    format: FormatName
    """`parquet`; `csv`, tab-separated files too; `jsonl`, one JSON object a line; `avro`. Texts may
    be compressed with gzip, zstd, bzip2 or xz, whatever their names."""
    columns: Mapping[str, str] | None = None
    """Column name to type (`docs/types.md`), such as `int64`, `string`, `list<int64>`, `timestamp`
    or `"struct<id: int64>"` (in quotes: YAML reads `: ` as a key). Required for `csv`, all columns
    in file order, without lists, and for `jsonl`, the fields to be read; all columns of the files
    when null."""
    partitions: Mapping[str, str] = field(default_factory=dict)
    """Column to type, for values in folder names such as `day=2026-03-01/`, and for `_file:
    string`, `_line: int64` and `_day: date`: the path of the row's file, the position in it, and
    the day of the segment."""
    delimiter: str = ","
    """One ASCII character between fields."""
    quote: str | None = '"'
    """One ASCII character around fields; null if quotes are plain text."""
    escape: str | None = None
    r"""One ASCII character before a quote, or before itself, within quotes, such as `\` of Spark
    and MySQL; null if quotes are written twice there."""
    header: bool = True
    """Whether the first line names the columns; a file with other names is rejected."""
    null_values: tuple[str, ...] = ("",)
    """Texts that mean null; in a string column only the empty one can."""

    @property
    def declared(self) -> Mapping[str, str]:
        """Declared columns: of files, then of folder names."""
        return {**(self.columns or {}), **self.partitions}

    @property
    def folder_columns(self) -> Mapping[str, str]:
        """Columns whose values are in folder names."""
        return {n: kind for n, kind in self.partitions.items() if n not in ROW_COLUMNS}

    def __post_init__(self) -> None:
        if self.format in ("csv", "jsonl") and not self.columns:
            raise ValueError(f"columns is missing; name every column of a {self.format} source")
        for key in ("delimiter", "quote", "escape"):
            mark = getattr(self, key)
            allowed = "one ASCII character" + ("" if key == "delimiter" else " or null")
            if (mark is not None and not re.fullmatch(r"[\0-\x7f]", mark)) or mark in ("\r", "\n"):
                raise ValueError(f"{key} must be {allowed}, got {mark!r}; write it in quotes")
            if mark == self.delimiter and key != "delimiter":
                raise ValueError(f"{key} must not be the delimiter, got {mark!r}; change one")
        for name in self.partitions:
            if name in (self.columns or {}):
                raise ValueError(f"columns and partitions both have {name!r}; remove it from one")
            kind = ROW_COLUMNS.get(name, self.partitions[name])
            if self.partitions[name] != kind:
                raise ValueError(f"partitions must have {name!r} as {kind}; write {name}: {kind}")
        for name, kind in (self.columns or {}).items():
            if self.format == "csv" and kind.strip().startswith("list<"):
                raise ValueError(
                    f"columns of a csv source must not be lists, got {kind!r} for {name!r}; "
                    "declare a string and split it in SQL"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class PerConfig:
    """SQL over all rows of one key."""

    key: str
    """Column that every source has; its values group the rows."""
    sql: str
    """A SELECT over the sources, run once per value of `key`; window functions see the rows of one
    value only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SideConfig(SourceConfig):
    r"""A side table: rows looked up by a key. The keys besides `key` and `time` are a source's.

    Example:
        data:
          sides:
            articles:
              files: articles.tsv
              format: csv
              columns: {id: int64, category: string, price: float32}
              delimiter: "\t"
              quote: null
              escape: null
              header: false
              null_values: ["", NA]
              key: id
    """

    key: str
    """Column that is looked up, without duplicates unless `time` is set; integers match at any
    width, other types must be equal."""
    time: str | None = None
    """Timestamp column from which on a row is valid; rows are always valid when null."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinConfig:
    """A look-up of every sample in a side table, after the SQL; a missing key gives nulls."""

    side: str
    """Name of the side table."""
    key: str | None = None
    """Column of the samples that is looked up; the side table's key column when null."""
    as_of: str | None = None
    """Timestamp column of the samples, for a side table with `time`: the newest row that is not
    after it is used; `session.time` when null."""
    columns: Mapping[str, str] | tuple[str, ...] | None = None
    """Columns to add, as a list, or as new name to column; all but key and time when null."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventsConfig:
    """Labels from a separate stream of events, joined to the sample source before any SQL."""

    source: str
    """The source of the events; `samples.source` has the features."""
    key: tuple[str, ...]
    """Columns of both, equal for a row of features and its events, such as `[request_id]`."""
    shard: str | None = None
    """Column of both by which they are sharded: the session key, if events have it, which saves a
    shuffle; the first of `key` when null."""
    time: str
    """Timestamp column of the features."""
    event_time: str | None = None
    """Timestamp column of the events; the name of `time` when null."""
    label_wait: timedelta
    """Longest time between features and a matching event (an earlier event matches, too); later
    events are written to `late/`."""
    columns: Mapping[str, float | None]
    """Columns to take from the event, each with its value for features without one."""
    label_time: str | None = None
    """New column with the time of the matching event; none when null."""
    without_event: Literal["keep", "drop"] = "keep"
    """Whether features without a matching event are kept or dropped."""
    duplicates: Literal["first", "last", "any"] = "first"
    """Which of several events is used: `first` or `last` by time, or `any`: of each column the
    largest value."""

    def __post_init__(self) -> None:
        if not self.key:
            raise ValueError("key is empty; name a column, such as [request_id]")
        if not self.columns:
            raise ValueError("columns is empty; name a column, such as {clicked: 0}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SqlLimitsConfig:
    """Limits of one SQL statement on one chunk of rows; beyond them, the build fails.

    A chunk is at most 65,536 rows, or a whole key, however many rows it has.

    Example:
        data:
          samples:
            map: SELECT * FROM log
            limits: {time: 60s, memory: 1GiB}
    """

    time: timedelta = timedelta(minutes=5)
    """Time limit of a statement."""
    memory: int = 4 << 30
    """Memory of a statement in DuckDB, and bytes of its result, at least 16MiB; nothing is spilled
    to disk."""

    def __post_init__(self) -> None:
        check_positive(self, "time")
        if self.memory < 16 << 20:
            raise ValueError(f"memory must be at least 16MiB, got {self.memory}; write 1GiB")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplesConfig:
    """How raw rows become samples: by `map`, by `per`, or by both."""

    map: str | None = None
    """Row-local SELECT from the one source, or from the table `per`, the result of `per.sql`: a
    row's output depends only on that row."""
    per: PerConfig | None = None
    """SELECT run once per value of a key, over all its rows of one or several sources."""
    source: str | None = None
    """The source whose rows become samples; required with several sources."""
    joins: tuple[JoinConfig, ...] = ()
    """Look-ups of every sample in side tables, one after the other."""
    events: EventsConfig | None = None
    """Labels from a separate stream, joined before any SQL."""
    limits: SqlLimitsConfig = field(default_factory=SqlLimitsConfig)
    """Limits of a statement on one chunk of rows."""

    def __post_init__(self) -> None:
        if self.map is None and self.per is None:
            raise ValueError("map and per are both missing; add one")


def check_sources(
    sources: Mapping[str, SourceConfig],
    samples: SamplesConfig,
    sides: Mapping[str, SideConfig],
    of_histories: Container[str] = (),
) -> None:
    """Raise ValueError if samples, joins or events name an undeclared or unsuitable source."""
    if not sources:
        raise ValueError("sources is empty; add a source")
    if samples.source is None and len(sources) > 1:
        raise ValueError(f"samples.source is missing; name one of {', '.join(sources)}")
    named = {"samples.source": samples.source}
    if samples.events is not None:
        named["samples.events.source"] = samples.events.source
    for key, name in named.items():
        if name is not None and name not in sources:
            raise ValueError(f"{key} must be a source, got {name!r}; {suggest_name(name, sources)}")
    _check_events({n: s for n, s in sources.items() if n not in of_histories}, samples)
    for name in sides:
        if name in sources:
            raise ValueError(f"sides must not have the name of a source, got {name!r}; rename it")
    for index, join in enumerate(samples.joins):
        if join.side not in sides:
            raise ValueError(
                f"samples.joins[{index}].side must be a side table, got {join.side!r}; "
                f"{suggest_name(join.side, sides) if sides else 'add it to data.sides'}"
            )


def _check_events(sources: Mapping[str, SourceConfig], samples: SamplesConfig) -> None:
    events = samples.events
    joined = len(sources) - (events is not None)
    if samples.per is None and joined > 1:
        raise ValueError(
            f"samples.map must read one source, got {joined}; use samples.per to join them"
        )
    if events is None:
        return
    if events.source == samples.source:
        raise ValueError(
            f"samples.events.source must be another source, got {events.source!r}, which has the "
            "features; name the source of the events"
        )
    shard = events.shard or events.key[0]
    if samples.per is not None and samples.per.key != shard:
        raise ValueError(
            f"samples.per.key must be the shard of the events, got {samples.per.key!r} and "
            f"{shard!r}; set samples.events.shard"
        )

"""Sections `data.sources`, `data.sides` and `data.samples` of the job file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal

from schemas.errors import check_positive, suggest_name

ROW_COLUMNS = {"_file": "string", "_line": "int64", "_day": "date"}
"""Columns that partitions may declare, with their types: path of the file below the input, position
in the file, and day of the segment."""

FormatName = Literal["parquet", "csv", "jsonl", "avro"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceConfig:
    """Input files of one format."""

    files: str
    """Glob below the input directory, such as `day/*.parquet`; `**` matches any folders."""
    format: FormatName
    """`csv` also reads tab-separated files; `jsonl` is one JSON object a line."""
    columns: Mapping[str, str] | None = None
    """Column name to Arrow type (`int64`, `string`, `list<int64>`, `timestamp`); all columns
    of a Parquet or Avro file when null; required for `jsonl`, and for `csv` in file order."""
    partitions: Mapping[str, str] = field(default_factory=dict)
    """Column to Arrow type, for values in folder names such as `day=2026-03-01/`, and those of
    `ROW_COLUMNS`."""
    delimiter: str = ","
    """One character between CSV fields."""
    quote: str | None = '"'
    """One character around CSV fields; null if quotes are plain text."""
    escape: str | None = None
    r"""One character before a quote, or itself, within quotes, such as `\` of Spark and MySQL; null
    if quotes are written twice there."""
    header: bool = True
    """Whether the first line of a CSV file names its columns."""
    null_values: tuple[str, ...] = ("",)
    """CSV texts that mean null; in a string column only the empty text."""

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
    """Column of every source; the rows of one value form the relations of `sql`."""
    sql: str
    """A SELECT whose tables are the sources; window functions see a single key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SideConfig(SourceConfig):
    """A side table: rows looked up by a key."""

    key: str
    """Key column; unique without `time`."""
    time: str | None = None
    """Timestamp column: a row is valid from this time on; always valid when null."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinConfig:
    """A left join of the samples with a side table, after the SQL."""

    side: str
    key: str | None = None
    """Key column of the samples; the side table's key column when null."""
    as_of: str | None = None
    """Timestamp column of the samples, for a side table with `time`: the newest row at or before it
    is joined; `session.time` when null."""
    columns: Mapping[str, str] | tuple[str, ...] | None = None
    """Columns to join, or new name to column; all but key and time when null. Samples without a
    match get nulls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventsConfig:
    """A second stream of events, joined to the rows of the sample source as labels."""

    source: str
    """Source of the events; the sample source has the features."""
    key: tuple[str, ...]
    """Join columns of both streams, such as `[request_id]`."""
    shard: str | None = None
    """Column of both streams by which they are sharded; the session key avoids a second shuffle.
    The first column of `key` when null."""
    time: str
    """Timestamp column of the features."""
    event_time: str | None = None
    """Timestamp column of the events; the name of `time` when null."""
    label_wait: timedelta
    """Longest delay of an event after its features; later events go to `late/`."""
    columns: Mapping[str, float | None]
    """Columns to join from the event, with their values for features without an event."""
    label_time: str | None = None
    """New column with the time of the joined event; none when null."""
    without_event: Literal["keep", "drop"] = "keep"
    """Whether features without an event are kept."""
    duplicates: Literal["first", "last", "any"] = "first"
    """Which of several events is joined: by time; `any` takes the largest value of each column."""

    def __post_init__(self) -> None:
        if not self.key:
            raise ValueError("key is empty; name a column, such as [request_id]")
        if not self.columns:
            raise ValueError("columns is empty; name a column, such as {clicked: 0}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SqlLimitsConfig:
    """Limits of one SQL statement of the job on one chunk of rows (at most 65,536)."""

    time: timedelta = timedelta(minutes=5)
    """Until its last row."""
    memory: int = 4 << 30
    """Most bytes that DuckDB uses, and of the result; nothing is spilled to disk."""

    def __post_init__(self) -> None:
        check_positive(self, "time")
        if self.memory < 16 << 20:
            raise ValueError(f"memory must be at least 16MiB, got {self.memory}; write 1GiB")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplesConfig:
    """How raw rows become samples: at least one of `map` and `per`."""

    map: str | None = None
    """Row-local SELECT from the one source, or from the result of `per`."""
    per: PerConfig | None = None
    """SELECT run after grouping by a key, over one or several sources."""
    source: str | None = None
    """Source whose rows become samples; optional with a single source."""
    joins: tuple[JoinConfig, ...] = ()
    events: EventsConfig | None = None
    limits: SqlLimitsConfig = field(default_factory=SqlLimitsConfig)
    """Limits of a statement on one chunk of rows; beyond them, the build fails."""

    def __post_init__(self) -> None:
        if self.map is None and self.per is None:
            raise ValueError("map and per are both missing; add one")


def check_sources(
    sources: Mapping[str, SourceConfig], samples: SamplesConfig, sides: Mapping[str, SideConfig]
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
    _check_events(sources, samples)
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

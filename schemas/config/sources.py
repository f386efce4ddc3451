"""Sections `data.sources`, `data.samples` and `data.events` of the job file.

Files, SQL, lookups, event join.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal

from schemas.config.limits import SqlLimitsConfig
from schemas.errors import suggest_name


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceConfig:
    """Files of one kind that the samples are made from."""

    files: str
    """Glob below the input directory, such as `day/*.parquet`; `**` stands for any folders."""
    format: Literal["parquet", "csv", "jsonl", "avro"]
    """`csv` also reads tab-separated files; `jsonl` is one JSON object a line."""
    columns: Mapping[str, str] | None = None
    """Column name to Arrow type (`int64`, `string`, `list<int64>`, `timestamp`); all columns
    of a Parquet or Avro file when absent; must be given for `jsonl`, for `csv` in file order."""
    partitions: Mapping[str, str] = field(default_factory=dict)
    """Column to Arrow type, of values that are in folder names such as `day=2026-03-01/`."""
    delimiter: str = ","
    """One character between CSV fields."""
    quote: str | None = '"'
    """One character around CSV fields, or null when quotes are plain text."""
    header: bool = True
    """Whether the first line of a CSV file names its columns."""
    null_values: tuple[str, ...] = ("",)
    """CSV texts that mean null; in a string column only the empty text can."""

    @property
    def declared(self) -> Mapping[str, str]:
        """Return the declared columns: of files, then of folder names."""
        return {**(self.columns or {}), **self.partitions}

    def __post_init__(self) -> None:
        """Check what one source can know about itself."""
        if self.format in ("csv", "jsonl") and not self.columns:
            raise ValueError(
                f"columns must name every column of a {self.format} source, got none; add them"
            )
        if len(self.delimiter) != 1:
            raise ValueError(f"delimiter must be one character, got {self.delimiter!r}; quote it")
        if self.quote is not None and len(self.quote) != 1:
            raise ValueError(f"quote must be one character or null, got {self.quote!r}; quote it")
        if self.quote == self.delimiter:
            raise ValueError(f"quote must not be the delimiter, got {self.quote!r}; change one")
        for name in self.partitions:
            if name in (self.columns or {}):
                raise ValueError(
                    f"column {name!r} is in `columns` and in `partitions`; remove it from one"
                )
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
    """Column that every source has; all rows of one value form the relations of `sql`."""
    sql: str
    """A SELECT whose tables are the sources; window functions see one key only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SideConfig(SourceConfig):
    """A side table: rows that are looked up by a key."""

    key: str
    """Column that is looked up; without `time`, no two rows may have the same value."""
    time: str | None = None
    """Timestamp column from which on a row holds; rows always hold when null."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinConfig:
    """One look-up of every sample in a side table, after the SQL."""

    side: str
    """Name of the side table."""
    key: str | None = None
    """Column of the samples that is looked up; the side table's key column when null."""
    as_of: str | None = None
    """Timestamp column of the samples: of a side table with `time`, the newest row that is not
    after it is taken; `session.time` when null."""
    columns: Mapping[str, str] | tuple[str, ...] | None = None
    """Columns to take, or new name to column; all but key and time when null. Samples that find
    no row have nulls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventsConfig:
    """A second stream whose events are joined to the rows of the sample source: their labels."""

    source: str
    """The source of the events; the sample source has the features."""
    key: tuple[str, ...]
    """Columns of both, equal for a row of features and its events, such as `[request_id]`."""
    shard: str | None = None
    """Column of both by which the streams are sharded, the session key if they have it, so that
    clustering moves nothing again; the first column of `key` when null."""
    time: str
    """Timestamp column of the features."""
    event_time: str | None = None
    """Timestamp column of the events; the name of `time` when null."""
    label_wait: timedelta
    """An event counts that comes at most so long after its features; others go to `late/`."""
    columns: Mapping[str, float | None]
    """Columns to take from the event, each with its value for features without one."""
    label_time: str | None = None
    """New column with the time of the event that counted; none when null."""
    without_event: Literal["keep", "drop"] = "keep"
    """What happens to features that no event belongs to."""
    duplicates: Literal["first", "last", "any"] = "first"
    """Which of several events counts: by time, or of each column the largest value."""

    def __post_init__(self) -> None:
        """Refuse events that could not be told apart or that bring nothing."""
        if not self.key:
            raise ValueError("key must name a column, got none; write [request_id]")
        if not self.columns:
            raise ValueError("columns must name a column, got none; write {clicked: 0}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplesConfig:
    """How raw rows become samples: at least one of `map` and `per`."""

    map: str | None = None
    """Row-local SELECT from the one source, or from `per`: a row's output depends only on it."""
    per: PerConfig | None = None
    """SELECT run after grouping by a key, over one or several sources."""
    source: str | None = None
    """The source whose rows become samples; may be absent when there is only one source."""
    joins: tuple[JoinConfig, ...] = ()
    """Look-ups in side tables, one after the other."""
    events: EventsConfig | None = None
    """Labels that come in a stream of their own."""
    limits: SqlLimitsConfig = field(default_factory=SqlLimitsConfig)
    """What a statement may take for one chunk of rows; beyond, the build ends."""

    def __post_init__(self) -> None:
        """Refuse samples without SQL."""
        if self.map is None and self.per is None:
            raise ValueError("map must be given, or per, got none; add one")


def check_sources(
    sources: Mapping[str, SourceConfig], samples: SamplesConfig, sides: Mapping[str, SideConfig]
) -> None:
    """Check that the samples are made from sources that there are.

    Raises:
        ValueError: naming the key that does not fit.
    """
    if not sources:
        raise ValueError("sources must name at least one source, got none; add one")
    if samples.source is None and len(sources) > 1:
        raise ValueError(f"samples.source must name one of {', '.join(sources)}, got none; add it")
    for key, name in _named_sources(samples):
        if name not in sources:
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


def _named_sources(samples: SamplesConfig) -> list[tuple[str, str]]:
    found = [("samples.source", samples.source)]
    if samples.events is not None:
        found.append(("samples.events.source", samples.events.source))
    return [(key, name) for key, name in found if name is not None]


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

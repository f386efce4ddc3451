"""The part of the job file that says what the samples are made from: files, SQL, joins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from schemas.errors import nearest


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
    delimiter: str = ","
    """One character between CSV fields."""
    quote: str | None = '"'
    """One character around CSV fields, or null when quotes are plain text."""
    header: bool = True
    """Whether the first line of a CSV file names its columns."""
    null_values: tuple[str, ...] = ("",)
    """CSV texts that mean null; in a string column only the empty text can."""

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
class SamplesConfig:
    """How raw rows become samples. Exactly one of `map` and `per`."""

    map: str | None = None
    """Row-local SELECT from the one source: a row's output depends only on that row."""
    per: PerConfig | None = None
    """SELECT run after grouping by a key, over one or several sources."""
    source: str | None = None
    """The source whose rows become samples; may be absent when there is only one source."""

    def __post_init__(self) -> None:
        """Refuse both and neither."""
        if (self.map is None) == (self.per is None):
            given = "none" if self.map is None else "both"
            raise ValueError(f"map must be given, or per, got {given}; keep exactly one")


def check_sources(sources: Mapping[str, SourceConfig], samples: SamplesConfig) -> None:
    """Check that the samples are made from sources that there are.

    Raises:
        ValueError: naming the key that does not fit.
    """
    if not sources:
        raise ValueError("sources must name at least one source, got none; add one")
    if samples.source is None and len(sources) > 1:
        raise ValueError(f"samples.source must name one of {', '.join(sources)}, got none; add it")
    if samples.source is not None and samples.source not in sources:
        raise ValueError(
            f"samples.source must be a source, got {samples.source!r}; "
            f"{nearest(samples.source, sources)}"
        )
    if samples.map is not None and len(sources) > 1:
        raise ValueError(
            f"samples.map must read one source, got {len(sources)}; use samples.per to join them"
        )

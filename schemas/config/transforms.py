"""Sections `data.transforms` and `data.vocabularies` of the job file.

A transform adds a column, computed once per unique tuple. It is a SQL expression or one of the
kinds below. `vocabulary`, `normalize` and `bucketize: {quantiles}` are fitted on the training range
of the first segment, and the fitted values are stored with the dataset.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from presage.schemas.errors import check_at_least, suggest_name
from presage.schemas.hashing import MAX_ROW

MAX_QUANTILES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class HashConfig:
    """Ids from the stable hash of one or several columns."""

    columns: tuple[str, ...]
    """Numbers, times or texts; several are hashed together, and one of them may be a list, each
    value of which is hashed with the other columns."""
    num_rows: int
    """Ids are in [0, `num_rows`), up to 2**63."""
    salt: str | None = None
    """Columns with the same salt give equal values the same id."""

    def __post_init__(self) -> None:
        if not self.columns:
            raise ValueError("columns is empty; name at least one column")
        _check_rows(self.num_rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossConfig:
    """Ids from the stable hash of a pair of features."""

    columns: tuple[str, ...]
    """Two columns; one may be a list, each value of which is crossed with the other column."""
    num_rows: int
    """Ids are in [0, `num_rows`), up to 2**63."""
    salt: str | None = None
    """Crosses with the same salt give equal pairs the same id."""

    def __post_init__(self) -> None:
        if len(self.columns) != 2 or self.columns[0] == self.columns[1]:
            raise ValueError(
                f"columns must name two columns, got {list(self.columns)}; use hash for others"
            )
        _check_rows(self.num_rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularyLookupConfig:
    """Rows of the values in a vocabulary, for a table with `rows: identity`."""

    name: str
    """One of `data.vocabularies`."""
    column: str
    """Whole numbers or texts, or a list of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TruncateConfig:
    """A list, truncated."""

    column: str
    """A list."""
    count: int
    """Number of values to keep: the first ones with `first`, the last ones with `last`."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "count")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipConfig:
    """Numbers clipped to a range; at least one of the bounds."""

    column: str
    """Numbers, or a list of them."""
    minimum: float | None = None
    """Lower bound, which smaller numbers become; none when null."""
    maximum: float | None = None
    """Upper bound, which larger numbers become; none when null."""

    def __post_init__(self) -> None:
        low, high = self.minimum, self.maximum
        if low is None and high is None:
            raise ValueError("minimum and maximum are both missing; add one")
        if low is not None and high is not None and low > high:
            raise ValueError(f"minimum must be at most maximum, got {low} and {high}; swap them")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """ln(offset + max(x, 0))."""

    column: str
    """Numbers, or a list of them; a negative one counts as 0."""
    offset: float = 1.0
    """Added before the logarithm; above 0."""

    def __post_init__(self) -> None:
        if not self.offset > 0:
            raise ValueError(f"offset must be larger than 0, got {self.offset}; write 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class NormalizeConfig:
    """Numbers scaled by statistics of the training range."""

    column: str
    """Numbers, or a list of them."""
    by: Literal["mean_std", "min_max"] = "mean_std"
    """`mean_std`: (x - mean) / standard deviation; `min_max`: (x - min) / (max - min)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketizeConfig:
    """The number of boundaries that are at most x. Exactly one of `boundaries` and `quantiles`."""

    column: str
    """Numbers, or with `boundaries` a list of them."""
    boundaries: tuple[float, ...] | None = None
    """Boundaries in ascending order."""
    quantiles: int | None = None
    """Number of buckets of about equal size in the training range, 2 to 4096."""

    def __post_init__(self) -> None:
        if (self.boundaries is None) == (self.quantiles is None):
            given = "none" if self.boundaries is None else "both"
            raise ValueError(f"boundaries or quantiles must be given, got {given}; keep one")
        bounds = self.boundaries
        if bounds is not None and (not bounds or list(bounds) != sorted(set(bounds))):
            raise ValueError(f"boundaries must ascend, got {list(bounds)}; sort them")
        if self.quantiles is not None and not 2 <= self.quantiles <= MAX_QUANTILES:
            raise ValueError(f"quantiles must be in [2, 4096], got {self.quantiles}; use 10")


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformConfig:
    """One declared transform: exactly one of the kinds.

    Example:
        data:
          groups:
            user: [user_id, city, age, history]
          vocabularies:
            articles: {columns: [article_id, recent], num_rows: 131072, min_count: 5, oov_rows: 64}
          transforms:
            user:
              recent: {last: {column: history, count: 50}}
              oldest: {first: {column: history, count: 5}}
              recent_rows: {vocabulary: {name: articles, column: recent}}
              city_id: {hash: {columns: [city], num_rows: 10000, salt: city}}
              city_age: {cross: {columns: [city, age], num_rows: 100000, salt: null}}
              adult_age: {clip: {column: age, minimum: 18, maximum: 90}}
              age_scale: {normalize: {column: adult_age, by: mean_std}}
              age_bucket: {bucketize: {column: age, boundaries: [18, 30, 50]}}
              num_recent: len(recent)
            samples:
              article_row: {vocabulary: {name: articles, column: article_id}}
              price_log: {log: {column: price, offset: 1}}
              price_bucket: {bucketize: {column: price, quantiles: 10}}
    """

    hash: HashConfig | None = None
    """Ids from the stable hash of one or several columns."""
    cross: CrossConfig | None = None
    """Ids from the stable hash of a pair of columns."""
    vocabulary: VocabularyLookupConfig | None = None
    """Rows of values in a vocabulary."""
    first: TruncateConfig | None = None
    """The first values of a list."""
    last: TruncateConfig | None = None
    """The last values of a list."""
    clip: ClipConfig | None = None
    """Numbers clipped to a range."""
    log: LogConfig | None = None
    """The logarithm of numbers."""
    normalize: NormalizeConfig | None = None
    """Numbers scaled by statistics of the training range."""
    bucketize: BucketizeConfig | None = None
    """The index of the bucket of numbers."""

    def __post_init__(self) -> None:
        given = [f.name for f in fields(self) if getattr(self, f.name) is not None]
        if len(given) != 1:
            names = ", ".join(f.name for f in fields(self))
            raise ValueError(f"{names} must be given once, got {given}; keep one")

    @property
    def kind(self) -> str:
        """Name of the kind, such as `hash`."""
        return next(f.name for f in fields(self) if getattr(self, f.name) is not None)

    @property
    def config(self) -> Any:
        """Config of the kind."""
        return getattr(self, self.kind)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Columns that the transform reads."""
        config = self.config
        return config.columns if self.kind in ("hash", "cross") else (config.column,)

    def to_mapping(self) -> dict[str, dict[str, Any]]:
        """Return the mapping that declares the transform in a job file, without nulls."""
        given = {f.name: getattr(self.config, f.name) for f in fields(self.config)}
        return {self.kind: {name: value for name, value in given.items() if value is not None}}

    @property
    def needs_fitting(self) -> bool:
        """Whether the transform is fitted on the training range before it can be applied."""
        if self.bucketize is not None:
            return self.bucketize.quantiles is not None
        return self.kind in ("vocabulary", "normalize")


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularyConfig:
    """A vocabulary: one row per value, most frequent first, append-only over segments."""

    columns: tuple[str, ...]
    """Columns whose values are counted, all whole numbers or all texts; may be lists, and results
    of transforms."""
    num_rows: int
    """Total number of rows, those of `oov_rows` included; the rarest values beyond it get no
    entry."""
    min_count: int = 1
    """Least occurrences in the training samples of a segment; a list entry counts in every sample
    that has it."""
    oov_rows: int = 1
    """Number of first rows, shared by hash among values without an entry."""

    def __post_init__(self) -> None:
        if not self.columns:
            raise ValueError("columns is empty; name at least one column")
        check_at_least(self, 1, "min_count", "oov_rows")
        _check_rows(self.num_rows)
        if self.num_rows <= self.oov_rows:
            raise ValueError(
                f"num_rows must be larger than oov_rows, got {self.num_rows} and {self.oov_rows}; "
                "raise it"
            )


Transforms = Mapping[str, Mapping[str, str | TransformConfig]]


def check_vocabularies(
    vocabularies: Mapping[str, VocabularyConfig], transforms: Transforms
) -> None:
    """Raise ValueError if a transform reads an undeclared vocabulary."""
    for group, columns in transforms.items():
        for column, transform in columns.items():
            if isinstance(transform, str) or transform.vocabulary is None:
                continue
            name = transform.vocabulary.name
            if name not in vocabularies:
                advice = suggest_name(name, vocabularies) if vocabularies else "add it"
                raise ValueError(
                    f"transforms.{group}.{column}.vocabulary.name must be one of "
                    f"data.vocabularies, got {name!r}; {advice}"
                )


def num_ids_of_transform(
    transform: str | TransformConfig, vocabularies: Mapping[str, VocabularyConfig]
) -> float:
    """Return n if the ids of a transform are in [0, n); infinite if unknown."""
    if isinstance(transform, str):
        return math.inf
    if transform.kind in ("hash", "cross"):
        return transform.config.num_rows
    if transform.vocabulary is not None:
        return vocabularies[transform.vocabulary.name].num_rows
    if transform.bucketize is not None:
        return transform.bucketize.quantiles or len(transform.bucketize.boundaries or ()) + 1
    return math.inf


def _check_rows(num_rows: int) -> None:
    if not 1 <= num_rows <= MAX_ROW + 1:
        raise ValueError(f"num_rows must be in [1, 2**63], got {num_rows}; lower it")

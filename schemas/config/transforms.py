"""Sections `data.transforms` and `data.vocabularies` of the job file.

Columns computed once per unique tuple.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from schemas.errors import check_at_least_one, suggest_name
from schemas.hashing import MAX_ROW

# Declared transforms of the job file: new columns, made once per unique tuple.
#
# A transform is a SQL text or one of the kinds below. `vocabulary`, `normalize` and `bucketize:
# {quantiles}` learn from the training range of the first segment; what they learned lies with the
# dataset.

MAX_QUANTILES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class HashConfig:
    """Ids from the stable hash of one column, or of several taken together."""

    columns: tuple[str, ...]
    """One or more; at most one of them a list, whose values are hashed each with the others."""
    num_rows: int
    """Ids lie in [0, num_rows); up to 2**63."""
    salt: str | None = None
    """Columns with the same salt give equal values the same id."""

    def __post_init__(self) -> None:
        """Check the columns and the range."""
        if not self.columns:
            raise ValueError("columns must name a column, got none; add one")
        _check_rows(self.num_rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossConfig:
    """Ids from the stable hash of a pair of features."""

    columns: tuple[str, ...]
    """Two; one of them may be a list, whose values are each crossed with the other."""
    num_rows: int
    """Ids lie in [0, num_rows); up to 2**63."""
    salt: str | None = None
    """Crosses with the same salt give equal pairs the same id."""

    def __post_init__(self) -> None:
        """Check the columns and the range."""
        if len(self.columns) != 2 or self.columns[0] == self.columns[1]:
            raise ValueError(
                f"columns must name two columns, got {list(self.columns)}; use hash for others"
            )
        _check_rows(self.num_rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularyLookupConfig:
    """Rows of the values in a vocabulary."""

    name: str
    """One of `data.vocabularies`."""
    column: str
    """Whole numbers or texts, one or a list."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TruncateConfig:
    """A list with at most some values."""

    column: str
    """A list."""
    count: int
    """Most values that stay."""

    def __post_init__(self) -> None:
        """Check the count."""
        check_at_least_one(self, "count")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipConfig:
    """Numbers moved into a range."""

    column: str
    """Numbers, one or a list."""
    minimum: float | None = None
    """Smaller numbers become this; open when null."""
    maximum: float | None = None
    """Larger numbers become this; open when null."""

    def __post_init__(self) -> None:
        """Check that there is a range."""
        low, high = self.minimum, self.maximum
        if low is None and high is None:
            raise ValueError("minimum must be given, or maximum, got none; add one")
        if low is not None and high is not None and low > high:
            raise ValueError(f"minimum must be at most maximum, got {low} and {high}; swap them")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """ln(offset + x); a negative x counts as 0."""

    column: str
    """Numbers, one or a list."""
    offset: float = 1.0
    """Larger than 0, so that the logarithm is finite."""

    def __post_init__(self) -> None:
        """Check the offset."""
        if not self.offset > 0:
            raise ValueError(f"offset must be larger than 0, got {self.offset}; write 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class NormalizeConfig:
    """Numbers brought to one scale, by what the training range holds."""

    column: str
    """Numbers, one or a list."""
    by: Literal["mean_std", "min_max"] = "mean_std"
    """`mean_std`: (x - mean) / standard deviation; `min_max`: (x - min) / (max - min)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketizeConfig:
    """The number of boundaries that are at most x. Exactly one of `boundaries` and `quantiles`."""

    column: str
    """Numbers; one, or a list when the boundaries are given."""
    boundaries: tuple[float, ...] | None = None
    """Ascending."""
    quantiles: int | None = None
    """Buckets of about equal size in the training range, 2 to 4096."""

    def __post_init__(self) -> None:
        """Check the boundaries."""
        if (self.boundaries is None) == (self.quantiles is None):
            given = "none" if self.boundaries is None else "both"
            raise ValueError(f"boundaries must be given, or quantiles, got {given}; keep one")
        bounds = self.boundaries
        if bounds is not None and (not bounds or list(bounds) != sorted(set(bounds))):
            raise ValueError(f"boundaries must ascend, got {list(bounds)}; sort them")
        if self.quantiles is not None and not 2 <= self.quantiles <= MAX_QUANTILES:
            raise ValueError(f"quantiles must be in [2, 4096], got {self.quantiles}; use 10")


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformConfig:
    """One declared transform: exactly one of the kinds."""

    hash: HashConfig | None = None
    """Stable hash of columns to ids of a table."""
    cross: CrossConfig | None = None
    """Stable hash of a pair of features."""
    vocabulary: VocabularyLookupConfig | None = None
    """Index into a vocabulary."""
    first: TruncateConfig | None = None
    """The first values of a list."""
    last: TruncateConfig | None = None
    """The last values of a list."""
    clip: ClipConfig | None = None
    """Numbers moved into a range."""
    log: LogConfig | None = None
    """Logarithm."""
    normalize: NormalizeConfig | None = None
    """Mean and deviation, or range, brought to 0 and 1."""
    bucketize: BucketizeConfig | None = None
    """Index of the bucket that a number falls into."""

    def __post_init__(self) -> None:
        """Refuse none and several."""
        given = [f.name for f in fields(self) if getattr(self, f.name) is not None]
        if len(given) != 1:
            names = ", ".join(f.name for f in fields(self))
            raise ValueError(f"{names} must be given once, got {given}; keep exactly one")

    @property
    def kind(self) -> str:
        """Name of the kind that is given."""
        return next(f.name for f in fields(self) if getattr(self, f.name) is not None)

    @property
    def config(self) -> Any:
        """What is given for the kind."""
        return getattr(self, self.kind)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Columns that the transform reads."""
        config = self.config
        return config.columns if self.kind in ("hash", "cross") else (config.column,)

    def to_mapping(self) -> dict[str, dict[str, Any]]:
        """Return the transform as it is written in a job file, what is null left out."""
        given = {f.name: getattr(self.config, f.name) for f in fields(self.config)}
        return {self.kind: {name: value for name, value in given.items() if value is not None}}

    @property
    def needs_fitting(self) -> bool:
        """Whether something has to be learned before it can be applied."""
        if self.bucketize is not None:
            return self.bucketize.quantiles is not None
        return self.kind in ("vocabulary", "normalize")


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularyConfig:
    """Values with rows of their own, most frequent first, append-only over segments."""

    columns: tuple[str, ...]
    """Columns whose values are counted, of one type: whole numbers or texts, one or a list."""
    num_rows: int
    """Rows for out-of-vocabulary values and entries together; the rarest beyond stay out."""
    min_count: int = 1
    """Least number of times that a value must occur in a segment's training samples."""
    oov_rows: int = 1
    """Rows 0 to oov_rows - 1, shared by hash among all values that have no entry."""

    def __post_init__(self) -> None:
        """Check the columns and ranges."""
        if not self.columns:
            raise ValueError("columns must name a column, got none; add one")
        check_at_least_one(self, "min_count", "oov_rows")
        _check_rows(self.num_rows)
        if self.num_rows <= self.oov_rows:
            raise ValueError(
                f"num_rows must be larger than oov_rows, got {self.num_rows} and {self.oov_rows}; "
                "raise it"
            )


Transforms = Mapping[str, Mapping[str, str | TransformConfig]]


def check_vocabularies(vocabularies: Mapping[str, VocabularyConfig], made: Transforms) -> None:
    """Refuse a transform that reads a vocabulary which is not there.

    Raises:
        ValueError: naming the transform and the nearest vocabulary.
    """
    for group, columns in made.items():
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
    """Return how many ids a transform can give: they lie in [0, this); infinite if unknown."""
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

"""The job file: one YAML file with the sections `data`, `train` and `schedule`.

Every dataclass field of this package is a key of the file; `docs/job.md` shows each with an
example.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import date, datetime, time, timedelta
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

from schemas.config.parse import parse_yaml, read_yaml
from schemas.config.schedule import ScheduleConfig
from schemas.config.sources import SamplesConfig, SideConfig, SourceConfig, check_sources
from schemas.config.train import TrainConfig
from schemas.config.transforms import (
    TransformConfig,
    Transforms,
    VocabularyConfig,
    check_vocabularies,
)
from schemas.errors import SchemaError, check_at_least, check_positive, suggest_name
from schemas.hashing import MAX_ROW
from schemas.layout import SAMPLE_WEIGHT
from schemas.paths import NAME, check_length, check_names, path_or_url
from schemas.storage.location import Location

MAX_GROUPS = 8
MAX_BLOCK_SAMPLES = 1 << 16
AUTO = "auto"
SAMPLES = "samples"
"""Destination of transforms whose inputs are not all in one dedup group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GateConfig:
    """Limits on a segment as a whole; limits on columns are in the schema."""

    action: Literal["fail", "warn"] = "fail"
    """`fail`: a segment with anomalies is not committed (exit code 3); `warn`: it is."""
    max_reject_fraction: float | None = 0.1
    """Most rejected rows, as a fraction of rejected rows and rows that gave samples; no limit when
    null. The default applies without a `gate`, too."""
    session_drift: float | None = None
    """Largest Jensen-Shannon divergence of samples per session from the previous segment."""
    delay_drift: float | None = None
    """Largest Jensen-Shannon divergence of label delay (`label_time` - time) from it."""
    label_drift: float | None = None
    """Largest relative change of the mean label from it."""
    dedup_drift: float | None = None
    """Largest relative change of a group's dedup factor from it."""

    def __post_init__(self) -> None:
        for name in ("max_reject_fraction", "session_drift", "delay_drift"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise ValueError(f"{name} must be in [0, 1], got {value}; it is a fraction")
        check_at_least(self, 0, "label_drift", "dedup_drift")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingConfig:
    """Downsampling of the negatives of the training range."""

    negatives: float
    """Fraction of the negatives that is kept, in (0, 1]; each gets the weight 1 / fraction."""
    unit: Literal["session", "sample"] = "session"
    """`session`: the negatives of a session key are all kept or all dropped; `sample`: each is
    drawn independently."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.negatives <= 1:
            raise ValueError(
                f"negatives must be in (0, 1], got {self.negatives}; write 0.1 to keep a tenth"
            )
        if not 0 <= self.seed <= MAX_ROW:
            raise ValueError(f"seed must be in [0, 2**63), got {self.seed}; lower it")


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitConfig:
    """Range of samples that is held back for evaluation."""

    evaluation_from: datetime | None = None
    """Samples at or after this time (UTC) are the evaluation split; none when null."""
    evaluation_last: timedelta | None = None
    """Length of the evaluation range at the end of each segment's day, instead of one time for all;
    requires building segments by day."""

    def __post_init__(self) -> None:
        last = self.evaluation_last
        if last is not None and not timedelta() < last < timedelta(days=1):
            raise ValueError(
                f"evaluation_last must be longer than 0s and shorter than a day, got {last}; "
                "write 2h, or null"
            )

    def for_day(self, day: date) -> SplitConfig:
        """Return the split of the segment of a day, midnight to midnight (UTC).

        Example:
            >>> split = SplitConfig(evaluation_last=timedelta(hours=2))
            >>> split.for_day(date(2026, 4, 9)).evaluation_from
            datetime.datetime(2026, 4, 9, 22, 0)
        """
        if self.evaluation_last is None:
            return self
        end = datetime.combine(day, time()) + timedelta(days=1)
        return replace(self, evaluation_from=end - self.evaluation_last)


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionConfig:
    """Definition of a session by columns of the samples."""

    key: str
    """Column with one value per session; samples with null are rejected."""
    time: str
    """Timestamp column that orders the samples of a session."""
    gap: timedelta | None = None
    """A longer pause starts a new session of the same key; no limit when null."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowConfig:
    """The horizon inside which sessions are clustered and shuffled."""

    span: timedelta | None = None
    """Length of a window; the whole segment when null."""

    def __post_init__(self) -> None:
        check_positive(self, "span")


@dataclass(frozen=True, slots=True, kw_only=True)
class TableConfig:
    """One embedding table: its features and how ids become rows."""

    features: tuple[str, ...]
    """Sparse features that share the table."""
    num_rows: int
    """Rows of the table, up to 2**63; rows are allocated on first use."""
    rows: Literal["hash", "identity"] = "hash"
    """`hash`: stable hash of the id, modulo `num_rows`; `identity`: the id is the row, and samples
    with an id outside [0, num_rows) are rejected."""

    def __post_init__(self) -> None:
        if not 1 <= self.num_rows <= MAX_ROW + 1:
            raise ValueError(f"num_rows must be in [1, 2**63], got {self.num_rows}; lower it")


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderConfig:
    """Order in which blocks are trained."""

    shuffle: Literal["none", "blocks"] = "none"
    """`none`: as stored (windows by time, sessions by hash within a window), each batch taken from
    up to eight row groups; `blocks`: in every epoch, the row groups of a segment are permuted, and
    blocks within 16 of them."""
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class OracleConfig:
    """The default index, built with the dataset."""

    batch_samples: int = 4096
    """Samples of a global batch; a multiple of `data.block_samples`."""
    epochs: int = 1
    order: OrderConfig = field(default_factory=OrderConfig)
    """Order of the blocks; the trainer must use the same one."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "batch_samples", "epochs")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateConfig:
    """The synthetic log of `pipelines generate`."""

    num_samples: int = 200_000
    seed: int = 0
    start: datetime = datetime(2026, 1, 1)
    """Start of the log (UTC)."""
    span: timedelta = timedelta(days=2)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Inputs, samples and storage of the dataset."""

    sources: Mapping[str, SourceConfig]
    """Source name, a table in SQL, to files."""
    samples: SamplesConfig
    """SQL, joins and events that turn raw rows into samples."""
    session: SessionConfig
    tables: Mapping[str, TableConfig]
    sides: Mapping[str, SideConfig] = field(default_factory=dict)
    """Side tables by name, for `samples.joins`; small ones are tables in SQL, too."""
    groups: Annotated[Mapping[str, tuple[str, ...]], AUTO] = field(default_factory=dict)
    """Dedup groups: columns that change together, stored once per unique tuple of a block. `auto`,
    kept as `{auto: ()}`, lets the build choose them."""
    transforms: Mapping[str, Mapping[str, str | TransformConfig]] = field(default_factory=dict)
    """Group name (or `samples`) to new columns, each a scalar SQL expression over the columns of
    that group or a declared transform; computed in order, once per unique tuple. Inputs are
    kept."""
    vocabularies: Mapping[str, VocabularyConfig] = field(default_factory=dict)
    sampling: SamplingConfig | None = None
    window: WindowConfig = field(default_factory=WindowConfig)
    split: SplitConfig = field(default_factory=SplitConfig)
    block_samples: int = 1024
    """Samples of a block, a power of two."""
    oracle: OracleConfig = field(default_factory=OracleConfig)
    gate: GateConfig | None = None
    """Limits on a segment, beyond those of the schema."""
    on_error: Literal["reject", "reject_files", "fail", "drop_key"] = "reject"
    """`reject`: unusable rows go to `rejects/` with their reason, and an unreadable file fails the
    build; `reject_files`: an unreadable file is a reject, too; `fail`: the first reject fails the
    build; `drop_key`: as `reject`, and a row that `samples.per` cannot use rejects all rows of its
    key."""
    schema: str = "schema.pbtxt"
    """tensorflow-metadata Schema of the sample columns, beside the job file."""
    generate: GenerateConfig | None = None

    def __post_init__(self) -> None:
        block = self.block_samples
        if not 16 <= block <= MAX_BLOCK_SAMPLES or block & (block - 1):
            raise ValueError(
                f"block_samples must be a power of two in [16, 65536], got {block}; use 1024"
            )
        if self.oracle.batch_samples % block:
            raise ValueError(
                "oracle.batch_samples must be a multiple of block_samples, "
                f"got {self.oracle.batch_samples} and {block}; "
                f"use {max(1, self.oracle.batch_samples // block) * block}"
            )
        check_names("sides", self.sides)
        check_sources(self.sources, self.samples, self.sides)
        if self.on_error == "drop_key" and self.samples.per is None:
            raise ValueError("on_error is drop_key without samples.per; write reject or fail")
        _check_groups(self.groups, self.transforms, [SAMPLE_WEIGHT] if self.sampling else [])
        _check_tables(self.tables)
        check_names("vocabularies", self.vocabularies)
        check_vocabularies(self.vocabularies, self.transforms)

    @property
    def has_auto_groups(self) -> bool:
        """Whether the build chooses the groups."""
        return self.groups == {AUTO: ()}

    @property
    def inputs(self) -> dict[str, SourceConfig]:
        """Sources and side tables."""
        return {**self.sources, **self.sides}

    @property
    def sample_source(self) -> str:
        """Name of the source whose rows become samples."""
        return self.samples.source or next(iter(self.sources))

    @cached_property
    def table_of_feature(self) -> dict[str, str]:
        """Sparse feature name to table name."""
        return {f: name for name, table in self.tables.items() for f in table.features}

    @cached_property
    def derived_columns(self) -> frozenset[str]:
        """Columns added by transforms and sampling."""
        columns = {c for columns in self.transforms.values() for c in columns}
        return frozenset(columns | ({SAMPLE_WEIGHT} if self.sampling is not None else set()))

    @cached_property
    def group_of_column(self) -> dict[str, str]:
        """Deduplicated column name to group name, transforms included."""
        stored = {c: group for group, columns in self.groups.items() for c in columns}
        derived = {
            c: group
            for group, columns in self.transforms.items()
            if group != SAMPLES
            for c in columns
        }
        return stored | derived


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A whole job file."""

    name: str
    """Short name, used in logs, manifests and as the scheduler's folder of the job."""
    data: DataConfig
    train: TrainConfig = field(default_factory=TrainConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)

    def __post_init__(self) -> None:
        """Check the name, which becomes that of a folder."""
        if not NAME.fullmatch(self.name):
            raise ValueError(
                "name must consist of letters, digits, '_' and '-' and not start with '-', got "
                f"{self.name!r}; rename it"
            )
        check_length("name", self.name)


def load_job(path: str | Path | Location) -> Job:
    """Read and check a job file at a path or URL.

    Raises:
        SchemaError: a key or value is invalid; names the file and line.
        StorageError: the store of the URL failed.
    """
    return _checked(read_yaml(path_or_url(path), Job), str(path))


def parse_job(text: str, name: str) -> Job:
    """Read and check the text of a job file; `name` is used in errors.

    Raises:
        SchemaError: a key or value is invalid.
    """
    return _checked(parse_yaml(text, name, Job), name)


def _checked(job: Job, name: str) -> Job:
    batch, block = job.train.batch_samples, job.data.block_samples
    if batch % block:
        raise SchemaError(
            f"train.batch_samples must be a multiple of data.block_samples, got {batch} and "
            f"{block}; use {max(1, batch // block) * block}",
            file=name,
        )
    split = job.data.split
    if split.evaluation_from is not None and split.evaluation_last is not None:
        raise SchemaError(
            "data.split has both evaluation_from and evaluation_last; keep one",
            file=name,
        )
    return job


def _check_groups(
    groups: Mapping[str, tuple[str, ...]],
    transforms: Transforms,
    reserved: Iterable[str],
) -> None:
    if len(groups) > MAX_GROUPS:
        raise ValueError(f"groups must be at most {MAX_GROUPS}, got {len(groups)}; merge some")
    check_names("groups", groups)
    if SAMPLES in groups:
        raise ValueError(f"groups has the reserved name {SAMPLES!r}; rename it")
    if groups == {AUTO: ()}:
        groups = {}
        for group in transforms:
            if group != SAMPLES:
                raise ValueError(
                    f"transforms.{group} names a group, but groups is auto; move it to "
                    f"transforms.{SAMPLES}: it is assigned to the group of its inputs"
                )
    owner: dict[str, str] = {}
    for group, columns in groups.items():
        if not columns:
            raise ValueError(f"groups.{group} is empty; name a column or remove it")
        for column in columns:
            if column in owner:
                raise ValueError(
                    f"groups {owner[column]} and {group} both have column {column!r}; keep one"
                )
            owner[column] = group
    owner.update(dict.fromkeys(reserved, SAMPLES))
    for group, columns in transforms.items():
        if group not in groups and group != SAMPLES:
            raise ValueError(
                f"transforms.{group} names an unknown group; "
                f"{suggest_name(group, [*groups, SAMPLES])}"
            )
        for column in columns:
            if column in owner:
                raise ValueError(f"transforms.{group}.{column} exists already; rename it")
            owner[column] = group


def _check_tables(tables: Mapping[str, TableConfig]) -> None:
    check_names("tables", tables)
    owner: dict[str, str] = {}
    for name, table in tables.items():
        for feature in table.features:
            if feature in owner:
                raise ValueError(
                    f"tables {owner[feature]} and {name} both have feature {feature!r}; keep one"
                )
            owner[feature] = name

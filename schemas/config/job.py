"""The job file: one YAML file with the sections `data`, `train` and `schedule`.

Every dataclass field of this package is a key of the file. `docs/job_reference.md` is generated
from the fields, their docstrings and the examples of the classes; `docs/job.md` has the guides.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import date, datetime, time, timedelta
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

from presage.schemas.config.histories import (
    HistoryConfig,
    check_histories,
    feature_of_history,
)
from presage.schemas.config.parse import parse_yaml, read_yaml
from presage.schemas.config.schedule import ScheduleConfig
from presage.schemas.config.sources import SamplesConfig, SideConfig, SourceConfig, check_sources
from presage.schemas.config.train import TrainConfig
from presage.schemas.config.transforms import (
    TransformConfig,
    Transforms,
    VocabularyConfig,
    check_vocabularies,
)
from presage.schemas.errors import SchemaError, check_at_least, check_positive, suggest_name
from presage.schemas.hashing import MAX_ROW
from presage.schemas.layout import SAMPLE_WEIGHT
from presage.schemas.paths import NAME, check_length, check_names, path_or_url
from presage.schemas.storage.location import Location

MAX_GROUPS = 8
MAX_BLOCK_SAMPLES = 1 << 16
AUTO = "auto"
SAMPLES = "samples"
"""Destination of transforms whose inputs are not all in one dedup group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GateConfig:
    """Conditions for a segment to enter the dataset; those on columns are in the schema.

    Example:
        data:
          gate:
            action: fail
            max_reject_fraction: 0.01
            session_drift: 0.1
            delay_drift: 0.2
            label_drift: 0.25
            dedup_drift: 0.3
    """

    action: Literal["fail", "warn"] = "fail"
    """`fail`: a segment with findings stays out, and the build ends with exit code 3; `warn`:
    findings are recorded, and the segment is committed."""
    max_reject_fraction: float | None = 0.1
    """Largest share of rejected rows, among these and the rows that gave samples (a row that gives
    six samples is one row); no limit when null. Applies without `gate`, too."""
    session_drift: float | None = None
    """Largest Jensen-Shannon divergence, in [0, 1], of samples per session from the previous
    segment; not checked when null."""
    delay_drift: float | None = None
    """Largest Jensen-Shannon divergence, in [0, 1], of label delay (`label_time` minus time) from
    the previous segment; not checked when null."""
    label_drift: float | None = None
    """Largest change of the mean label, relative to the previous segment; not checked when null."""
    dedup_drift: float | None = None
    """Largest change of a group's dedup factor, relative to the previous segment; not checked when
    null."""

    def __post_init__(self) -> None:
        for name in ("max_reject_fraction", "session_drift", "delay_drift"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise ValueError(f"{name} must be in [0, 1], got {value}; it is a fraction")
        check_at_least(self, 0, "label_drift", "dedup_drift")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingConfig:
    """Downsampling of the negatives of the training range.

    Example:
        data:
          sampling: {negatives: 0.1, unit: session, seed: 0}
    """

    negatives: float
    """Share of the negatives that is kept, in (0, 1]; each kept negative gets `sample_weight` 1 /
    `negatives`."""
    unit: Literal["session", "sample"] = "session"
    """`session`: negatives of one session key are all kept or all dropped; `sample`: each is
    selected by itself."""
    seed: int = 0
    """Changes the selection; in [0, 2**63)."""

    def __post_init__(self) -> None:
        if not 0 < self.negatives <= 1:
            raise ValueError(
                f"negatives must be in (0, 1], got {self.negatives}; write 0.1 to keep a tenth"
            )
        if not 0 <= self.seed <= MAX_ROW:
            raise ValueError(f"seed must be in [0, 2**63), got {self.seed}; lower it")


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitConfig:
    """Range of samples that is held back for evaluation; at most one of the two keys.

    Example:
        data:
          split: {evaluation_last: 2h}
    """

    evaluation_from: datetime | None = None
    """Samples at or after this time (UTC) are the evaluation split; none are when null."""
    evaluation_last: timedelta | None = None
    """Length of the range at the end of each segment's day (UTC) that is for evaluation, shorter
    than `1d`; segments must be built with `--day`, all with the same length."""

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
    """Column that is equal for all samples of a session; samples with null are rejected."""
    time: str
    """Timestamp column that orders the samples of a session; may be a whole number if no `gap`,
    `window.span` or `split` needs its unit."""
    gap: timedelta | None = None
    """A longer pause starts another session of the same key; no limit when null."""


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
    """Sparse features that share the table, all of numbers or all of texts; each feature is in one
    table. None if only histories look it up."""
    num_rows: int
    """Rows of the table, 1 to 2**63; a row costs nothing until its first use."""
    rows: Literal["hash", "identity"] = "hash"
    """`hash`: a stable hash of the id, a number or a text, modulo `num_rows`; `identity`: the id is
    the row, and a sample with an id outside [0, `num_rows`) is rejected."""

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
    """Seed of the permutation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OracleConfig:
    """The default index, built with the dataset.

    Example:
        data:
          oracle:
            batch_samples: 8192
            epochs: 3
            order: {shuffle: blocks, seed: 7}
    """

    batch_samples: int = 4096
    """Samples of a global batch; a multiple of `data.block_samples`."""
    epochs: int = 1
    """Passes over the training range that the index covers."""
    order: OrderConfig = field(default_factory=OrderConfig)
    """Order of the blocks; the trainer must use the same one."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "batch_samples", "epochs")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateConfig:
    """The synthetic log of `pipelines generate`.

    Example:
        data:
          generate: {num_samples: 50000, seed: 3, start: 2026-02-01, span: 12h}
    """

    num_samples: int = 200_000
    """Rows of the log."""
    seed: int = 0
    """Seed of all random values in the log."""
    start: datetime = datetime(2026, 1, 1)
    """Time of the first possible sample (UTC)."""
    span: timedelta = timedelta(days=2)
    """Length of the log."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Inputs, samples and storage of the dataset.

    Example:
        data:
          block_samples: 1024
          on_error: reject
          schema: schema.pbtxt
    """

    sources: Mapping[str, SourceConfig]
    """Source name, usable as a table in SQL, to input files."""
    samples: SamplesConfig
    """How raw rows become samples."""
    session: SessionConfig
    """Definition of a session."""
    tables: Mapping[str, TableConfig]
    """Embedding tables by name."""
    sides: Mapping[str, SideConfig] = field(default_factory=dict)
    """Side tables by name, looked up by `samples.joins`; SQL may read small ones as tables, too."""
    histories: Mapping[str, HistoryConfig] = field(default_factory=dict)
    """Events by the name of their history, stored once; a sample has the count of those that it
    sees."""
    groups: Annotated[Mapping[str, tuple[str, ...]], AUTO] = field(default_factory=dict)
    """Dedup groups: columns that change together, stored once per distinct tuple of a block; at
    most 8, each column in at most one. `auto`: the build chooses them."""
    transforms: Mapping[str, Mapping[str, str | TransformConfig]] = field(default_factory=dict)
    """Group name, or `samples`, to new columns, each a scalar SQL expression over the columns of
    the group or a declared transform; computed in order, once per distinct tuple. The inputs are
    kept."""
    vocabularies: Mapping[str, VocabularyConfig] = field(default_factory=dict)
    """Values with rows of their own, by name, for transforms."""
    sampling: SamplingConfig | None = None
    """Which negatives are kept; all when null."""
    window: WindowConfig = field(default_factory=WindowConfig)
    """Horizon of clustering."""
    split: SplitConfig = field(default_factory=SplitConfig)
    """Range that is held back for evaluation."""
    block_samples: int = 1024
    """Samples of a block: a power of two in [16, 65536]."""
    oracle: OracleConfig = field(default_factory=OracleConfig)
    """The default index."""
    gate: GateConfig | None = None
    """Limits that keep a segment out of the dataset; when null, findings are recorded and printed
    as a warning."""
    on_error: Literal["reject", "reject_files", "fail", "drop_key"] = "reject"
    """`reject`: unusable rows are written to `rejects/` with their reason, and a file that cannot
    be read to its end fails the build; `reject_files`: such a file is a reject, too; `fail`: the
    first reject fails the build; `drop_key`: as `reject`, and a row that `samples.per` cannot use
    also rejects the other rows of its key."""
    schema: str = "schema.pbtxt"
    """The columns, a tensorflow-metadata Schema in the folder of the job file or below it;
    elsewhere, also at a URL, only with `--allow-outside`, an option of every command that reads it
    (`preview`, `build`, `append`, `scheduler plan`, `run` and `retrain`)."""
    generate: GenerateConfig | None = None
    """The synthetic log, for jobs that have one."""

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
        check_sources(self.sources, self.samples, self.sides, self.history_sources)
        if self.on_error == "drop_key" and self.samples.per is None:
            raise ValueError("on_error is drop_key without samples.per; write reject or fail")
        _check_groups(self.groups, self.transforms, [SAMPLE_WEIGHT] if self.sampling else [])
        _check_tables(self.tables)
        check_histories(self.histories, self.sources, self.tables)
        looked_up = {table for each in self.histories.values() for table in each.tables.values()}
        for name, table in self.tables.items():
            if not table.features and name not in looked_up:
                raise ValueError(
                    f"tables.{name} has no features, and no history looks it up; remove it"
                )
        check_names("vocabularies", self.vocabularies)
        check_vocabularies(self.vocabularies, self.transforms)

    @property
    def has_auto_groups(self) -> bool:
        """Whether the build chooses the groups: `auto` is read as `{auto: ()}`."""
        return self.groups == {AUTO: ()}

    @property
    def inputs(self) -> dict[str, SourceConfig]:
        """Sources and side tables."""
        return {**self.sources, **self.sides}

    @property
    def sample_source(self) -> str:
        """Name of the source whose rows become samples."""
        return self.samples.source or next(iter(self.sources))

    @property
    def history_sources(self) -> frozenset[str]:
        """Sources that only histories read."""
        if self.samples.per is not None:  # it may read them, too
            return frozenset()
        named = {history.source for history in self.histories.values()}
        return frozenset(name for name in named if name not in (None, self.sample_source))

    @cached_property
    def table_of_feature(self) -> dict[str, str]:
        """Sparse feature name to table name."""
        return {f: name for name, table in self.tables.items() for f in table.features}

    @property
    def table_of_history_feature(self) -> dict[str, str]:
        """Table of each column of a history that a batch can have as a feature, `plays.song`."""
        return {
            feature_of_history(name, column): table
            for name, history in self.histories.items()
            for column, table in history.tables.items()
        }

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
    """Short name, used in logs, in manifests and for folders: at most 128 letters, digits, `_` and
    `-`, not starting with `-`."""
    data: DataConfig
    """Definition of the dataset."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """Model and training."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """Resources, and daily retraining."""

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

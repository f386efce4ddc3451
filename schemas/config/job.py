"""The job file: one YAML file with the sections `data`, `train` and `schedule`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import date, datetime, time, timedelta
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
from schemas.errors import SchemaError, check_at_least_one, suggest_name
from schemas.hashing import MAX_ROW
from schemas.layout import MANIFEST, SAMPLE_WEIGHT
from schemas.paths import NAME, check_names


@dataclass(frozen=True, slots=True, kw_only=True)
class GateConfig:
    """Limits on a segment as a whole; those on columns stand in the schema."""

    action: Literal["fail", "warn"] = "fail"
    """`fail`: a segment with findings stays out (exit code 3); `warn`: they are written down."""
    max_reject_fraction: float | None = 0.1
    """Most rejected rows, as a share of these and the rows that gave samples; no limit when null.
    It holds without a `gate`, too."""
    session_drift: float | None = None
    """Largest Jensen-Shannon divergence of samples per session from the segment before."""
    delay_drift: float | None = None
    """Largest Jensen-Shannon divergence of label delay (`label_time` less time) from it."""
    label_drift: float | None = None
    """Largest change of the mean label from it, as a share of the one before."""
    dedup_drift: float | None = None
    """Largest change of a group's dedup factor from it, as a share of the one before."""

    def __post_init__(self) -> None:
        """Check the ranges."""
        for name in ("max_reject_fraction", "session_drift", "delay_drift"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise ValueError(f"{name} must be in [0, 1], got {value}; it is a share")
        for name in ("label_drift", "dedup_drift"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"{name} must be at least 0, got {value}; it is a share")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingConfig:
    """Which negatives of the training range are kept, and with what weight."""

    negatives: float
    """Share of the negatives that is kept, in (0, 1]; a kept one weighs 1 / share."""
    unit: Literal["session", "sample"] = "session"
    """`session`: the negatives of a session key are all kept or all dropped; `sample`: each has a
    draw of its own."""
    seed: int = 0
    """Seed of the draws."""

    def __post_init__(self) -> None:
        """Check the ranges."""
        if not 0 < self.negatives <= 1:
            raise ValueError(
                f"negatives must be in (0, 1], got {self.negatives}; write 0.1 to keep a tenth"
            )
        if not 0 <= self.seed <= MAX_ROW:
            raise ValueError(f"seed must be in [0, 2**63), got {self.seed}; lower it")


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitConfig:
    """Which samples are held back for evaluation."""

    evaluation_from: datetime | None = None
    """Samples at or after this time (UTC) are for evaluation; none when null."""
    evaluation_last: timedelta | None = None
    """Length of the range at the end of each segment's day that is for evaluation, in the place of
    one time for all; segments are built with their days then."""

    def __post_init__(self) -> None:
        """Refuse a range that leaves nothing, or nothing to train."""
        last = self.evaluation_last
        if last is not None and not timedelta() < last < timedelta(days=1):
            raise ValueError(
                f"evaluation_last must be longer than nothing and shorter than a day, got {last}; "
                "write 2h, or null"
            )

    def for_day(self, day: date) -> SplitConfig:
        """Return the split of the segment of a day: from midnight (UTC) to midnight.

        Example:
            >>> split = SplitConfig(evaluation_last=timedelta(hours=2))
            >>> split.for_day(date(2026, 4, 9)).evaluation_from
            datetime.datetime(2026, 4, 9, 22, 0)
        """
        if self.evaluation_last is None:
            return self
        end = datetime.combine(day, time()) + timedelta(days=1)
        return replace(self, evaluation_from=end - self.evaluation_last)


GroupSelection = Literal["auto", "none"] | tuple[str, ...]
"""By measured bytes, never, or these groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageConfig:
    """Which groups are stored in parts that their tuples share."""

    windows: GroupSelection = "auto"
    """Groups whose lists are windows over shared buffers: `auto` (each list by measured bytes),
    `none`, or a list of groups."""
    shared_tuples: GroupSelection = "auto"
    """Groups whose tuples are kept once per row group instead of once per block: `auto`, `none`,
    or a list of groups."""

    def check_groups(self, groups: Collection[str]) -> None:
        """Refuse names that are no groups.

        Raises:
            ValueError: naming the key and the nearest group.
        """
        for key in ("windows", "shared_tuples"):
            choice = getattr(self, key)
            for name in () if isinstance(choice, str) else choice:
                if name not in groups:
                    raise ValueError(
                        f"storage.{key} names an unknown group: {name!r}; "
                        f"{suggest_name(name, groups)}"
                    )


def resolve_choice(choice: GroupSelection, group: str) -> bool | None:
    """Return whether a group is to have it, None when that is to be measured.

    Example:
        >>> named("auto", "user"), named("none", "user"), named(("user",), "user")
        (None, False, True)
    """
    if isinstance(choice, str):
        return None if choice == "auto" else False
    return group in choice


# The job file: one YAML file that says what to build, train and size.
#
# Three sections: `data` here, `train` and `schedule` in the modules beside it. Every dataclass
# field below is a key of the file; `docs/job.md` shows each with an example.

MAX_GROUPS = 8
MAX_BLOCK_SAMPLES = 1 << 16
AUTO = "auto"
SAMPLES = "samples"
"""Where a transform writes when its inputs are not all in one dedup group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionConfig:
    """What a session is, in columns of the samples."""

    key: str
    """Column that is equal for all samples of a session; a null key is rejected."""
    time: str
    """Timestamp column that orders the samples of a session."""
    gap: timedelta | None = None
    """A longer pause than this starts another session of the same key; no cut when null."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowConfig:
    """The horizon inside which sessions are clustered and shuffled."""

    span: timedelta | None = None
    """Length of a window; the whole segment when null."""

    def __post_init__(self) -> None:
        """Refuse windows without length."""
        if self.span is not None and not self.span:
            raise ValueError("span must be longer than nothing, got 0s; write 1d, or null")


@dataclass(frozen=True, slots=True, kw_only=True)
class TableConfig:
    """One embedding table: which features look into it and how an id becomes a row."""

    features: tuple[str, ...]
    """Sparse features that share the table."""
    num_rows: int
    """Rows of the table; up to 2**63, a row costs nothing until it is first used."""
    rows: Literal["hash", "identity"] = "hash"
    """`hash`: stable hash of the id, modulo `num_rows`; `identity`: the id is the row, and an id
    outside [0, num_rows) is rejected with its sample."""

    def __post_init__(self) -> None:
        """Check the range of rows."""
        if not 1 <= self.num_rows <= MAX_ROW + 1:
            raise ValueError(f"num_rows must be in [1, 2**63], got {self.num_rows}; lower it")


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderConfig:
    """In which order blocks are trained."""

    shuffle: Literal["none", "blocks"] = "none"
    """`none`: as stored (time windows in order, sessions hashed inside); `blocks`: blocks of a
    segment permuted anew in every epoch."""
    seed: int = 0
    """Seed of the permutation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OracleConfig:
    """The default index that is built with the dataset."""

    batch_samples: int = 4096
    """Samples of a global batch; a multiple of `data.block_samples`."""
    epochs: int = 1
    """Passes over the training range that the index covers."""
    order: OrderConfig = field(default_factory=OrderConfig)
    """Order of the blocks; the trainer must use the same to follow this index."""

    def __post_init__(self) -> None:
        """Check the ranges."""
        check_at_least_one(self, "batch_samples", "epochs")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateConfig:
    """The synthetic log of `pipelines generate`."""

    num_samples: int = 200_000
    """Rows of the log."""
    seed: int = 0
    """Seed of everything that is random in it."""
    start: datetime = datetime(2026, 1, 1)
    """Time of the first possible sample (UTC)."""
    span: timedelta = timedelta(days=2)
    """Length of the log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """What the dataset is made of."""

    sources: Mapping[str, SourceConfig]
    """Name, usable as a table in SQL, to files."""
    samples: SamplesConfig
    """How raw rows become samples."""
    session: SessionConfig
    """What a session is."""
    tables: Mapping[str, TableConfig]
    """Embedding tables by name."""
    sides: Mapping[str, SideConfig] = field(default_factory=dict)
    """Side tables by name, looked up by `samples.joins`; small ones are tables in SQL, too."""
    groups: Annotated[Mapping[str, tuple[str, ...]], AUTO] = field(default_factory=dict)
    """Dedup groups: columns that change together, stored once per unique tuple of a block; `auto`
    to have them chosen, which is kept as `{auto: ()}` until the build has done so."""
    transforms: Mapping[str, Mapping[str, str | TransformConfig]] = field(default_factory=dict)
    """Group name (or `samples`) to new columns, each a scalar SQL expression over the columns of
    that group, or declared; made in order, once per unique tuple. The inputs stay."""
    vocabularies: Mapping[str, VocabularyConfig] = field(default_factory=dict)
    """Vocabularies by name, for transforms."""
    sampling: SamplingConfig | None = None
    """Which negatives are kept; all when null."""
    window: WindowConfig = field(default_factory=WindowConfig)
    """Horizon of clustering."""
    split: SplitConfig = field(default_factory=SplitConfig)
    """Held-back range."""
    block_samples: int = 1024
    """Samples of a block, a power of two."""
    storage: StorageConfig = field(default_factory=StorageConfig)
    """What is kept once beyond single blocks."""
    oracle: OracleConfig = field(default_factory=OracleConfig)
    """Default index."""
    gate: GateConfig | None = None
    """Limits that keep a segment out of the dataset, beyond those of the schema."""
    on_error: Literal["reject", "reject_files", "fail", "drop_key"] = "reject"
    """`reject`: unusable rows go to `rejects/` with their reason, and a file that cannot be read
    to its end ends the build; `reject_files`: such a file is a reject, too; `fail`: the first
    reject ends the build; `drop_key`: as `reject`, and a row that `samples.per` cannot use takes
    the other rows of its key with it."""
    schema: str = "schema.pbtxt"
    """tensorflow-metadata Schema of the sample columns, beside the job file."""
    generate: GenerateConfig | None = None
    """Parameters of the synthetic log, for jobs that have one."""

    def __post_init__(self) -> None:
        """Check what the data section can know about itself."""
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
        check_sources(self.sources, self.samples, self.sides)
        if self.on_error == "drop_key" and self.samples.per is None:
            raise ValueError(
                "on_error must be reject or fail without samples.per, got drop_key; there are no "
                "keys to drop"
            )
        _check_groups(self.groups, self.transforms, [SAMPLE_WEIGHT] if self.sampling else [])
        self.storage.check_groups(self.groups)
        _check_tables(self.tables)
        check_names("vocabularies", self.vocabularies)
        check_vocabularies(self.vocabularies, self.transforms)

    @property
    def has_auto_groups(self) -> bool:
        """Whether the groups are still to be chosen."""
        return self.groups == {AUTO: ()}

    @property
    def inputs(self) -> dict[str, SourceConfig]:
        """Everything that is read from files: sources and side tables."""
        return {**self.sources, **self.sides}

    @property
    def sample_source(self) -> str:
        """Name of the source whose rows become samples."""
        return self.samples.source or next(iter(self.sources))

    @property
    def table_of_feature(self) -> dict[str, str]:
        """Sparse feature name to table name."""
        return {f: name for name, table in self.tables.items() for f in table.features}

    @property
    def derived_columns(self) -> frozenset[str]:
        """Columns that are no part of the original samples: of transforms and of sampling."""
        made = {c for columns in self.transforms.values() for c in columns}
        return frozenset(made | ({SAMPLE_WEIGHT} if self.sampling is not None else set()))

    @property
    def group_of_column(self) -> dict[str, str]:
        """Deduplicated column name to group name, transforms included."""
        stored = {c: group for group, columns in self.groups.items() for c in columns}
        made = {
            c: group
            for group, columns in self.transforms.items()
            if group != SAMPLES
            for c in columns
        }
        return stored | made


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A whole job file."""

    name: str
    """Short name, used in logs and manifests and, by the scheduler, for the job's folder."""
    data: DataConfig
    """What the dataset is made of."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """What is trained on it."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """What it may run on."""


def load_job(path: str | Path) -> Job:
    """Read and check a job file.

    Raises:
        SchemaError: naming the file, the line, the key, and the nearest valid key.
    """
    return _checked(read_yaml(Path(path), Job), str(path))


def check_new_names(job: Job, path: Path, dataset: Path | None = None) -> None:
    """Refuse names that cannot be file names: of new datasets, and where paths are made of them.

    Args:
        job: the job.
        path: its file, for the error.
        dataset: where it is built; one that exists can still be read and appended to.

    Raises:
        SchemaError: the job, or one of its side tables, has such a name.
    """
    if dataset is not None and (dataset / MANIFEST).exists():
        return
    try:
        check_names("data.sides", job.data.sides)
    except ValueError as error:
        raise SchemaError(str(error), file=str(path)) from error
    if not NAME.fullmatch(job.name):
        raise SchemaError(
            "name must be of letters, digits, '_' and '-', not first a '-', got "
            f"{job.name!r}; rename it",
            file=str(path),
        )


def parse_job(text: str, name: str) -> Job:
    """Read and check the text of a job file.

    Args:
        text: the document.
        name: of the file that it came from, for errors.

    Raises:
        SchemaError: as `load_job`.
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
            "data.split must hold back one range, got evaluation_from and evaluation_last; keep "
            "one of them",
            file=name,
        )
    return job


def _check_groups(
    groups: Mapping[str, tuple[str, ...]],
    transforms: Transforms,
    taken: Iterable[str],
) -> None:
    if len(groups) > MAX_GROUPS:
        raise ValueError(f"groups must be at most {MAX_GROUPS}, got {len(groups)}; merge some")
    check_names("groups", groups)
    if SAMPLES in groups:
        raise ValueError(f"groups must not use the name {SAMPLES!r}; rename the group")
    if groups == {AUTO: ()}:
        groups = {}
        for group in transforms:
            if group != SAMPLES:
                raise ValueError(
                    f"transforms.{group} must stand in transforms.{SAMPLES} with groups: auto, got "
                    "a group that is not chosen yet; move it there, it goes where its inputs go"
                )
    owner: dict[str, str] = {}
    for group, columns in groups.items():
        if not columns:
            raise ValueError(f"groups.{group} must name a column, got none; add or remove it")
        for column in columns:
            if column in owner:
                raise ValueError(
                    f"groups must not share columns, got {column!r} in {owner[column]} "
                    f"and {group}; keep one"
                )
            owner[column] = group
    owner.update(dict.fromkeys(taken, SAMPLES))
    for group, columns in transforms.items():
        if group not in groups and group != SAMPLES:
            raise ValueError(
                f"transforms.{group} must be a group, got none of that name; "
                f"{suggest_name(group, [*groups, SAMPLES])}"
            )
        for column in columns:
            if column in owner:
                raise ValueError(
                    f"transforms.{group}.{column} must be a new name, got one that is taken; "
                    "rename it"
                )
            owner[column] = group


def _check_tables(tables: Mapping[str, TableConfig]) -> None:
    check_names("tables", tables)
    owner: dict[str, str] = {}
    for name, table in tables.items():
        for feature in table.features:
            if feature in owner:
                raise ValueError(
                    f"tables must not share features, got {feature!r} in {owner[feature]} "
                    f"and {name}; keep one"
                )
            owner[feature] = name

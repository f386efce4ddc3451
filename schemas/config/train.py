"""Section `train` of the job file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import Literal

from presage.schemas.errors import check_at_least, check_at_most, check_positive, suggest_name
from presage.schemas.paths import parse_store_address

WAIT, SAVE, EVALUATE, START, DRAIN = "wait", "save", "evaluate", "start", "drain"
"""Activities of a trainer besides the phases of a step."""


MAX_WIDTH = 1 << 16
"""Largest width of a row or layer."""
MAX_LAYERS = 1000
MAX_THREADS = 1 << 12


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryWindowConfig:
    """Which events of one of `data.histories` a sample sees in training.

    Columns of the history with a table are list features of the model, such as `plays.song`.

    Example:
        train:
          model: {name: hstu, history: plays, target: song, num_layers: 2, num_heads: 4}
          histories:
            plays: {length: 512, step: 128}
    """

    length: int
    """Number of newest events."""
    step: int = 1
    """Events by which the start of a window moves: `length` to `length + step - 1` events, from a
    multiple of `step` on, counted from the first event of the user in the segment of the sample. 1:
    exactly the newest `length`; larger ones let samples of a user share their window."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "length", "step")
        check_at_most(self, MAX_WIDTH, "length", "step")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Architecture of the model.

    Example:
        train:
          model:
            {name: dcn, bottom_layers: [64], top_layers: [256, 64], cross_layers: 2, cross_rank: 32}
    """

    name: Literal["dlrm", "dcn", "deepfm", "wide_deep", "attention", "hstu"] = "dlrm"
    """`dlrm`, `dcn` (DLRM with DCN-v2's low-rank cross network) and `deepfm`: TorchRec's `DLRM`,
    `DLRM_DCN` and `SimpleDeepFMNN`; `wide_deep`: Wide & Deep, the first number of each row being
    the id's weight in the wide part; `attention`: target attention over one list feature; `hstu`:
    causal attention over one of `train.histories`, computed once for all samples of a window."""
    bottom_layers: tuple[int, ...] = (64,)
    """Widths of the MLP over dense features, without the last layer of width `embedding_dim`;
    `wide_deep` has none."""
    top_layers: tuple[int, ...] = (256, 64)
    """Widths of the MLP over the interactions, without the last layer of width 1; for `deepfm` and
    `wide_deep`, of the deep part."""
    dedup_compute: bool = True
    """Whether to compute once per distinct tuple whatever depends on it alone, equal up to
    rounding; `false` runs TorchRec's unmodified module."""
    cross_layers: int = 3
    """Layers of the cross network of `dcn`."""
    cross_rank: int = 64
    """Rank of the matrices of each layer of the cross network."""
    history: str | None = None
    """List feature that `attention` reads, or history that `hstu` reads; required for them."""
    target: str | None = None
    """Scalar feature that queries the history, in its table; required for `attention` and
    `hstu`."""
    max_history: int = 50
    """Number of newest history entries that `attention` reads."""
    num_heads: int = 4
    """Heads of the history encoder; divides `embedding_dim`."""
    num_layers: int = 2
    """Layers of `hstu`. With more than one, only samples whose windows begin at the same event
    share them: set `step` of the history."""

    def __post_init__(self) -> None:
        at_least_one = ("max_history", "num_heads", "num_layers", "cross_layers", "cross_rank")
        check_at_least(self, 1, *at_least_one)
        widths = ("max_history", "num_heads", "cross_rank", "bottom_layers", "top_layers")
        check_at_most(self, MAX_WIDTH, *widths)
        check_at_most(self, MAX_LAYERS, "cross_layers", "num_layers")
        for name in ("bottom_layers", "top_layers"):
            widths = getattr(self, name)
            if any(width < 1 for width in widths):
                raise ValueError(f"{name} must have widths of at least 1, got {widths}; raise them")
        if self.name in ("attention", "hstu") and (self.history is None or self.target is None):
            raise ValueError(
                f"history and target are required by the {self.name} model, got "
                f"history={self.history}, target={self.target}; name two features"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseOptimizerConfig:
    """Optimizer of the dense parameters.

    Example:
        train:
          dense_optimizer: {name: sgd, learning_rate: 0.01}
    """

    name: Literal["adam", "sgd"] = "adam"
    """Algorithm."""
    learning_rate: float = 1e-3
    """Step size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseOptimizerConfig:
    """Optimizer of the embedding rows, fused into their update; its state is stored with the row.

    Example:
        train:
          sparse_optimizer:
            {name: adam, learning_rate: 0.001, eps: 1.0e-8, beta1: 0.9, beta2: 0.999}
    """

    name: Literal["rowwise_adagrad", "adagrad", "adam", "sgd"] = "rowwise_adagrad"
    """Algorithm; `adam` is lazy: only rows of the step change."""
    learning_rate: float = 0.02
    """Step size."""
    eps: float = 1e-8
    """Added to the root of the accumulated squares."""
    beta1: float = 0.9
    """Decay of Adam's mean of gradients, in [0, 1)."""
    beta2: float = 0.999
    """Decay of Adam's mean of their squares, in [0, 1)."""

    def __post_init__(self) -> None:
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be in [0, 1), got {getattr(self, name)}; lower it")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The cache of embedding rows, and its plan with `--embedding cached`.

    Example:
        train:
          cache: {policy: ttl, lookahead: 20, prefetch_steps: 2, rows: 500000, files: log}
    """

    policy: Literal["ttl", "belady"] = "ttl"
    """`ttl`: a row stays cached while its next use is within `lookahead` steps; `belady`: rows stay
    while there is room, then the row with the farthest next use is evicted."""
    lookahead: int = 50
    """Steps that the plan of `ttl` looks ahead."""
    prefetch_steps: int = 2
    """Steps before its use that a row is fetched; with `ttl` at most `lookahead`."""
    rows: int | None = None
    """Largest number of rows in the cache, of all tables, including those in flight; unbounded when
    null; required for `--embedding lru`."""
    files: Literal["log", "mmap"] = "log"
    """Store of the rows that are not cached, if there are no store processes: `log`: files in the
    order of next use, read and written sequentially; `mmap`: mapped files, updated in place, as
    always with `lru` and `uncached`."""

    def __post_init__(self) -> None:
        # A fetch must follow the write-back that it depends on.
        check_at_least(self, 1, "rows", "lookahead", "prefetch_steps")
        if self.policy == "ttl" and self.prefetch_steps > self.lookahead:
            raise ValueError(
                f"prefetch_steps must be in [1, lookahead], got {self.prefetch_steps} and "
                f"{self.lookahead}; lower it"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class StoresConfig:
    """Store processes started separately, with `python -m presage.trainer store`.

    Without `addresses` and `--stores`, rows are in this process: `train.cache.files` chooses how.

    Example:
        train:
          stores:
            addresses: ["grpc+tls://store-0:7070", "grpc+tls://store-1:7070"]
            token_file: token
            certificates: authorities.pem
            certificate_name: stores.example
            timeout: 2m
    """

    addresses: tuple[str, ...] = ()
    """`grpc://host:port` or `grpc+tls://host:port` of each, or where a store that may be restarted
    on another host publishes that address: `file:///DIRECTORY/address`, in its `--directory`, or a
    URL such as `s3://bucket/run/stores/0/address`, given to it with `--address-file`. They share
    the 4,096 slots of each table; used by every `--embedding` except `plain`."""
    token_file: str | None = None
    """Local file with the stores' token, relative to the job file, an absolute path if the job file
    is at a URL; required with `addresses`."""
    certificates: str | None = None
    """PEM file of the trusted authorities, relative to the job file; those of the system when
    null."""
    certificate_name: str | None = None
    """Name in the stores' certificates; the host of each address when null."""
    timeout: timedelta = timedelta(seconds=30)
    """Time-out of a request; also the time within which a failed store must be back."""

    def __post_init__(self) -> None:
        try:
            addresses = tuple(map(parse_store_address, self.addresses))
        except ValueError as error:
            raise ValueError(f"addresses {error}") from error
        object.__setattr__(self, "addresses", addresses)
        if self.addresses and self.token_file is None:
            raise ValueError("addresses are given without token_file; name the stores' token file")
        check_positive(self, "timeout")


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsConfig:
    """Metrics of the evaluation split besides NE and AUC.

    Example:
        train:
          metrics: {gauc_key: user_id}
    """

    gauc_key: str | None = None
    """Column whose values group samples for GAUC; the session key when null."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """When checkpoints are written, and which are kept.

    Example:
        train:
          checkpoint: {every_steps: 1000, keep: 3, late: skip, copy_to: /dev/shm}
    """

    every_steps: int | None = None
    """Steps between checkpoints, which are written asynchronously (`docs/checkpoints.md`); only one
    at the end when null."""
    keep: int = 2
    """Number of newest checkpoints to keep."""
    late: Literal["skip", "wait"] = "skip"
    """What to do if a checkpoint is due while the previous one is still being written: `skip`: omit
    it, training never waits; `wait`: training waits."""
    copy_to: str = "/dev/shm"
    """Directory for the copy that is waiting to be written: in memory, or on a disk, which is
    slower."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "every_steps", "keep")


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowConfig:
    """Training on committed segments while later ones are built.

    Example:
        train:
          follow: {poll: 5s}
    """

    poll: timedelta = timedelta(seconds=1)
    """Shortest time between two looks at the dataset, also during training."""

    def __post_init__(self) -> None:
        check_positive(self, "poll")


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsConfig:
    """Longest time of each activity of a trainer; beyond it, the trainer reports and exits.

    Example:
        train:
          limits: {start: 1h, read: 5m, fetch: 2m, forward: 1m, backward: 1m, sync: 2m, update: 1m,
                   save: 1h, evaluate: 5m, wait: 12h, drain: 60s}
    """

    start: timedelta = timedelta(minutes=30)
    """From the creation of the run's folder to the first step: stores, the checkpoint, the plan."""
    read: timedelta = timedelta(minutes=10)
    """Of each step: its batch from the dataset's files."""
    fetch: timedelta = timedelta(minutes=10)
    """Of each step: its rows from the stores; longer than `stores.timeout`."""
    forward: timedelta = timedelta(minutes=10)
    """Of each step: the forward pass."""
    backward: timedelta = timedelta(minutes=10)
    """Of each step: the backward pass."""
    sync: timedelta = timedelta(minutes=10)
    """Of each step: partial sums from the other replicas."""
    update: timedelta = timedelta(minutes=10)
    """Of each step: the update of parameters and rows."""
    save: timedelta = timedelta(minutes=30)
    """One checkpoint."""
    evaluate: timedelta = timedelta(minutes=10)
    """One batch of the evaluation split."""
    wait: timedelta = timedelta(hours=1)
    """Until the pipeline commits the next segment, or seals the dataset."""
    drain: timedelta = timedelta(seconds=30)
    """From SIGTERM or SIGINT to the end of the process."""

    def __post_init__(self) -> None:
        check_positive(self, *(field.name for field in fields(self)))

    def seconds(self) -> dict[str, float]:
        """Return each limit in seconds, by name."""
        return {field.name: getattr(self, field.name).total_seconds() for field in fields(self)}


MIN_MICROBATCH_SAMPLES = 16
"""Matrix products of fewer rows have other bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """Model, optimizers, batches and checkpoints.

    Example:
        train:
          embedding_dim: 64
          pooling: mean
          batch_samples: 8192
          microbatch_samples: 512
          epochs: 3
          seed: 1
          dtype: float32
          device: cpu
          num_threads: 8
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    """Architecture."""
    histories: Mapping[str, HistoryWindowConfig] = field(default_factory=dict)
    """Of `data.histories`, those that the model reads, and how far back."""
    embedding_dim: int = 32
    """Width of every embedding row."""
    pooling: Literal["mean", "sum"] = "mean"
    """How the rows of a list become one vector."""
    batch_samples: int = 4096
    """Samples of a global batch; a multiple of `data.block_samples`."""
    microbatch_samples: int | None = None
    """Samples of a microbatch, a power of two from 16 on, below or above the block size;
    `data.block_samples` when null. Replicas compute whole microbatches, so a batch serves at most
    `batch_samples / microbatch_samples` of them; smaller ones are slower
    (`benchmarks/microbatches.md`)."""
    epochs: int = 1
    """Passes over the training range."""
    seed: int = 0
    """Seed of dense parameters and embedding rows."""
    dtype: Literal["float32", "float64"] = "float32"
    """Precision of parameters and computation."""
    dense_optimizer: DenseOptimizerConfig = field(default_factory=DenseOptimizerConfig)
    """Optimizer of the dense parameters."""
    sparse_optimizer: SparseOptimizerConfig = field(default_factory=SparseOptimizerConfig)
    """Optimizer of the embedding rows."""
    device: Literal["cpu", "cuda"] = "cpu"
    """`cuda` uses one GPU for each process (`docs/gpu.md`), and is refused at start if torch finds
    none."""
    cache: CacheConfig = field(default_factory=CacheConfig)
    """Plan and store of cached rows."""
    stores: StoresConfig = field(default_factory=StoresConfig)
    """Store processes that hold the rows; none by default."""
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    """Evaluation."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Saving."""
    follow: FollowConfig = field(default_factory=FollowConfig)
    """Training while the dataset is built (`docs/following.md`)."""
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    """Time limits (`docs/following.md`)."""
    num_threads: int | None = None
    """Compute threads. When null, the cores of the process: its affinity mask, within its cgroup
    quota."""

    @property
    def windows(self) -> dict[str, tuple[int, int]]:
        """Length and step of the windows of histories, by name."""
        return {name: (each.length, each.step) for name, each in sorted(self.histories.items())}

    def __post_init__(self) -> None:
        check_at_least(self, 1, "embedding_dim", "batch_samples", "epochs", "num_threads")
        check_at_most(self, MAX_WIDTH, "embedding_dim")
        check_at_most(self, MAX_THREADS, "num_threads")
        if self.model.name == "hstu" and self.model.history not in self.histories:
            raise ValueError(
                f"model.history must be one of train.histories, got {self.model.history!r}; "
                f"{suggest_name(self.model.history or '', self.histories)}"
            )
        size = self.microbatch_samples
        if size is not None and (size < MIN_MICROBATCH_SAMPLES or size & (size - 1)):
            raise ValueError(
                f"microbatch_samples must be a power of two from {MIN_MICROBATCH_SAMPLES} on, got "
                f"{size}; use {max(MIN_MICROBATCH_SAMPLES, 1 << max(0, size).bit_length())}"
            )
        if self.model.name == "wide_deep" and self.embedding_dim < 2:
            raise ValueError(
                f"embedding_dim must be at least 2 for wide_deep, got {self.embedding_dim}; raise "
                "it: the first number of a row is the weight of the wide part"
            )
        if self.model.name in ("attention", "hstu") and self.embedding_dim % self.model.num_heads:
            raise ValueError(
                f"embedding_dim must be divisible by model.num_heads, got {self.embedding_dim} and "
                f"{self.model.num_heads}; change one"
            )

"""Section `train` of the job file."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import Literal

from schemas.errors import check_at_least, check_at_most, check_positive
from schemas.paths import parse_store_address

WAIT, SAVE, EVALUATE, START, DRAIN = "wait", "save", "evaluate", "start", "drain"
"""Activities of a trainer besides the phases of a step."""


MAX_WIDTH = 1 << 16
"""Largest width of a row or layer."""
MAX_LAYERS = 1000
MAX_THREADS = 1 << 12


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The model."""

    name: Literal["dlrm", "dcn", "deepfm", "wide_deep", "attention"] = "dlrm"
    """`dlrm`, `dcn` and `deepfm`: TorchRec's models; `wide_deep`: from its modules; `attention`:
    target attention over one history feature."""
    bottom_layers: tuple[int, ...] = (64,)
    """Widths of the MLP over dense features; a layer of `embedding_dim` follows."""
    top_layers: tuple[int, ...] = (256, 64)
    """Widths of the MLP over the interactions; a layer of 1 follows."""
    dedup_compute: bool = True
    """Compute once per unique tuple what depends only on it; equal up to rounding."""
    cross_layers: int = 3
    """Layers of the cross network of `dcn`."""
    cross_rank: int = 64
    history: str | None = None
    """List feature of the attention model."""
    target: str | None = None
    """Scalar feature that queries the history; must share its table."""
    max_history: int = 50
    """Newest entries of the history that are read."""
    num_heads: int = 4
    """Heads of the history encoder; divides `embedding_dim`."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "max_history", "num_heads", "cross_layers", "cross_rank")
        widths = ("max_history", "num_heads", "cross_rank", "bottom_layers", "top_layers")
        check_at_most(self, MAX_WIDTH, *widths)
        check_at_most(self, MAX_LAYERS, "cross_layers")
        for name in ("bottom_layers", "top_layers"):
            widths = getattr(self, name)
            if any(width < 1 for width in widths):
                raise ValueError(f"{name} must have widths of at least 1, got {widths}; raise them")
        if self.name == "attention" and (self.history is None or self.target is None):
            raise ValueError(
                "history and target are required by the attention model, got "
                f"history={self.history}, target={self.target}; name two features"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseOptimizerConfig:
    """Optimizer of the dense parameters."""

    name: Literal["adam", "sgd"] = "adam"
    learning_rate: float = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseOptimizerConfig:
    """Optimizer of the embedding rows, fused into their update."""

    name: Literal["rowwise_adagrad", "adagrad", "adam", "sgd"] = "rowwise_adagrad"
    learning_rate: float = 0.02
    eps: float = 1e-8
    """Added to the root of the accumulated squares."""
    beta1: float = 0.9
    """Decay of Adam's mean of gradients."""
    beta2: float = 0.999
    """Decay of Adam's mean of their squares."""

    def __post_init__(self) -> None:
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be in [0, 1), got {getattr(self, name)}; lower it")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The cache plan of `--embedding cached`."""

    policy: Literal["ttl", "belady"] = "ttl"
    """`ttl`: a row is evicted when its next use is more than `lookahead` steps away; `belady`: when
    space is needed, the row with the farthest next use is evicted."""
    lookahead: int = 50
    """Steps that a `ttl` plan looks ahead."""
    prefetch_steps: int = 2
    """A row is fetched this many steps before its use; with `ttl` at most `lookahead`."""
    rows: int | None = None
    """Most cached rows per table, rows in flight included; unbounded when null."""
    files: Literal["log", "mmap"] = "log"
    """The store of uncached rows if there are no store processes (`train.stores`). `log`: files
    ordered by next use, read and written sequentially; `mmap`: memory-mapped files, updated in
    place, as always for `lru` and `uncached`."""

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
    """Store processes started separately, with `python -m trainer store`.

    Without `addresses` and `--stores`, rows are in this process: `train.cache.files` chooses how.
    """

    addresses: tuple[str, ...] = ()
    """`grpc://host:port` or `grpc+tls://host:port` of each, or where a store that may move
    publishes that: `file:///DIRECTORY/address`, or a URL such as `s3://bucket/run/stores/0/address`.
    They share all slots equally when they serve their first run."""
    token_file: str | None = None
    """File with the stores' token, relative to the job file."""
    certificates: str | None = None
    """PEM file of trusted authorities, relative to the job file; the system's when null."""
    certificate_name: str | None = None
    """Name in the stores' certificates; the host of each address when null."""
    timeout: timedelta = timedelta(seconds=30)
    """Longest wait for a response; a store must restart within this time."""

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
    """Metrics of the evaluation split besides NE and AUC."""

    gauc_key: str | None = None
    """Column that groups samples for GAUC; the session key when null."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints."""

    every_steps: int | None = None
    """Steps between checkpoints; only one at the end when null."""
    keep: int = 2
    """Newest checkpoints kept."""
    late: Literal["skip", "wait"] = "skip"
    """If a checkpoint is due while the previous one is still being written: skip it, or wait."""
    copy_to: str = "/dev/shm"
    """Directory of the copy that is written in the background: in memory, or on a slower disk."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "every_steps", "keep")


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowConfig:
    """Training on committed segments while later ones are built."""

    poll: timedelta = timedelta(seconds=1)
    """Shortest time between two looks at the dataset, beside training too."""

    def __post_init__(self) -> None:
        check_positive(self, "poll")


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsConfig:
    """Longest time of each activity of a trainer; beyond it, the trainer reports and exits."""

    start: timedelta = timedelta(minutes=30)
    """Start until the first step: stores, the checkpoint, the plan."""
    read: timedelta = timedelta(minutes=10)
    """Phase of a step: its batch from the dataset's files."""
    fetch: timedelta = timedelta(minutes=10)
    """Phase of a step: its rows from the stores."""
    forward: timedelta = timedelta(minutes=10)
    backward: timedelta = timedelta(minutes=10)
    sync: timedelta = timedelta(minutes=10)
    """Phase of a step: partial sums from the other replicas."""
    update: timedelta = timedelta(minutes=10)
    save: timedelta = timedelta(minutes=30)
    """One checkpoint."""
    evaluate: timedelta = timedelta(minutes=10)
    """One batch of the evaluation split."""
    wait: timedelta = timedelta(hours=1)
    """Until the pipeline commits the next segment or seals the dataset."""
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
    """Model, optimizers, batches and checkpoints."""

    model: ModelConfig = field(default_factory=ModelConfig)
    embedding_dim: int = 32
    pooling: Literal["mean", "sum"] = "mean"
    batch_samples: int = 4096
    """Samples of a global batch; a multiple of `data.block_samples`."""
    microbatch_samples: int | None = None
    """Samples of a microbatch, a power of two: replicas compute whole ones, and the sums of a step
    are added over a fixed tree of them. `data.block_samples` when null."""
    epochs: int = 1
    seed: int = 0
    """Seed of dense parameters and embedding rows."""
    dtype: Literal["float32", "float64"] = "float32"
    """Precision of parameters and computation."""
    dense_optimizer: DenseOptimizerConfig = field(default_factory=DenseOptimizerConfig)
    sparse_optimizer: SparseOptimizerConfig = field(default_factory=SparseOptimizerConfig)
    device: Literal["cpu", "cuda"] = "cpu"
    """Device of the computation, and of rows that `--embedding cached` keeps between steps."""
    cache: CacheConfig = field(default_factory=CacheConfig)
    stores: StoresConfig = field(default_factory=StoresConfig)
    """Store processes that hold the rows."""
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    follow: FollowConfig = field(default_factory=FollowConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    num_threads: int | None = None
    """Compute threads; all cores when null."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "embedding_dim", "batch_samples", "epochs", "num_threads")
        check_at_most(self, MAX_WIDTH, "embedding_dim")
        check_at_most(self, MAX_THREADS, "num_threads")
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
        if self.model.name == "attention" and self.embedding_dim % self.model.num_heads:
            raise ValueError(
                f"embedding_dim must be divisible by model.num_heads, got {self.embedding_dim} and "
                f"{self.model.num_heads}; change one"
            )

"""Section `train` of the job file.

Model, tables, optimizers, cache, stores, metrics, checkpoints.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal

from schemas.config.limits import FollowConfig, LimitsConfig
from schemas.errors import check_at_least_one


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which model is trained."""

    name: Literal["dlrm", "dcn", "deepfm", "wide_deep", "attention"] = "dlrm"
    """`dlrm`, `dcn` and `deepfm`: TorchRec's; `wide_deep`: of its modules; `attention`: target
    attention over one history feature."""
    bottom_layers: tuple[int, ...] = (64,)
    """Widths of the MLP over dense features, before the one of `embedding_dim`."""
    top_layers: tuple[int, ...] = (256, 64)
    """Widths of the MLP over the interactions, before the one of 1."""
    dedup_compute: bool = True
    """What depends on a unique tuple alone is computed once; equal up to rounding."""
    cross_layers: int = 3
    """Layers of the cross network of `dcn`."""
    cross_rank: int = 64
    """Rank of each of its layers' matrices."""
    history: str | None = None
    """List feature that the attention model reads."""
    target: str | None = None
    """Scalar feature that queries the history; must share its table."""
    max_history: int = 50
    """Newest entries of the history that are read."""
    num_heads: int = 4
    """Heads of the history encoder; divides `embedding_dim`."""

    def __post_init__(self) -> None:
        """Refuse empty layers, and an attention model without its two features."""
        check_at_least_one(self, "max_history", "num_heads", "cross_layers", "cross_rank")
        for name in ("bottom_layers", "top_layers"):
            widths = getattr(self, name)
            if any(width < 1 for width in widths):
                raise ValueError(f"{name} must have widths of at least 1, got {widths}; raise them")
        if self.name == "attention" and (self.history is None or self.target is None):
            raise ValueError(
                "history and target must be given for the attention model, got "
                f"history={self.history}, target={self.target}; name two features"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseOptimizerConfig:
    """Optimizer of the dense parameters."""

    name: Literal["adam", "sgd"] = "adam"
    """Update rule."""
    learning_rate: float = 1e-3
    """Step size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseOptimizerConfig:
    """Optimizer of the embedding rows, fused into their update."""

    name: Literal["rowwise_adagrad", "adagrad", "adam", "sgd"] = "rowwise_adagrad"
    """Update rule; the state travels with the row."""
    learning_rate: float = 0.02
    """Step size."""
    eps: float = 1e-8
    """Added to the root of the accumulated squares."""
    beta1: float = 0.9
    """Decay of Adam's mean of gradients."""
    beta2: float = 0.999
    """Decay of Adam's mean of their squares."""

    def __post_init__(self) -> None:
        """Check that what decays does."""
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be in [0, 1), got {getattr(self, name)}; lower it")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The plan that `--embedding cached` obeys."""

    policy: Literal["ttl", "belady"] = "ttl"
    """`ttl`: a row stays while its next use lies within `lookahead` steps; `belady`: while there
    is room, and then the row whose next use is farthest leaves."""
    lookahead: int = 50
    """Steps that the plan of `ttl` looks ahead."""
    prefetch_steps: int = 2
    """Steps before its use that a row is fetched; with `ttl` at most `lookahead`."""
    rows: int | None = None
    """Most rows that the cache of each table may hold, those in flight included; unbounded when
    null."""
    files: Literal["log", "mmap"] = "log"
    """How other rows lie without store processes. `log`: in the order of their next use, read and
    written sequentially; `mmap`: in mapped files, in place, as for `lru` and `uncached`."""

    def __post_init__(self) -> None:
        """Keep every fetch after the write-back that it depends on."""
        check_at_least_one(self, "rows", "lookahead", "prefetch_steps")
        if self.policy == "ttl" and self.prefetch_steps > self.lookahead:
            raise ValueError(
                f"prefetch_steps must be in [1, lookahead], got {self.prefetch_steps} and "
                f"{self.lookahead}; lower it"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class StoresConfig:
    """Store processes that run elsewhere, started with `python -m trainer store`."""

    addresses: tuple[str, ...] = ()
    """`grpc://host:port` or `grpc+tls://host:port` of each, or `file:///DIRECTORY/address` where a
    store says it that may be started elsewhere; together they serve every slot once, or twice."""
    token_file: str | None = None
    """File with the token that they ask for, relative to the job file."""
    certificates: str | None = None
    """PEM file of the authorities to be trusted, relative to the job file; the system's when
    null."""
    certificate_name: str | None = None
    """Name that their certificates bear; the host of each address when null."""
    timeout: timedelta = timedelta(seconds=30)
    """Longest wait for an answer; a store that died has so long to come back."""
    replicas: int = 1
    """Stores that serve each slot: 2 to lose nothing when one dies with its directory."""
    elastic: bool = False
    """Whether stores of `addresses` may serve slots of a run in the place of others that have left;
    else a run does not begin with less than all of its stores."""

    def __post_init__(self) -> None:
        """Refuse what is no address, and stores without a token."""
        for address in self.addresses:
            if re.fullmatch(r"grpc(\+tls)?://[^/]+:\d+|file:///.+", address) is None:
                raise ValueError(
                    "addresses must be grpc://host:port, grpc+tls://host:port or file:///path, "
                    f"got {address!r}; write what the store announced"
                )
        if self.addresses and self.token_file is None:
            raise ValueError(
                "token_file must be given with addresses, got null; name the stores' own"
            )
        if self.replicas not in (1, 2):
            raise ValueError(f"replicas must be 1 or 2, got {self.replicas}; write 2 for a copy")
        if self.addresses and self.replicas > len(self.addresses):
            raise ValueError(
                f"replicas must be at most the number of stores, got replicas={self.replicas}, "
                f"addresses={len(self.addresses)}; start more stores"
            )
        if not self.timeout:
            raise ValueError("timeout must be longer than nothing, got 0s; write 30s")


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsConfig:
    """What is measured on the evaluation split besides NE and AUC."""

    gauc_key: str | None = None
    """Column whose values group samples for GAUC; the session key when null."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """When state is saved."""

    every_steps: int | None = None
    """Steps between checkpoints; only one at the end when null."""
    keep: int = 2
    """Newest checkpoints that are kept."""
    late: Literal["skip", "wait"] = "skip"
    """A checkpoint that comes due while the one before is still being written: it is skipped, and
    training never waits; or training waits."""
    copy_to: str = "/dev/shm"
    """Directory for the copy that waits to be written: in memory, or on a disk, which is slower."""

    def __post_init__(self) -> None:
        """Check the ranges."""
        check_at_least_one(self, "every_steps", "keep")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """What is trained on the dataset."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """Which model."""
    embedding_dim: int = 32
    """Width of every embedding row."""
    pooling: Literal["mean", "sum"] = "mean"
    """How the rows of a list become one vector."""
    batch_samples: int = 4096
    """Samples of a global batch; a multiple of `data.block_samples`."""
    epochs: int = 1
    """Passes over the training range."""
    seed: int = 0
    """Seed of dense parameters and embedding rows."""
    dtype: Literal["float32", "float64"] = "float32"
    """Precision of parameters and compute."""
    dense_optimizer: DenseOptimizerConfig = field(default_factory=DenseOptimizerConfig)
    """Optimizer of the dense parameters."""
    sparse_optimizer: SparseOptimizerConfig = field(default_factory=SparseOptimizerConfig)
    """Optimizer of the embedding rows."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where it is computed; rows stay in the memory of the processor between steps."""
    kernels: Literal["compiled", "torch"] = "compiled"
    """What looks up and updates rows: C++ compiled on first use, or torch operators."""
    cache: CacheConfig = field(default_factory=CacheConfig)
    """Plan of the cached embedding."""
    stores: StoresConfig = field(default_factory=StoresConfig)
    """Store processes that hold the rows."""
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    """Evaluation."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Saving."""
    follow: FollowConfig = field(default_factory=FollowConfig)
    """Training while the dataset is built."""
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    """How long anything may wait."""
    num_threads: int | None = None
    """Compute threads; all cores when null."""

    def __post_init__(self) -> None:
        """Check what the section can know about itself."""
        check_at_least_one(self, "embedding_dim", "batch_samples", "epochs", "num_threads")
        if self.model.name == "wide_deep" and self.embedding_dim < 2:
            raise ValueError(
                f"embedding_dim must be at least 2 for wide_deep, got {self.embedding_dim}; raise "
                "it, for the first number of a row is the wide part's"
            )
        if self.model.name == "attention" and self.embedding_dim % self.model.num_heads:
            raise ValueError(
                f"embedding_dim must be divisible by model.num_heads, got {self.embedding_dim} and "
                f"{self.model.num_heads}; change one"
            )

"""The fingerprint of a checkpoint: the model, order and segments that it belongs to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from presage.schemas.config.job import Job
from presage.schemas.config.train import CacheConfig
from presage.schemas.dataset.opened import OpenDataset
from presage.schemas.errors import SchemaError, check_at_least, first_difference, shown
from presage.schemas.typed_values import DecodeError, from_json
from presage.trainer.checkpoint.files import CheckpointManifest
from presage.trainer.components import layouts_of, order_of
from presage.trainer.data.decode import training_spec
from presage.trainer.stores.store import TableLayout

# ---- The fingerprint: what a checkpoint belongs to ----
#
# It does not contain the number of processes, the kind of stores, or where rows are cached.

_ADVICE = "continue with the job and the dataset that it was trained with"


@dataclass(frozen=True, slots=True, kw_only=True)
class TableFingerprint:
    """A table in a fingerprint: its layout, and how ids become rows."""

    dim: int
    state_width: int
    dtype: str
    seed: int
    rows: str
    num_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderFingerprint:
    """The blocks of the segments and the order in which a run trains them."""

    num_blocks: tuple[int, ...]
    """Training blocks of each segment."""
    blocks_per_batch: int
    epochs: int
    shuffle: str
    seed: int

    def __post_init__(self) -> None:
        check_at_least(self, 1, "blocks_per_batch", "epochs")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """What `fingerprint_of` returns, as the manifest of a checkpoint has it."""

    model: str
    dense_optimizer: str
    sparse_optimizer: str
    tables: Mapping[str, TableFingerprint]
    features: Mapping[str, str]
    """Column to role."""
    segments: tuple[str, ...]
    """Ids."""
    segments_sha256: tuple[str, ...]
    order: OrderFingerprint
    cache: Mapping[str, Any]

    def __post_init__(self) -> None:
        if len(self.segments) != len(self.segments_sha256):
            raise ValueError(
                f"segments must have a hash each, got {len(self.segments_sha256)} for "
                f"{len(self.segments)}"
            )


def parse_fingerprint(manifest: CheckpointManifest, file: str) -> Fingerprint:
    """Return the fingerprint of a checkpoint of `train`.

    Raises:
        SchemaError: it is not one, or one of another model class (`open_rows`).
    """
    try:
        return from_json(Fingerprint, manifest.fingerprint)
    except DecodeError as error:
        raise SchemaError(f"fingerprint.{error}; {_ADVICE}", file=file) from error


def fingerprint_of(job: Job, dataset: OpenDataset) -> dict[str, Any]:
    """Return the fingerprint of a run, which the manifests of its checkpoints contain."""
    order = order_of(job, dataset, trains=False)
    return {
        **_model_fingerprint(job, dataset),
        "segments": [s.id for s in dataset.segments],
        "segments_sha256": [r.manifest_sha256 for r in dataset.manifest.segments],
        "order": {
            "num_blocks": list(order.num_blocks),
            "blocks_per_batch": order.blocks_per_batch,
            "epochs": order.epochs,
            "shuffle": order.config.shuffle,
            "seed": order.config.seed,
        },
        "cache": _cache_fingerprint(job.train.cache),
    }


def _model_fingerprint(job: Job, dataset: OpenDataset) -> dict[str, Any]:
    """Return names only of the model and its optimizers.

    `load_state` compares the layers of the model; a learning rate, eps or beta may change between
    runs that start from each other (a resumed run compares all of `train`, see
    `trainer/run/folder.py`).
    """
    layouts = layouts_of(training_spec(dataset, job.train), job.train)
    tables = dataset.job.data.tables
    return {
        "model": job.train.model.name,
        "dense_optimizer": job.train.dense_optimizer.name,
        "sparse_optimizer": job.train.sparse_optimizer.name,
        "tables": {
            table: {
                "dim": layout.dim,
                "state_width": layout.state_width,
                "dtype": layout.dtype,
                "seed": layout.seed,
                "rows": tables[table].rows,
                "num_rows": tables[table].num_rows,
            }
            for table, layout in layouts.items()
        },
        "features": {f.name: f.role for f in dataset.features.features if f.role != "kept"},
    }


def _cache_fingerprint(cache: CacheConfig) -> dict[str, Any]:
    return {name: value for name, value in asdict(cache).items() if name != "files"}


def has_plan_of(manifest: CheckpointManifest, cache: CacheConfig) -> bool:
    """Return whether a run with this cache can continue the plan of a checkpoint."""
    return manifest.fingerprint.get("cache") == _cache_fingerprint(cache)


def check_model(manifest: CheckpointManifest, expected: Mapping[str, Any], file: str) -> None:
    """Check that a checkpoint is of the same model, trained on any dataset.

    Raises:
        SchemaError: they differ; names the first difference.
    """
    actual = asdict(parse_fingerprint(manifest, file))
    for name in ("model", "dense_optimizer", "sparse_optimizer", "features"):
        _check(name, actual[name], expected[name], file)
    tables = actual["tables"]
    _check("tables", sorted(tables), sorted(expected["tables"]), file)
    for table, old in tables.items():
        new = dict(expected["tables"][table])
        if new["rows"] == old["rows"] == "identity" and new["num_rows"] > old["num_rows"]:
            new["num_rows"] = old["num_rows"]  # a table may grow: its rows keep their meaning
        _check(f"tables.{table}", old, new, file)


def _check(name: str, actual: Any, expected: Any, file: str) -> None:
    difference = first_difference(actual, expected, name)
    if difference is not None:
        name, actual, expected = difference
        raise SchemaError(
            f"{name} differs from that of the checkpoint: {shown(expected)} instead of "
            f"{shown(actual)}; {_ADVICE}",
            file=file,
        )


def check_layouts(
    manifest: CheckpointManifest, layouts: Mapping[str, TableLayout], file: str
) -> None:
    """Check that a checkpoint has rows of these tables, by their names in it, and no others.

    Raises:
        SchemaError: they differ; names the first difference.
    """
    saved = manifest.fingerprint["tables"]
    _check("tables", sorted(saved), sorted(layouts), file)
    for table, layout in layouts.items():
        for name in ("dim", "state_width", "dtype"):
            _check(f"tables.{table}.{name}", saved[table][name], getattr(layout, name), file)


def check_collections(
    manifest: CheckpointManifest, expected: Mapping[str, Any], checkpoint: Path
) -> None:
    """Check that a checkpoint of a loop that Presage does not own is of its collections."""
    difference = first_difference(manifest.fingerprint, expected, "")
    if difference is not None:
        name, saved, ours = difference
        raise SchemaError(
            f"{name[1:]} differs from that of the checkpoint: {ours!r} instead of {saved!r}; "
            "make the same collections before it is loaded",
            file=str(checkpoint),
        )


def check_position(manifest: CheckpointManifest, expected: Mapping[str, Any], file: str) -> None:
    """Check that the trained steps of a checkpoint are the first ones of the dataset."""
    actual = parse_fingerprint(manifest, file)
    names, hashes = actual.segments, actual.segments_sha256
    for number, (name, sha256) in enumerate(zip(names, hashes, strict=True)):
        now = expected["segments"][number : number + 1]
        _check(f"segments[{number}]", [name], now, file)
        now = expected["segments_sha256"][number]
        _check(f"segments[{number}].sha256", sha256[:12], now[:12], file)
    order, now = actual.order, expected["order"]
    for key in ("blocks_per_batch", "shuffle", "seed"):
        _check(f"order.{key}", getattr(order, key), now[key], file)
    if len(expected["segments"]) == len(names):
        _check("order.epochs", order.epochs, now["epochs"], file)
        return
    steps = sum(-(-n // now["blocks_per_batch"]) for n in order.num_blocks)
    if manifest.train_step > steps:
        raise SchemaError(
            f"dataset may grow only in the first epoch, which had {steps} steps on "
            f"{len(names)} segments: the checkpoint is of step {manifest.train_step}, and the "
            f"dataset has {len(expected['segments'])} segments; train the larger one as a new run",
            file=file,
        )

"""What a checkpoint belongs to, and whether a run may go on with it; differences are named.

How many processes train or hold rows, what they cache and where rows lie is no part of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from schemas.dataset import Dataset
from schemas.errors import SchemaError
from schemas.job import Job
from schemas.job_train import CacheConfig
from trainer.decode import spec_of
from trainer.parts import layouts_of, order_of
from trainer.run import first_difference

_ADVICE = "go on with the job and the dataset that it was trained with"


def made_of(job: Job, dataset: Dataset) -> dict[str, Any]:
    """Return what the checkpoints of a run belong to, as it stands in their manifests."""
    order = order_of(job, dataset)
    try:
        index = dataset.index_for(order).manifest.id
    except SchemaError:
        index = None
    return {
        **_model_of(job, dataset),
        "segments": [s.manifest.id for s in dataset.segments],
        "segments_sha256": [r.manifest_sha256 for r in dataset.manifest.segments],
        "order": {
            "num_blocks": list(order.num_blocks),
            "blocks_per_batch": order.blocks_per_batch,
            "epochs": order.epochs,
            "shuffle": order.config.shuffle,
            "seed": order.config.seed,
        },
        "index": index,
        "cache": _of_cache(job.train.cache),
    }


def _model_of(job: Job, dataset: Dataset) -> dict[str, Any]:
    layouts = layouts_of(spec_of(dataset, job.train.dtype), job.train)
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


def check_fits(
    held: Mapping[str, Any], wanted: Mapping[str, Any], train_step: int, file: str
) -> None:
    """Refuse a checkpoint of something else.

    Args:
        held: what the checkpoint belongs to.
        wanted: what the run is.
        train_step: of the checkpoint.
        file: its manifest.

    Raises:
        SchemaError: the first difference, by name, with both sides.
    """
    check_model(held, wanted, file)
    _check_position(held, wanted, train_step, file)


def check_model(held: Mapping[str, Any], wanted: Mapping[str, Any], file: str) -> None:
    """Refuse a checkpoint of another model, whatever it was trained on.

    Args:
        held: what the checkpoint belongs to.
        wanted: what it is to be used for.
        file: its manifest.

    Raises:
        SchemaError: the first difference, by name, with both sides.
    """
    for name in ("model", "dense_optimizer", "sparse_optimizer", "features"):
        _check(name, held.get(name), wanted[name], file)
    _check_tables(held.get("tables", {}), wanted["tables"], file)


def same_plan(held: Mapping[str, Any], cache: CacheConfig) -> bool:
    """Say whether the plan of a checkpoint is one of the run's cache, which may go on with it."""
    return held.get("cache") == _of_cache(cache)


def _of_cache(cache: CacheConfig) -> dict[str, Any]:
    return {name: value for name, value in asdict(cache).items() if name != "files"}


def _check(name: str, held: Any, wanted: Any, file: str) -> None:
    different = first_difference(held, wanted, name)
    if different is not None:
        name, held, wanted = different
        raise SchemaError(
            f"checkpoint must have {name}={wanted!r}, got {held!r}; {_ADVICE}", file=file
        )


def _check_tables(held: Mapping[str, Any], wanted: Mapping[str, Any], file: str) -> None:
    _check("tables", sorted(held), sorted(wanted), file)
    for table, each in held.items():
        now = dict(wanted[table])
        if now["rows"] == each["rows"] == "identity" and now["num_rows"] > each["num_rows"]:
            now["num_rows"] = each["num_rows"]  # more ids: rows keep their meaning
        _check(f"tables.{table}", each, now, file)


def _check_position(
    held: Mapping[str, Any], wanted: Mapping[str, Any], train_step: int, file: str
) -> None:
    """Refuse a dataset whose first steps are others than those that were trained."""
    names, sums = held.get("segments", []), held.get("segments_sha256", [])
    for number, (name, sha256) in enumerate(zip(names, sums, strict=True)):
        now = wanted["segments"][number : number + 1]
        _check(f"segments[{number}]", [name], now, file)
        now = wanted["segments_sha256"][number]
        _check(f"segments[{number}].sha256", sha256[:12], now[:12], file)
    order, now = held.get("order", {}), wanted["order"]
    for key in ("blocks_per_batch", "shuffle", "seed"):
        _check(f"order.{key}", order.get(key), now[key], file)
    if len(wanted["segments"]) == len(names):
        _check("order.epochs", order.get("epochs"), now["epochs"], file)
        if held.get("index") and wanted["index"]:
            _check("index", held["index"], wanted["index"], file)
        return
    steps = sum(-(-n // now["blocks_per_batch"]) for n in order["num_blocks"])
    if train_step > steps:
        raise SchemaError(
            f"dataset may grow while its first epoch is trained, got {len(names)} segments of "
            f"{steps} steps in the checkpoint of step {train_step} and {len(wanted['segments'])} "
            "segments now; train the larger dataset as a new run",
            file=file,
        )

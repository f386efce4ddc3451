"""Load the newest complete checkpoint, and check that it belongs to the run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from schemas.arrays import Array
from schemas.config.job import Job
from schemas.config.train import CacheConfig
from schemas.dataset import Dataset
from schemas.errors import SchemaError, suggest_name
from schemas.layout import MANIFEST
from schemas.rows import initial_rows
from schemas.run_log import CHECKPOINTS
from trainer.checkpoint.agent import NewCheckpoint
from trainer.checkpoint.format import RowPart, Spec, from_bytes, newest, spec_of_array
from trainer.checkpoint.manifest import (
    DENSE,
    PLAN,
    CheckpointManifest,
    complete,
    folder_of,
    read_checkpoint_manifest,
    verify_files,
)
from trainer.components import Components, layouts_of, order_of
from trainer.data.decode import spec_of
from trainer.embedding.cache import CachedRows, arrays_of_cached, cached_of
from trainer.run import first_difference
from trainer.stores.api import (
    Records,
    Store,
    TableLayout,
    WriteBack,
)

# The dense state of training as named arrays: parameters, buffers, and the optimizer's numbers.
#
# `arrays.py` makes bytes of them and back. A checkpoint holds these bytes, and a replica that
# joins gets them from a peer. Names are the model's own: a state that does not fit is told by
# name.
#
#     model/<parameter or buffer>
#     optimizer/<parameter>/<number>     such as optimizer/top.0.weight/exp_avg
#
# Learning rates are not among them: they are the job's.

MODEL, OPTIMIZER = "model/", "optimizer/"
"""What names begin with."""
_NUMBERS: dict[type[torch.optim.Optimizer], frozenset[str]] = {
    torch.optim.Adam: frozenset({"step", "exp_avg", "exp_avg_sq"}),
    torch.optim.SGD: frozenset(),
}
"""What optimizers keep for a parameter; others are taken as they are."""


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Array]:
    """Return the state by name; on the processor the arrays are views of what is trained.

    Args:
        model: dense parameters and buffers.
        optimizer: of its parameters; None to leave it out.

    Raises:
        ValueError: the optimizer holds a parameter that is not the model's.
    """
    found = {f"{MODEL}{name}": _array(value) for name, value in model.state_dict().items()}
    if optimizer is not None:
        names = _parameter_names(model, optimizer)
        for index, numbers in optimizer.state_dict()["state"].items():
            for key, value in numbers.items():
                if value is not None:
                    found[f"{OPTIMIZER}{names[index]}/{key}"] = _array(value)
    return found


def load_state(
    arrays: Mapping[str, Array],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    *,
    file: str | None = None,
) -> None:
    """Load a state into a model and its optimizer, all of it or nothing.

    Args:
        arrays: what `state_of` returned; copied.
        model: of the same parameters.
        optimizer: of the same kind; None to leave it out.
        file: where the arrays came from, for errors.

    Raises:
        SchemaError: the state is of another model or optimizer; the message prints both sides.
    """
    held = {f"{MODEL}{name}": _array(value) for name, value in model.state_dict().items()}
    given = {name: array for name, array in arrays.items() if name.startswith(MODEL)}
    _check_names(held.keys(), given.keys(), "model", file)
    for name, array in given.items():
        _check_spec(name, spec_of_array(held[name]), spec_of_array(array), file)
    state = None if optimizer is None else _optimizer_state(arrays, model, optimizer, file)
    model.load_state_dict({n.removeprefix(MODEL): _tensor(array) for n, array in given.items()})
    if optimizer is not None and state is not None:
        optimizer.load_state_dict({**optimizer.state_dict(), "state": state})


def _optimizer_state(
    arrays: Mapping[str, Array],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    file: str | None,
) -> dict[int, dict[str, Any]]:
    """Return the state of an optimizer as its own `load_state_dict` takes it."""
    names = _parameter_names(model, optimizer)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    index_of = {name: index for index, name in enumerate(names)}
    found: dict[int, dict[str, Any]] = {}
    for name, array in arrays.items():
        if not name.startswith(OPTIMIZER):
            continue
        parameter, _, key = name.removeprefix(OPTIMIZER).rpartition("/")
        if parameter not in index_of:
            raise SchemaError(
                f"state must be of the optimizer's parameters, got {name!r}; "
                f"{suggest_name(parameter, index_of)}",
                file=file,
            )
        if array.ndim:
            wanted = Spec(array.dtype, shapes[parameter])
            _check_spec(name, wanted, spec_of_array(array), file)
        found.setdefault(index_of[parameter], {})[key] = _tensor(array)
    wanted_keys = _NUMBERS.get(type(optimizer))
    for index, numbers in found.items():
        if wanted_keys is not None and numbers.keys() != wanted_keys:
            kind = type(optimizer).__name__
            raise SchemaError(
                f"optimizer state of {names[index]!r} must be {_listed(wanted_keys)} for {kind}, "
                f"got {_listed(numbers)}; use the optimizer that it was trained with",
                file=file,
            )
    return found


def _parameter_names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the name of each of the optimizer's parameters, in its own order."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    strangers = [tuple(p.shape) for p in held if id(p) not in names]
    if strangers:
        raise ValueError(
            f"optimizer must hold parameters of the model, got others of shapes {strangers[:3]}; "
            "build it from model.parameters()"
        )
    return [names[id(parameter)] for parameter in held]


def _check_names(wanted: Any, got: Any, what: str, file: str | None) -> None:
    missing, others = sorted(wanted - got), sorted(got - wanted)
    if missing or others:
        raise SchemaError(
            f"state must be of the {what}, got {len(others)} unknown arrays ({_listed(others)}) "
            f"and {len(missing)} missing ({_listed(missing)}); "
            f"use the {what} that it was trained with",
            file=file,
        )


def _check_spec(name: str, wanted: Spec, got: Spec, file: str | None) -> None:
    if wanted != got:
        raise SchemaError(
            f"array {name!r} must be {wanted}, got {got}; use the job that it was trained with",
            file=file,
        )


def _listed(names: Any) -> str:
    found = sorted(names)
    return ", ".join(found[:3]) + (", ..." if len(found) > 3 else "") if found else "none"


def _array(value: Any) -> Array:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().numpy()
    return np.asarray(value)


def _tensor(array: Array) -> torch.Tensor:
    return torch.from_numpy(np.array(array))


class CheckpointTable:
    """The rows of one table of a checkpoint."""

    def __init__(self, layout: TableLayout, folders: Sequence[Path]) -> None:
        """Map the table's files.

        Args:
            layout: of the run.
            folders: parts of the table, in a complete checkpoint; of a row the first holds.
        """
        self._layout = layout
        self._folders = folders
        self._parts = [RowPart(folder, random=True) for folder in folders]

    @property
    def layout(self) -> TableLayout:
        """What the rows look like."""
        return self._layout

    def fetch(self, rows: NDArray[np.int64]) -> Records:
        """Return copies of rows; a row that was never trained has its first values."""
        layout = self._layout
        values = initial_rows(
            rows, table=layout.table, seed=layout.seed, dim=layout.dim, dtype=layout.dtype
        )
        state = np.zeros((len(rows), layout.state_width), layout.dtype)
        for part in reversed(self._parts):
            known, at = _found(part, rows)
            values[known] = part.records.values[at[known]]
            state[known] = part.records.state[at[known]]
        return Records(values, state)

    def holds(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which rows were ever trained."""
        held = np.zeros(len(rows), bool)
        for part in self._parts:
            held |= _found(part, rows)[0]
        return held

    def contents(self) -> Iterator[tuple[NDArray[np.int64], Records]]:
        """Yield all rows, ascending, and their records, in parts."""
        return newest([RowPart(folder).pieces() for folder in self._folders])


class CheckpointRows:
    """The rows of all tables of a checkpoint, a `RowReader`."""

    def __init__(self, tables: Mapping[str, CheckpointTable]) -> None:
        self.tables = tables

    @property
    def layouts(self) -> dict[str, TableLayout]:
        """Layouts of the rows, by table."""
        return {name: table.layout for name, table in self.tables.items()}

    def fetch(self, train_step: int, rows: Mapping[str, NDArray[np.int64]]) -> dict[str, Records]:
        """Return copies of rows; `train_step` is ignored."""
        return {table: self.tables[table].fetch(ids) for table, ids in rows.items()}

    def contents(self, table: str) -> Iterator[tuple[NDArray[np.int64], Records]]:
        """Yield all rows of a table, ascending, and their records, in chunks."""
        return self.tables[table].contents()


def _found(part: RowPart, rows: NDArray[np.int64]) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """Return which rows a part has, and where."""
    at = np.searchsorted(part.rows, rows)
    known = np.zeros(len(rows), bool)
    inside = at < len(part.rows)
    known[inside] = part.rows[at[inside]] == rows[inside]
    return known, at


# What a checkpoint belongs to, and whether a run may go on with it; differences are named.
#
# How many processes train or hold rows, what they cache and where rows lie is no part of it.

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


# Checkpoints: dense parameters, both optimizers, and the rows that were ever trained.
#
# Here whole tables are written while training waits, at the end of a run that saves nowhere else,
# and checkpoints of any kind are read; `flash/` writes them beside training.

_NO_ROWS = np.empty(0, np.int64)
NextUseOf = Callable[[str, int, NDArray[np.int64]], NDArray[np.int64]]
"""(table, train_step, rows) to the first step from that one on that uses each row."""


def save_checkpoint(
    run: Path,
    train_step: int,
    components: Components,
    *,
    keep: int,
    cached: Mapping[str, CachedRows] | None = None,
    made_of: Mapping[str, Any] | None = None,
) -> Path:
    """Save the state before a step, all rows of it; flush the row source first.

    Where another process has saved it, or a later one, that stands, and is returned.

    Args:
        run: run folder.
        train_step: the next step to train.
        components: of the run.
        keep: newest checkpoints that remain.
        cached: where the plan stands, of a planned cache.
        made_of: what the run is, from `flash.fits`.

    Raises:
        SchemaError: the disk is full; nothing is left of this checkpoint.
    """
    with NewCheckpoint(run / CHECKPOINTS, train_step) as writing:
        writing.arrays(DENSE, state_of(components.model, components.optimizer))
        if cached:
            writing.arrays(PLAN, arrays_of_cached(cached))
        store = components.store
        for table, layout in store.layouts.items():
            writing.rows(table, layout, store.contents(table))
        parts = {table: (f"{folder_of(train_step)}/{table}",) for table in store.layouts}
        writing.finish(made_of or {}, parts, {}, keep=keep)
    return writing.folder


def newest_checkpoint(run: Path) -> Path | None:
    """Return the folder of the newest complete checkpoint, None when there is none."""
    found = complete(run / CHECKPOINTS)
    return found[-1] if found else None


def step_of(checkpoint: Path | None) -> int:
    """Return the step that training goes on at: 0 without a checkpoint."""
    return 0 if checkpoint is None else int(checkpoint.name)


def load_checkpoint(
    checkpoint: Path,
    manifest: CheckpointManifest,
    components: Components,
    *,
    next_use: NextUseOf | None = None,
    cached: Mapping[str, CachedRows] | None = None,
    with_optimizer: bool = True,
    with_rows: bool = True,
) -> int:
    """Load a checkpoint into new components.

    Args:
        checkpoint: folder of the checkpoint.
        manifest: of it, from `verified`.
        components: of the run.
        next_use: when rows are used next, for stores that are ordered by it.
        cached: rows that the cache holds; stores that are ordered by next use do without them.
        with_optimizer: load the state of the dense optimizer.
        with_rows: load the rows into the store.

    Returns:
        The next step to train.

    Raises:
        SchemaError: the state is of another model.
    """
    optimizer = components.optimizer if with_optimizer else None
    dense = dense_of(checkpoint)
    load_state(dense, components.model, optimizer, file=str(checkpoint / DENSE))
    if with_rows:
        load_rows(checkpoint, manifest, components.store, next_use, cached)
    return manifest.train_step


def load_rows(
    checkpoint: Path,
    manifest: CheckpointManifest,
    store: Store,
    next_use: NextUseOf | None = None,
    cached: Mapping[str, CachedRows] | None = None,
) -> None:
    """Write the rows of a checkpoint into a store; arguments are those of `load_checkpoint`."""
    train_step = manifest.train_step
    held = {table: rows.rows[rows.is_cached] for table, rows in (cached or {}).items()}
    for table, layout in store.layouts.items():
        apart_from = held.get(table, _NO_ROWS) if next_use is not None else _NO_ROWS
        for all_rows, all_records in table_rows(checkpoint, manifest, layout).contents():
            rows, records, steps = all_rows, all_records, None
            if next_use is not None:
                apart = np.isin(rows, apart_from, invert=True)
                rows = rows[apart]
                records = Records(records.values[apart], records.state[apart])
                steps = next_use(table, train_step, rows)
            store.write(train_step - 1, {table: WriteBack(rows, records, steps)})


def verified(checkpoint: Path, wanted: Mapping[str, Any] | None) -> CheckpointManifest:
    """Return the manifest of a checkpoint of which every byte is as it was written.

    Args:
        checkpoint: folder of the checkpoint.
        wanted: what the run is, from `flash.fits`; None to take any.

    Raises:
        SchemaError: a file is missing or has changed, or it is the checkpoint of something else.
    """
    manifest = read_checkpoint_manifest(checkpoint)
    if wanted is not None:
        file = str(checkpoint / MANIFEST)
        check_fits(manifest.made_of, wanted, manifest.train_step, file)
    verify_files(checkpoint, manifest)
    return manifest


def dense_of(checkpoint: Path) -> dict[str, np.ndarray]:
    """Return the dense state of a checkpoint, by name."""
    path = checkpoint / DENSE
    return from_bytes(path.read_bytes(), file=str(path))


def table_rows(
    checkpoint: Path, manifest: CheckpointManifest, layout: TableLayout
) -> CheckpointTable:
    """Return the rows of one table of a checkpoint."""
    parts = manifest.parts.get(layout.table, ())
    return CheckpointTable(layout, [checkpoint.parent / part for part in parts])


def open_rows(checkpoint: Path, layouts: Mapping[str, TableLayout]) -> CheckpointRows:
    """Return the rows of all tables of a checkpoint."""
    manifest = read_checkpoint_manifest(checkpoint)
    return CheckpointRows(
        {table: table_rows(checkpoint, manifest, layout) for table, layout in layouts.items()}
    )


def load_cached(path: Path, tables: Iterable[str]) -> dict[str, CachedRows]:
    """Return the state of the plan of each table; empty if the run had no planned cache.

    Args:
        path: file of a checkpoint, which may be missing.
        tables: all tables of the run.

    Raises:
        SchemaError: the file has other content.
    """
    if not path.is_file():
        return {}
    arrays = from_bytes(path.read_bytes(), file=str(path))
    try:
        return cached_of(arrays, tables)
    except (KeyError, TypeError) as error:
        raise SchemaError(
            "file with the cache plan's state has other content; remove this checkpoint to use "
            "the one before it",
            file=str(path),
        ) from error

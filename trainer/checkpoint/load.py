"""Save and load the state of training, and check that a checkpoint belongs to the run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from schemas.arrays import Array, find_sorted
from schemas.config.job import Job
from schemas.config.train import CacheConfig
from schemas.dataset.layout import MANIFEST
from schemas.dataset.opened import Dataset
from schemas.errors import SchemaError, check_at_least, shown, suggest_name
from schemas.run.records import CHECKPOINTS
from schemas.typed_values import DecodeError, from_json
from trainer.checkpoint.files import (
    DENSE_FILE,
    PLAN_FILE,
    CheckpointManifest,
    NewCheckpoint,
    complete_checkpoints,
    folder_name,
    read_checkpoint_manifest,
    verify_files,
)
from trainer.checkpoint.format import (
    ArraySpec,
    RowPart,
    RowsAndRecords,
    from_bytes,
    merge_newest,
    read_parts,
)
from trainer.checkpoint.read_rows import fill_store, verified_chunks
from trainer.components import Components, layouts_of, order_of
from trainer.data.decode import spec_of
from trainer.embedding.cache import CachedRows, arrays_of_cached, cached_of
from trainer.run.folder import first_difference
from trainer.stores.local import LocalStore
from trainer.stores.store import (
    Records,
    Store,
    TableLayout,
    WriteBack,
    empty_records,
    initial_records,
)

# ---- The dense state as named arrays ----
#
#     model/<parameter or buffer>
#     optimizer/<parameter>/<key>     such as optimizer/top.0.weight/exp_avg
#
# `format.py` converts them to bytes, for a checkpoint or for a replica that joins. Learning rates
# are not part of the state: they are those of the job.

MODEL, OPTIMIZER = "model/", "optimizer/"
_STATE_KEYS: dict[type[torch.optim.Optimizer], frozenset[str]] = {
    torch.optim.Adam: frozenset({"step", "exp_avg", "exp_avg_sq"}),
    torch.optim.SGD: frozenset(),
}
"""Keys of the state of each parameter; not checked for other optimizers."""


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Array]:
    """Return the state by name; in CPU memory the arrays are views of it.

    Raises:
        ValueError: the optimizer has a parameter that is not the model's.
    """
    state = {f"{MODEL}{name}": _array(value) for name, value in model.state_dict().items()}
    if optimizer is not None:
        names = _parameter_names(model, optimizer)
        for index, values in optimizer.state_dict()["state"].items():
            for key, value in values.items():
                if value is not None:
                    state[f"{OPTIMIZER}{names[index]}/{key}"] = _array(value)
    return state


def load_state(
    arrays: Mapping[str, Array],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    *,
    file: str | None = None,
) -> None:
    """Load a state into a model and its optimizer, completely or not at all.

    Args:
        arrays: what `state_of` returned; copied.
        model: with the same parameters.
        optimizer: of the same kind; None to leave it out.
        file: origin of the arrays, for errors.

    Raises:
        SchemaError: the state is of another model or optimizer; names the first difference.
    """
    expected = {f"{MODEL}{name}": _array(value) for name, value in model.state_dict().items()}
    given = {name: array for name, array in arrays.items() if name.startswith(MODEL)}
    missing, unknown = sorted(expected.keys() - given), sorted(given.keys() - expected)
    if missing or unknown:
        raise SchemaError(
            f"state is of another model: {len(unknown)} unknown arrays ({_shortened(unknown)}) and "
            f"{len(missing)} missing ({_shortened(missing)}); use the model that was trained",
            file=file,
        )
    for name, array in given.items():
        _check_spec(name, ArraySpec.of(expected[name]), array, file)
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
    """Return the state of an optimizer as its own `load_state_dict` expects it."""
    names = _parameter_names(model, optimizer)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    index_of = {name: index for index, name in enumerate(names)}
    state: dict[int, dict[str, Any]] = {}
    for name, array in arrays.items():
        if not name.startswith(OPTIMIZER):
            continue
        parameter, _, key = name.removeprefix(OPTIMIZER).rpartition("/")
        if parameter not in index_of:
            raise SchemaError(
                f"optimizer has no parameter of the state {name!r}; "
                f"{suggest_name(parameter, index_of)}",
                file=file,
            )
        if array.ndim:
            _check_spec(name, ArraySpec(array.dtype, shapes[parameter]), array, file)
        state.setdefault(index_of[parameter], {})[key] = _tensor(array)
    keys = _STATE_KEYS.get(type(optimizer))
    for index, values in state.items():
        if keys is not None and values.keys() != keys:
            raise SchemaError(
                f"optimizer state of {names[index]!r} must be {_shortened(keys)} for "
                f"{type(optimizer).__name__}, got {_shortened(values)}; use the optimizer that it "
                "was trained with",
                file=file,
            )
    return state


def _parameter_names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the name of each of the optimizer's parameters, in its own order."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    others = [tuple(p.shape) for p in parameters if id(p) not in names]
    if others:
        raise ValueError(
            f"optimizer has parameters that are not the model's, of shapes {others[:3]}; build it "
            "from model.parameters()"
        )
    return [names[id(parameter)] for parameter in parameters]


def _check_spec(name: str, expected: ArraySpec, array: Array, file: str | None) -> None:
    if expected != ArraySpec.of(array):
        raise SchemaError(
            f"array {name!r} must be {expected}, got {ArraySpec.of(array)}; use the job that it "
            "was trained with",
            file=file,
        )


def _shortened(names: Iterable[str]) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:3]) + (", ..." if len(ordered) > 3 else "") if ordered else "none"


def _array(value: Any) -> Array:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().numpy()
    return np.asarray(value)


def _tensor(array: Array) -> torch.Tensor:
    return torch.from_numpy(np.array(array))


# ---- The rows of a checkpoint ----


class CheckpointTable:
    """The rows of one table of a checkpoint."""

    def __init__(self, layout: TableLayout, folders: Sequence[Path]) -> None:
        """Map the table's files.

        Args:
            layout: of the run.
            folders: parts of the table in a complete checkpoint, the newest first.
        """
        self.layout = layout
        self._folders = folders
        self._parts = [RowPart(folder, random=True) for folder in folders]

    def fetch(self, rows: NDArray[np.int64]) -> Records:
        """Return copies of rows; a row that was never trained has its initial values."""
        return self.find(rows)[1]

    def find(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.bool_], Records]:
        """Return which rows were ever trained, and copies of all; see `fetch`."""
        records, is_trained = empty_records(self.layout, len(rows)), np.zeros(len(rows), bool)
        for part in self._parts:
            missing = np.flatnonzero(~is_trained)
            is_in, positions = find_sorted(part.rows, rows[missing])
            records.put(missing[is_in], part.records.take(positions[is_in]))
            is_trained[missing[is_in]] = True
        records.put(~is_trained, initial_records(self.layout, rows[~is_trained]))
        return is_trained, records

    def contents(self) -> Iterator[RowsAndRecords]:
        """Yield all rows, ascending, and their records, in chunks."""
        return read_parts(self._folders)


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

    def contents(self, table: str) -> Iterator[RowsAndRecords]:
        """Yield all rows of a table, ascending, and their records, in chunks."""
        return self.tables[table].contents()


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
    """The order in a fingerprint."""

    num_blocks: tuple[int, ...]
    """Of each segment."""
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


def fingerprint_of(job: Job, dataset: Dataset) -> dict[str, Any]:
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


def _model_fingerprint(job: Job, dataset: Dataset) -> dict[str, Any]:
    """Return names only of the model and its optimizers.

    `load_state` compares the layers of the model; a learning rate, eps or beta may change between
    runs that start from each other (a resumed run compares all of `train`, see `trainer/run/folder.py`).
    """
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
            f"checkpoint must have {name}={shown(expected)}, got {shown(actual)}; {_ADVICE}",
            file=file,
        )


def _check_position(manifest: CheckpointManifest, expected: Mapping[str, Any], file: str) -> None:
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


# ---- Save and load checkpoints ----

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
    fingerprint: Mapping[str, Any] | None = None,
) -> Path:
    """Write all state before a step; the row source must be flushed.

    If another process has saved this step or a later one, that checkpoint is returned.

    Raises:
        SchemaError: the disk is full; this checkpoint is removed.
    """

    def write_dense(checkpoint: NewCheckpoint) -> None:
        state = state_of(components.model, components.optimizer)
        checkpoint.write_arrays(DENSE_FILE, state)
        if cached:
            checkpoint.write_arrays(PLAN_FILE, arrays_of_cached(cached))

    return write_checkpoint(
        run, train_step, components.store, write_dense, keep=keep, fingerprint=fingerprint
    )


def write_checkpoint(
    run: Path,
    train_step: int,
    store: Store,
    write_dense: Callable[[NewCheckpoint], None],
    *,
    keep: int,
    fingerprint: Mapping[str, Any] | None = None,
) -> Path:
    """Write all rows of a store and other files as a checkpoint; see `save_checkpoint`."""
    with NewCheckpoint(run / CHECKPOINTS, train_step) as checkpoint:
        write_dense(checkpoint)
        for table, layout in store.layouts.items():
            checkpoint.write_rows(table, layout, store.contents(table))
        parts = {table: (f"{folder_name(train_step)}/{table}",) for table in store.layouts}
        checkpoint.finish(fingerprint or {}, parts, {}, keep=keep)
    return checkpoint.folder


def newest_checkpoint(run: Path) -> Path | None:
    """Return the folder of the newest complete checkpoint, None if there is none."""
    complete = complete_checkpoints(run / CHECKPOINTS)
    return complete[-1] if complete else None


def require_checkpoint(run: Path, train_step: int | None = None) -> Path:
    """Return the complete checkpoint of a step, or the newest one.

    Raises:
        SchemaError: the run does not have it.
    """
    by_step = {int(each.name): each for each in complete_checkpoints(run / CHECKPOINTS)}
    if not by_step:
        raise SchemaError("run has no checkpoint; train it to its end", file=str(run))
    chosen = max(by_step) if train_step is None else train_step
    if chosen not in by_step:
        raise SchemaError(
            f"run has no checkpoint of step {chosen}: it has {list(by_step)}; use one of these",
            file=str(run),
        )
    return by_step[chosen]


def step_of(checkpoint: Path | None) -> int:
    """Return the first step to train after a checkpoint, 0 without one."""
    return 0 if checkpoint is None else int(checkpoint.name)


def verify_checkpoint(
    checkpoint: Path, fingerprint: Mapping[str, Any] | None = None, *, with_rows: bool = True
) -> CheckpointManifest:
    """Verify every byte of a checkpoint and return its manifest.

    Args:
        checkpoint: folder of the checkpoint.
        fingerprint: of the run that it must belong to; None for any run.
        with_rows: also verify rows, which `load_rows` does as it reads them.

    Raises:
        SchemaError: a file is missing or has changed, or it does not belong to the run.
    """
    manifest = read_checkpoint_manifest(checkpoint)
    if fingerprint is not None:
        file = str(checkpoint / MANIFEST)
        check_model(manifest, fingerprint, file)
        _check_position(manifest, fingerprint, file)
    parts = {part for parts in manifest.parts.values() for part in parts}
    names = [n for n in manifest.files if with_rows or n.rpartition("/")[0] not in parts]
    verify_files(checkpoint, {name: manifest.files[name] for name in names})
    return manifest


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
        manifest: of the checkpoint, from `verify_checkpoint`.
        components: of the run.
        next_use: next use of rows, for stores that are ordered by it.
        cached: rows that the cache holds, which stores that are ordered by next use do not get.
        with_optimizer: load the state of the dense optimizer.
        with_rows: load the rows into the store.

    Returns:
        The next step to train.

    Raises:
        SchemaError: the state is of another model, or a file of rows has changed.
    """
    optimizer = components.optimizer if with_optimizer else None
    dense = read_dense(checkpoint)
    load_state(dense, components.model, optimizer, file=str(checkpoint / DENSE_FILE))
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
    """Write the rows of a checkpoint to an empty store; arguments as in `load_checkpoint`.

    Raises:
        SchemaError: a file of rows is missing or has changed; the store must not be used then.
    """
    if isinstance(store, LocalStore):
        _load_local(checkpoint, manifest, store)
        return
    cached_rows = {table: state.rows[state.is_cached] for table, state in (cached or {}).items()}
    for table, layout in store.layouts.items():
        parts = manifest.parts.get(table, ())
        chunks = [verified_chunks(checkpoint, manifest, part, layout) for part in parts]
        for rows, records in merge_newest(chunks):
            steps = None
            if next_use is not None:
                chosen = np.isin(rows, cached_rows.get(table, _NO_ROWS), invert=True)
                rows, records = rows[chosen], records.take(chosen)
                steps = next_use(table, manifest.train_step, rows)
            store.write(manifest.train_step - 1, {table: WriteBack(rows, records, steps)})


def _load_local(checkpoint: Path, manifest: CheckpointManifest, store: LocalStore) -> None:
    """Read the oldest parts into the arrays of the store, and overwrite rows of newer ones."""
    fill_store(checkpoint, manifest, store)
    for table, layout in store.layouts.items():
        for part in reversed(manifest.parts.get(table, ())[:-1]):
            for rows, records in verified_chunks(checkpoint, manifest, part, layout):
                store.tables[table].write(rows, records)


def read_dense(checkpoint: Path) -> dict[str, Array]:
    """Return the dense state of a checkpoint, by name."""
    path = checkpoint / DENSE_FILE
    return from_bytes(path.read_bytes(), file=str(path))


def read_cached(path: Path, tables: Iterable[str]) -> dict[str, CachedRows]:
    """Return the state of the plan of each table; empty if the run had no planned cache.

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

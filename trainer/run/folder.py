"""The folder of a run: its identity, the log lines of its steps, and their verification."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from presage.schemas.config.job import TableConfig
from presage.schemas.config.train import TrainConfig
from presage.schemas.dataset.files import replace_bytes, sync_file
from presage.schemas.dataset.manifest import canonical_json
from presage.schemas.dataset.opened import OpenDataset, read_version
from presage.schemas.errors import SchemaError, first_difference, shown
from presage.schemas.layout import BLOCKS, JOB, SCHEMA, TRAIN
from presage.schemas.rows import TORCHREC_SUFFIX
from presage.schemas.run.records import (
    LEDGER,
    METRICS,
    RUN_FILE,
    SUMMARY,
    LedgerEntry,
    RunSummary,
    read_lines,
    read_metrics,
    to_line,
)
from presage.schemas.run.run_manifest import LOGS, read_newest_state
from presage.schemas.storage.location import Location
from presage.schemas.storage.locks import directory_lock
from presage.schemas.typed_values import from_json

PLANNED_SLOTS = "PlannedSlots"
"""`train.model.name` of a run of `presage.PlannedSlots`, whose model is that of a user's loop."""

# ---- Identity: what must be equal for a run to be continued ----


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOrigin:
    """The warm start of a run (`warm_start.py`)."""

    run: str
    """Folder or URL of the other run, relative to this one if both are local."""
    train_step: int
    """Trained steps of its checkpoint."""
    checkpoint_sha256: str
    """Hash of the checkpoint's manifest."""
    steps_before: int
    """Steps trained up to the checkpoint, including those of preceding runs."""
    trained: tuple[str, ...]
    """Hashes of the segments that the other run and its predecessors trained."""
    expire_days: int | None
    """Days after which rows expire, None for never."""
    segments: tuple[str, ...]
    """Ids of the segments to train."""
    tables: Mapping[str, Mapping[str, int]]
    """By table, numbers of rows that are `kept`, `dropped` and `new`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunIdentity:
    """What must be equal for a run to be continued: the content of `run.json`."""

    dataset: Mapping[str, Any]
    """Roles of its columns and ids of its tables, without indexes."""
    segments: tuple[str, ...]
    """Hash of the manifest of each segment, so far if the run follows the pipeline."""
    closed: bool
    """Whether no segment may be added: the dataset is sealed, or the run does not follow it."""
    train: Mapping[str, Any]
    """The job's train section without checkpoints, stores, cache, limits and threads; of a run of
    `presage.PlannedSlots` what it knows."""
    chosen: bool = False
    """Whether `segments` were selected from those of the dataset."""
    origin: RunOrigin | None = None

    @property
    def selected(self) -> tuple[str, ...] | None:
        """Hashes of the segments that the run selected, None for all of the dataset."""
        return self.segments if self.chosen else None

    @property
    def is_of_slots(self) -> bool:
        """Whether `presage.PlannedSlots` trained the run."""
        return self.train.get("model") == {"name": PLANNED_SLOTS}

    def saved_name(self, table: str) -> str:
        """Return the name of a table of the job in the run's checkpoints."""
        return f"{table}{TORCHREC_SUFFIX}" if self.is_of_slots else table


def identity_of(
    dataset: OpenDataset,
    config: TrainConfig,
    *,
    follows: bool,
    chosen: bool = False,
    origin: RunOrigin | None = None,
) -> RunIdentity:
    """Return the identity of a run of this job on this dataset."""
    train = asdict(config)
    for name in ("checkpoint", "stores", "cache", "num_threads", "limits", "follow"):
        del train[name]  # they do not change the bits of a run
    closed = dataset.manifest.sealed or not follows
    return _identity_of(dataset, train, closed=closed, chosen=chosen, origin=origin)


def _identity_of(dataset: OpenDataset, train: Mapping[str, Any], **others: Any) -> RunIdentity:
    # as `read_identity` returns it: lists for tuples, strings for what JSON lacks
    body = json.loads(canonical_json({"dataset": _schema_of(dataset), "train": train}))
    hashes = (reference.manifest_sha256 for reference in dataset.manifest.segments)
    return RunIdentity(**body, segments=tuple(hashes), **others)


def _schema_of(dataset: OpenDataset) -> dict[str, Any]:
    return {
        "features": {f.name: f.role for f in dataset.features.features if f.role != "kept"},
        "tables": {name: _ids_of(table) for name, table in dataset.job.data.tables.items()},
    }


def _ids_of(table: TableConfig) -> dict[str, Any]:
    """Return how ids become rows; an identity table may grow without changing its rows."""
    body = {"features": table.features, "rows": table.rows}
    return body if table.rows == "identity" else {**body, "num_rows": table.num_rows}


def has_run(run: Path | Location) -> bool:
    """Return whether a folder or URL contains a run."""
    if isinstance(run, Location):
        return read_newest_state(run) is not None
    return (run / RUN_FILE).is_file()


def check_no_run(run: Path | Location) -> None:
    """Raise SchemaError if a folder or URL contains a run."""
    if has_run(run):
        raise SchemaError(
            "output folder has a run already; use --resume or another folder", file=str(run)
        )


def run_lock(run: Path) -> AbstractContextManager[None]:
    """Return the lock of a run folder, whose files only its holder and its children change."""
    return directory_lock(
        run, "run is in use", "wait for that process or end it, or use another folder"
    )


def start_run(run: Path, job: Path | Location, dataset: OpenDataset, identity: RunIdentity) -> None:
    """Create the folder of a new run of a job file.

    Raises:
        SchemaError: the folder has a run already, or a file of another kind that a run would
            replace.
    """
    check_no_run(run)
    run.mkdir(parents=True, exist_ok=True)
    contents = {
        JOB: job.read_bytes(),
        SCHEMA: read_version(dataset.directory, SCHEMA, dataset.manifest.schema_sha256),
    }
    for name in (JOB, SCHEMA, *LOGS, SUMMARY):  # equal or empty: of a start that was killed
        path = run / name
        if path.exists() and path.read_bytes() != contents.get(name, b""):
            raise SchemaError(
                f"output folder has another {name}, which the run would replace; use another "
                "folder, or remove the file",
                file=str(run),
            )
    (run / JOB).write_bytes(contents[JOB])
    for name in (METRICS, LEDGER):
        (run / name).write_text("", encoding="utf-8")
    write_dataset(run, dataset, identity)


def write_dataset(run: Path, dataset: OpenDataset, identity: RunIdentity) -> None:
    """Write the blocks to train, the schema and the identity; again if the dataset has grown."""
    _write_blocks(run, dataset, identity.train["epochs"])
    _write_identity(run, dataset, identity)


def write_slots_run(
    run: Path, dataset: OpenDataset, train: Mapping[str, Any], origin: RunOrigin | None
) -> None:
    """Write what other commands read of a run of `presage.PlannedSlots`.

    Args:
        run: its folder.
        dataset: whose segments it trains.
        train: what is known of its training, beside the model.
        origin: warm start, if it has one.
    """
    job = read_version(dataset.directory, JOB, dataset.manifest.job_sha256)
    replace_bytes(run / JOB, job)
    train = {**train, "model": {"name": PLANNED_SLOTS}}
    others = {"closed": True, "chosen": bool(dataset.unselected), "origin": origin}
    _write_identity(run, dataset, _identity_of(dataset, train, **others))


def _write_identity(run: Path, dataset: OpenDataset, identity: RunIdentity) -> None:
    schema = read_version(dataset.directory, SCHEMA, dataset.manifest.schema_sha256)
    replace_bytes(run / SCHEMA, schema)
    replace_bytes(run / RUN_FILE, canonical_json(asdict(identity)).encode())


def read_identity(run: Path) -> RunIdentity:
    """Return the identity of a run.

    Raises:
        SchemaError: the folder has no run, or its identity is damaged.
    """
    path = run / RUN_FILE
    if not has_run(run):
        raise SchemaError("folder has no run; train first", file=str(run))
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
        return from_json(RunIdentity, body, use_defaults=True)
    except (ValueError, AttributeError) as error:
        raise SchemaError(
            "identity is not JSON with dataset and train; restore it",
            file=str(path),
        ) from error


def read_identity_of_job(run: Path) -> RunIdentity:
    """Return the identity of a run whose model is that of a job.

    Raises:
        SchemaError: as `read_identity`, or the model is that of a user's loop.
    """
    identity = read_identity(run)
    if identity.is_of_slots:
        raise SchemaError(
            "expected a run of a job, got one of presage.PlannedSlots; continue it with "
            "PlannedSlots, or its rows with presage.open_rows",
            file=str(run / RUN_FILE),
        )
    return identity


def check_run(
    run: Path, dataset: OpenDataset, config: TrainConfig, *, follows: bool = False
) -> None:
    """Check that a run is of this job and dataset, so that it can be continued or evaluated.

    Raises:
        SchemaError: the folder has no run, or one of another job or dataset.
    """
    path, identity = run / RUN_FILE, read_identity(run)
    expected = identity_of(dataset, config, follows=follows)
    advice = "use the job and the dataset that it was started with"
    _check_equal(path, "dataset", identity.dataset, expected.dataset, advice)
    _check_equal(path, "train", identity.train, expected.train, advice)
    _check_segments(path, identity, expected.segments, follows=follows, epochs=config.epochs)


def check_schema(path: Path, identity: RunIdentity, dataset: OpenDataset) -> None:
    """Check that the columns and tables of a dataset are those of a run, on any segments.

    Raises:
        SchemaError: they differ; names the first difference.
    """
    schema = json.loads(canonical_json(_schema_of(dataset)))
    advice = "use a dataset with the same columns and tables"
    _check_equal(path, "dataset", identity.dataset, schema, advice)


def check_optimizer(path: Path, identity: RunIdentity, name: str) -> None:
    """Check that the state of a run's rows is that of an optimizer; raises as `check_schema`."""
    old = {"name": identity.train["sparse_optimizer"]["name"]}
    _check_equal(path, "train.sparse_optimizer", old, {"name": name}, "use the same optimizer")


def _check_equal(
    path: Path, name: str, old: Mapping[str, Any], new: Mapping[str, Any], advice: str
) -> None:
    difference = first_difference(old, new, name)
    if difference is not None:
        name, before, now = difference
        raise SchemaError(
            f"{name} differs from that of the run: {shown(now)} instead of {shown(before)}; "
            f"{advice}",
            file=str(path),
        )


def _check_segments(
    path: Path, identity: RunIdentity, new: tuple[str, ...], *, follows: bool, epochs: int
) -> None:
    old = identity.segments
    for index, (before, now) in enumerate(zip_longest(old, new[: len(old)])):
        if before != now:
            raise SchemaError(
                f"dataset does not begin with the segments of the run: segment {str(now)[:12]} "
                f"instead of {before[:12]} at index {index}; use the one it was started with",
                file=str(path),
            )
    if len(new) == len(old):
        return
    if identity.closed and epochs > 1:
        raise SchemaError(
            f"dataset has grown after its first epoch: {len(new)} segments instead of {len(old)}; "
            "train again",
            file=str(path),
        )
    if not follows:
        raise SchemaError(
            f"dataset has grown since the run: {len(new)} segments instead of {len(old)}; use "
            "--follow to continue with the new ones",
            file=str(path),
        )


def write_summary(run: Path, summary: RunSummary) -> None:
    """Write `summary.json`."""
    replace_bytes(run / SUMMARY, f"{to_line(summary)}\n".encode())


# ---- Verification: every sample of every epoch was trained exactly once ----

_BLOCKS_SCHEMA = pa.schema(
    [
        pa.field("segment", pa.string()),
        pa.field("block", pa.int64()),
        pa.field("num_samples", pa.int64()),
    ]
)


def _write_blocks(run: Path, dataset: OpenDataset, epochs: int) -> None:
    """Write `blocks.parquet`: the blocks to train in each epoch."""
    tables: list[pa.Table] = []
    for segment in dataset.segments:
        positions = segment.positions(TRAIN)
        columns = {
            "segment": pa.array([segment.id] * len(positions), pa.string()),
            "block": segment.block_ids[positions],
            "num_samples": segment.column("num_samples")[positions],
        }
        tables.append(pa.table(columns, _BLOCKS_SCHEMA))
    table = pa.concat_tables(tables).replace_schema_metadata({"epochs": str(epochs)})
    with Location.parse(run / BLOCKS).new_file() as path:  # replaces one of a smaller dataset
        pq.write_table(table, path)
        sync_file(path)


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerReport:
    """Result of `verify RUN`."""

    num_steps: int
    """Committed steps."""
    num_samples: int
    """Samples in them."""
    num_expected_samples: int
    """Samples of every epoch."""
    problems: tuple[str, ...]
    """One line each; empty if every sample of every epoch was trained exactly once."""


def verify_run(run: Path) -> LedgerReport:
    """Count in the ledger how often each sample of each epoch was trained.

    Raises:
        SchemaError: the folder has no run, or its files are damaged.
    """
    if not (run / BLOCKS).is_file():
        raise SchemaError(
            f"folder has no run of presage train: {BLOCKS} is missing; train first", file=str(run)
        )
    expected = pq.read_table(run / BLOCKS)
    epochs = int(expected.schema.metadata[b"epochs"])
    entries = read_ledger(run / LEDGER)
    metrics = read_metrics(run / METRICS)
    steps = sorted({e.step for e in entries})
    problems = list(_miscounted_blocks(expected, epochs, entries))
    if steps != list(range(len(steps))):
        missing = next(i for i, step in enumerate([*steps, -1]) if step != i)
        problems.append(f"step {missing} is missing in the ledger, which has later ones")
    if [m.step for m in metrics] != steps:
        problems.append(f"metrics have {len(metrics)} lines for {len(steps)} steps")
    num_expected = epochs * int(expected["num_samples"].to_numpy().sum())
    num_samples = sum(e.num_samples for e in entries)
    if num_samples != num_expected:
        problems.append(f"ledger adds up to {num_samples} samples instead of {num_expected}")
    return LedgerReport(
        num_steps=len(steps),
        num_samples=num_samples,
        num_expected_samples=num_expected,
        problems=tuple(problems),
    )


def read_ledger(path: Path) -> list[LedgerEntry]:
    """Read `ledger.jsonl` without a torn last line.

    Raises:
        SchemaError: the file is missing, or a line other than the last is no entry.
    """
    try:
        return read_lines(
            path,
            lambda body: from_json(LedgerEntry, body),
            "a ledger entry",
        )
    except OSError as error:
        raise SchemaError("ledger is missing; this is no run", file=str(path)) from error


def _miscounted_blocks(
    expected: pa.Table, epochs: int, entries: Iterable[LedgerEntry]
) -> Iterable[str]:
    """Yield one line per epoch in which some block was not trained exactly once."""
    keys = zip(expected["segment"].to_pylist(), expected["block"].to_pylist(), strict=True)
    index_of = {key: index for index, key in enumerate(keys)}
    counts = np.zeros((epochs, len(index_of)), np.int64)
    num_unknown = 0
    for entry in entries:
        for block in entry.blocks:
            index = index_of.get((entry.segment, block))
            if index is None or not 0 <= entry.epoch < epochs:
                num_unknown += 1
            else:
                counts[entry.epoch, index] += 1
    if num_unknown:
        yield f"{num_unknown} blocks of the ledger are not in the training range"
    for epoch in range(epochs):
        yield from _miscounts(counts[epoch], epoch)


def _miscounts(counts: NDArray[np.int64], epoch: int) -> Iterable[str]:
    missing, repeated = int((counts == 0).sum()), int((counts > 1).sum())
    if missing or repeated:
        yield (
            f"epoch {epoch} trained {missing} of {len(counts)} blocks never and {repeated} more "
            "than once"
        )

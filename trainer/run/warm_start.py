"""Start a run from the checkpoint of another run, on segments that the other run did not train.

The initial state is written as the new run's own checkpoint of step 0: rows by row id with their
optimizer state, and the dense state with that of its optimizer. Hence every reader of checkpoints
works unchanged (stores, replicas, savers). The checkpoint is complete before `run.json` is written,
so `--resume` never starts a second time.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from presage.schemas.arrays import find_sorted
from presage.schemas.config.job import Job, load_job
from presage.schemas.dataset.files import sha256_of
from presage.schemas.dataset.manifest import previous_names
from presage.schemas.dataset.opened import OpenDataset, Segment, all_segment_hashes
from presage.schemas.errors import SchemaError
from presage.schemas.layout import JOB, MANIFEST
from presage.schemas.run.records import CHECKPOINTS, RUN_FILE
from presage.schemas.run.run_manifest import local_run
from presage.schemas.storage.location import Location
from presage.trainer.checkpoint.dense_state import load_state, state_of
from presage.trainer.checkpoint.files import (
    DENSE_FILE,
    CheckpointManifest,
    NewCheckpoint,
    complete_checkpoints,
    folder_name,
    remove_checkpoint,
)
from presage.trainer.checkpoint.fingerprint import (
    check_layouts,
    check_model,
    fingerprint_of,
    parse_fingerprint,
)
from presage.trainer.checkpoint.load import (
    read_dense,
    require_checkpoint,
    table_rows,
    verify_checkpoint,
)
from presage.trainer.components import build_components
from presage.trainer.data.decode import training_spec
from presage.trainer.run.folder import (
    RunIdentity,
    RunOrigin,
    check_optimizer,
    check_schema,
    read_identity,
)
from presage.trainer.stores.store import RowsAndRecords, TableLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStart:
    """The run and the checkpoint that a new run starts from.

    Attributes:
        run: folder of the other run.
        checkpoint: its newest complete checkpoint.
        manifest: of that.
        identity: of the other run.
    """

    run: Path
    checkpoint: Path
    manifest: CheckpointManifest
    identity: RunIdentity

    @property
    def trained(self) -> tuple[str, ...]:
        """Hashes of the segments that this run and its predecessors trained."""
        origin = self.identity.origin
        earlier = () if origin is None else origin.trained
        return tuple(dict.fromkeys((*earlier, *self.identity.segments)))

    @property
    def num_steps(self) -> int:
        """Steps of the whole run."""
        if self.identity.is_of_slots:
            return int(self.identity.train["num_steps"])
        order = parse_fingerprint(self.manifest, str(self.checkpoint / MANIFEST)).order
        return sum(-(-n // order.blocks_per_batch) for n in order.num_blocks) * order.epochs

    def num_rows(self, table: str) -> int:
        """Return the number of rows of a table of the job."""
        if self.identity.is_of_slots:
            return load_job(self.run / JOB).data.tables[table].num_rows
        return int(self.manifest.fingerprint["tables"][table]["num_rows"])

    @property
    def steps_before(self) -> int:
        """Steps trained up to the checkpoint, including those of preceding runs."""
        return steps_before(self.identity) + self.manifest.train_step


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstState:
    """What a new run has beside the rows of the other one.

    Attributes:
        layouts: of its rows, by table of the job.
        sparse_optimizer: name of the optimizer of the rows.
        fingerprint: of its checkpoints.
        write_dense: writes the dense state to the checkpoint of step 0.
    """

    layouts: Mapping[str, TableLayout]
    sparse_optimizer: str
    fingerprint: Mapping[str, Any]
    write_dense: Callable[[NewCheckpoint], None]


def steps_before(identity: RunIdentity) -> int:
    """Return the steps that preceding runs trained."""
    return 0 if identity.origin is None else identity.origin.steps_before


@contextmanager
def open_warm_start(source: Path | Location) -> Generator[WarmStart]:
    """Find the newest checkpoint of a run and verify its checksums.

    Raises:
        SchemaError: there is no run, or the checkpoint is missing or damaged.
    """
    with local_run(source, (RUN_FILE,), (None,)) as run:
        identity, checkpoint = read_identity(run), require_checkpoint(run)
        yield WarmStart(
            run=run,
            checkpoint=checkpoint,
            manifest=verify_checkpoint(checkpoint),
            identity=identity,
        )


def untrained_segments(start: WarmStart, dataset: OpenDataset) -> tuple[str, ...]:
    """Return the ids of the segments that the other run did not train.

    Raises:
        SchemaError: there is none, or the other run is not finished.
    """
    train_step, num_steps = start.manifest.train_step, start.num_steps
    if train_step < num_steps:
        raise SchemaError(
            f"run to start from is not finished: its checkpoint is of step {train_step} of "
            f"{num_steps}; train it to its end, or name --segments",
            file=str(start.checkpoint),
        )
    trained, hashes = frozenset(start.trained), all_segment_hashes(dataset)
    untrained = [r.id for r in dataset.manifest.segments if trained.isdisjoint(hashes[r.id])]
    if not untrained:
        raise SchemaError(
            f"dataset has no segment that {start.run.name} did not train; append a day, or name "
            "--segments",
            file=str(dataset.directory),
        )
    return tuple(untrained)


def write_initial_checkpoint(
    start: WarmStart,
    run: Path,
    dataset: OpenDataset,
    first: FirstState,
    expire_days: int | None,
    name: str,
) -> RunOrigin:
    """Write the checkpoint of step 0 of a new run, which has no `run.json` yet.

    The other run has the `name`; `dataset`, whose columns are checked before, has the segments to
    train selected.

    Returns:
        The lineage of the run, `origin` of `run.json`.

    Raises:
        SchemaError: optimizers or tables differ, or rows expire and a segment has no day.
    """
    _check_tables(start, dataset, first)
    _remove_incomplete(run)
    tables = dataset.job.data.tables
    counts: dict[str, dict[str, int]] = {}
    parts: dict[str, tuple[str, ...]] = {}
    with NewCheckpoint(run / CHECKPOINTS, 0) as checkpoint:
        first.write_dense(checkpoint)
        for table, layout in first.layouts.items():
            used = rows_used(dataset, dataset.segments, table)
            alive = rows_of_days(dataset, table, expire_days, start.trained)
            counts[table] = {  # rows
                "new": len(used),  # used by the segments, and not in the initial checkpoint
                "kept": 0,  # in the initial checkpoint
                "dropped": 0,  # expired
                "grown": tables[table].num_rows - start.num_rows(table),
            }
            saved = replace(layout, table=start.identity.saved_name(table))
            chunks = _kept_rows(start, saved, used, alive, counts[table])
            parts[layout.table] = (checkpoint.write_rows(layout.table, layout, chunks),)
        checkpoint.finish(first.fingerprint, parts, {}, keep=1)
    return RunOrigin(
        run=name,
        train_step=start.manifest.train_step,
        checkpoint_sha256=sha256_of(start.checkpoint / MANIFEST),
        steps_before=start.steps_before,
        trained=start.trained,
        expire_days=expire_days,
        segments=tuple(segment.id for segment in dataset.segments),
        tables=counts,
    )


def summary_of_origin(origin: RunOrigin | None) -> dict[str, Any] | None:
    """Return the fields of a run's origin that its summary contains."""
    if origin is None:
        return None
    names = ("run", "train_step", "checkpoint_sha256", "segments", "tables")
    body = asdict(origin)
    return {name: body[name] for name in names}


def rows_used(dataset: OpenDataset, segments: Iterable[Segment], table: str) -> NDArray[np.int64]:
    """Return the distinct ascending rows of a table that training blocks of segments look up."""
    rows = [s.rows(table) for s in segments if table in s.manifest.tables]
    return np.unique(np.concatenate([np.empty(0, np.int64), *rows]))


def rows_of_days(
    dataset: OpenDataset, table: str, num_days: int | None, trained: Sequence[str]
) -> NDArray[np.int64] | None:
    """Return the ascending rows that do not expire, None for all.

    A row is kept if a segment of the last `num_days` days uses it. The last of these days is the
    newest one among the segments to train and those trained before; later days are ignored.

    Raises:
        SchemaError: one of these segments has no day.
    """
    if num_days is None:
        return None
    lineage = dataset.manifest.lineage
    earlier = [s for s in dataset.unselected if not _hashes(s, lineage).isdisjoint(trained)]
    newest = max(_day_of(s) for s in (*dataset.segments, *earlier))
    oldest = newest - timedelta(days=num_days - 1)
    segments = (*dataset.segments, *dataset.unselected)
    recent = [s for s in segments if s.day and oldest <= _day_of(s) <= newest]
    return rows_used(dataset, recent, table)


def _hashes(segment: Segment, lineage: Mapping[str, str]) -> frozenset[str]:
    """Return the hash of a segment's manifest, and those of its versions before erasures."""
    return previous_names(lineage, segment.id) | {segment.reference.manifest_sha256}


def _day_of(segment: Segment) -> date:
    if segment.day is None:
        raise SchemaError(
            "segment has no day, which --expire-days needs; leave it out, or build the dataset "
            "with --day",
            file=str(segment.directory / MANIFEST),
        )
    return date.fromisoformat(segment.day)


def _kept_rows(
    start: WarmStart,
    layout: TableLayout,
    used: NDArray[np.int64],
    alive: NDArray[np.int64] | None,
    counts: dict[str, int],
) -> Iterator[RowsAndRecords]:
    """Yield the rows of a checkpoint that do not expire, ascending, and count them."""
    for rows, records in table_rows(start.checkpoint, start.manifest, layout).contents():
        keep = np.ones(len(rows), bool) if alive is None else find_sorted(alive, rows)[0]
        counts["kept"] += int(keep.sum())
        counts["dropped"] += int((~keep).sum())
        counts["new"] -= int(find_sorted(used, rows[keep])[0].sum())
        yield rows[keep], records.take(keep)


def first_state_of(
    start: WarmStart, job: Job, dataset: OpenDataset, *, rows_only: bool
) -> FirstState:
    """Return the first state of a run of a job, with the other run's dense state or a new one.

    Raises:
        SchemaError: the dense state, which `rows_only` leaves out, is that of another model.
    """
    check_schema(start.run / RUN_FILE, start.identity, dataset)
    spec, fingerprint = training_spec(dataset, job.train), fingerprint_of(job, dataset)
    components = build_components(spec, job.train)
    if rows_only:
        dense = state_of(components.model, components.optimizer)
    elif start.identity.is_of_slots:
        raise SchemaError(
            "dense layers of the run to start from are those of a loop of presage.PlannedSlots; "
            "add --rows-only to take its rows with their optimizer state, and new dense layers",
            file=str(start.run / RUN_FILE),
        )
    else:
        check_model(start.manifest, fingerprint, str(start.checkpoint / MANIFEST))
        dense = read_dense(start.checkpoint)
        file = str(start.checkpoint / DENSE_FILE)
        load_state(dense, components.model, components.optimizer, file=file)
    return FirstState(
        layouts=components.store.layouts,
        sparse_optimizer=job.train.sparse_optimizer.name,
        fingerprint=fingerprint,
        write_dense=lambda checkpoint: checkpoint.write_arrays(DENSE_FILE, dense),
    )


def _check_tables(start: WarmStart, dataset: OpenDataset, first: FirstState) -> None:
    """Check that the rows of a run mean the same in a new one.

    Raises:
        SchemaError: tables or their optimizers differ; names the first difference.
    """
    file, identity = start.run / RUN_FILE, start.identity
    check_optimizer(file, identity, first.sparse_optimizer)
    saved = {identity.saved_name(table): layout for table, layout in first.layouts.items()}
    check_layouts(start.manifest, saved, str(start.checkpoint / MANIFEST))
    for table in first.layouts:
        before, now = start.num_rows(table), dataset.job.data.tables[table].num_rows
        if now < before:
            raise SchemaError(
                f"table {table!r} has {now} rows, fewer than the {before} of the run to start "
                "from; use a dataset with at least as many",
                file=str(file),
            )


def _remove_incomplete(run: Path) -> None:
    """Remove the checkpoint of a start that was killed before `run.json` was written.

    Raises:
        SchemaError: the folder holds other checkpoints.
    """
    names = [folder.name for folder in complete_checkpoints(run / CHECKPOINTS)]
    if names not in ([], [folder_name(0)]):
        raise SchemaError(
            f"output folder has checkpoints {', '.join(names[-3:])} without {RUN_FILE}; use "
            "another folder",
            file=str(run),
        )
    remove_checkpoint(run / CHECKPOINTS / folder_name(0))

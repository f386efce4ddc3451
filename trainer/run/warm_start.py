"""Start a run from the checkpoint of another run, on segments that the other run did not train.

The initial state is written as the new run's own checkpoint of step 0: rows by row id with their
optimizer state, and the dense state with that of its optimizer. Hence every reader of checkpoints
works unchanged (stores, replicas, savers). The checkpoint is complete before `run.json` is written,
so `--resume` never starts a second time.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from presage.schemas.arrays import find_sorted
from presage.schemas.config.job import Job
from presage.schemas.dataset.files import sha256_of
from presage.schemas.dataset.manifest import previous_names
from presage.schemas.dataset.opened import OpenDataset, Segment, all_segment_hashes
from presage.schemas.errors import SchemaError
from presage.schemas.layout import MANIFEST
from presage.schemas.run.records import CHECKPOINTS, RUN_FILE
from presage.schemas.run.run_manifest import local_run
from presage.schemas.storage.location import Location
from presage.trainer.checkpoint.dense_state import load_state
from presage.trainer.checkpoint.files import (
    DENSE_FILE,
    CheckpointManifest,
    NewCheckpoint,
    complete_checkpoints,
    folder_name,
    remove_checkpoint,
)
from presage.trainer.checkpoint.fingerprint import check_model, fingerprint_of, parse_fingerprint
from presage.trainer.checkpoint.load import (
    read_dense,
    require_checkpoint,
    table_rows,
    verify_checkpoint,
)
from presage.trainer.components import build_components, layouts_of
from presage.trainer.data.decode import spec_of
from presage.trainer.run.folder import RunIdentity, RunOrigin, check_schema, read_identity
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
    def steps_before(self) -> int:
        """Steps trained up to the checkpoint, including those of preceding runs."""
        return steps_before(self.identity) + self.manifest.train_step


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
    file = str(start.checkpoint / MANIFEST)
    order, train_step = parse_fingerprint(start.manifest, file).order, start.manifest.train_step
    steps = sum(-(-n // order.blocks_per_batch) for n in order.num_blocks) * order.epochs
    if train_step < steps:
        raise SchemaError(
            f"run to start from is not finished: its checkpoint is of step {train_step} of "
            f"{steps}; train it to its end, or name --segments",
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
    job: Job,
    dataset: OpenDataset,
    expire_days: int | None,
    name: str,
) -> RunOrigin:
    """Write the checkpoint of step 0 of a new run, which has no `run.json` yet.

    The model of its job must match the other run's, which has the `name`; `dataset` has the
    segments to train selected.

    Returns:
        The lineage of the run, `origin` of `run.json`.

    Raises:
        SchemaError: model, optimizers or tables differ, or rows expire and a segment has no day.
    """
    _check_compatible(start, job, dataset)
    _remove_incomplete(run)
    layouts = layouts_of(spec_of(dataset, job.train.dtype), job.train)
    tables = dataset.job.data.tables
    counts: dict[str, dict[str, int]] = {}
    fingerprint = fingerprint_of(job, dataset)
    with NewCheckpoint(run / CHECKPOINTS, 0) as checkpoint:
        checkpoint.write_arrays(DENSE_FILE, read_dense(start.checkpoint))
        for table, layout in layouts.items():
            used = rows_used(dataset, dataset.segments, table)
            alive = rows_of_days(dataset, table, expire_days, start.trained)
            old_num_rows = int(start.manifest.fingerprint["tables"][table]["num_rows"])
            counts[table] = {  # rows
                "new": len(used),  # used by the segments, and not in the initial checkpoint
                "kept": 0,  # in the initial checkpoint
                "dropped": 0,  # expired
                "grown": tables[table].num_rows - old_num_rows,
            }
            chunks = _kept_rows(start, layout, used, alive, counts[table])
            checkpoint.write_rows(table, layout, chunks)
        parts = {table: (f"{folder_name(0)}/{table}",) for table in layouts}
        checkpoint.finish(fingerprint, parts, {}, keep=1)
    return RunOrigin(
        run=name,
        train_step=start.manifest.train_step,
        checkpoint_sha256=sha256_of(start.checkpoint / MANIFEST),
        steps_before=start.steps_before,
        trained=start.trained,
        expire_days=expire_days,
        segments=tuple(fingerprint["segments"]),
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


def _check_compatible(start: WarmStart, job: Job, dataset: OpenDataset) -> None:
    check_schema(start.run / RUN_FILE, start.identity, dataset)
    file = start.checkpoint / MANIFEST
    check_model(start.manifest, fingerprint_of(job, dataset), str(file))
    spec = spec_of(dataset, job.train.dtype)
    components = build_components(spec, job.train)
    dense = read_dense(start.checkpoint)
    load_state(
        dense, components.model, components.optimizer, file=str(start.checkpoint / DENSE_FILE)
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

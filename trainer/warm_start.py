"""Start a run from the checkpoint of another one, on segments which that one did not train."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from schemas.config.job import Job
from schemas.dataset import Dataset, Segment, all_segment_hashes, has_accesses
from schemas.errors import SchemaError
from schemas.files import sha256_of
from schemas.layout import MANIFEST
from schemas.manifest import previous_names
from schemas.run_log import CHECKPOINTS, RUN_FILE
from trainer.checkpoint.agent import NewCheckpoint
from trainer.checkpoint.format import RowsAndRecords
from trainer.checkpoint.load import (
    check_model,
    dense_of,
    load_state,
    made_of,
    newest_checkpoint,
    store_of,
    verified,
)
from trainer.checkpoint.manifest import DENSE, CheckpointManifest, complete, folder_of
from trainer.components import build_parts, memory_stores
from trainer.data.decode import spec_of
from trainer.run import RunIdentity, check_meaning, read_identity
from trainer.stores.api import Records, Store


def rows_used(dataset: Dataset, segments: Iterable[Segment], table: str) -> NDArray[np.int64]:
    """Return the distinct rows that the training blocks of segments look up, ascending.

    Args:
        dataset: that the segments are of.
        segments: of it.
        table: table name.
    """
    found = [s.rows(table) for s in segments if has_accesses(dataset, s, table)]
    return np.unique(np.concatenate([np.empty(0, np.int64), *found]))


def rows_of_days(
    dataset: Dataset, table: str, num_days: int | None, trained: Sequence[str]
) -> NDArray[np.int64] | None:
    """Return the ascending rows that stay, None where all do.

    A row stays when a segment of the last `num_days` days uses it. The last of these days is the
    newest one of the segments that are trained now or were before; later days are not looked at.

    Args:
        dataset: the segments that are trained now, chosen from all.
        table: table name.
        num_days: days that count, the newest among them; None for all days.
        trained: hashes of the segments that were trained before.

    Raises:
        SchemaError: one of these segments has no day.
    """
    if num_days is None:
        return None
    lineage = dataset.manifest.lineage
    before = [s for s in dataset.unselected if not _hashes(s, lineage).isdisjoint(trained)]
    newest = max(_day_of(s) for s in (*dataset.segments, *before))
    first = newest - timedelta(days=num_days - 1)
    everything = (*dataset.segments, *dataset.unselected)
    last = [s for s in everything if s.manifest.day and first <= _day_of(s) <= newest]
    return rows_used(dataset, last, table)


def _hashes(segment: Segment, lineage: Mapping[str, str]) -> frozenset[str]:
    """Return the hash of a segment's manifest, and those from before ids were forgotten in it."""
    return previous_names(lineage, segment.manifest.id) | {sha256_of(segment.directory / MANIFEST)}


def _day_of(segment: Segment) -> date:
    if segment.manifest.day is None:
        raise SchemaError(
            "segment must have a day while rows expire by days, got none; leave --expire-days out, "
            "or build the dataset with --day",
            file=str(segment.directory / MANIFEST),
        )
    return date.fromisoformat(segment.manifest.day)


# A run that begins with the checkpoint of another, on segments which that one did not train.
#
# What it begins with becomes the new run's own checkpoint of step 0: rows by row id with their
# optimizer rows, the dense state with that of its optimizer. So whatever reads a checkpoint reads
# this one (every kind of store, replicas, what saves beside training), and a run that is there
# has it: it is complete before `run.json` is written, and `--resume` begins nothing a second
# time.


@dataclass(frozen=True, slots=True, kw_only=True)
class TableStart:
    """What became of the rows of one table."""

    new: int
    """Rows that the segments of the run use and that it did not begin with."""
    kept: int
    """Rows that it begins with."""
    dropped: int
    """Rows of the other run that no segment of the last days uses."""
    grown: int
    """How many more ids the table has room for, where ids are rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """What a run begins with.

    Attributes:
        old: folder of the other run.
        checkpoint: its newest complete checkpoint.
        manifest: of that.
        identity: of the other run.
    """

    old: Path
    checkpoint: Path
    manifest: CheckpointManifest
    identity: RunIdentity

    @property
    def trained(self) -> tuple[str, ...]:
        """Hashes of the segments that it was trained on, by the runs before it, too."""
        before = (self.identity.origin or {}).get("trained", ())
        return tuple(dict.fromkeys((*before, *self.identity.segments)))

    @property
    def steps_before(self) -> int:
        """Steps that were trained up to the checkpoint, since the first run began from nothing."""
        return steps_before(self.identity) + self.manifest.train_step


def steps_before(identity: RunIdentity) -> int:
    """Return the steps that were trained before the first step of a run."""
    return int((identity.origin or {}).get("steps_before", 0))


def open_beginning(old: Path) -> Beginning:
    """Find the newest checkpoint of a run and verify every byte of it.

    Raises:
        SchemaError: the folder holds no run, or one without a checkpoint, or a file has changed.
    """
    identity, checkpoint = read_identity(old), newest_checkpoint(old)
    if checkpoint is None:
        raise SchemaError(
            "run to start from must have a checkpoint, got none; train it to its end",
            file=str(old),
        )
    return Beginning(
        old=old, checkpoint=checkpoint, manifest=verified(checkpoint, None), identity=identity
    )


def not_trained(beginning: Beginning, dataset: Dataset) -> tuple[str, ...]:
    """Return the ids of the segments that are left to train.

    Raises:
        SchemaError: none are, or the other run was stopped before its end.
    """
    order, found = beginning.manifest.made_of.get("order", {}), beginning.manifest.train_step
    steps = sum(-(-n // order["blocks_per_batch"]) for n in order["num_blocks"]) * order["epochs"]
    if found < steps:
        raise SchemaError(
            f"run to start from must be finished, got a checkpoint of step {found} of {steps}; "
            "train it to its end, or name --segments",
            file=str(beginning.checkpoint),
        )
    trained, hashes = frozenset(beginning.trained), all_segment_hashes(dataset)
    left = [r.id for r in dataset.manifest.segments if trained.isdisjoint(hashes[r.id])]
    if not left:
        raise SchemaError(
            f"dataset must have segments that {beginning.old.name} did not train, got none; append "
            "a day, or name --segments",
            file=str(dataset.directory / MANIFEST),
        )
    return tuple(left)


def begin_with(
    beginning: Beginning, run: Path, job: Job, dataset: Dataset, expire_days: int | None
) -> dict[str, Any]:
    """Write the checkpoint of step 0 of a new run, which has no `run.json` yet.

    Args:
        beginning: what it begins with.
        run: folder of the new run.
        job: of the new run; what is not the model's may differ from the other run's.
        dataset: the segments that are to be trained, chosen from all.
        expire_days: drop rows that no segment of so many days up to the newest one uses; None
            keeps all.

    Returns:
        The lineage of the run, as `run.json` has it.

    Raises:
        SchemaError: model, optimizers or tables are others, or a segment has no day to count by.
    """
    _check(beginning, job, dataset)
    _clear(run)
    stores = memory_stores(spec_of(dataset, job.train.dtype), job.train)
    tables = dataset.job.data.tables
    found: dict[str, TableStart] = {}
    wanted = made_of(job, dataset)
    with NewCheckpoint(run / CHECKPOINTS, 0) as writing:
        writing.arrays(DENSE, dense_of(beginning.checkpoint))
        for table, store in stores.items():
            rows = Rows(
                used=rows_used(dataset, dataset.segments, table),
                alive=rows_of_days(dataset, table, expire_days, beginning.trained),
            )
            writing.rows(table, store.layout, rows.kept_of(beginning, store))
            before = int(beginning.manifest.made_of["tables"][table]["num_rows"])
            found[table] = rows.report(tables[table].num_rows - before)
        parts = {table: (f"{folder_of(0)}/{table}",) for table in stores}
        writing.finish(wanted, parts, {}, keep=1)
    return {
        "run": Path(os.path.relpath(beginning.old, run)).as_posix(),
        "train_step": beginning.manifest.train_step,
        "checkpoint_sha256": sha256_of(beginning.checkpoint / MANIFEST),
        "steps_before": beginning.steps_before,
        "trained": list(beginning.trained),
        "expire_days": expire_days,
        "segments": wanted["segments"],
        "tables": {table: asdict(each) for table, each in found.items()},
    }


def said_of(origin: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return what the summary of a run says of where it began."""
    if origin is None:
        return None
    names = ("run", "train_step", "checkpoint_sha256", "segments", "tables")
    return {name: origin[name] for name in names}


class Rows:
    """Counts the rows of one table as they are written."""

    def __init__(self, used: NDArray[np.int64], alive: NDArray[np.int64] | None) -> None:
        """Keep both, and count nothing yet.

        Args:
            used: ascending rows that the new run uses.
            alive: ascending rows that stay; None for all.
        """
        self._used, self._alive = used, alive
        self._kept = self._dropped = self._known = 0

    def kept_of(self, beginning: Beginning, store: Store) -> Iterator[RowsAndRecords]:
        """Yield the rows of a checkpoint that stay, ascending."""
        pieces = store_of(beginning.checkpoint, beginning.manifest, store).contents()
        for rows, records in pieces:
            stay = np.ones(len(rows), bool) if self._alive is None else among(rows, self._alive)
            self._kept += int(stay.sum())
            self._dropped += int((~stay).sum())
            self._known += int(among(rows[stay], self._used).sum())
            yield rows[stay], Records(records.values[stay], records.state[stay])

    def report(self, grown: int) -> TableStart:
        """Return the counts, when all rows are written."""
        return TableStart(
            new=len(self._used) - self._known, kept=self._kept, dropped=self._dropped, grown=grown
        )


def among(rows: NDArray[np.int64], known: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Tell which rows are among ascending ones.

    Example:
        >>> among(np.array([1, 4, 9]), np.array([2, 4, 8])).tolist()
        [False, True, False]
    """
    if not len(known):
        return np.zeros(len(rows), bool)
    at = np.minimum(np.searchsorted(known, rows), len(known) - 1)
    return known[at] == rows


def _check(beginning: Beginning, job: Job, dataset: Dataset) -> None:
    """Refuse what does not fit before anything is written."""
    check_meaning(beginning.old / RUN_FILE, beginning.identity, dataset)
    file = beginning.checkpoint / MANIFEST
    check_model(beginning.manifest.made_of, made_of(job, dataset), str(file))
    spec = spec_of(dataset, job.train.dtype)
    parts = build_parts(spec, job.train, memory_stores(spec, job.train))
    dense = dense_of(beginning.checkpoint)
    load_state(dense, parts.model, parts.optimizer, file=str(beginning.checkpoint / DENSE))


def _clear(run: Path) -> None:
    """Remove what was left of a beginning that was killed before `run.json` was there.

    Raises:
        SchemaError: the folder holds other checkpoints.
    """
    found = [folder.name for folder in complete(run / CHECKPOINTS)]
    if found not in ([], [folder_of(0)]):
        raise SchemaError(
            f"output must hold no run, got checkpoints {', '.join(found[-3:])} without "
            f"{RUN_FILE}; use another folder",
            file=str(run),
        )
    shutil.rmtree(run / CHECKPOINTS / folder_of(0), ignore_errors=True)

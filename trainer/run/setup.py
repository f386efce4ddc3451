"""Open or resume a run: its first checkpoint, and the rollback when rows were lost."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from presage.schemas.config.job import Job
from presage.schemas.config.train import WAIT
from presage.schemas.dataset.opened import (
    OpenDataset,
    open_dataset,
    segment_hashes,
    select_segments,
)
from presage.schemas.errors import SchemaError
from presage.schemas.run.records import CHECKPOINTS, METRICS, RUN_FILE
from presage.schemas.storage.location import Location
from presage.trainer.checkpoint.files import complete_checkpoints, set_aside
from presage.trainer.checkpoint.load import newest_checkpoint, step_of, verify_checkpoint
from presage.trainer.checkpoint.manager import claim_leftovers
from presage.trainer.components import order_of
from presage.trainer.growing.follow import FollowedDataset
from presage.trainer.options import TrainOptions
from presage.trainer.recovery import Drain, Watchdog
from presage.trainer.run.folder import (
    RunIdentity,
    RunOrigin,
    check_no_run,
    check_run,
    has_run,
    identity_of,
    read_identity,
    read_identity_of_job,
    start_run,
    write_dataset,
)
from presage.trainer.run.ledger import steps_with_lines
from presage.trainer.run.warm_start import (
    WarmStart,
    first_state_of,
    open_warm_start,
    untrained_segments,
    write_initial_checkpoint,
)
from presage.trainer.stores.store import RowsLostError

logger = logging.getLogger(__name__)


def open_run(
    job_path: Path | Location,
    job: Job,
    dataset_path: Location,
    run: Path,
    options: TrainOptions,
    drain: Drain,
    progress: Callable[[str], None],
    watchdog: Watchdog,
) -> FollowedDataset:
    """Create or resume the folder of a run, after waiting for a first segment.

    Returns:
        The dataset, with its first span.

    Raises:
        SchemaError: dataset or run break their format, or do not belong together.
        DrainInterrupt: shutdown was requested; a new run has no folder then.
    """
    config = job.train
    may_start = options.follow or options.start_from is not None or not options.resume
    if has_run(run) or not may_start:
        if not options.resume:
            check_no_run(run)
        return _resume_run(job, dataset_path, run, options, drain, progress, watchdog)
    with ExitStack() as opened:
        warm_start = None
        if options.start_from is not None:
            warm_start = opened.enter_context(open_warm_start(options.start_from))
        selected = _select_segments(warm_start, dataset_path, options)
        data = FollowedDataset(dataset_path, job, options, drain, progress, selected=selected)
        with watchdog(WAIT):
            dataset = data.wait_for(0).dataset
        drain.check()
        _report_missing_index(dataset, job, options, progress)
        origin: RunOrigin | None = None
        if warm_start is not None:
            name = _name_of_origin(run, options)
            first = first_state_of(warm_start, job, dataset, rows_only=options.rows_only)
            origin = write_initial_checkpoint(
                warm_start, run, dataset, first, options.expire_days, name
            )
    chosen = selected is not None
    identity = identity_of(dataset, config, follows=options.follow, chosen=chosen, origin=origin)
    start_run(run, job_path, dataset, identity)
    claim_leftovers(run, config.checkpoint, resume=False)
    return data


def _resume_run(
    job: Job,
    dataset_path: Location,
    run: Path,
    options: TrainOptions,
    drain: Drain,
    progress: Callable[[str], None],
    watchdog: Watchdog,
) -> FollowedDataset:
    """Open the dataset of an existing run; arguments as in `open_run`."""
    config = job.train
    identity = read_identity_of_job(run)
    claim_leftovers(run, config.checkpoint, resume=True)
    _check_same_start(run, identity, dataset_path, options)

    def check(dataset: OpenDataset) -> None:
        check_run(run, dataset, config, follows=options.follow)

    selected = identity.selected
    data = FollowedDataset(dataset_path, job, options, drain, progress, check, selected=selected)
    with watchdog(WAIT):
        span = data.wait_for(0)
    drain.check()
    now = identity_of(span.dataset, config, follows=options.follow)
    write_dataset(run, span.dataset, replace(now, chosen=identity.chosen, origin=identity.origin))
    return data


def _report_missing_index(
    dataset: OpenDataset, job: Job, options: TrainOptions, progress: Callable[[str], None]
) -> None:
    """Report that no index of the dataset has the order of the run, where that is allowed."""
    train, indexes = job.train, dataset.complete_indexes()
    same = [(i.batch_samples, i.epochs) == (train.batch_samples, train.epochs) for i in indexes]
    if options.embedding == "cached" or any(same) or not indexes:
        return
    try:
        dataset.index_for(order_of(job, dataset))
    except SchemaError as error:
        progress(
            f"training without an index, which --embedding {options.embedding} allows: {error}"
        )


def _name_of_origin(run: Path, options: TrainOptions) -> str:
    """Return the run that a run starts from: as seen from its folder, or a whole path or URL."""
    start = options.start_from
    assert start is not None, "the run starts from another one"
    if isinstance(start, Location):
        return str(start)
    return Path(
        os.path.relpath(start, run) if options.output is None else start.absolute()
    ).as_posix()


def _select_segments(
    warm_start: WarmStart | None, dataset_path: Location, options: TrainOptions
) -> tuple[str, ...] | None:
    """Return the hashes of the segments of a new run, None for all of the dataset."""
    if warm_start is None and options.segments is None:
        return None
    dataset = open_dataset(dataset_path)
    names = options.segments
    if names is None:
        assert warm_start is not None, "one of both is given"
        names = untrained_segments(warm_start, dataset)
    return tuple(segment_hashes(select_segments(dataset, names)).values())


def _check_same_start(
    run: Path, identity: RunIdentity, dataset_path: Location, options: TrainOptions
) -> None:
    """Raise SchemaError if a run was started with other options than the command has."""
    problem = None
    if options.start_from is not None and identity.origin is None:
        problem = "was not started from another run, as --start-from requires"
    elif options.follow and identity.chosen:
        problem = "trains selected segments, and cannot --follow its dataset"
    elif options.segments is not None:
        named = select_segments(open_dataset(dataset_path), options.segments)
        if set(segment_hashes(named).values()) != set(identity.segments):
            problem = f"trains other segments than {', '.join(options.segments)}"
    if problem is not None:
        raise SchemaError(
            f"run to continue {problem}; use another folder", file=str(run / RUN_FILE)
        )


def first_checkpoint(run: Path, options: TrainOptions) -> Path | None:
    """Return the checkpoint that training starts from, None for none."""
    may_have_one = options.resume or options.start_from is not None
    checkpoint = resumable_checkpoint(run) if may_have_one else None
    if may_have_one and checkpoint is None and (num_steps := steps_with_lines(run)[0]):
        logger.warning(
            "%s has no checkpoint: its %s steps are trained again. Set "
            "train.checkpoint.every_steps to save beside training.",
            *(run, num_steps),
        )
    return checkpoint


def resumable_checkpoint(run: Path) -> Path | None:
    """Return the newest checkpoint whose steps all have lines in the logs, None if none exists.

    Newer checkpoints are renamed, and removed once the run has saved their steps again.

    Raises:
        SchemaError: no checkpoint is reached by the lines, it is damaged, or the initial checkpoint
            of a warm start is missing.
    """
    origin = read_identity(run).origin
    checkpoints = complete_checkpoints(run / CHECKPOINTS)
    if not checkpoints and origin is not None:
        raise SchemaError(
            f"checkpoint that the run started from is missing; {_restart_hint(run, origin)}",
            file=str(run / CHECKPOINTS),
        )
    num_steps, file = steps_with_lines(run)
    reached = [checkpoint for checkpoint in checkpoints if step_of(checkpoint) <= num_steps]
    if len(reached) == len(checkpoints):
        return newest_checkpoint(run)
    if not reached:
        oldest = step_of(checkpoints[0])
        raise SchemaError(
            f"lines of steps {num_steps} to {oldest - 1} are missing, before the checkpoint of "
            f"step {oldest}; restore the file from a copy, or {_restart_hint(run, origin)}",
            file=str(file),
        )
    verify_checkpoint(reached[-1])
    first, last = step_of(reached[-1]), step_of(checkpoints[-1])
    for checkpoint in checkpoints[len(reached) :]:
        set_aside(checkpoint)
    logger.warning(
        "lines of steps are missing: %s has those of the first %s steps, the newest checkpoint is "
        "of step %s. Training continues from the checkpoint of step %s; steps %s to %s are trained "
        "again.",
        *(file, num_steps, last, first, first, last - 1),
    )
    return reached[-1]


def _restart_hint(run: Path, origin: RunOrigin | None) -> str:
    """Return how to train a run again from its start."""
    if origin is None:
        return f"remove {run / CHECKPOINTS} and use --resume to train again from step 0"
    old = origin.run if "://" in origin.run else os.path.normpath(run / origin.run)
    return f"begin again in another folder with --start-from {old}"


T = TypeVar("T")
_MAX_ATTEMPTS_WITHOUT_PROGRESS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollbacks:
    """Rollbacks of a run and their cost."""

    num_rollbacks: int = 0
    recomputed_steps: int = 0
    """Committed steps that were trained again."""


def with_rollbacks(
    run: Path,
    checkpoint: Path | None,
    attempt: Callable[[Path | None, Rollbacks], T],
    complete_folder: Callable[[], None],
) -> T:
    """Train, and train again from the newest checkpoint whenever stores lose rows.

    Args:
        run: run folder.
        checkpoint: to start from, None for the start of the run.
        attempt: trains from a checkpoint to the end, with stores of its own; is given the
            rollbacks before it.
        complete_folder: waits until all files of the previous attempt are in the folder.

    Returns:
        The result of the attempt that finished.

    Raises:
        RowsLostError: rows were lost three times without a newly committed step in between.
    """
    rollbacks, furthest, without_progress = Rollbacks(), -1, 0
    while True:
        try:
            return attempt(checkpoint, rollbacks)
        except RowsLostError as error:
            complete_folder()
            committed = len((run / METRICS).read_text(encoding="utf-8").splitlines())
            without_progress = 0 if committed > furthest else without_progress + 1
            furthest = max(furthest, committed)
            if without_progress == _MAX_ATTEMPTS_WITHOUT_PROGRESS:
                raise
            checkpoint = resumable_checkpoint(run)
            first = step_of(checkpoint)
            rollbacks = Rollbacks(
                num_rollbacks=rollbacks.num_rollbacks + 1,
                recomputed_steps=rollbacks.recomputed_steps + committed - first,
            )
            logger.warning("rows were lost: back to step %s of %s: %s", first, committed, error)

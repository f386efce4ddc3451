"""The folder of a run and the dataset that it is to train: begun, or gone on with."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from schemas.chosen import choose, hashes_of
from schemas.dataset import Dataset, open_dataset
from schemas.errors import SchemaError
from schemas.events import CHECKPOINTS, IDENTITY
from schemas.job import Job
from schemas.job_limits import WAIT
from trainer.checkpoint import newest_checkpoint, step_of, verified
from trainer.draining import Drain
from trainer.flash.manifest import complete, set_aside
from trainer.following import Following, FollowOptions
from trainer.ledger import steps_with_lines
from trainer.parts import order_of
from trainer.run import (
    RunIdentity,
    check_run,
    has_run,
    read_identity,
    refuse_run,
    start_run,
    write_dataset,
)
from trainer.saving import claim_leftovers
from trainer.training import TrainOptions
from trainer.warm import Beginning, begin_with, not_trained, open_beginning
from trainer.watchdog import Watchdog

logger = logging.getLogger(__name__)


def begin_run(
    job_path: Path,
    job: Job,
    dataset_path: Path,
    run: Path,
    options: TrainOptions,
    drain: Drain,
    say: Callable[[str], None],
    watchdog: Watchdog,
) -> Following:
    """Wait for a first segment, and have a folder of the run that names what is committed.

    Args:
        job_path: job file.
        job: read from it.
        dataset_path: dataset folder.
        run: output folder.
        options: what the command line says.
        drain: ends a wait.
        say: told what is waited for.
        watchdog: limits it.

    Returns:
        The dataset, whose first span is known.

    Raises:
        SchemaError: dataset or run break their format, or do not belong together.
        DrainInterrupt: the process is to end; what was not begun has no folder.
    """
    config = job.train
    may_begin = options.follow or options.start_from is not None or not options.resume
    if has_run(run) or not may_begin:
        if not options.resume:
            refuse_run(run)
        return _go_on(job, dataset_path, run, options, drain, say, watchdog)
    beginning = None if options.start_from is None else open_beginning(options.start_from)
    chosen = _chosen(beginning, dataset_path, options)
    data = Following(dataset_path, job, how_of(options, chosen=chosen), drain, say)
    with watchdog(WAIT):
        dataset = data.first().dataset
    drain.check()
    _say_without_index(dataset, job, options, say)
    origin: dict[str, Any] | None = None
    if beginning is not None:
        origin = begin_with(beginning, run, job, dataset, options.expire_days)
    is_chosen = chosen is not None
    start_run(
        run, job_path, dataset, config, follows=options.follow, chosen=is_chosen, origin=origin
    )
    claim_leftovers(run, config.checkpoint, resume=False)
    return data


def _go_on(
    job: Job,
    dataset_path: Path,
    run: Path,
    options: TrainOptions,
    drain: Drain,
    say: Callable[[str], None],
    watchdog: Watchdog,
) -> Following:
    """Open the dataset of a run that is there; arguments are those of `begin_run`."""
    config = job.train
    found = read_identity(run)
    claim_leftovers(run, config.checkpoint, resume=True)
    _check_same(run, found, dataset_path, options)

    def check(dataset: Dataset) -> None:
        check_run(run, dataset, config, follows=options.follow)

    how = how_of(options, chosen=chosen_of(found))
    data = Following(dataset_path, job, how, drain, say, check)
    with watchdog(WAIT):
        span = data.first()
    drain.check()
    write_dataset(
        run,
        span.dataset,
        config,
        follows=options.follow,
        chosen=found.chosen,
        origin=found.origin,
    )
    return data


def _say_without_index(
    dataset: Dataset, job: Job, options: TrainOptions, say: Callable[[str], None]
) -> None:
    """Say that a run trains in another order than the indexes of its dataset, where it may."""
    train, manifests = job.train, [index.manifest for index in dataset.indexes]
    same = [(m.batch_samples, m.epochs) == (train.batch_samples, train.epochs) for m in manifests]
    if options.embedding == "cached" or any(same) or not manifests:
        return
    try:
        dataset.index_for(order_of(job, dataset))
    except SchemaError as error:
        say(f"training without an index, which --embedding {options.embedding} allows: {error}")


def _chosen(
    beginning: Beginning | None, dataset_path: Path, options: TrainOptions
) -> tuple[str, ...] | None:
    """Return the hashes of the segments of a new run, None for all of the dataset."""
    if beginning is None and options.segments is None:
        return None
    dataset = open_dataset(dataset_path)
    wanted = options.segments
    if wanted is None:
        assert beginning is not None, "one of both is given"
        wanted = not_trained(beginning, dataset)
    return tuple(hashes_of(choose(dataset, wanted)).values())


def _check_same(run: Path, found: RunIdentity, dataset_path: Path, options: TrainOptions) -> None:
    """Refuse to go on with a run that was begun in another way.

    Raises:
        SchemaError: it was not started from a run, or has other segments, or is to follow.
    """
    problem = None
    if options.start_from is not None and found.origin is None:
        problem = "a run that was started from another, got one that began from nothing"
    elif options.follow and found.chosen:
        problem = "one that follows its dataset, got one of chosen segments"
    elif options.segments is not None:
        named = choose(open_dataset(dataset_path), options.segments)
        if set(hashes_of(named).values()) != set(found.segments):
            problem = f"of the segments {', '.join(options.segments)}, got one of others"
    if problem is not None:
        raise SchemaError(
            f"run to go on with must be {problem}; use another folder", file=str(run / IDENTITY)
        )


def chosen_of(found: RunIdentity) -> tuple[str, ...] | None:
    """Return the hashes of the segments that a run has chosen, None where it has all."""
    return found.segments if found.chosen else None


def first_checkpoint(run: Path, options: TrainOptions) -> Path | None:
    """Return what a run that has been begun begins with, None for nothing."""
    begun = options.resume or options.start_from is not None
    checkpoint = resumable_checkpoint(run) if begun else None
    if begun and checkpoint is None and (num_steps := steps_with_lines(run)[0]):
        logger.warning(
            "%s has no checkpoint: its %s steps are trained again. Set "
            "train.checkpoint.every_steps to save beside training.",
            *(run, num_steps),
        )
    return checkpoint


def resumable_checkpoint(run: Path) -> Path | None:
    """Return the newest checkpoint that the lines of steps reach, None where there is none at all.

    Newer ones are set aside: they go when the run has saved those steps again.

    Raises:
        SchemaError: the lines reach no checkpoint, the one that they reach is damaged, or the run
            began with the checkpoint of another one, which is gone.
    """
    origin = read_identity(run).origin
    checkpoints = complete(run / CHECKPOINTS)
    if not checkpoints and origin is not None:
        raise SchemaError(
            f"run must have the checkpoint that it began with, got none; {_again(run, origin)}",
            file=str(run / CHECKPOINTS),
        )
    num_steps, file = steps_with_lines(run)
    reached = [checkpoint for checkpoint in checkpoints if step_of(checkpoint) <= num_steps]
    if len(reached) == len(checkpoints):
        return newest_checkpoint(run)
    if not reached:
        oldest = step_of(checkpoints[0])
        raise SchemaError(
            f"lines of steps {num_steps} to {oldest - 1} must exist to continue from the "
            f"checkpoint of step {oldest}, got none; restore the file from a copy, or "
            f"{_again(run, origin)}",
            file=str(file),
        )
    verified(reached[-1], None)
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


def _again(run: Path, origin: Mapping[str, Any] | None) -> str:
    """Return how a run is trained again from its beginning."""
    if origin is None:
        return f"remove {run / CHECKPOINTS} and use --resume to train again from step 0"
    old = os.path.normpath(run / origin["run"])
    return f"begin again in another folder with --start-from {old}"


def how_of(
    options: TrainOptions, at_least: int = 0, chosen: tuple[str, ...] | None = None
) -> FollowOptions:
    """Return how a run looks at its dataset.

    Args:
        options: what the command line says.
        at_least: segments to wait for at first.
        chosen: hashes of the segments that it trains; all when None.
    """
    return FollowOptions(
        follow=options.follow,
        stop=options.steps,
        planned=options.embedding == "cached",
        at_least=at_least,
        chosen=chosen,
    )

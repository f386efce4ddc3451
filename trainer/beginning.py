"""The folder of a run and the dataset that it is to train: begun, or gone on with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from schemas.dataset import Dataset
from schemas.job import Job
from schemas.job_limits import WAIT
from trainer.draining import Drain
from trainer.following import Following, FollowOptions
from trainer.run import check_run, has_run, start_run, write_dataset
from trainer.saving import claim_leftovers
from trainer.training import TrainOptions
from trainer.watchdog import Watchdog


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
    goes_on = options.resume and (has_run(run) or not options.follow)
    if goes_on and has_run(run):
        claim_leftovers(run, config.checkpoint, resume=True)

    def check(dataset: Dataset) -> None:
        if goes_on:
            check_run(run, dataset, config, follows=options.follow)

    data = Following(dataset_path, job, how_of(options), drain, say, check)
    with watchdog(WAIT):
        span = data.first()
    drain.check()
    if goes_on:
        write_dataset(run, span.dataset, config, follows=options.follow)
    else:
        start_run(run, job_path, span.dataset, config, follows=options.follow)
        claim_leftovers(run, config.checkpoint, resume=False)
    return data


def how_of(options: TrainOptions, at_least: int = 0) -> FollowOptions:
    """Return how a run looks at its dataset.

    Args:
        options: what the command line says.
        at_least: segments to wait for at first.
    """
    return FollowOptions(
        follow=options.follow,
        stop=options.steps,
        planned=options.embedding == "cached",
        at_least=at_least,
    )

"""Open or resume a run: its stores, its first checkpoint, and the rollback when rows were lost."""

from __future__ import annotations

import json
import logging
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from schemas.config.job import Job
from schemas.config.limits import WAIT
from schemas.config.train import StoresConfig
from schemas.dataset import Dataset, open_dataset, segment_hashes, select_segments
from schemas.errors import SchemaError
from schemas.manifest import canonical_json, replace_bytes
from schemas.run_log import CHECKPOINTS, METRICS, RUN_FILE
from trainer.checkpoint.load import newest_checkpoint, step_of, stores_of, verified
from trainer.checkpoint.manager import claim_leftovers
from trainer.checkpoint.manifest import complete, set_aside
from trainer.components import order_of
from trainer.follow import Following, FollowOptions
from trainer.recovery import Drain, Watchdog
from trainer.run import (
    RunIdentity,
    check_run,
    has_run,
    read_identity,
    refuse_run,
    start_run,
    steps_with_lines,
    write_dataset,
)
from trainer.stores.api import RowsLostError, Store, TableLayout, close_stores, group_of
from trainer.stores.future_log import FutureLog, log_stores
from trainer.stores.local import memory_store, mmap_store
from trainer.stores.remote.client import open_group
from trainer.stores.remote.connection import Access
from trainer.stores.remote.processes import TOKEN, LocalStores
from trainer.stores.remote.wire import read_token
from trainer.warm_start import (
    WarmStart,
    open_warm_start,
    untrained_segments,
    write_initial_checkpoint,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """What the command line says beyond the job."""

    embedding: str = "plain"
    """plain: all rows in memory; cached: the plan in front of a store; lru: the rows used last in
    front of the same store; uncached: that store alone."""
    expanded: bool = False
    """Undo the deduplication, for comparison."""
    steps: int | None = None
    """Stop before this step; the whole run when None."""
    resume: bool = False
    """Go on from the newest checkpoint of the run."""
    stores: int | None = None
    """Store processes to start on this machine; those of the job when None."""
    follow: bool = False
    """Train on committed segments while later ones are built, until the dataset is finished."""
    fast: bool = False
    """Compute all samples of a step at once: other bits than leaf by leaf, equal to rounding."""
    start_from: Path | None = None
    """Begin with the newest checkpoint of this run, where the run is not there yet."""
    segments: tuple[str, ...] | None = None
    """Ids or days of the segments to train on; all that are to be trained when None."""
    expire_days: int | None = None
    """Drop rows that no segment of so many last days uses; keep all when None."""

    def __post_init__(self) -> None:
        """Refuse stores that nothing would be kept in, and what belongs to other beginnings."""
        if self.expire_days is not None and self.start_from is None:
            raise ValueError(
                f"rows must be those of a run to expire, got expire_days={self.expire_days} "
                "without a run; use --start-from"
            )
        if self.follow and (self.start_from is not None or self.segments is not None):
            raise ValueError(
                "segments must be known when the run begins, got --follow with --start-from or "
                "--segments; leave --follow out, and train the next day as the next run"
            )
        if self.stores is not None and self.embedding == "plain":
            raise ValueError(
                f"stores must hold the rows, got stores={self.stores} and the embedding 'plain', "
                "which has all rows in memory; use --embedding cached"
            )


STORE = "store"
"""Folder of the run for rows outside memory."""
OWNER = "store.json"
"""File of the run with the name that its store processes know it by."""


@contextmanager
def open_stores(
    run: Path,
    layouts: Mapping[str, TableLayout],
    config: StoresConfig,
    *,
    job: Path,
    kind: Literal["memory", "mmap", "log"],
    num_processes: int | None,
) -> Iterator[dict[str, Store]]:
    """Open empty stores of all tables; what they hold open is given back at the end.

    Args:
        run: run folder.
        layouts: tables by name.
        config: store processes of the job, for rows that are not all in memory.
        job: job file; its paths are relative to it.
        kind: where rows lie without store processes; `memory` holds with them, too.
        num_processes: store processes to be started here, in the place of those of the job.

    Raises:
        SchemaError: a store refuses or cannot be reached.
    """
    if kind == "memory":
        yield {table: memory_store(layout) for table, layout in layouts.items()}
    elif num_processes:
        with LocalStores(num_processes, run / STORE, replicas=config.replicas) as local:
            access = access_of(config, job.parent, local.directory / TOKEN)
            with _opened(run, layouts, tuple(local.addresses), access, config.replicas) as stores:
                yield stores
    elif config.addresses:
        access = access_of(config, job.parent, job.parent / str(config.token_file))
        with _opened(run, layouts, config.addresses, access, config.replicas) as stores:
            yield stores
    elif kind == "log":
        yield dict(log_stores(layouts, run / STORE))
    else:
        yield {table: mmap_store(layout, run / STORE) for table, layout in layouts.items()}


def readable(stores: Mapping[str, Store], checkpoint: Path | None) -> dict[str, Store]:
    """Return stores that give any row after training.

    Args:
        stores: of the run.
        checkpoint: the newest; read in the place of a log, which gives rows by their step only.
    """
    if checkpoint is None or not isinstance(group_of(stores), FutureLog):
        return dict(stores)
    return stores_of(checkpoint, stores)


@contextmanager
def _opened(
    run: Path,
    layouts: Mapping[str, TableLayout],
    addresses: tuple[str, ...],
    access: Access,
    replicas: int,
) -> Iterator[dict[str, Store]]:
    session = secrets.token_hex(8)
    group = open_group(
        addresses,
        access,
        layouts,
        owner=owner_of(run),
        session=session,
        reset=True,
        replicas=replicas,
    )
    stores: dict[str, Store] = dict(group)
    try:
        yield stores
    finally:
        close_stores(stores)


def access_of(config: StoresConfig, folder: Path, token_file: Path) -> Access:
    """Return how store processes are reached.

    Args:
        config: of the job.
        folder: of the job file, which its paths are relative to.
        token_file: with what they ask for.

    Raises:
        SchemaError: there is no token in the file.
    """
    trusted = config.certificates
    return Access(
        token=read_token(token_file),
        certificates=None if trusted is None else (folder / trusted).read_bytes(),
        certificate_name=config.certificate_name,
        timeout_sec=config.timeout.total_seconds(),
        elastic=config.elastic,
    )


def owner_of(run: Path) -> str:
    """Return the name of a run, given once and kept beside it."""
    path = run / OWNER
    if not path.is_file():
        replace_bytes(path, canonical_json({"owner": secrets.token_hex(8)}).encode())
    return str(json.loads(path.read_text(encoding="utf-8"))["owner"])


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
    beginning = None if options.start_from is None else open_warm_start(options.start_from)
    chosen = _chosen(beginning, dataset_path, options)
    data = Following(dataset_path, job, how_of(options, chosen=chosen), drain, say)
    with watchdog(WAIT):
        dataset = data.first().dataset
    drain.check()
    _say_without_index(dataset, job, options, say)
    origin: dict[str, Any] | None = None
    if beginning is not None:
        origin = write_initial_checkpoint(beginning, run, job, dataset, options.expire_days)
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
    beginning: WarmStart | None, dataset_path: Path, options: TrainOptions
) -> tuple[str, ...] | None:
    """Return the hashes of the segments of a new run, None for all of the dataset."""
    if beginning is None and options.segments is None:
        return None
    dataset = open_dataset(dataset_path)
    wanted = options.segments
    if wanted is None:
        assert beginning is not None, "one of both is given"
        wanted = untrained_segments(beginning, dataset)
    return tuple(segment_hashes(select_segments(dataset, wanted)).values())


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
        named = select_segments(open_dataset(dataset_path), options.segments)
        if set(segment_hashes(named).values()) != set(found.segments):
            problem = f"of the segments {', '.join(options.segments)}, got one of others"
    if problem is not None:
        raise SchemaError(
            f"run to go on with must be {problem}; use another folder", file=str(run / RUN_FILE)
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


T = TypeVar("T")
_MOST_IN_VAIN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollbacks:
    """What going back has cost."""

    num_rollbacks: int = 0
    """Times that the run went back to a checkpoint."""
    recomputed_steps: int = 0
    """Committed steps that were trained again."""


def with_rollbacks(
    run: Path,
    checkpoint: Path | None,
    attempt: Callable[[Path | None], T],
    settle: Callable[[], None] = lambda: None,
) -> tuple[T, Rollbacks]:
    """Train, again from the newest checkpoint whenever a store lost rows.

    Args:
        run: run folder.
        checkpoint: to begin with; None for the beginning.
        attempt: trains from a checkpoint to the end, with stores of its own.
        settle: waits until the checkpoints of the attempt before are all on the disk.

    Returns:
        (what the attempt returned that came to its end, what the others cost).

    Raises:
        RowsLostError: rows were lost three times without a step committed in between that was
            not committed before.
    """
    found, furthest, in_vain = Rollbacks(), -1, 0
    while True:
        try:
            return attempt(checkpoint), found
        except RowsLostError as error:
            committed = len((run / METRICS).read_text(encoding="utf-8").splitlines())
            in_vain = 0 if committed > furthest else in_vain + 1
            furthest = max(furthest, committed)
            if in_vain == _MOST_IN_VAIN:
                raise
            settle()
            checkpoint = resumable_checkpoint(run)
            first = step_of(checkpoint)
            found = Rollbacks(
                num_rollbacks=found.num_rollbacks + 1,
                recomputed_steps=found.recomputed_steps + committed - first,
            )
            logger.warning("rows were lost: back to step %s of %s: %s", first, committed, error)

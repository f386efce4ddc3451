"""The steps of a run: from span to span, each step committed, until the end or until asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from schemas.dataset import Dataset
from schemas.errors import PlanError, SchemaError
from schemas.events import LedgerEntry, StepMetric
from schemas.horizon import decide
from schemas.job import Job
from schemas.job_limits import SAVE, WAIT
from schemas.job_train import TrainConfig
from schemas.order import Order
from trainer.batch import Batch
from trainer.cache import PlannedCache
from trainer.decode import spec_of
from trainer.device import device_of
from trainer.draining import Drain, told
from trainer.extending import extend, settle
from trainer.flash.fits import made_of
from trainer.flash.space import copy_bytes
from trainer.following import Following, Span
from trainer.kernels.build import kernels_of
from trainer.leaf_work import LeafWork
from trainer.leaves import Leaves
from trainer.models.build import wants_sides
from trainer.parts import Parts
from trainer.reader import Reader, prefetched
from trainer.run import RunLog, cut_run, write_dataset
from trainer.saving import Saver, saver_of
from trainer.sources import RowSource
from trainer.step import LeafSteps, PhaseTimer, Steps, WholeSteps, check_loss, metric_of
from trainer.watchdog import Watchdog

READ_AHEAD = 2
"""Batches that are read beside training."""
REPLICA = "0"
"""Name of the only replica in the ledger."""


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


class Training:
    """The steps of a run."""

    def __init__(
        self,
        run: Path,
        job: Job,
        options: TrainOptions,
        data: Following,
        parts: Parts,
        drain: Drain,
        watchdog: Watchdog,
        timer: PhaseTimer,
        on_step: Callable[[StepMetric, int], None],
    ) -> None:
        """Keep the parts.

        Args:
            run: run folder.
            job: of the run.
            options: what the command line says.
            data: the dataset.
            parts: what is trained.
            drain: ends the run between two steps.
            watchdog: limits each phase.
            timer: of the phases.
            on_step: called after each step, with its metric and the number of steps.
        """
        self._run, self._job, self._options = run, job, options
        self._data, self._parts, self._drain = data, parts, drain
        self._watchdog, self._timer, self._on_step = watchdog, timer, on_step

    def run(self, span: Span, first: int, source: RowSource, *, loaded: bool) -> Span:
        """Train all steps and save.

        Args:
            span: the first.
            first: step to begin with.
            source: of the rows.
            loaded: whether a checkpoint before that step was loaded.

        Returns:
            The last span.

        Raises:
            SchemaError: the data, or a disk; checkpoints are whole.
            DrainInterrupt: it was asked to end; what was trained is saved.
        """
        self._known = span.dataset
        saver = self._saver = self._saver_of(span, first, source, loaded=loaded)
        cut_run(self._run, first)
        step = first
        try:
            with RunLog(self._run) as log:
                step = self._steps(span, step, source, log)
                while not self._drain.asked and decide(step, span.horizon) != "end":
                    span = self._next_span(span, step, source)
                    step = self._steps(span, step, source, log)
            with self._watchdog(SAVE):
                saver.finish(step)
        finally:
            saver.close()
            source.close()
        with told(f"stopped at step {step}, which {self._run} goes on from with --resume"):
            self._drain.check()
        return span

    def _steps(self, span: Span, step: int, source: RowSource, log: RunLog) -> int:
        """Train the steps of a span, as far as nothing ends it before; return the next one."""
        config, until = self._job.train, span.horizon.until
        reader = reader_of(span.dataset, span.order, self._options, config)
        with ExitStack() as stack:
            steps = stack.enter_context(steps_of(self._options, config, reader, self._parts))
            batches = prefetched(steps.read, range(step, until), READ_AHEAD)
            stack.enter_context(closing(batches))
            while step < until and not self._drain.asked:
                self._watchdog.step = step
                with self._timer("read"):
                    batch = next(batches)
                loss = check_loss(steps.train(batch, self._timer), step)
                metric = metric_of(step, loss, batch.num_samples, 1, self._timer)
                log.commit(metric, _entry(batch, span.dataset, reader))
                self._on_step(metric, until)
                step += 1
                with self._watchdog(SAVE):
                    self._saver.after(step)
                if self._data.grown():
                    until = min(until, max(step, settle(source)))
        return step

    def _next_span(self, span: Span, step: int, source: RowSource) -> Span:
        """Wait for what the pipeline commits, and let the run and its rows know."""
        self._watchdog.step = step
        try:
            with self._timer(WAIT), told(f"stopped at step {step}; {self._run} goes on from it"):
                found = self._data.next(step, lambda: self._save(step))
                if found is not span:
                    known = self._known = found.dataset
                    write_dataset(self._run, known, self._job.train, follows=True)
                    extend(source, self._parts.stores, found, self._job.train, step)
        except (SchemaError, PlanError):
            self._save(step)  # what was trained stays, whatever became of the dataset
            raise
        return found

    def _save(self, step: int) -> None:
        with self._watchdog(SAVE):
            self._saver.save(step)

    def _saver_of(self, span: Span, first: int, source: RowSource, *, loaded: bool) -> Saver:
        """Return what saves the run, before its first step: there may be too little memory."""
        config, stores = self._job.train, self._parts.stores
        layouts = {table: store.layout for table, store in stores.items()}
        steps = range(first, span.horizon.until)
        cache = config.cache if isinstance(source, PlannedCache) else None
        return saver_of(
            self._run,
            config.checkpoint,
            self._parts,
            source,
            lambda: made_of(self._job, self._known),
            first_step=first,
            loaded=loaded,
            num_bytes=lambda every: copy_bytes(
                span.dataset, span.order, layouts, steps, every, cache
            ),
        )


def reader_of(dataset: Dataset, order: Order, options: TrainOptions, config: TrainConfig) -> Reader:
    """Return the reader of the training steps of an order."""
    return Reader(
        dataset,
        order,
        spec_of(dataset, config.dtype),
        expanded=options.expanded,
        sides=wants_sides(config),
        transpose=kernels_of(config.kernels).transpose,
    )


@contextmanager
def steps_of(
    options: TrainOptions, config: TrainConfig, reader: Reader, parts: Parts
) -> Iterator[Steps]:
    """Yield how steps are computed: on a GPU as a whole, for leaves would leave it idle."""
    device = device_of(config.device)
    if options.fast or device.type != "cpu":
        yield WholeSteps(reader, parts.model, parts.embedding, parts.optimizer, device)
        return
    with LeafWork(parts.model, parts.embedding, kernels_of(config.kernels)) as work:
        yield LeafSteps(reader, work, parts.embedding, parts.optimizer)


def _entry(batch: Batch | Leaves, dataset: Dataset, reader: Reader) -> LedgerEntry:
    return LedgerEntry(
        step=batch.step.train_step,
        epoch=batch.step.epoch,
        segment=dataset.segments[batch.step.segment].manifest.id,
        replica=REPLICA,
        blocks=tuple(reader.blocks_of(batch.step).tolist()),
        num_samples=batch.num_samples,
    )

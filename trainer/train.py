"""The training loop of one process.

`train_run.py` opens a run, loads its checkpoint and enters this loop; `elastic/replica.py` is the
loop of one of several replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from schemas.config.job import Job
from schemas.config.train import SAVE, WAIT, TrainConfig
from schemas.dataset import Dataset
from schemas.errors import PlanError, SchemaError
from schemas.order import Order
from schemas.run_log import LedgerEntry, StepMetric
from trainer.checkpoint.load import made_of
from trainer.checkpoint.manager import Saver, saver_of
from trainer.checkpoint.snapshot import copy_bytes
from trainer.components import Components, uses_shared_features
from trainer.data.collate import Batch
from trainer.data.decode import spec_of
from trainer.data.microbatches import Microbatches
from trainer.data.reader import Reader, prefetch
from trainer.device import device_of, to_device
from trainer.embedding.cache import PlannedCache, RowSource
from trainer.embedding.kernels.compiled import kernels_of
from trainer.follow import FollowedDataset, Span, extend, next_action, settle
from trainer.gradient_sums import MicrobatchWorker
from trainer.recovery import Drain, Watchdog, resume_hint
from trainer.run import RunLog, cut_run, write_dataset
from trainer.setup import TrainOptions
from trainer.step import MicrobatchStep, PhaseTimer, Step, WholeBatchStep, check_loss, metric_of

READ_AHEAD = 2
"""Batches that are read beside training."""
REPLICA = "0"
"""Name of the only replica in the ledger."""


class TrainingLoop:
    """Trains the steps of a run, one after the other, and commits each."""

    def __init__(
        self,
        run: Path,
        job: Job,
        options: TrainOptions,
        data: FollowedDataset,
        components: Components,
        drain: Drain,
        watchdog: Watchdog,
        timer: PhaseTimer,
        on_step: Callable[[StepMetric, int], None],
    ) -> None:
        """Store the components.

        Args:
            run: run folder.
            job: job file.
            options: command-line options.
            data: the dataset, which may grow.
            components: model, embedding, optimizer and stores.
            drain: requests an early end between two steps.
            watchdog: limits the time of each phase.
            timer: measures the phases.
            on_step: called after each step with its metric and the number of steps.
        """
        self._run, self._job, self._options = run, job, options
        self._data, self._components, self._drain = data, components, drain
        self._watchdog, self._timer, self._on_step = watchdog, timer, on_step

    def run(self, span: Span, first_step: int, source: RowSource, *, loaded: bool) -> Span:
        """Train all steps from `first_step` on and save.

        Args:
            span: dataset and order as known at the start.
            first_step: step to start at.
            source: of the embedding rows.
            loaded: whether a checkpoint was loaded.

        Returns:
            The last span: a run that follows its dataset passes through several.

        Raises:
            SchemaError: the data or a disk failed; complete checkpoints stay.
            DrainInterrupt: the run was stopped by a signal; all trained steps are saved.
        """
        self._dataset = span.dataset
        self._saver = self._open_saver(span, first_step, source, loaded=loaded)
        cut_run(self._run, first_step)
        step = first_step
        try:
            with RunLog(self._run) as log:
                step = self._train_span(span, step, source, log)
                while not self._drain.asked and next_action(step, span.horizon) != "end":
                    span = self._next_span(span, step, source)
                    step = self._train_span(span, step, source, log)
            with self._watchdog(SAVE):
                self._saver.finish(step)
        finally:
            self._saver.close()
            source.close()
        with resume_hint(f"stopped at step {step}; continue {self._run} with --resume"):
            self._drain.check()
        return span

    def _train_span(self, span: Span, step: int, source: RowSource, log: RunLog) -> int:
        """Train the steps of a span until it ends or the run is stopped; return the next step."""
        config, until, timer = self._job.train, span.horizon.end_step, self._timer
        reader = reader_of(span.dataset, span.order, self._options, config)
        with (
            step_of(self._options, config, reader, self._components) as (read, compute),
            closing(prefetch(read, range(step, until), READ_AHEAD)) as batches,
        ):
            while step < until and not self._drain.asked:
                self._watchdog.step = step
                with timer("read"):
                    batch = next(batches)
                with timer("fetch"):
                    compute.fetch(batch)
                compute.forward_backward(batch, timer)
                with timer("update"):
                    loss = compute.update()
                metric = metric_of(step, check_loss(loss, step), batch.num_samples, 1, timer)
                log.commit(metric, _ledger_entry(batch, span.dataset, reader))
                self._on_step(metric, until)
                step += 1
                with self._watchdog(SAVE):
                    self._saver.after(step)
                if self._data.has_grown():
                    until = min(until, max(step, settle(source)))
        return step

    def _next_span(self, span: Span, step: int, source: RowSource) -> Span:
        """Wait for more segments, and extend plans and stores by their steps."""
        self._watchdog.step = step
        try:
            with (
                self._timer(WAIT),
                resume_hint(f"stopped at step {step}; {self._run} goes on from it"),
            ):
                next_span = self._data.wait_for(step, lambda: self._save(step))
                if next_span is not span:
                    self._dataset = next_span.dataset
                    write_dataset(self._run, self._dataset, self._job.train, follows=True)
                    extend(source, self._components.store, next_span, self._job.train, step)
        except (SchemaError, PlanError):
            self._save(step)
            raise
        return next_span

    def _save(self, step: int) -> None:
        with self._watchdog(SAVE):
            self._saver.save(step)

    def _open_saver(self, span: Span, first: int, source: RowSource, *, loaded: bool) -> Saver:
        """Return the saver; raises before the first step if copies do not fit in memory."""
        config, layouts = self._job.train, self._components.store.layouts
        steps = range(first, span.horizon.end_step)
        cache = config.cache if isinstance(source, PlannedCache) else None
        return saver_of(
            self._run,
            config.checkpoint,
            self._components,
            source,
            lambda: made_of(self._job, self._dataset),
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
        find_shared=uses_shared_features(config),
        transpose=kernels_of(config.kernels).transpose,
    )


@contextmanager
def step_of(
    options: TrainOptions, config: TrainConfig, reader: Reader, components: Components
) -> Iterator[tuple[Callable[[int], Any], Step[Any]]]:
    """Yield a function that reads the batch of a step, and what computes it.

    A GPU computes whole batches: microbatches would leave it idle.
    """
    device = device_of(config.device)
    if options.fast or device.type != "cpu":
        whole_batch = WholeBatchStep(components)
        yield lambda step: to_device(reader.read(step), device), whole_batch
        return
    with MicrobatchWorker(
        components.model, components.embedding, kernels_of(config.kernels)
    ) as worker:
        yield reader.read_microbatches, MicrobatchStep(worker, components)


def _ledger_entry(batch: Batch | Microbatches, dataset: Dataset, reader: Reader) -> LedgerEntry:
    return LedgerEntry(
        step=batch.step.train_step,
        epoch=batch.step.epoch,
        segment=dataset.segments[batch.step.segment].manifest.id,
        replica=REPLICA,
        blocks=tuple(reader.blocks_of(batch.step).tolist()),
        num_samples=batch.num_samples,
    )

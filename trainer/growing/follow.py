"""Follow a dataset while the pipeline builds it: what may be trained, and when to wait.

A run trains span by span. Each span is a dataset that begins with the segments of the previous one,
so that every step keeps its index; the last span is of a sealed dataset.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from dataclasses import replace

from presage.schemas.config.job import Job
from presage.schemas.dataset.manifest import DatasetManifest, read_dataset
from presage.schemas.dataset.opened import (
    OpenDataset,
    open_dataset,
    reading_histories,
    select_segments_by_hash,
)
from presage.schemas.dataset.run_next_uses import SharedNextUses
from presage.schemas.errors import SchemaError
from presage.schemas.layout import TRAIN
from presage.schemas.storage.leases import Lease
from presage.schemas.storage.location import Location
from presage.schemas.storage.versions import Versions
from presage.trainer.components import order_of
from presage.trainer.options import TrainOptions
from presage.trainer.recovery import Drain
from presage.trainer.steps import DatasetExtent, Span, horizon_of, next_action


class FollowedDataset:
    """Opens committed segments, and waits for more."""

    def __init__(
        self,
        path: Location,
        job: Job,
        options: TrainOptions,
        drain: Drain,
        progress: Callable[[str], None] = lambda _: None,
        check: Callable[[OpenDataset], None] = lambda _: None,
        *,
        min_segments: int = 0,
        selected: tuple[str, ...] | None = None,
    ) -> None:
        """Store the arguments; nothing is opened yet.

        Args:
            path: dataset folder.
            job: of the run.
            options: of the run; with `--embedding cached` an index must cover the segments.
            drain: interrupts a wait.
            progress: called with a message while waiting.
            check: raises if the first dataset does not fit the run.
            min_segments: segments to wait for at the start, since other processes have trained
                them.
            selected: hashes of the manifests of the segments to train; None for all segments.
        """
        self.location = path
        self._job = job
        self._options = options
        self._min_segments, self._selected = min_segments, selected
        self._drain = drain
        self._progress = progress
        self._check = check
        self._lease = Lease(path, f"run {socket.gethostname()}:{os.getpid()}")
        self._used: tuple[str, ...] = ()  # directories of the span that `use` returned
        self._last_stamp = 0  # number of the root manifest that was read
        self._next_look_sec = 0.0
        self._versions = Versions(path)
        self._span: Span | None = None
        self.wait_reason = ""  # why all known steps are trained

    def _has_grown(self) -> bool:
        """Return whether the root manifest was replaced since it was read.

        The store is asked at most once in `train.follow.poll`.
        """
        span, now_sec = self._span, time.monotonic()
        if span is None or span.horizon.is_final or now_sec < self._next_look_sec:
            return False
        self._next_look_sec = now_sec + self._job.train.follow.poll.total_seconds()
        return self._stamp() != self._last_stamp

    def current(self) -> Span:
        """Return the newest span that was opened, which begins with all earlier ones."""
        assert self._span is not None, "`wait_for` returned the first span"
        return self._span

    def refresh(self, *, at_once: bool = False) -> DatasetExtent:
        """Return what is committed, and open it if the root manifest was replaced; do not wait.

        Args:
            at_once: open it in any case, even less than `train.follow.poll` after the last poll.

        Raises:
            SchemaError: the dataset is another one, or one of its segments does not fit the run.
        """
        if at_once or self._has_grown():
            self._last_stamp = self._stamp()
            self._span = self._try_open()
        manifest = self.current().dataset.manifest
        return DatasetExtent(
            num_segments=len(manifest.segments),
            sealed=manifest.sealed or not self._options.follow,
        )

    def use(self, extent: DatasetExtent) -> Span:
        """Return the span of an agreed extent, whose files are kept from being removed.

        Args:
            extent: no more than is committed.

        Raises:
            PlanError: the dataset has grown after it was sealed.
        """
        span = self.current()
        self._used = directories_of(span.dataset)
        return replace(span, horizon=horizon_of(span.order, extent, self._options.steps))

    def wait_for(self, train_step: int) -> Span:
        """Return the span that has a step, or the last one if none has it.

        Raises:
            SchemaError: the dataset breaks its format, is another one, or does not fit the run.
            DrainInterrupt: shutdown was requested.
        """
        reported = None
        while True:
            self._last_stamp = self._stamp()
            span = self._try_open()
            if span is not None:
                self._span = span
                if next_action(train_step, span.horizon) != "wait":
                    return span
            if self.wait_reason != reported:
                reported = self.wait_reason
                self._progress(f"waiting at step {train_step}: {reported}")
            while self._stamp() == self._last_stamp:
                with self._drain.at_once():
                    self._drain.sleep(self._job.train.follow.poll.total_seconds())
                self._drain.check()

    def _try_open(self) -> Span | None:
        """Return the newest span; None, with `wait_reason`, while there is nothing to train."""
        previous = self._span
        if self._options.follow and previous is None and not self._last_stamp:
            self.wait_reason = f"{self.location} does not exist yet"
            return None
        try:
            span = self._open()
        except _NoIndexError as error:
            if previous is None or error.sealed:
                raise error.error from None
            self.wait_reason = str(error.error)
            return previous
        if span is None:
            self.wait_reason = "no segment with training samples is committed yet"
            if self._min_segments:
                self.wait_reason = (
                    f"fewer than the {self._min_segments} segments of the run are visible"
                )
            return None
        ids = [s.id for s in span.dataset.segments]
        self.wait_reason = (
            f"{len(ids)} segments are committed, the last is {ids[-1]}, and the dataset is not "
            f"sealed; append segments, or run python -m presage.pipelines seal {self.location}"
        )
        return span

    def _open(self) -> Span | None:
        """Open the dataset as it is now; None while there is nothing to train."""
        while True:
            root = read_dataset(self.location)
            if self._span is not None:
                check_continues(self._span.dataset.manifest, root, self.location)
            elif len(root.segments) < self._min_segments:
                return None
            try:
                dataset = open_dataset(self.location)
                if self._selected is not None:
                    dataset = select_segments_by_hash(dataset, self._selected)
                dataset = reading_histories(dataset, self._job.train.windows)
                if self._span is None:
                    self._check(dataset)
                span = self._span_of(dataset)
                if span is not None and self._options.embedding == "cached":
                    self._check_index(span)
                self._lease.hold({*directories_of(dataset), *self._used})
                if read_dataset(self.location) != root:
                    continue  # something may have been removed before the lease was held
            except SchemaError:
                if read_dataset(self.location) == root:
                    raise
                continue  # it was replaced while it was opened
            return span

    def _span_of(self, dataset: OpenDataset) -> Span | None:
        sealed = dataset.manifest.sealed or not self._options.follow
        if not sealed and not any(len(s.positions(TRAIN)) for s in dataset.segments):
            return None
        order = order_of(self._job, dataset)
        extent = DatasetExtent(num_segments=len(dataset.segments), sealed=sealed)
        horizon = horizon_of(order, extent, self._options.steps)
        return Span(dataset, order, horizon, SharedNextUses(dataset, order))

    def _check_index(self, span: Span) -> None:
        try:
            span.dataset.index_for(span.order)
        except SchemaError as error:
            if not self._options.follow:
                raise
            raise _NoIndexError(error, sealed=span.dataset.manifest.sealed) from error

    def _stamp(self) -> int:
        """Return the number of the newest root manifest; 0 if there is none."""
        return self._versions.newest_number()


def directories_of(dataset: OpenDataset) -> tuple[str, ...]:
    """Return the names of the directories of a dataset's segments, by which leases keep them."""
    return tuple(segment.directory.name for segment in dataset.segments)


class _NoIndexError(Exception):
    """A dataset has no index for the run's order."""

    def __init__(self, error: SchemaError, *, sealed: bool) -> None:
        super().__init__(str(error))
        self.error = error
        self.sealed = sealed


def check_continues(old: DatasetManifest, new: DatasetManifest, path: Location) -> None:
    """Check that a dataset is an earlier one with more segments after it.

    Raises:
        SchemaError: it has another job or schema, another segment, or fewer segments.
    """
    file = str(path)
    for name in ("name", "job_sha256", "schema_sha256"):
        before, now = getattr(old, name), getattr(new, name)
        if before != now:
            raise SchemaError(
                f"{name} of the dataset changed while it was followed: from {before[:12]} to "
                f"{now[:12]}; train a new run on it",
                file=file,
            )
    for index, segment in enumerate(old.segments):
        other = new.segments[index] if index < len(new.segments) else None
        if other != segment:
            raise SchemaError(
                f"segment {index} of the dataset changed while it was followed: from {segment.id} "
                f"to {other.id if other else None}; restore it, or train a new run on the dataset",
                file=file,
            )

"""Train on a dataset that grows while the pipeline builds it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from schemas.cache_plan import Keyframe
from schemas.config.job import Job
from schemas.config.train import TrainConfig
from schemas.dataset import Dataset, open_dataset, select_segments_by_hash
from schemas.errors import SchemaError
from schemas.layout import MANIFEST, TRAIN
from schemas.manifest import DatasetManifest, read_dataset
from schemas.order import Order
from trainer.components import order_of, plans_of
from trainer.embedding.cache import PlannedCache, RowSource, TablePlan
from trainer.horizon import Horizon, Known, decide, horizon_of
from trainer.recovery import Drain
from trainer.runtime import ReadLocks
from trainer.stores.api import Store, group_of
from trainer.stores.future_log import FutureLog, NextUseLookup

# The dataset of a run: as it is, or followed while the pipeline builds it.
#
# A `Span` is what may be trained with what is known. A run that follows goes from span to span:
# each is of a dataset that begins with the segments of the one before, so that all steps keep
# their place, and the last one is of a dataset that says that it is finished.


@dataclass(frozen=True, slots=True)
class Span:
    """What may be trained now.

    Attributes:
        dataset: opened with all segments that are known.
        order: global order over them.
        horizon: how far the run may go.
    """

    dataset: Dataset
    order: Order
    horizon: Horizon


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowOptions:
    """How a run looks at its dataset."""

    follow: bool
    """Whether segments may come; otherwise those that are there are all."""
    stop: int | None
    """Step that the run is to stop before."""
    planned: bool
    """Whether an index must cover the segments."""
    at_least: int = 0
    """Segments to wait for at first: others have trained them."""
    chosen: tuple[str, ...] | None = None
    """Hashes of the manifests of the segments that are trained; all segments when None."""


class Following:
    """Opens what is committed, and waits for more."""

    def __init__(
        self,
        path: Path,
        job: Job,
        options: FollowOptions,
        drain: Drain,
        say: Callable[[str], None] = lambda _: None,
        check: Callable[[Dataset], None] = lambda _: None,
    ) -> None:
        """Keep the parts; nothing is opened yet.

        Args:
            path: dataset folder.
            job: of the run.
            options: what is asked for.
            drain: ends a wait.
            say: told what is waited for, one line at a time.
            check: raises what does not fit about the first dataset, before it is asked for more.
        """
        self._path = path
        self._job = job
        self._options = options
        self._drain = drain
        self._say = say
        self._check = check
        self._held = ReadLocks()
        self._seen: object = None  # of the root manifest's file
        self._span: Span | None = None
        self._using = ReadLocks()
        self.waits_for = ""  # when all known steps are trained

    def grown(self) -> bool:
        """Tell whether the root manifest was replaced since it was read; one look at its file."""
        span = self._span
        return span is not None and not span.horizon.last and self._fingerprint() != self._seen

    def first(self) -> Span:
        """Return the first span, after waiting for a segment with training samples.

        Raises:
            SchemaError: the dataset breaks its format, or does not fit the job.
            DrainInterrupt: the process is to end.
        """
        if not self._options.follow:
            span = self._opened()
            assert span is not None, "what is not followed is opened, or refused"
            self._span = span
            return span
        return self._awaited(0)

    def current(self) -> Span:
        """Return the newest span that is known, which begins with all before."""
        assert self._span is not None, "the first span is waited for first"
        return self._span

    def look(self) -> Known:
        """Return what is committed, opened anew when the root manifest was replaced; do not wait.

        Raises:
            SchemaError: the dataset is another one, or a segment of it does not fit the run.
        """
        if self.grown():
            self._seen = self._fingerprint()
            self._span = self._look()
        m = self.current().dataset.manifest
        return Known(num_segments=len(m.segments), finished=m.finished or not self._options.follow)

    def use(self, known: Known) -> Span:
        """Return what may be trained when that much is agreed on, and hold what it is read from.

        Args:
            known: no more than is committed.

        Raises:
            PlanError: the dataset has grown after it was finished.
        """
        span = self.current()
        self._using.replace(*self._indexes(span))
        return replace(span, horizon=horizon_of(span.order, known, self._options.stop))

    def next(self, train_step: int, before_wait: Callable[[], None] = lambda: None) -> Span:
        """Return the span that a step lies in, or the last one when none comes.

        Args:
            train_step: the next step.
            before_wait: called once, when there is nothing to train.

        Raises:
            SchemaError: the dataset is another one, or a segment of it does not fit the run.
            DrainInterrupt: the process is to end.
        """
        return self._awaited(train_step, before_wait)

    def _awaited(self, train_step: int, before_wait: Callable[[], None] = lambda: None) -> Span:
        said = None
        while True:
            self._seen = self._fingerprint()
            found = self._look()
            if found is not None:
                self._span = found
                if decide(train_step, found.horizon) != "wait":
                    return found
            if said is None:
                before_wait()
            if self.waits_for != said:
                said = self.waits_for
                self._say(f"waiting at step {train_step}: {said}")
            while self._fingerprint() == self._seen:
                with self._drain.at_once():
                    self._drain.sleep(self._job.train.follow.poll.total_seconds())
                self._drain.check()

    def _look(self) -> Span | None:
        """Return what is committed, or None, and say what is waited for."""
        if self._span is None and self._seen is None:
            self.waits_for = f"{self._path} does not exist yet"
            return None
        before = self._span
        try:
            span = self._opened()
        except _NoIndexError as error:
            if before is None or error.finished:
                raise error.error from None
            self.waits_for = str(error.error)
            return before
        if span is None:
            self.waits_for = "no segment with training samples is committed yet"
            if self._options.at_least:
                self.waits_for = f"not all {self._options.at_least} segments of the run are there"
            return None
        ids = [s.manifest.id for s in span.dataset.segments]
        self.waits_for = (
            f"{len(ids)} segments are committed, the last is {ids[-1]}, and the dataset is not "
            f"sealed; append segments, or run python -m pipelines seal {self._path}"
        )
        return span

    def _opened(self) -> Span | None:
        """Open the dataset as it is now; None while there is nothing to train."""
        while True:
            root = read_dataset(self._path)
            if self._span is not None:
                check_same(self._span.dataset.manifest, root, self._path)
            elif len(root.segments) < self._options.at_least:
                return None
            try:
                dataset = open_dataset(self._path)
                if self._options.chosen is not None:
                    dataset = select_segments_by_hash(dataset, self._options.chosen)
                if self._span is None:
                    self._check(dataset)
                span = self._span_of(dataset)
                indexes = [] if span is None else self._indexes(span)
                segments = () if span is None else span.dataset.segments
                self._held.replace(*indexes, *(s.directory for s in segments))
            except SchemaError:
                if read_dataset(self._path) == root:
                    raise
                continue  # replaced while it was opened
            return span

    def _span_of(self, dataset: Dataset) -> Span | None:
        finished = dataset.manifest.finished or not self._options.follow
        if not finished and not any(len(s.positions(TRAIN)) for s in dataset.segments):
            return None
        order = order_of(self._job, dataset)
        known = Known(num_segments=len(dataset.segments), finished=finished)
        return Span(dataset, order, horizon_of(order, known, self._options.stop))

    def _indexes(self, span: Span) -> list[Path]:
        if not self._options.planned:
            return []
        try:
            return [span.dataset.index_for(span.order).directory]
        except SchemaError as error:
            if not self._options.follow:
                raise
            raise _NoIndexError(error, finished=span.dataset.manifest.finished) from error

    def _fingerprint(self) -> object:
        try:
            found = (self._path / MANIFEST).stat()
        except FileNotFoundError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size


class _NoIndexError(Exception):
    """A dataset has no index for the run's order."""

    def __init__(self, error: SchemaError, *, finished: bool) -> None:
        super().__init__(str(error))
        self.error = error
        self.finished = finished


def check_same(old: DatasetManifest, new: DatasetManifest, path: Path) -> None:
    """Refuse a dataset that is not the one before with more segments after it.

    Args:
        old: root manifest that the run knows.
        new: root manifest as it is now.
        path: dataset folder.

    Raises:
        SchemaError: another job or schema, another segment in some place, or fewer.
    """
    place = str(path / MANIFEST)
    for name in ("name", "job_sha256", "schema_sha256"):
        before, now = getattr(old, name), getattr(new, name)
        if before != now:
            raise SchemaError(
                f"dataset must keep its {name} while it is followed, got {now[:12]} for "
                f"{before[:12]}; train a new run on it",
                file=place,
            )
    for index, segment in enumerate(old.segments):
        found = new.segments[index] if index < len(new.segments) else None
        if found != segment:
            raise SchemaError(
                f"dataset must begin with the segments that are followed, got "
                f"{found.id if found else None} at place {index} for {segment.id}; restore it, or "
                "train a new run on it",
                file=place,
            )


def plans_of_span(
    span: Span,
    stores: Mapping[str, Store],
    config: TrainConfig,
    first_step: int,
    starts: Mapping[str, Keyframe],
) -> dict[str, TablePlan]:
    """Return the plan of each table from a step to the end of a span.

    Raises:
        PlanError: the cache is too small for a table.
    """
    return plans_of(
        span.dataset,
        span.order,
        stores,
        config.cache,
        first_step,
        None,
        starts,
        span.horizon.known,
    )


def settle(source: RowSource, at: int | None = None) -> int:
    """Return the step that training must reach before a source can know of more, and fix it.

    Args:
        source: of the run.
        at: a later step than would do, which another process has fixed.
    """
    return source.settle(at) if isinstance(source, PlannedCache) else 0


def extend(
    source: RowSource, stores: Mapping[str, Store], span: Span, config: TrainConfig, step: int
) -> None:
    """Let a source know of the steps of a span.

    A plan goes on from its keyframe, as a resumed run's does. Rows that a log had written down for
    no step are written down for the step that uses them, before any of these is read.

    Args:
        source: of the run.
        stores: by table.
        span: with more steps than the source knows.
        config: train section of the job.
        step: the next step; `settle` has returned it, or one before.

    Raises:
        PlanError: the cache is too small for a table.
    """
    if not isinstance(source, PlannedCache):
        return
    plans = plans_of_span(span, stores, config, step, source.keyframes())
    log = group_of(stores)
    reschedule = partial(_reschedule, log, span, step) if isinstance(log, FutureLog) else None
    source.replace_plans(plans, span.horizon.until, reschedule)


def _reschedule(log: FutureLog, span: Span, step: int) -> None:
    known: dict[str, NextUseLookup] = {}  # of each table: a piece of the log has rows of all

    def next_uses(table: str, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        if table not in known:
            known[table] = NextUseLookup(span.dataset, span.order, span.horizon.known)
        return known[table](table, step, rows)

    log.reschedule(next_uses)

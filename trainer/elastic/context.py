"""Settings shared by all replicas of a run, the agreed part of the dataset, and its steps."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from schemas.accesses import TableAccesses, decoded_cache_for
from schemas.arrays import Array
from schemas.config.job import Job
from schemas.dataset import Dataset
from schemas.errors import PlanError, SchemaError
from schemas.layout import TRAIN
from schemas.manifest import canonical_json, from_json
from schemas.order import Order
from schemas.run_log import RENDEZVOUS, LedgerEntry
from schemas.storage import Location
from trainer.checkpoint.load import load_state, state_of
from trainer.components import Components
from trainer.data.collate import Microbatches
from trainer.data.reader import Reader
from trainer.elastic.exchange import SumsShape
from trainer.elastic.peer_state import ReplicaRows
from trainer.elastic.shared_rows import SharedStores
from trainer.follow import DatasetExtent, FollowedDataset, Span, next_action
from trainer.recovery import Drain
from trainer.setup import Rollbacks, TrainOptions
from trainer.step import Clock
from trainer.stores.api import (
    BehindError,
    RowsLostError,
)
from trainer.train import reader_of

TOKEN = "token"
"""File of the run with the token of its replicas."""
ROWS_LOST = "rows-lost"
"""File of the run, at a URL beside its state, with the id of the attempt whose rows are lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """Settings of one attempt at a run, written by the launcher for its replicas."""

    job: str
    """Path or URL of the job file."""
    dataset: str
    """Path or URL of the dataset."""
    lighthouse: str
    """`http://host:port`."""
    heartbeat_sec: float
    """Time without heartbeat after which a replica is considered dead."""
    embedding: str
    """Value of `--embedding`."""
    expanded: bool
    """Whether to undo the deduplication."""
    steps: int | None
    """Stop before this step."""
    follow: bool
    """Whether to wait for new segments."""
    known: DatasetExtent
    """The part of the dataset that is agreed on at the start."""
    retained_bytes: int
    """Size of the write buffer in front of the stores."""
    copy_bytes: int
    """Size of the largest copy for a checkpoint; 0 if none is made beside training."""
    shared: SharedStores | None
    """Stores of the run; None if every replica has all rows in memory."""
    attempt: str
    """Unique id; that of `RunManifest.attempt` at a URL."""
    rollbacks: Rollbacks = field(default_factory=Rollbacks)
    """Rollbacks of the run before this attempt."""


def write_rendezvous(run: Location, rendezvous: Rendezvous) -> None:
    """Write the settings of an attempt into the folder or to the URL of the run."""
    (run / RENDEZVOUS).write_bytes(_encode(rendezvous))


def _encode(rendezvous: Rendezvous) -> bytes:
    return canonical_json(asdict(rendezvous)).encode()


def read_rendezvous(run: Location) -> Rendezvous:
    """Return what `write_rendezvous` wrote.

    Raises:
        SchemaError: the run has no launcher, or the file is of another release.
        StorageError: the store failed.
    """
    path = run / RENDEZVOUS
    try:
        return from_json(Rendezvous, json.loads(path.read_text()))
    except (OSError, ValueError) as error:
        raise SchemaError(
            f"run cannot be joined by replicas: {error}; start it with "
            "python -m trainer train --replicas 0",
            file=str(path),
        ) from error


def remove_rendezvous(run: Location, rendezvous: Rendezvous) -> None:
    """Remove the settings of an attempt, unless another launcher has written its own."""
    if read_run_object(run, RENDEZVOUS) == _encode(rendezvous):
        run.remove([RENDEZVOUS])


@contextmanager
def report_lost_rows(run: Location, attempt: str) -> Generator[None]:
    """Report a `RowsLostError` to the launcher of an attempt, through a file of the run."""
    try:
        yield
    except RowsLostError:
        (run / ROWS_LOST).write_bytes(attempt.encode())
        raise


def rows_are_lost(run: Location, attempt: str) -> bool:
    """Return whether a replica of an attempt has reported lost rows."""
    return read_run_object(run, ROWS_LOST) == attempt.encode()


def read_run_object(run: Location, name: str) -> bytes | None:
    """Return a file beside the state of a run; None if it does not exist."""
    try:
        return (run / name).read_bytes()
    except FileNotFoundError:
        return None


FRONTIER = "frontier"
"""Name of `Frontier.state` among the arrays of a state."""
Extend = Callable[[Span, int], None]
"""Extends training to a span, from a step on."""


class DatasetRefusedError(SchemaError):
    """New segments cannot be trained; all replicas raise it in the same step, and save."""


class Frontier:
    """The part of the dataset that may be trained, the same on all replicas at each step.

    The part that all members of a step's agreement see is committed with the step; replicas that
    are behind or join receive it with the sums. It becomes valid at the first step that no replica
    has read ahead, so that all caches extend their plan at the same step. When all valid steps are
    trained, it becomes valid in the step itself.
    """

    def __init__(
        self,
        data: FollowedDataset,
        agreed: DatasetExtent,
        drain: Drain,
        poll_sec: float,
        progress: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Wait until this process sees as much of the dataset as others.

        Args:
            data: the dataset; `first` was called.
            agreed: the part that is agreed on at the first step.
            drain: interrupts a wait.
            poll_sec: interval of looking for new segments.
            progress: called with a line when training waits.

        Raises:
            SchemaError: the dataset was replaced.
            DrainInterrupt: the process is asked to leave.
        """
        self.trouble = ""
        self._data, self._drain, self._poll_sec = data, drain, poll_sec
        self._progress = progress
        self.visible = data.refresh()
        """The part of the dataset that this process saw at the last `refresh`."""
        self._agreed = agreed
        self._pending: tuple[DatasetExtent, int] | None = (
            None  # and the step at which it becomes valid
        )
        self._in_flight: DatasetExtent | None = None  # valid for the step in flight already
        self._reported = ""
        self.span = self._wait_for(agreed)

    @property
    def state(self) -> tuple[int, ...]:
        """The valid part, the pending part, and the step at which it becomes valid or -1."""
        pending, at = (self._agreed, -1) if self._pending is None else self._pending
        extents = self._agreed, pending
        both = [number for each in extents for number in (each.num_segments, int(each.finished))]
        return (*both, at)

    def refresh(self) -> None:
        """Look for new segments; a replaced dataset sets `trouble`, which ends the run."""
        try:
            self.visible = self._data.refresh()
        except SchemaError as error:
            self.trouble = self.trouble or str(error)

    def time_out(self, train_step: int, seconds: float) -> None:
        """Set `trouble`, because training has waited for too long."""
        self.trouble = self.trouble or (
            f"dataset must grow or be finished within {seconds:g} s, got a run that waits at step "
            f"{train_step}: {self._data.wait_reason}; continue with --resume --follow"
        )

    def report_waiting(self, train_step: int) -> None:
        """Report what training waits for, unless that was the last report."""
        line = f"waiting at step {train_step}: {self._data.wait_reason}"
        if line != self._reported:
            self._reported = line
            self._progress(line)

    def check(self, agreed: DatasetExtent, state: tuple[int, ...]) -> None:
        """Check that the members of an agreement have the same frontier.

        Args:
            agreed: the part that all of them see.
            state: `state` of the writer.

        Raises:
            BehindError: this replica must be restarted.
        """
        same = state == self.state if self._in_flight is None else agreed == self._in_flight
        if not same:
            raise BehindError(
                f"replica agreed on another part of the dataset than the writer: {self.state} for "
                f"{state} and {agreed}; restart it"
            )

    def advance(self, agreed: DatasetExtent, train_step: int, extend: Extend) -> bool:
        """Make a part of the dataset valid while training waits at a step.

        Args:
            agreed: the part that all members of the agreement see.
            train_step: the end of what may be trained so far.
            extend: called with what may be trained now.

        Returns:
            Whether training may continue, or end.

        Raises:
            DatasetRefusedError: the new segments cannot be trained.
        """
        if agreed == self._agreed:
            return False
        decision = next_action(train_step, self._wait_for(agreed).horizon)
        if decision == "wait":
            return False
        self._make_valid(agreed, train_step, extend)
        self._in_flight = agreed if decision == "train" else None
        return True

    def on_commit(
        self, agreed: DatasetExtent, train_step: int, settle: Callable[[], int], extend: Extend
    ) -> None:
        """Process the part of the dataset that was committed with a step.

        Args:
            agreed: the part that all members of its agreement saw.
            train_step: the next step.
            settle: fixes and returns the step from which on more may be planned, or one before it.
            extend: called when that step comes.

        Raises:
            DatasetRefusedError: the new segments cannot be trained.
            BehindError: this replica must be restarted.
        """
        if self._in_flight not in (None, agreed):
            raise BehindError(
                f"replica trained with another part of the dataset than others: {self._in_flight} "
                f"for {agreed}; restart it"
            )
        self._in_flight = None
        if agreed != (self._agreed if self._pending is None else self._pending[0]):
            self._pending = (agreed, settle() if self._pending is None else self._pending[1])
        if self._pending is not None and train_step >= self._pending[1]:
            self._make_valid(self._pending[0], train_step, extend)

    def to_arrays(self) -> dict[str, Array]:
        """Return the state for a replica that joins before the next step."""
        return {FRONTIER: np.array(self.state, np.int64)}

    def load(self, arrays: Mapping[str, Array]) -> int | None:
        """Load what `to_arrays` of another replica returned.

        Returns:
            The step that `settle` returned there; None if it was not called.
        """
        segments, finished, pending_segments, pending_finished, at = arrays[FRONTIER].tolist()
        self._agreed = DatasetExtent(num_segments=segments, finished=bool(finished))
        self._in_flight = None
        pending = DatasetExtent(num_segments=pending_segments, finished=bool(pending_finished))
        self._pending = None if at < 0 else (pending, at)
        self.span = self._wait_for(self._agreed)
        return None if at < 0 else at

    def _make_valid(self, agreed: DatasetExtent, train_step: int, extend: Extend) -> None:
        span = self._wait_for(agreed)
        try:
            extend(span, train_step)
        except (SchemaError, PlanError) as error:
            raise DatasetRefusedError(str(error)) from error
        self.span, self._agreed, self._pending = span, agreed, None

    def _wait_for(self, agreed: DatasetExtent) -> Span:
        """Wait until a part of the dataset is visible here, and return its span."""
        while not covers(self.visible, agreed):
            with self._drain.at_once():
                self._drain.sleep(self._poll_sec)
            self.visible = self._data.refresh()
        return self._data.use(agreed)


def covers(visible: DatasetExtent, agreed: DatasetExtent) -> bool:
    """Return whether a process that sees `visible` can train `agreed`.

    Example:
        >>> fewer = DatasetExtent(num_segments=2, finished=False)
        >>> covers(DatasetExtent(num_segments=3, finished=False), fewer)
        True
        >>> covers(fewer, DatasetExtent(num_segments=2, finished=True))
        False
    """
    enough = visible.num_segments >= agreed.num_segments
    return enough and (visible.finished or not agreed.finished)


def extent_at_step(order: Order, agreed: DatasetExtent, train_step: int) -> DatasetExtent:
    """Return the smallest agreed part of a dataset when all steps before one are trained.

    Args:
        order: global order of at least these steps.
        agreed: the minimum.
        train_step: of the run.

    Example:
        >>> from schemas.config.job import OrderConfig
        >>> order = Order((4, 3, 1), 2, epochs=2, config=OrderConfig())
        >>> first = DatasetExtent(num_segments=1, finished=False)
        >>> [extent_at_step(order, first, step).num_segments for step in (2, 3, 4, 5)]
        [1, 2, 2, 3]
        >>> extent_at_step(order, first, 6)
        DatasetExtent(num_segments=3, finished=True)
    """
    if agreed.finished:
        return agreed
    num_steps = 0
    for count, steps in enumerate(order.steps_per_segment, 1):
        num_steps += steps
        if count >= agreed.num_segments and num_steps >= train_step:
            return DatasetExtent(num_segments=count, finished=False)
    return DatasetExtent(num_segments=len(order.num_blocks), finished=True)


_ACCESS_LIST_BYTES = 128 << 20
"""Maximum bytes of decoded access lists of all tables."""


class StepRows:
    """The rows of any step; not thread-safe."""

    def __init__(self, dataset: Dataset, order: Order, tables: Iterable[str]) -> None:
        """Open the access lists.

        Args:
            dataset: open dataset, with its oracle.
            order: global order of the run.
            tables: table names.

        Raises:
            SchemaError: the dataset has no access lists.
        """
        kept = decoded_cache_for(order, _ACCESS_LIST_BYTES)
        self._accesses = {t: TableAccesses(dataset, t, order, kept) for t in tables}

    def of(self, train_step: int) -> dict[str, NDArray[np.int64]]:
        """Return by table the distinct rows of a step, ascending."""
        return {t: np.sort(a.rows[a.numbers(train_step)]) for t, a in self._accesses.items()}


@dataclass(frozen=True, slots=True)
class _SpanReader:
    """Readers of the steps of a span; used by one thread.

    Attributes:
        span: what may be trained.
        reader: of microbatches.
        step_rows: of rows.
    """

    span: Span
    reader: Reader
    step_rows: StepRows


class ReplicaContext:
    """A run as each of its replicas has it: job, model, rows, and the steps of the dataset."""

    def __init__(
        self,
        run: Path,
        job: Job,
        options: TrainOptions,
        span: Span,
        components: Components,
        rows: ReplicaRows,
        first_step: int,
        clock: Clock,
    ) -> None:
        """Open the readers of a span.

        Args:
            run: local folder of the run.
            job: of the run.
            options: of the command line.
            span: what may be trained, agreed on by all replicas.
            components: model, embedding and optimizer.
            rows: of the embedding.
            first_step: the first step that is not trained yet.
            clock: seconds.
        """
        self.run, self.job, self.options = run, job, options
        self.components, self.rows, self.first_step, self.clock = (
            components,
            rows,
            first_step,
            clock,
        )
        self.set_span(span)

    def set_span(self, span: Span) -> None:
        """Replace the span by a longer one."""
        reader = reader_of(span.dataset, span.order, self.options, self.job.train)
        step_rows = StepRows(span.dataset, span.order, self.components.store.layouts)
        self._span_reader = _SpanReader(span, reader, step_rows)

    @property
    def span(self) -> Span:
        """What may be trained, agreed on by all replicas."""
        return self._span_reader.span

    @property
    def end_step(self) -> int:
        """The end of the steps that may be trained."""
        return self.span.horizon.end_step

    def num_microbatches(self, train_step: int) -> int:
        """Return the number of microbatches of a step, 0 from `end_step` on."""
        if train_step >= self.end_step:
            return 0
        return len(self.span.order.step(train_step).positions)

    def read(self, train_step: int, microbatches: range) -> Microbatches:
        """Read microbatches of a step and all of its rows; called by the reader's thread."""
        span_reader = self._span_reader  # another thread may replace it
        rows = span_reader.step_rows.of(train_step)
        chosen = slice(microbatches.start, microbatches.stop)
        return span_reader.reader.read_microbatches(train_step, chosen, rows)

    def sums_shape(self, microbatches: Microbatches) -> SumsShape:
        """Return the shape of a step's sums."""
        parameters = [p for p in self.components.model.parameters() if p.requires_grad]
        return SumsShape(
            num_parameters=sum(p.numel() for p in parameters),
            num_rows=sum(len(rows) for rows in microbatches.rows.values()),
            dim=self.job.train.embedding_dim,
            dtype=parameters[0].dtype,
        )

    def ledger_entry(self, train_step: int, replica: str, microbatches: list[int]) -> LedgerEntry:
        """Return the ledger's entry of a replica's microbatches of a step."""
        step = self.span.order.step(train_step)
        segment = self.span.dataset.segments[step.segment]
        blocks = self._span_reader.reader.blocks_of(step)
        return LedgerEntry(
            step=train_step,
            epoch=step.epoch,
            segment=segment.id,
            replica=replica,
            blocks=tuple(blocks[microbatches].tolist()),
            num_samples=int(self._samples(train_step)[microbatches].sum()),
        )

    def num_samples(self, train_step: int) -> int:
        """Return the number of samples of a step."""
        return int(self._samples(train_step).sum())

    def _samples(self, train_step: int) -> NDArray[np.int64]:
        """Return the number of samples of each microbatch."""
        step = self.span.order.step(train_step)
        segment = self.span.dataset.segments[step.segment]
        return segment.column("num_samples")[segment.positions(TRAIN)[step.positions]]

    def state_before(self, train_step: int) -> dict[str, Array] | None:
        """Return the state before a step as copied arrays; None: retry with a later step."""
        rows = self.rows.state_before(train_step)
        if rows is None:
            return None
        dense = state_of(self.components.model, self.components.optimizer)
        copies = {name: array.copy() for name, array in dense.items()}
        return {"step": np.array([train_step]), **copies, **rows}

    def load(self, arrays: Mapping[str, Array]) -> int:
        """Load the `state_before` of another replica with the same span; return its step."""
        dense = {name: a for name, a in arrays.items() if name.startswith(("model/", "optimizer/"))}
        load_state(dense, self.components.model, self.components.optimizer)
        [step] = arrays["step"].tolist()
        self.rows.load(arrays, int(step), self.span)
        return int(step)

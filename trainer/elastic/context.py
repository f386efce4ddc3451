"""What all replicas of a run agree on, and what each builds from the job and the dataset."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from schemas.arrays import Array
from schemas.config.job import Job
from schemas.errors import PlanError, SchemaError
from schemas.layout import TRAIN
from schemas.manifest import canonical_json, replace_bytes
from schemas.order import Order
from schemas.run_log import RENDEZVOUS, LedgerEntry
from trainer.checkpoint.load import load_state, state_of
from trainer.components import Parts
from trainer.data.microbatches import Microbatches
from trainer.data.reader import Reader
from trainer.elastic.group import SumsShape
from trainer.elastic.peer_state import ReplicaRows
from trainer.elastic.shared_rows import SharedStores, StepRows
from trainer.embedding.kernels.compiled import kernels_of
from trainer.embedding.kernels.interface import Kernels
from trainer.follow import Following, Span
from trainer.horizon import Known, decide
from trainer.recovery import Drain
from trainer.setup import TrainOptions
from trainer.step import Clock
from trainer.stores.api import BehindError, RowsLostError
from trainer.train import reader_of

TOKEN = "token"
"""File of the run with what its replicas present to each other."""
ROWS_LOST = "rows-lost"
"""File of the run with the lighthouse of the attempt of which rows are lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """One attempt at a run."""

    job: str
    """Job file."""
    dataset: str
    """Dataset folder."""
    lighthouse: str
    """`http://host:port`."""
    heartbeat_sec: float
    """Time without a sign of life after which a replica is dead."""
    embedding: str
    """Where rows lie, as `--embedding` says."""
    expanded: bool
    """Undo the deduplication."""
    steps: int | None
    """Stop before this step."""
    follow: bool
    """Whether segments may come."""
    known: Known
    """What all know of the dataset when they begin."""
    retained_bytes: int
    """Most bytes of rows that the writer lets wait before they go to the stores."""
    copy_bytes: int
    """Of the largest copy of a checkpoint; 0 where none is taken beside training."""
    shared: SharedStores | None
    """Stores of the run; None where every replica has all rows in memory."""


def write_rendezvous(run: Path, together: Rendezvous) -> None:
    """Let replicas know."""
    replace_bytes(run / RENDEZVOUS, canonical_json(asdict(together)).encode())


def read_rendezvous(run: Path) -> Rendezvous:
    """Return what `write_together` wrote.

    Raises:
        SchemaError: nobody leads the run, or the file is of another release.
    """
    path = run / RENDEZVOUS
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
        shared = body["shared"]
        if shared is not None:
            shared = SharedStores(**{**shared, "addresses": tuple(shared["addresses"])})
        return Rendezvous(**{**body, "known": Known(**body["known"]), "shared": shared})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise SchemaError(
            f"run must be one that replicas are asked to join, got {error}; begin it with "
            "python -m trainer train --replicas 0",
            file=str(path),
        ) from error


@contextmanager
def report_lost_rows(run: Path, lighthouse: str) -> Generator[None]:
    """Let whoever leads an attempt know when it cannot go on, since rows are lost.

    Args:
        run: run folder.
        lighthouse: of the attempt.
    """
    try:
        yield
    except RowsLostError:
        replace_bytes(run / ROWS_LOST, lighthouse.encode())
        raise


def rows_are_lost(run: Path, lighthouse: str) -> bool:
    """Tell whether a replica of an attempt has found that it cannot go on."""
    try:
        return (run / ROWS_LOST).read_text(encoding="utf-8") == lighthouse
    except FileNotFoundError:
        return False


# How far a replica may train: what it sees of the dataset, and what all have agreed on.
#
# What the members of a step's agreement all see is committed with the step, so those that are
# behind or join learn it with the sums. It holds from the first step on whose reads no replica
# has issued then, the same for all: their caches go on with one plan. Where all known steps are
# trained, the agreement that shows more is that of the next step itself.

FRONTIER = "frontier"
"""Name of what one that joins must know, among the arrays of a state."""
Extend = Callable[[Span, int], None]
"""Lets a span be trained from a step on."""


class DatasetRefusedError(SchemaError):
    """Say that what has come cannot be trained; all replicas find the same, and save."""


class Frontier:
    """What may be trained, from step to step."""

    def __init__(
        self,
        data: Following,
        known: Known,
        drain: Drain,
        poll_sec: float,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Wait until this process sees as much of the dataset as others.

        Args:
            data: the dataset; `first` was called.
            known: what is agreed on at the first step.
            drain: ends a wait.
            poll_sec: seconds between two looks.
            say: told what is waited for, one line at a time.

        Raises:
            SchemaError: the dataset is another one.
            DrainInterrupt: the process is to end.
        """
        self.trouble = ""
        self._data, self._drain, self._poll_sec, self._say = data, drain, poll_sec, say
        self._seen, self._known = data.look(), known
        self._coming: tuple[Known, int] | None = None  # and the step from which on it holds
        self._tried: Known | None = None  # holds already for the step in flight
        self._said = ""
        self.span = self._seen_by_me(known)

    @property
    def seen(self) -> Known:
        """What this process has seen of the dataset when it looked last."""
        return self._seen

    def look(self) -> None:
        """See what is committed now; a dataset that is another one is everybody's trouble."""
        try:
            self._seen = self._data.look()
        except SchemaError as error:
            self.trouble = self.trouble or str(error)

    def give_up(self, train_step: int, seconds: float) -> None:
        """Wait no longer."""
        self.trouble = self.trouble or (
            f"dataset must grow or be finished within {seconds:g} s, got a run that waits at step "
            f"{train_step}: {self._data.waits_for}; go on with --resume --follow"
        )

    def say(self, train_step: int) -> None:
        """Say what is waited for, once."""
        line = f"waiting at step {train_step}: {self._data.waits_for}"
        if line != self._said:
            self._said = line
            self._say(line)

    @property
    def told(self) -> tuple[int, ...]:
        """What is agreed on, and what will hold from which step on."""
        known, at = (self._known, -1) if self._coming is None else self._coming
        both = self._known.num_segments, self._known.finished, known.num_segments, known.finished
        return (*map(int, both), at)

    def check(self, known: Known, told: tuple[int, ...]) -> None:
        """Refuse to compute a step with others that have agreed on something else.

        Args:
            known: what all see that agree on the step.
            told: `told` of the replica that writes.

        Raises:
            BehindError: this replica must be started again.
        """
        same = told == self.told if self._tried is None else known == self._tried
        if not same:
            raise BehindError(
                f"replica must know what others know, got {self.told} for {told} and {known}; "
                "start it again"
            )

    def reach(self, known: Known, train_step: int, extend: Extend) -> bool:
        """Let a step be trained, or be the end, if what is known says so.

        Args:
            known: what all see that agree on the step.
            train_step: behind all that could be trained so far.
            extend: called with what may be trained now.

        Returns:
            Whether it says so.

        Raises:
            RefusedError: what has come cannot be trained.
        """
        if known == self._known:
            return False
        comes = decide(train_step, self._seen_by_me(known).horizon)
        if comes == "wait":
            return False
        self._take(known, train_step, extend)
        self._tried = known if comes == "train" else None
        return True

    def committed(
        self, known: Known, train_step: int, settle: Callable[[], int], extend: Extend
    ) -> None:
        """Take note of what was known to all in the step that was committed last.

        Args:
            known: what all saw that agreed on it.
            train_step: the next step.
            settle: fixes the step from which on more may be known, and returns it or one before.
            extend: called when that step comes.

        Raises:
            RefusedError: what has come cannot be trained.
            BehindError: this replica must be started again.
        """
        if self._tried not in (None, known):
            raise BehindError(
                f"replica must train what others know, got {self._tried} for {known}; start it "
                "again"
            )
        self._tried = None
        if known != (self._known if self._coming is None else self._coming[0]):
            self._coming = (known, settle() if self._coming is None else self._coming[1])
        if self._coming is not None and train_step >= self._coming[1]:
            self._take(self._coming[0], train_step, extend)

    def arrays(self) -> dict[str, Array]:
        """Return what one that joins must know before the next step."""
        return {FRONTIER: np.array(self.told, np.int64)}

    def load(self, arrays: Mapping[str, Array]) -> int | None:
        """Begin with what another replica knew.

        Returns:
            The step before which `settle` was called there; None where it was not.
        """
        segments, finished, coming, ends, at = arrays[FRONTIER].tolist()
        self._known = Known(num_segments=segments, finished=bool(finished))
        self._tried = None
        later = Known(num_segments=coming, finished=bool(ends))
        self._coming = None if at < 0 else (later, at)
        self.span = self._seen_by_me(self._known)
        return None if at < 0 else at

    def _take(self, known: Known, train_step: int, extend: Extend) -> None:
        span = self._seen_by_me(known)
        try:
            extend(span, train_step)
        except (SchemaError, PlanError) as error:
            raise DatasetRefusedError(str(error)) from error
        self.span, self._known, self._coming = span, known, None

    def _seen_by_me(self, known: Known) -> Span:
        """Return what may be trained when that much is known, as soon as it is seen here."""
        while not covers_known(self._seen, known):
            with self._drain.at_once():
                self._drain.sleep(self._poll_sec)
            self._seen = self._data.look()
        return self._data.use(known)


def covers_known(seen: Known, known: Known) -> bool:
    """Tell whether who has seen something can train what others know.

    Example:
        >>> covers(Known(num_segments=3, finished=False), Known(num_segments=2, finished=False))
        True
        >>> covers(Known(num_segments=2, finished=False), Known(num_segments=2, finished=True))
        False
    """
    enough = seen.num_segments >= known.num_segments
    return enough and (seen.finished or not known.finished)


def known_at_step(order: Order, known: Known, train_step: int) -> Known:
    """Return the least that is known of a dataset when all steps before one are trained.

    Args:
        order: global order over at least these steps.
        known: what all know in any case.
        train_step: of the run.

    Example:
        >>> from schemas.config.job import OrderConfig
        >>> order = Order((4, 3, 1), 2, epochs=2, config=OrderConfig())
        >>> first = Known(num_segments=1, finished=False)
        >>> [known_at(order, first, step).num_segments for step in (2, 3, 4, 5)]
        [1, 2, 2, 3]
        >>> known_at(order, first, 6)
        Known(num_segments=3, finished=True)
    """
    if known.finished:
        return known
    num_steps = 0
    for count, steps in enumerate(order.steps_per_segment, 1):
        num_steps += steps
        if count >= known.num_segments and num_steps >= train_step:
            return Known(num_segments=count, finished=False)
    return Known(num_segments=len(order.num_blocks), finished=True)


@dataclass(frozen=True, slots=True)
class _Steps:
    """What the steps of a span are read with.

    Attributes:
        span: what may be trained.
        reader: reads leaves; used by one thread.
        step_rows: rows of steps; used by the same thread.
    """

    span: Span
    reader: Reader
    step_rows: StepRows


class ReplicaContext:
    """A run as each of its replicas has it."""

    def __init__(
        self,
        run: Path,
        job: Job,
        options: TrainOptions,
        span: Span,
        parts: Parts,
        rows: ReplicaRows,
        first: int,
        clock: Clock,
    ) -> None:
        """Keep the parts.

        Args:
            run: run folder, the same for all.
            job: its job.
            options: what the command line says.
            span: what may be trained, agreed on.
            parts: what is trained.
            rows: where its rows come from.
            first: the first step that is not trained yet.
            clock: seconds.
        """
        self.run, self.job, self.options = run, job, options
        self.parts, self.rows, self.first, self.clock = parts, rows, first, clock
        self.know(span)

    def know(self, span: Span) -> None:
        """Let the steps of a span be trained, which begins with those that are known."""
        reader = reader_of(span.dataset, span.order, self.options, self.job.train)
        step_rows = StepRows(span.dataset, span.order, self.parts.stores)
        self._steps = _Steps(span, reader, step_rows)

    @property
    def span(self) -> Span:
        """What may be trained, agreed on by all."""
        return self._steps.span

    @property
    def last(self) -> int:
        """The step after the last one that may be trained."""
        return self.span.horizon.until

    def num_leaves(self, train_step: int) -> int:
        """Return the leaves of a step; none behind the last one."""
        if train_step >= self.last:
            return 0
        return len(self.span.order.step(train_step).positions)

    def read(self, train_step: int, run: range) -> Microbatches:
        """Return some leaves of a step among all of its rows; called by the reader's thread."""
        steps = self._steps  # another thread may let more be known
        rows = steps.step_rows.of(train_step)
        return steps.reader.read_microbatches(train_step, slice(run.start, run.stop), rows)

    def shape(self, leaves: Microbatches) -> SumsShape:
        """Return the shape of a step's sums."""
        parameters = [p for p in self.parts.model.parameters() if p.requires_grad]
        return SumsShape(
            num_parameters=sum(p.numel() for p in parameters),
            num_rows=sum(len(rows) for rows in leaves.rows.values()),
            dim=self.job.train.embedding_dim,
            dtype=parameters[0].dtype,
        )

    def entry(self, train_step: int, replica: str, chosen: list[int]) -> LedgerEntry:
        """Return the ledger's entry of some leaves of a step."""
        step = self.span.order.step(train_step)
        segment = self.span.dataset.segments[step.segment]
        names = self._steps.reader.blocks_of(step)
        return LedgerEntry(
            step=train_step,
            epoch=step.epoch,
            segment=segment.manifest.id,
            replica=replica,
            blocks=tuple(names[chosen].tolist()),
            num_samples=int(self._samples(train_step)[chosen].sum()),
        )

    def num_samples(self, train_step: int) -> int:
        """Return the samples of a step."""
        return int(self._samples(train_step).sum())

    def _samples(self, train_step: int) -> NDArray[np.int64]:
        step = self.span.order.step(train_step)
        segment = self.span.dataset.segments[step.segment]
        return segment.column("num_samples")[segment.positions(TRAIN)[step.positions]]

    def state_before(self, train_step: int) -> dict[str, Array] | None:
        """Return what a replica needs to begin with a step; None where a later one must do."""
        rows = self.rows.arrays(train_step)
        if rows is None:
            return None
        dense = state_of(self.parts.model, self.parts.optimizer)
        return {"step": np.array([train_step]), **dense, **rows}

    def load(self, arrays: Mapping[str, Array]) -> int:
        """Begin with what `state_before` returned elsewhere; return its step.

        What may be trained is what it was there.
        """
        dense = {name: a for name, a in arrays.items() if name.startswith(("model/", "optimizer/"))}
        load_state(dense, self.parts.model, self.parts.optimizer)
        [step] = arrays["step"].tolist()
        self.rows.load(arrays, int(step), self.span)
        return int(step)

    @property
    def kernels(self) -> Kernels:
        """Return the kernels of the job."""
        return kernels_of(self.job.train.kernels)

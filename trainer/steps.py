"""The steps of a run: which may be trained, and their batches, read ahead of time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from presage.schemas.config.train import TrainConfig
from presage.schemas.dataset.accesses import TableAccesses
from presage.schemas.dataset.checked_files import DecodedListCache
from presage.schemas.dataset.opened import OpenDataset
from presage.schemas.dataset.order import Order
from presage.schemas.dataset.run_next_uses import SharedNextUses
from presage.schemas.errors import PlanError
from presage.schemas.oracle.cache_plan import Keyframe
from presage.schemas.run.records import LedgerEntry
from presage.trainer.components import plan_of_rows, uses_shared_features
from presage.trainer.data.collate import Microbatches, move_batch, single_microbatch
from presage.trainer.data.decode import training_spec
from presage.trainer.data.reader import Reader
from presage.trainer.data.transfer import device_of
from presage.trainer.embedding.cache import RowsPlan
from presage.trainer.options import TrainOptions

NO_MICROBATCHES = range(0)
_ACCESS_LIST_BYTES = 128 << 20
"""Maximum bytes of decoded access lists of all tables."""


# ---- The horizon: how far a run may train ----
#
# The horizon of a dataset that is still built is the end of its first epoch over the committed
# segments. The steps before it are those of the sealed dataset, since batches do not span
# segments and an epoch reads its segments in order. Later epochs follow the last segment, so they
# wait until the dataset is sealed. Replicas agree on a `DatasetExtent`, from which each computes
# the same horizon, so they end and wait at the same step.


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetExtent:
    """The part of a dataset that a process can see, or that all processes agree on."""

    num_segments: int
    """Committed segments, counted from the first one."""
    sealed: bool
    """Whether no segment follows them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Horizon:
    """The steps that may be trained."""

    end_step: int
    """One after the last of them."""
    known_end: int
    """One after the last known step, which may be later: plans look ahead to it."""
    is_final: bool
    """Whether the run ends there; otherwise it waits there for more segments."""


def common_extent(extents: Sequence[DatasetExtent]) -> DatasetExtent:
    """Return the extent that all processes see; sealed only if all see the end.

    Example:
        >>> three = DatasetExtent(num_segments=3, sealed=True)
        >>> common_extent([three, DatasetExtent(num_segments=2, sealed=False)])
        DatasetExtent(num_segments=2, sealed=False)
    """
    fewest = min(extent.num_segments for extent in extents)
    return DatasetExtent(num_segments=fewest, sealed=all(e.sealed for e in extents))


def horizon_of(order: Order, extent: DatasetExtent, stop: int | None = None) -> Horizon:
    """Return how far a run may train.

    Args:
        order: global order over at least the segments of the extent.
        extent: agreed on by all processes.
        stop: step before which the run stops; None for the whole run.

    Raises:
        PlanError: the order is of other segments.

    Example:
        >>> from presage.schemas.config.job import OrderConfig
        >>> order = Order((4, 3), 2, epochs=2, config=OrderConfig())
        >>> horizon_of(order, DatasetExtent(num_segments=1, sealed=False))
        Horizon(end_step=2, known_end=2, is_final=False)
        >>> horizon_of(order, DatasetExtent(num_segments=2, sealed=False))
        Horizon(end_step=4, known_end=4, is_final=False)
        >>> horizon_of(order, DatasetExtent(num_segments=2, sealed=True))
        Horizon(end_step=8, known_end=8, is_final=True)
        >>> horizon_of(order, DatasetExtent(num_segments=2, sealed=False), stop=3)
        Horizon(end_step=3, known_end=4, is_final=True)
    """
    num_segments = len(order.num_blocks)
    if num_segments < extent.num_segments or (
        extent.sealed and num_segments != extent.num_segments
    ):
        raise PlanError(
            f"order is of {num_segments} segments, but the dataset has {extent.num_segments}; "
            "open the dataset again"
        )
    end = order.num_steps
    if not extent.sealed:
        end = sum(order.steps_per_segment[: extent.num_segments])
    if stop is not None and stop <= end:
        return Horizon(end_step=stop, known_end=end, is_final=True)
    return Horizon(end_step=end, known_end=end, is_final=extent.sealed)


def next_action(train_step: int, horizon: Horizon) -> Literal["train", "wait", "end"]:
    """Return what to do at a step, the same in every replica.

    Example:
        >>> open_end = Horizon(end_step=2, known_end=2, is_final=False)
        >>> [next_action(step, open_end) for step in range(3)]
        ['train', 'train', 'wait']
        >>> next_action(2, Horizon(end_step=2, known_end=2, is_final=True))
        'end'
    """
    if train_step < horizon.end_step:
        return "train"
    return "end" if horizon.is_final else "wait"


@dataclass(frozen=True, slots=True)
class Span:
    """What may be trained now.

    Attributes:
        dataset: opened with all committed segments.
        order: global order over them.
        horizon: how far the run may train.
        next_uses: of the tables' rows.
    """

    dataset: OpenDataset
    order: Order
    horizon: Horizon
    next_uses: SharedNextUses


def plan_of_span(
    span: Span,
    tables: Iterable[str],
    config: TrainConfig,
    first_step: int,
    starts: Mapping[str, Keyframe],
) -> RowsPlan:
    """Return the plan of tables from a step to the end of a span; see `plan_of_rows`."""
    return plan_of_rows(
        span.dataset,
        span.order,
        tables,
        config.cache,
        first_step,
        starts=starts,
        end_step=span.horizon.known_end,
        shared=span.next_uses,
    )


# ---- Reading ----


class StepRows:
    """The rows of any step; not thread-safe."""

    def __init__(self, dataset: OpenDataset, order: Order, tables: Iterable[str]) -> None:
        """Open the access lists.

        Raises:
            SchemaError: the dataset has no access lists.
        """
        kept = DecodedListCache(_ACCESS_LIST_BYTES)
        self._accesses = {t: TableAccesses(dataset, t, order, kept) for t in tables}

    def of(self, train_step: int) -> dict[str, NDArray[np.int64]]:
        """Return by table the distinct rows of a step, ascending."""
        return {t: np.sort(a.rows[a.numbers(train_step)]) for t, a in self._accesses.items()}


@dataclass(frozen=True, slots=True)
class _SpanReader:
    """Readers of the steps of a span; used by one thread.

    Attributes:
        span: what may be trained.
        reader: of batches.
        step_rows: of the rows of whole steps; None: a step has the rows of its microbatches.
    """

    span: Span
    reader: Reader
    step_rows: StepRows | None


class StepReader:
    """Reads microbatches of steps ahead of time, in one thread; a context for it.

    A process that trains alone on a device, or with `fast`, reads a step as one batch there.
    """

    def __init__(
        self,
        config: TrainConfig,
        options: TrainOptions,
        span: Span,
        tables: Iterable[str],
        *,
        is_replica: bool,
    ) -> None:
        """Open the readers of a span.

        Args:
            config: train section of the job.
            options: of the run.
            span: what may be trained.
            tables: of the embedding.
            is_replica: others compute microbatches of the same steps.
        """
        self._config, self._tables, self._is_replica = config, tuple(tables), is_replica
        self._expanded, self._device = options.expanded, device_of(config.device)
        on_device = self._device.type != "cpu"
        self.is_whole = not is_replica and (options.fast or on_device)
        """Whether a step is read as one batch."""
        self._pool = ThreadPoolExecutor(
            1, "reader", initializer=torch.set_num_threads, initargs=(1,)
        )
        self._pending: dict[tuple[int, range], Future[Microbatches]] = {}
        self.set_span(span)

    def __enter__(self) -> StepReader:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def set_span(self, span: Span) -> None:
        """Replace the span by a longer one."""
        reader = Reader(
            span.dataset,
            span.order,
            training_spec(span.dataset, self._config),
            expanded=self._expanded,
            find_shared=uses_shared_features(self._config),
            num_sharing=2 if self._is_replica else 1,
            microbatch_samples=self._config.microbatch_samples,
        )
        rows = StepRows(span.dataset, span.order, self._tables) if self._is_replica else None
        self._reader = _SpanReader(span, reader, rows)

    @property
    def span(self) -> Span:
        """What may be trained, agreed on by all processes."""
        return self._reader.span

    @property
    def end_step(self) -> int:
        """The end of the steps that may be trained."""
        return self.span.horizon.end_step

    def num_microbatches(self, train_step: int) -> int:
        """Return the number of microbatches of a step, 0 from `end_step` on."""
        if train_step >= self.end_step:
            return 0
        return len(self._reader.reader.microbatches(self.span.order.step(train_step)))

    def work(self, train_step: int) -> list[float]:
        """Return the work of each microbatch of a step, empty from `end_step` on."""
        if train_step >= self.end_step:
            return []
        return self._reader.reader.microbatch_work(self.span.order.step(train_step))

    def prefetch(self, train_step: int, microbatches: range) -> None:
        """Start to read a step unless it is pending; cancel other microbatches of that step."""
        key = train_step, microbatches
        for other in [k for k in self._pending if k[0] == train_step and k != key]:
            self._pending.pop(other).cancel()
        if key not in self._pending:
            self._pending[key] = self._pool.submit(self._read, train_step, microbatches)

    def take(self, train_step: int, microbatches: range) -> Microbatches:
        """Return microbatches of a step with its rows, and cancel reads of earlier steps."""
        self.prefetch(train_step, microbatches)
        read = self._pending.pop((train_step, microbatches)).result()
        for key in [key for key in self._pending if key[0] <= train_step]:
            self._pending.pop(key).cancel()
        return read

    def ledger_entry(self, train_step: int, replica: str, microbatches: range) -> LedgerEntry:
        """Return the ledger's entry of a replica's microbatches of a step."""
        step, reader = self.span.order.step(train_step), self._reader.reader
        blocks = reader.blocks_of(step)
        chosen = reader.microbatches(step)[microbatches.start : microbatches.stop]
        first = [blocks[each.blocks] for each in chosen if not each.first_sample]
        return LedgerEntry(
            step=train_step,
            epoch=step.epoch,
            segment=self.span.dataset.segments[step.segment].id,
            replica=replica,
            blocks=tuple(block for each in first for block in each.tolist()),
            num_samples=sum(each.num_samples for each in chosen),
        )

    def _read(self, train_step: int, microbatches: range) -> Microbatches:
        current = self._reader  # another thread may replace it
        if self.is_whole:
            batch = move_batch(current.reader.read(train_step), self._config.model, self._device)
            return single_microbatch(batch)
        rows = None if current.step_rows is None else current.step_rows.of(train_step)
        chosen = slice(microbatches.start, microbatches.stop)
        return current.reader.read_microbatches(train_step, chosen, rows)

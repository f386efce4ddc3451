"""What a process computes of a step, from batches that a thread reads ahead."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Generic, TypeVar

import torch

from trainer.data.collate import Batch, move_batch
from trainer.data.decode import spec_of
from trainer.data.microbatches import Microbatches
from trainer.data.transfer import device_of
from trainer.device_worker import DeviceMicrobatchWorker
from trainer.run.run_context import RunContext
from trainer.step import (
    MicrobatchWorker,
    Node,
    PartialSums,
    PhaseTimer,
    Tree,
    WholeBatchStep,
    update_from_sums,
)

NO_MICROBATCHES = range(0)
T = TypeVar("T")


class ReadAhead(Generic[T]):
    """Calls a function of a step and its microbatches ahead of time, in one thread."""

    def __init__(self, function: Callable[[int, range], T]) -> None:
        self._function = function
        self._pool = ThreadPoolExecutor(
            1, "reader", initializer=torch.set_num_threads, initargs=(1,)
        )
        self._pending: dict[tuple[int, range], Future[T]] = {}

    def __enter__(self) -> ReadAhead[T]:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def prefetch(self, step: int, microbatches: range) -> None:
        """Start the call for a step unless it is pending; cancel other ranges of that step."""
        for key in [key for key in self._pending if key[0] == step and key[1] != microbatches]:
            self._pending.pop(key).cancel()
        if (step, microbatches) not in self._pending:
            self._pending[step, microbatches] = self._pool.submit(
                self._function, step, microbatches
            )

    def take(self, step: int, microbatches: range) -> T:
        """Return the result for a step, and cancel calls for earlier ones."""
        self.prefetch(step, microbatches)
        result = self._pending.pop((step, microbatches)).result()
        for key in [key for key in self._pending if key[0] <= step]:
            self._pending.pop(key).cancel()
        return result


class WholeBatchCompute:
    """Computes all samples of a step at once, on any device; for a process that trains alone."""

    speed = None

    def __init__(self, context: RunContext, timer: PhaseTimer) -> None:
        self.timer = timer
        self._step = WholeBatchStep(context.components)
        config = context.job.train
        device = device_of(config.device)
        self._reader = ReadAhead[Batch](
            lambda step, _: move_batch(context.read_batch(step), config.model, device)
        )

    def __enter__(self) -> WholeBatchCompute:
        return self

    def __exit__(self, *error: object) -> None:
        self._reader.__exit__(*error)

    def prefetch(self, train_step: int, microbatches: range) -> None:
        """Start to read the batch of a later step."""
        self._reader.prefetch(train_step, microbatches)

    def compute(self, train_step: int, microbatches: range) -> Tree[WholeBatchStep]:
        """Open the rows of a step and compute it, as the only leaf of its tree."""
        with self.timer("read"):
            batch = self._reader.take(train_step, microbatches)
        with self.timer("fetch"):
            self._step.fetch(batch)
        self._step.forward_backward(batch, self.timer)
        tree = Tree[WholeBatchStep](1, lambda left, _: left)
        tree.add(Node(0, 0), self._step)
        return tree

    def update(self, total: WholeBatchStep) -> float:
        """Update model and rows; return the loss before that."""
        with self.timer("update"):
            return total.update()


class StepCompute:
    """Computes microbatches, which are read ahead of time; a context for its threads."""

    def __init__(self, context: RunContext, timer: PhaseTimer) -> None:
        self.timer = timer
        self.speed: float | None = None  # work per second; None before the first step
        self._context = context
        self._open: Microbatches | None = None
        self._stack = ExitStack()

    def __enter__(self) -> StepCompute:
        enter = self._stack.enter_context
        self._work = enter(_open_worker(self._context))
        self._reader = enter(ReadAhead(self._context.read))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @property
    def opened(self) -> Microbatches:
        """Microbatches of the current step that were opened last."""
        assert self._open is not None, "rows of the step are open"
        return self._open

    def prefetch(self, train_step: int, microbatches: range) -> None:
        """Start to read microbatches of a later step."""
        self._reader.prefetch(train_step, microbatches)

    def compute(self, train_step: int, microbatches: range) -> Tree[PartialSums]:
        """Open the rows of a step, compute microbatches, and return their sums."""
        clock = self._context.clock
        opened = self._open_rows(train_step, microbatches)
        start = clock()
        with self.timer("backward"):
            tree = self._work.compute(opened)
        if len(microbatches):
            work = sum(self._context.work(train_step)[microbatches.start : microbatches.stop])
            self.speed = smooth_speed(self.speed, work / (clock() - start))
        return tree

    def open(self, train_step: int) -> None:
        """Open the rows of a step that others have computed, unless they are open."""
        if not self._is_open(train_step):
            self._open_rows(train_step, NO_MICROBATCHES)

    def warm_up(self, train_step: int) -> None:
        """Compute a step with initial rows and discard it, before others wait for this process.

        The first step is slow. Reading it also decodes the row groups of later steps.
        """
        components, whole = self._context.components, self._context.num_microbatches(train_step)
        opened = self._reader.take(train_step, range(whole))
        components.embedding.open_initial(opened, components.store.layouts)
        self._work.compute(opened)

    def update(self, total: PartialSums) -> float:
        """Update model and rows by the sum over all microbatches; return the loss before that."""
        with self.timer("update"):
            update_from_sums(total, self._work, self._context.components)
        self.reset()
        return total.loss / total.divisor

    def reset(self) -> None:
        """Drop the current step."""
        self._open = None

    def _open_rows(self, train_step: int, microbatches: range) -> Microbatches:
        with self.timer("read"):
            opened = self._reader.take(train_step, microbatches)
        embedding = self._context.components.embedding
        with self.timer("fetch"):
            if self._is_open(train_step):  # computed again, or after failing to catch up
                embedding.add(opened)
            else:
                embedding.open(opened)
        self._open = opened
        return opened

    def _is_open(self, train_step: int) -> bool:
        return self._open is not None and self._open.step.train_step == train_step


def _open_worker(context: RunContext) -> MicrobatchWorker:
    """Return what computes microbatches on the device of a job."""
    config, components = context.job.train, context.components
    device = device_of(config.device)
    if device.type != "cpu":
        spec = spec_of(context.span.dataset, config.dtype)
        return DeviceMicrobatchWorker(components, spec, config, device)
    return MicrobatchWorker(components.model, components.embedding)


def smooth_speed(before: float | None, measured: float) -> float:
    """Return the exponential moving average of a speed; `before` is None for the first."""
    return measured if before is None else before + 0.3 * (measured - before)


def open_compute(context: RunContext, timer: PhaseTimer) -> WholeBatchCompute | StepCompute:
    """Return what computes the steps of a process.

    One that trains alone computes batches whole on a GPU or with `--fast`, otherwise in
    microbatches.
    """
    on_device = device_of(context.job.train.device).type != "cpu"
    is_whole = not context.is_replica and (context.options.fast or on_device)
    return WholeBatchCompute(context, timer) if is_whole else StepCompute(context, timer)

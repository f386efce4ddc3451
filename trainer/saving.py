"""When a run saves: beside training every so many steps, or once at its end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

from schemas.jagged import Array
from schemas.job_train import CheckpointConfig
from trainer.cache import PlannedCache
from trainer.checkpoint import save_checkpoint
from trainer.flash.agent import recover
from trainer.flash.changes import Changed, Changes
from trainer.flash.memory import WAIT_SEC, CopyMemory, claim, memory_path
from trainer.flash.saver import BesideSaver
from trainer.keyframes import arrays_of_cached
from trainer.parts import Parts
from trainer.sources import RowSource
from trainer.state import state_of
from trainer.stores.future_log import FutureLog
from trainer.stores.together import checkpointed, group_of

MadeOf = Callable[[], Mapping[str, Any]]
"""What the run is by now, from `flash.fits`."""


class Saver(Protocol):
    """Saves a run."""

    def after(self, train_step: int) -> None:
        """Take note that all steps before one are committed."""
        ...

    def settle(self) -> None:
        """Wait until what was copied is on the disk, or is known not to be."""
        ...

    def save(self, train_step: int) -> None:
        """Have the state before a step on the disk, whether one is due or not.

        Raises:
            SchemaError: the disk is full.
        """
        ...

    def finish(self, train_step: int) -> None:
        """Have the state before a step saved, and all rows where evaluation finds them.

        Raises:
            SchemaError: the disk is full.
        """
        ...

    def close(self) -> None:
        """Give back what was taken; what was committed is still written."""
        ...


def saver_of(
    run: Path,
    config: CheckpointConfig,
    parts: Parts,
    source: RowSource,
    made_of: MadeOf,
    *,
    first_step: int,
    loaded: bool,
    num_bytes: Callable[[int], int],
) -> Saver:
    """Return what saves a run; memory is taken and the agent started where it saves beside.

    Args:
        run: run folder.
        config: of the job.
        parts: what is trained.
        source: of its rows.
        made_of: what the run is by now.
        first_step: the first step that is trained.
        loaded: whether a checkpoint before that step was loaded.
        num_bytes: returns the bytes of the largest copy of rows, by steps between checkpoints.

    Raises:
        SchemaError: there is too little memory for the copies.
    """
    if config.every_steps is None:
        return AtEnd(run, config, parts, source, made_of, first_step)
    layouts = {table: store.layout for table, store in parts.stores.items()}
    changes = Changes(layouts)
    source.follow(changes)
    state = TrainState(parts, source, changes, made_of)
    memory = CopyMemory(memory_path(Path(config.copy_to), run))
    saver = BesideSaver(
        run,
        memory,
        state,
        layouts=layouts,
        first_step=first_step,
        loaded=loaded,
        config=config,
    )
    saver.start(state.dense_bytes + num_bytes(config.every_steps))
    return Beside(saver, state, config.every_steps)


def claim_leftovers(
    run: Path, config: CheckpointConfig, *, resume: bool, wait_sec: float = WAIT_SEC
) -> None:
    """Wait for the agent of the run before, and clear what both left in memory where both died.

    Args:
        run: run folder.
        config: of the job.
        resume: write what was committed there; otherwise it goes.
        wait_sec: longest wait.

    Raises:
        SchemaError: another process trains the run.
    """
    for directory in dict.fromkeys((config.copy_to, CheckpointConfig().copy_to, str(run))):
        if not Path(directory).is_dir():
            continue
        found = claim(memory_path(Path(directory), run), wait_sec=wait_sec)
        if found is None:
            continue
        if resume:
            recover(run, found, keep=config.keep)
        else:
            found.remove()


def dense_bytes(parts: Parts) -> int:
    """Return the bytes of the dense state with all numbers of the optimizer: two of each."""
    return 3 * sum(a.nbytes for a in state_of(parts.model, None).values())


class TrainState:
    """What is saved of a run, at a step boundary."""

    def __init__(self, parts: Parts, source: RowSource, changes: Changes, made_of: MadeOf) -> None:
        """Keep the parts.

        Args:
            parts: what is trained.
            source: of its rows.
            changes: that the source tells of.
            made_of: what the run is by now.
        """
        self._parts = parts
        self._source = source
        self._changes = changes
        self._made_of = made_of
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="truncate")
        self._truncating: Future[None] | None = None

    @property
    def dense_bytes(self) -> int:
        """Bytes of the dense state."""
        return dense_bytes(self._parts)

    @property
    def left_bytes(self) -> int:
        """Bytes of copies of rows that left the cache."""
        return self._changes.left_bytes

    def made_of(self) -> Mapping[str, Any]:
        """Return what the run is."""
        return self._made_of()

    def dense(self) -> Mapping[str, Array]:
        """Return the dense state, by name."""
        return state_of(self._parts.model, self._parts.optimizer)

    def plan(self, train_step: int) -> Mapping[str, Array]:
        """Return where a planned cache stands before a step, by name; nothing without."""
        if not isinstance(self._source, PlannedCache):
            return {}
        return arrays_of_cached(self._source.cached(train_step))

    def changed(self, since: int) -> Mapping[str, list[Changed]]:
        """Return by table the rows that steps from one on used, and where they lie."""
        return self._changes.since(since, self._source.held)

    def saved(self, train_step: int) -> None:
        """Forget what a checkpoint has, and let stores shorten their logs, beside training."""
        self._changes.forget(train_step)
        if self._truncating is None or self._truncating.done():
            self.check()
            self._truncating = self._pool.submit(checkpointed, self._parts.stores, train_step)

    def check(self) -> None:
        """Raise what a store raised."""
        found, self._truncating = self._truncating, None
        if found is not None:
            found.result()

    def finish(self) -> None:
        """Bring all rows where evaluation finds them: a log has no use for it."""
        self.check()
        if not isinstance(group_of(self._parts.stores), FutureLog):
            self._source.flush()

    def close(self) -> None:
        """Stop the thread."""
        self._pool.shutdown()


class Beside:
    """Saves every so many steps, beside training."""

    def __init__(self, saver: BesideSaver, state: TrainState, every_steps: int) -> None:
        """Keep the parts; the saver has been started."""
        self._saver = saver
        self._state = state
        self._every_steps = every_steps

    def after(self, train_step: int) -> None:
        """Copy what changed, where a checkpoint is due."""
        if train_step % self._every_steps == 0:
            self._saver.save(train_step)

    def settle(self) -> None:
        """Wait until what was copied is on the disk, or is known not to be."""
        self._saver.settle()

    def save(self, train_step: int) -> None:
        """Copy what changed and wait until it is on the disk."""
        self._saver.finish(train_step)

    def finish(self, train_step: int) -> None:
        """Wait until the last state is on the disk."""
        self.save(train_step)
        self._state.finish()

    def close(self) -> None:
        """End the agent and give the memory back."""
        self._saver.close()
        self._state.close()


class AtEnd:
    """Saves all rows once, while nothing is trained any more."""

    def __init__(
        self,
        run: Path,
        config: CheckpointConfig,
        parts: Parts,
        source: RowSource,
        made_of: MadeOf,
        first_step: int,
    ) -> None:
        """Keep the parts."""
        self._run = run
        self._config = config
        self._parts = parts
        self._source = source
        self._made_of = made_of
        self._saved = first_step

    def after(self, train_step: int) -> None:
        """Do nothing."""

    def settle(self) -> None:
        """Do nothing: nothing is under way."""

    def finish(self, train_step: int) -> None:
        """Save, unless nothing was trained."""
        self.save(train_step)

    def save(self, train_step: int) -> None:
        """Write all rows, unless nothing was trained since."""
        if self._saved == train_step:
            return
        self._source.flush()
        source, parts = self._source, self._parts
        save_checkpoint(
            self._run,
            train_step,
            parts.model,
            parts.optimizer,
            parts.stores,
            keep=self._config.keep,
            cached=source.cached(train_step) if isinstance(source, PlannedCache) else None,
            made_of=self._made_of(),
        )
        checkpointed(parts.stores, train_step)
        self._saved = train_step

    def close(self) -> None:
        """Do nothing."""

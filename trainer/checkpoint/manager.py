"""When a run saves: beside training every N steps, or once at its end."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from schemas.arrays import Array
from schemas.config.train import CheckpointConfig
from schemas.errors import SchemaError
from schemas.manifest import canonical_json
from trainer.checkpoint.agent import recover
from trainer.checkpoint.load import save_checkpoint, state_of
from trainer.checkpoint.snapshot import (
    COMMITTED,
    WAIT_SEC,
    WRITTEN,
    About,
    CopyMemory,
    claim,
    copy_to,
    memory_path,
)
from trainer.components import Parts
from trainer.embedding.cache import PlannedCache, RowSource, arrays_of_cached
from trainer.embedding.changes import Changed, Changes
from trainer.runtime import close_pipes, is_readable, start_child
from trainer.stores.api import TableLayout, group_of, notify_checkpoint
from trainer.stores.future_log import FutureLog

logger = logging.getLogger(__name__)

COPIES = "checkpoints.jsonl"
"""File of the run with a line for each checkpoint that was due."""
_END_SEC = 10.0
"""How long an agent that has nothing to write may take to end."""


class State(Protocol):
    """What a checkpoint is taken of, at a step boundary."""

    def dense(self) -> Mapping[str, Array]:
        """Return the dense state, by name."""
        ...

    def plan(self, train_step: int) -> Mapping[str, Array]:
        """Return where a planned cache stands before a step, by name; nothing without."""
        ...

    def changed(self, since: int) -> Mapping[str, list[Changed]]:
        """Return by table the rows that steps from one on used, and where they lie."""
        ...

    @property
    def left_bytes(self) -> int:
        """Bytes of copies of rows that left the cache."""
        ...

    def made_of(self) -> Mapping[str, Any]:
        """Return what the run is by now, as it stands in manifests."""
        ...

    def saved(self, train_step: int) -> None:
        """Take note that a checkpoint before a step is on the disk."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyEvent:
    """A checkpoint that was due: a line of `checkpoints.jsonl`."""

    train_step: int
    """The next step to train."""
    pause_sec: float
    """Time that training stood still for it."""
    num_bytes: int
    """Bytes that were copied; 0 when it was skipped."""
    memory_bytes: int
    """Bytes that are taken for copies, those of rows that left the cache with them."""


class BesideSaver:
    """Copies at step boundaries; one copy at a time is under way to the disk.

    A checkpoint that comes due while the one before is still being written is skipped, and training
    never waits for the disk; its rows are in the next one. Or training waits, as the job says.
    """

    def __init__(
        self,
        run: Path,
        memory: CopyMemory,
        state: State,
        *,
        layouts: Mapping[str, TableLayout],
        first_step: int,
        loaded: bool,
        config: CheckpointConfig,
    ) -> None:
        """Keep the parts; `start` begins.

        Args:
            run: run folder.
            memory: not yet made.
            state: what is saved.
            layouts: tables by name.
            first_step: the first step that is trained.
            loaded: whether a checkpoint before that step was loaded.
            config: of the job.
        """
        self._run = run
        self._memory = memory
        self._state = state
        self._layouts = layouts
        self._saved = first_step  # the newest that is on disk
        self._since = first_step if loaded else None
        self._under_way: int | None = None
        self._failed: str | None = None
        self._config = config
        self._agent: subprocess.Popen[bytes] | None = None

    def start(self, num_bytes: int) -> None:
        """Make the memory and start the agent.

        Args:
            num_bytes: of the largest copy, from the oracle.

        Raises:
            SchemaError: there is too little memory.
        """
        self._memory.create(num_bytes)
        self._agent = self._started()

    def save(self, train_step: int) -> None:
        """Take a checkpoint before a step, unless the one before is still being written."""
        start = time.perf_counter()
        self._look()
        if self._config.late == "wait":
            self.settle()
        copied, plan = 0, self._state.plan(train_step)
        if self._under_way is not None:
            logger.warning(
                "checkpoint is skipped, the one before is still being written; save less often "
                "train_step=%s being_written=%s",
                train_step,
                self._under_way,
            )
        else:
            copied = self._copy(train_step, plan)
        event = CopyEvent(
            train_step=train_step,
            pause_sec=time.perf_counter() - start,
            num_bytes=copied,
            memory_bytes=self._memory.num_bytes + self._state.left_bytes,
        )
        with (self._run / COPIES).open("a", encoding="utf-8") as file:
            file.write(f"{canonical_json(asdict(event))}\n")

    def go_on_from(self, train_step: int) -> None:
        """Build on a checkpoint that another process has completed, if it is newer."""
        self._look()
        if self._under_way is None and self._saved < train_step:
            self._is_saved(train_step)

    def settle(self) -> None:
        """Wait until nothing is under way to the disk."""
        while self._under_way is not None:
            self._look(1.0)

    def finish(self, train_step: int) -> None:
        """Have the state before a step on the disk, the last one of a run.

        Raises:
            SchemaError: it cannot be written.
        """
        self.settle()
        if self._saved < train_step or self._failed is not None:
            self.save(train_step)
            self.settle()
        if self._failed is not None:
            raise SchemaError(self._failed)

    def close(self) -> None:
        """End the agent, when it has written what is under way, and give the memory back."""
        agent, self._agent = self._agent, None
        if agent is None or _end(agent):
            self._memory.remove()
        else:
            self._memory.close()  # the agent gives it back when it has written what is there

    def _copy(self, train_step: int, plan: Mapping[str, Array]) -> int:
        about = About(
            train_step=train_step,
            since=self._since,
            made_of=self._state.made_of(),
            layouts=self._layouts,
        )
        changed = self._state.changed(0 if self._since is None else self._since)
        arguments = about, self._state.dense(), plan, changed
        try:
            num_bytes = copy_to(self._memory, *arguments)
        except OSError:  # more rows than an interval has: a checkpoint was skipped, or failed
            self._move()
            num_bytes = copy_to(self._memory, *arguments)
        self._under_way, self._failed = train_step, None
        self._send(train_step)
        return num_bytes

    def _move(self) -> None:
        """Have the memory in the run's folder, where there is more room than in memory."""
        logger.warning(
            "copy of a checkpoint is more than memory holds, it goes to the disk; save more often, "
            "or give it more memory directory=%s",
            self._memory.path.parent,
        )
        self.close()
        self._memory = CopyMemory(memory_path(self._run, self._run))
        self._memory.create(0)
        self._agent = self._started()

    def _send(self, train_step: int) -> None:
        agent = self._agent
        if agent is None or agent.stdin is None:
            return
        try:
            agent.stdin.write(f"{train_step}\n".encode())
            agent.stdin.flush()
        except BrokenPipeError:
            pass  # it died: the next look starts another, which finds what is committed

    def _look(self, timeout_sec: float = 0.0) -> bool:
        """Read an answer of the agent, if there is one; start it again where it died."""
        agent = self._agent
        assert agent is not None, "the agent runs while there is something to save"
        assert agent.stdout is not None, "its output is a pipe"
        if not is_readable(agent.stdout, timeout_sec):
            return False
        line = agent.stdout.readline()
        if not line:
            self._start_again(agent)
            return True
        answer = json.loads(line)
        step = int(answer["train_step"])
        if answer["error"] is not None:
            self._told(str(answer["error"]))
        else:
            self._is_saved(step)
        self._under_way = None
        return True

    def _is_saved(self, train_step: int) -> None:
        self._saved = self._since = train_step
        self._state.saved(train_step)

    def _told(self, error: str) -> None:
        self._failed = error
        logger.warning("checkpoint is not written, the next one tries again: %s", error)

    def _start_again(self, agent: subprocess.Popen[bytes]) -> None:
        agent.wait()
        logger.warning("agent of checkpoints died, another is started status=%s", agent.returncode)
        if self._under_way is not None and self._memory.state != COMMITTED:
            if self._memory.state == WRITTEN:
                self._is_saved(self._under_way)
            self._under_way = None
        self._agent = self._started()

    def _started(self) -> subprocess.Popen[bytes]:
        arguments = ["agent", str(self._run.resolve()), "--parent", str(os.getpid())]
        arguments += ["--memory", str(self._memory.path.resolve())]
        arguments += ["--file", str(self._memory.file)]
        arguments += ["--keep", str(self._config.keep)]
        # what ends the trainer's group must not end what it saved
        return start_child(arguments, answers=True, own_session=True, files=[self._memory.file])


def _end(agent: subprocess.Popen[bytes]) -> bool:
    """Close an agent's input and wait: it writes what is committed, then it ends.

    Returns:
        Whether it has ended; it may have much to write.
    """
    close_pipes(agent)
    try:
        agent.wait(_END_SEC)
    except subprocess.TimeoutExpired:
        logger.warning("agent of checkpoints goes on writing pid=%s", agent.pid)
        return False
    return True


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
    source.track_changes(changes)
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
        return self._changes.since(since, self._source.rows_at)

    def saved(self, train_step: int) -> None:
        """Forget what a checkpoint has, and let stores shorten their logs, beside training."""
        self._changes.forget(train_step)
        if self._truncating is None or self._truncating.done():
            self.check()
            self._truncating = self._pool.submit(notify_checkpoint, self._parts.stores, train_step)

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
        notify_checkpoint(parts.stores, train_step)
        self._saved = train_step

    def close(self) -> None:
        """Do nothing."""

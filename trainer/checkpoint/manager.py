"""Save beside training: copies of the changed state, which an agent process writes to disk."""

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
from typing import Any

from presage.schemas.arrays import Array
from presage.schemas.config.train import CheckpointConfig
from presage.schemas.dataset.manifest import canonical_json
from presage.schemas.errors import SchemaError
from presage.schemas.run.records import CHECKPOINT_LOG
from presage.trainer.checkpoint.agent import recover
from presage.trainer.checkpoint.dense_state import state_of
from presage.trainer.checkpoint.snapshot import (
    COMMITTED,
    FAILED,
    WAIT_SEC,
    WRITTEN,
    SnapshotHeader,
    SnapshotMemory,
    claim_memory,
    commit_snapshot,
    memory_path,
)
from presage.trainer.components import Components
from presage.trainer.embedding.cache import arrays_of_cached
from presage.trainer.embedding.changes import Changes
from presage.trainer.run_rows import RunRows
from presage.trainer.runtime import close_pipes, is_readable, start_child

logger = logging.getLogger(__name__)

_AGENT_EXIT_SEC = 10.0
_MAX_DEATHS = 3
"""Successive deaths of agents after which a checkpoint has failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointEvent:
    """A line of `checkpoints.jsonl`."""

    train_step: int
    """The next step to train."""
    pause_sec: float
    """Seconds for which training stopped."""
    num_bytes: int
    """Bytes that were copied, 0 if the checkpoint was skipped."""
    memory_bytes: int
    """Bytes reserved for copies, including copies of evicted rows."""


class BackgroundSaver:
    """Copies state at step boundaries; an agent process writes one copy at a time to disk.

    A checkpoint that is due while the previous one is still being written is skipped, so training
    does not wait for the disk; its changes are in the next one. With `late: wait` training waits.
    """

    def __init__(
        self,
        run: Path,
        components: Components,
        rows: RunRows,
        changes: Changes,
        get_fingerprint: Callable[[], Mapping[str, Any]],
        config: CheckpointConfig,
        base_step: int | None,
    ) -> None:
        self._run = run
        self._memory = SnapshotMemory(memory_path(Path(config.copy_to), run))
        self._components, self._rows, self._changes = components, rows, changes
        self._get_fingerprint = get_fingerprint
        self._base_step = base_step  # of the newest checkpoint; None: there is none
        self._pending: int | None = None
        self._failed: str | None = None
        self._config = config
        self._agent: subprocess.Popen[bytes] | None = None
        self._deaths = 0  # of agents since the last answer
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="truncate")
        self._truncating: Future[None] | None = None

    def start(self, num_bytes: int) -> None:
        """Create the memory and start the agent.

        Raises:
            SchemaError: there is too little memory.
        """
        self._memory.create(num_bytes)
        self._agent = self._start_agent()

    def save(self, train_step: int) -> None:
        """Copy the state before `train_step`, unless the previous copy is still being written."""
        start = time.perf_counter()
        self._poll_agent()
        if self._config.late == "wait":
            self.wait_until_saved()
        copied, plan = 0, arrays_of_cached(self._rows.cached(train_step))
        if self._pending is not None:
            logger.warning(
                "checkpoint is skipped, the one before is still being written; save less often "
                "train_step=%s being_written=%s",
                train_step,
                self._pending,
            )
        else:
            copied = self._copy(train_step, plan)
        event = CheckpointEvent(
            train_step=train_step,
            pause_sec=time.perf_counter() - start,
            num_bytes=copied,
            memory_bytes=self._memory.num_bytes + self._changes.evicted_bytes,
        )
        with (self._run / CHECKPOINT_LOG).open("a", encoding="utf-8") as file:
            file.write(f"{canonical_json(asdict(event))}\n")

    def rebase_on(self, train_step: int) -> None:
        """Use a newer checkpoint of another process as the base of the next one."""
        self._poll_agent()
        if self._pending is None and (self._base_step or 0) < train_step:
            self._is_saved(train_step)

    def wait_until_saved(self) -> None:
        """Wait until the pending copy is on disk or has failed."""
        while self._pending is not None:
            self._poll_agent(1.0)

    def finish(self, train_step: int) -> None:
        """Write the state before `train_step` to disk and wait for it.

        Raises:
            SchemaError: it cannot be written.
        """
        self.wait_until_saved()
        if (self._base_step or 0) < train_step or self._failed is not None:
            self.save(train_step)
            self.wait_until_saved()
        if self._failed is not None:
            raise SchemaError(self._failed)

    def close(self) -> None:
        """Stop the agent after its pending copy, and remove the memory."""
        self._close_memory()
        self._pool.shutdown()

    def _close_memory(self) -> None:
        agent, self._agent = self._agent, None
        if agent is None or _stop_agent(agent):
            self._memory.remove()
        else:
            self._memory.close()  # the agent removes it when it has written the copy

    def _copy(self, train_step: int, plan: Mapping[str, Array]) -> int:
        header = SnapshotHeader(
            train_step=train_step,
            since=self._base_step,
            fingerprint=self._get_fingerprint(),
            layouts=self._components.store.layouts,
        )
        dense = state_of(self._components.model, self._components.optimizer)
        changed = self._changes.since(self._base_step or 0, self._rows.source.rows_at)
        arguments = header, dense, plan, changed
        try:
            num_bytes = commit_snapshot(self._memory, *arguments)
        except OSError:  # no room, since a checkpoint was skipped: more rows changed
            self._move_to_disk()
            num_bytes = commit_snapshot(self._memory, *arguments)
        self._pending, self._failed = train_step, None
        self._notify_agent(train_step)
        return num_bytes

    def _move_to_disk(self) -> None:
        """Replace the shared-memory file by a file in the run folder."""
        logger.warning(
            "snapshot of a checkpoint is larger than its memory and moves to the disk; save more "
            "often, or enlarge the memory directory=%s",
            self._memory.path.parent,
        )
        self._close_memory()
        self._memory = SnapshotMemory(memory_path(self._run, self._run))
        self._memory.create(0)
        self._agent = self._start_agent()

    def _notify_agent(self, train_step: int) -> None:
        agent = self._agent
        if agent is None or agent.stdin is None:
            return
        try:
            agent.stdin.write(f"{train_step}\n".encode())
            agent.stdin.flush()
        except BrokenPipeError:
            pass  # it died: the next poll starts another one, which finds the committed copy

    def _poll_agent(self, timeout_sec: float = 0.0) -> bool:
        """Handle an answer of the agent if there is one; restart the agent if it died."""
        agent = self._agent
        assert agent is not None, "the agent runs while there is something to save"
        assert agent.stdout is not None, "its output is a pipe"
        if not is_readable(agent.stdout, timeout_sec):
            return False
        line = agent.stdout.readline()
        if not line:
            self._restart_agent(agent)
            return True
        self._deaths, answer = 0, json.loads(line)
        step = int(answer["train_step"])
        if answer["error"] is not None:
            self._on_failure(str(answer["error"]))
        else:
            self._is_saved(step)
        self._pending = None
        return True

    def _is_saved(self, train_step: int) -> None:
        """Build on a checkpoint, and let stores truncate their logs in the background."""
        self._base_step = train_step
        if self._truncating is None or self._truncating.done():
            truncating, self._truncating = self._truncating, None
            if truncating is not None:
                truncating.result()
            notify = self._components.store.notify_checkpoint
            self._truncating = self._pool.submit(notify, train_step)

    def _on_failure(self, error: str) -> None:
        self._failed = error
        logger.warning("checkpoint is not written, the next one tries again: %s", error)

    def _restart_agent(self, agent: subprocess.Popen[bytes]) -> None:
        agent.wait()
        logger.warning("agent of checkpoints died, another is started status=%s", agent.returncode)
        if self._pending is not None and self._memory.state != COMMITTED:
            if self._memory.state == WRITTEN:
                self._is_saved(self._pending)
            self._pending = None
        self._deaths += 1
        if self._pending is not None and self._deaths >= _MAX_DEATHS:
            self._memory.state = FAILED
            self._on_failure(
                f"checkpoint of step {self._pending} was not written: {self._deaths} agents died, "
                f"the last with status {agent.returncode}; its message is above"
            )
            self._pending, self._deaths = None, 0
        self._agent = self._start_agent()

    def _start_agent(self) -> subprocess.Popen[bytes]:
        arguments = ["agent", str(self._run.resolve()), "--parent", str(os.getpid())]
        arguments += ["--memory", str(self._memory.path.resolve())]
        arguments += ["--file", str(self._memory.file)]
        arguments += ["--keep", str(self._config.keep)]
        return start_child(arguments, answers=True, files=[self._memory.file])


def _stop_agent(agent: subprocess.Popen[bytes]) -> bool:
    """Close the agent's input, after which it writes the committed copy and exits.

    Returns:
        Whether it exited in time.
    """
    close_pipes(agent)
    try:
        agent.wait(_AGENT_EXIT_SEC)
    except subprocess.TimeoutExpired:
        logger.warning("agent of checkpoints is still writing pid=%s", agent.pid)
        return False
    return True


def claim_leftovers(
    run: Path, config: CheckpointConfig, *, resume: bool, wait_sec: float = WAIT_SEC
) -> None:
    """Wait for the agent of an earlier process, and recover memory that both left behind.

    With `resume` a committed copy is written to disk; it is deleted otherwise.

    Raises:
        SchemaError: another process trains the run.
    """
    for directory in dict.fromkeys((config.copy_to, CheckpointConfig().copy_to, str(run))):
        if not Path(directory).is_dir():
            continue
        memory = claim_memory(memory_path(Path(directory), run), wait_sec=wait_sec)
        if memory is None:
            continue
        if resume:
            recover(run, memory, keep=config.keep)
        else:
            memory.remove()


def dense_bytes(components: Components) -> int:
    """Return an upper bound of the dense state: each value and two optimizer values."""
    return 3 * sum(a.nbytes for a in state_of(components.model, None).values())

"""The process that writes checkpoints beside training, and lives on when the trainer dies.

It reads a line for each copy that was committed, and answers with a line when it is on disk or
could not be written. When its input ends or its parent is gone it writes what is committed and not
on disk yet, gives the memory back and ends: it looks twice a second, so it outlives its work by
less than a second. Torch is not imported here.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from schemas.errors import SchemaError
from schemas.events import CHECKPOINTS
from trainer.flash.manifest import complete
from trainer.flash.memory import COMMITTED, FAILED, WRITTEN, CopyMemory
from trainer.flash.persist import persist
from trainer.flash.snapshot import Snapshot
from trainer.readable import is_readable

LOOK_SEC = 0.5
"""How often the agent looks whether its parent lives."""
_NICENESS = 10


def run_agent(
    run: Path,
    path: Path,
    file: int,
    *,
    keep: int,
    parent: int,
    lines: BinaryIO,
    answer: Callable[[str], None],
) -> None:
    """Write what is committed in a run's memory until the trainer ends.

    Args:
        run: run folder.
        path: the memory, which the trainer has made.
        file: number of its open file.
        keep: newest checkpoints that remain.
        parent: process id of the trainer.
        lines: a line for each copy.
        answer: takes a line of JSON for each.
    """
    os.nice(_NICENESS)
    memory = CopyMemory(path)
    memory.inherit(file)
    if memory.state == COMMITTED:
        answer(_write(run, memory, keep))  # of an agent that died before
    for _ in _ordered(lines, parent):
        if memory.state == COMMITTED:  # or an agent that died wrote it
            memory.remap()
            answer(_write(run, memory, keep))
    if memory.state in (COMMITTED, FAILED):
        memory.remap()
        answer(_write(run, memory, keep))
    memory.remove()


def recover(run: Path, memory: CopyMemory, *, keep: int) -> None:
    """Write what is committed in memory that a trainer and its agent left, and give it back.

    Raises:
        SchemaError: the disk is full; the memory stays.
    """
    if memory.state in (COMMITTED, FAILED):
        about = Snapshot(memory).about
        checkpoints = run / CHECKPOINTS
        found = [int(folder.name) for folder in complete(checkpoints)]
        newer = about.train_step > max(found, default=-1)
        if newer and (about.since is None or about.since in found):
            persist(checkpoints, Snapshot(memory), keep=keep)
    memory.remove()


def _write(run: Path, memory: CopyMemory, keep: int) -> str:
    """Write a copy; return the line that says how it went."""
    start = time.monotonic()
    snapshot = Snapshot(memory)
    step = snapshot.about.train_step
    try:
        folder = persist(run / CHECKPOINTS, snapshot, keep=keep)
    except (SchemaError, OSError) as error:
        memory.state = FAILED
        return json.dumps({"train_step": step, "error": str(error)})
    memory.state = WRITTEN
    written = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    seconds = time.monotonic() - start
    return json.dumps({"train_step": step, "error": None, "seconds": seconds, "num_bytes": written})


def _ordered(lines: BinaryIO, parent: int) -> Iterator[bytes]:
    """Yield lines until there are no more, or the parent is gone: others may hold the pipe open."""
    while os.getppid() == parent:
        if not is_readable(lines, LOOK_SEC):
            continue
        line = lines.readline()
        if not line:
            return
        yield line


def tell(stream: BinaryIO, line: str) -> None:
    """Write a line to a trainer that may be gone."""
    with suppress(BrokenPipeError, ValueError):
        stream.write(f"{line}\n".encode())
        stream.flush()

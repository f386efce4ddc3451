"""`python -m tests.trainer.paused PIPE STEP ...`: `python -m presage.trainer`, paused at a step.

It waits behind the commit of the step until the pipe is written to.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from presage.trainer.__main__ import main as train
from presage.trainer.run.ledger import LogWriter


def paused_at(pipe: Path, step: int) -> tuple[str, str, str]:
    """Create a pipe, and return the module and arguments of a trainer that pauses at a step."""
    os.mkfifo(pipe)
    return "tests.trainer.paused", str(pipe), str(step)


@contextmanager
def resumed(pipe: Path) -> Iterator[None]:
    """Let the trainer continue, now or when it comes to the step, until the context ends."""
    number = os.open(pipe, os.O_RDWR)
    os.write(number, b"xx")  # the log of a step is written again when a run ends there
    try:
        yield
    finally:
        os.close(number)


def main(arguments: Sequence[str]) -> int:
    """Train."""
    pipe, paused_step, *given = arguments
    write = LogWriter.write

    def write_and_wait(self: LogWriter) -> None:
        write(self)
        if self.written == int(paused_step):
            with Path(pipe).open("rb", 0) as file:
                file.read(1)

    LogWriter.write = write_and_wait
    return train(given)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

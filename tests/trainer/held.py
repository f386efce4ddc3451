"""`python -m tests.trainer.held PIPE STEP ...`: `python -m trainer`, held when it commits a step.

It waits until the pipe is written to, so what a test does meanwhile meets it at that step.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from trainer.__main__ import main as train
from trainer.run_log import LogWriter


def held_by(pipe: Path, step: int) -> tuple[str, str, str]:
    """Make a pipe that holds at a step, and return the module to be started."""
    os.mkfifo(pipe)
    return "tests.trainer.held", str(pipe), str(step)


@contextmanager
def let_go(pipe: Path) -> Iterator[None]:
    """Hold no longer, now or when the step comes, until the context ends."""
    number = os.open(pipe, os.O_RDWR)
    os.write(number, b"on")
    try:
        yield
    finally:
        os.close(number)


def main(arguments: Sequence[str]) -> int:
    """Train."""
    pipe, held_step, *given = arguments
    write = LogWriter.write

    def write_and_wait(self: LogWriter) -> None:
        write(self)
        if self.written == int(held_step):
            with Path(pipe).open("rb", 0) as file:
                file.read(1)

    LogWriter.write = write_and_wait
    return train(given)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

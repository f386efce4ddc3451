"""The status of a scheduler that runs here: in the terminal, and as a page."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rich.console import Console

from scheduler.alone import is_held
from scheduler.machine.log import LOG
from scheduler.status.board import Board
from scheduler.status.server import serving
from scheduler.status.terminal import live
from schemas.errors import SchemaError
from schemas.manifest import replace_bytes

ADDRESS = "status.url"
"""Name of the file with the page's address, in the scheduler's folder while it is served."""
OFF = -1
"""The port that stands for no page."""

Say = Callable[[str], None]


def port_of(text: str) -> int:
    """Return the port that `--status` names.

    Raises:
        ValueError: it is neither a port nor `off`.
    """
    if text == "off":
        return OFF
    port = int(text)
    if not 0 <= port <= 65535:
        raise ValueError(f"port must be 0 to 65535, got {port}; 0 takes any that is free")
    return port


@contextmanager
def watching(output: Path, port: int, console: Console, say: Say) -> Generator[Say, None, None]:
    """Show what a scheduler does while the context lasts.

    Args:
        output: folder of the scheduler, which begins in the context.
        port: of the page, 0 for any that is free, OFF for none.
        console: its terminal, if it is one.
        say: prints one line where it is none.

    Yields:
        What is to be called with each decision, in one line.

    Raises:
        PlanError: the port is taken, or may not be used.
    """
    board = Board(output / LOG)
    with ExitStack() as stack:
        if console.is_terminal and not console.is_dumb_terminal:
            say = stack.enter_context(live(board, console))
        if port != OFF and not is_held(output):
            address = stack.enter_context(serving(board, port))
            output.mkdir(parents=True, exist_ok=True)
            replace_bytes(output / ADDRESS, f"{address}\n".encode())
            stack.callback((output / ADDRESS).unlink, missing_ok=True)
            say(f"status page: {address}")
        yield say


def board_of(output: Path) -> Board:
    """Return the board of a scheduler that runs or has ended.

    Raises:
        SchemaError: there is no log.
    """
    if not (output / LOG).is_file():
        raise SchemaError(
            f"folder must have the log of a scheduler, got no {LOG}; name what --output named",
            file=str(output),
        )
    return Board(output / LOG)

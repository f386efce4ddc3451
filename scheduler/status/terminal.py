"""The status in a terminal: once, or live while jobs run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from queue import Empty, SimpleQueue

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from scheduler.controller.log import LOG
from scheduler.files import is_locked
from scheduler.planner.policy import counted
from scheduler.status.board import Board, serving
from scheduler.status.journal import Incident
from scheduler.status.page import headline
from scheduler.status.view import (
    JobView,
    PoolView,
    Stores,
    StoreView,
    View,
    clock,
    digits,
    duration,
    in_words,
    memory,
    percent,
    visible,
)
from schemas.errors import SchemaError
from schemas.manifest import replace_bytes

LATEST = 6
"""Incidents of the live view, newest last; its decisions stay above it, as they are said."""
REFRESH_SEC = 1.0
LEAVE_SEC = 5.0
"""Longest wait for a terminal that takes nothing any more."""


def render(view: View, num_incidents: int = LATEST, num_decisions: int = 0) -> RenderableType:
    """Return the view for a terminal, with the latest incidents and decisions, newest last."""
    spent = sum(job.spent for job in view.jobs)
    head = (
        f"{headline(view)} | {digits(view.used_cpus)} of {digits(view.cpus)} cores, "
        f"{memory(view.used_memory_bytes)} of {memory(view.memory_bytes)} booked | "
        f"cost {digits(spent)} | {clock(view.now_sec)} UTC"
    )
    parts: list[RenderableType] = [Text(visible(head), style="bold"), _jobs(view.jobs)]
    parts += [_stores(job.name, job.stores) for job in view.jobs if job.stores is not None]
    if view.incidents:
        parts.append(Text("failures and replacements", style="bold"))
        parts += [_incident(one, view) for one in reversed(view.incidents[:num_incidents])]
    if view.decisions and num_decisions:
        parts.append(Text("decisions", style="bold"))
    for decision in reversed(view.decisions[:num_decisions]):
        whose = f"{decision.job} {decision.process}".strip()
        line = f"{clock(decision.time_sec)} {whose}: {decision.action}: {decision.reason}"
        parts.append(Text(visible(line)))
    return Group(*parts)


@contextmanager
def live(board: Board, console: Console) -> Generator[Callable[[str], None], None, None]:
    """Show a board in a terminal until the context ends.

    A thread of its own writes, so that a terminal that is held (^S) holds nothing else.

    Args:
        board: what is shown.
        console: the terminal.

    Yields:
        What is to be called with each line that is to stay above the view.
    """
    lines, done = SimpleQueue[str](), threading.Event()
    thread = threading.Thread(
        target=_show, args=(board, console, lines, done), name="terminal", daemon=True
    )
    thread.start()
    try:
        yield lines.put
    finally:
        done.set()
        thread.join(LEAVE_SEC)


def _show(board: Board, console: Console, lines: SimpleQueue[str], done: threading.Event) -> None:
    # What others write to stdout is theirs: `--json` prints one object there.
    with Live(
        console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
    ) as shown:
        over = False
        while not over:
            over = done.wait(REFRESH_SEC)
            try:
                while True:
                    shown.console.print(Text(visible(lines.get_nowait())))
            except Empty:
                pass
            try:
                seen = render(board.view())
            except SchemaError as error:
                seen = Text(f"no status: {error}")
            shown.update(seen, refresh=True)


def _jobs(jobs: tuple[JobView, ...]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("job", "phase", "segments", "trained", "pools", "speed", "memory", "cost, time"):
        table.add_column(name, overflow="fold")
    for job in jobs:
        table.add_row(
            Text(visible(job.name)),
            job.phase,
            f"{job.segments_built}/{job.num_segments}",
            f"{percent(job.num_trained / max(job.num_to_train, 1))}, step {job.next_step:,}",
            ", ".join(map(_pool, job.pools)) or "none",
            _speeds(job) or "not measured",
            _memory(job),
            _price(job),
        )
    return table


def _pool(pool: PoolView) -> str:
    running = pool.count("running")
    more = len(pool.processes) - running
    return f"{pool.name} {running}/{pool.wanted}" + (f" +{more}" if more else "")


def _stores(job: str, stores: Stores) -> Text:
    """Return who holds a job's rows in one line."""
    told = [_store(store) for store in stores.stores]
    if stores.move is not None:
        told.append(in_words(stores.move))
    return Text(visible(f"{job}: stores {'; '.join(told)}"))


def _store(store: StoreView) -> str:
    share = "" if store.share is None else f", {percent(store.share)} of accesses"
    status = "no process" if store.process is None else store.process.status
    state = "" if status == "running" else f", {status}"
    return f"{store.number}: {counted(len(store.ranges), 'range')}{share}{state}"


def _speeds(job: JobView) -> str:
    found: list[str] = []
    for pool, unit in (("preprocessing", "rows/s"), ("training", "samples/s")):
        speeds = [speed for speed in job.speeds if speed.pool == pool]
        if speeds:
            last = speeds[-1]
            found.append(f"{digits(last.measured)} {unit} ({digits(last.predicted)} predicted)")
    return ", ".join(found)


def _memory(job: JobView) -> str:
    """Return the process that is nearest to its limit."""
    read = [
        (one.resident_bytes / one.limit_bytes, one.name)
        for pool in job.pools
        for one in pool.processes
        if one.resident_bytes is not None and one.limit_bytes
    ]
    if not read:
        return "not read"
    share, name = max(read)
    return f"{percent(share)} of {name}"


def _price(job: JobView) -> str:
    found = job.forecast
    if found is None:
        return digits(job.spent)
    total = digits(job.spent + found.left_cost)
    return f"{digits(job.spent)} of {total}, {duration(found.left_sec)} left"


def _incident(one: Incident, view: View) -> Text:
    then = "is to be replaced" if view.is_open(one) else "is not needed any more"
    if one.back_sec is not None:
        then = f"replaced by {one.successor} after {duration(one.back_sec - one.time_sec)}"
    elif not one.process:
        then = "noted"
    whose = f"{one.job} {one.process}".strip()
    return Text(visible(f"{clock(one.time_sec)} {whose}: {one.kind}, {then}"))


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
        if port != OFF and not is_locked(output):
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

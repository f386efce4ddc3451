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

from presage.scheduler.controller.journal import Incident
from presage.scheduler.controller.log import LOG
from presage.scheduler.model.pools import counted
from presage.scheduler.status.board import Board, serving
from presage.scheduler.status.status_page import headline
from presage.scheduler.status.view import (
    JobView,
    PoolView,
    Stores,
    StoreView,
    View,
    clock,
    describe_move,
    duration,
    memory,
    notes_of,
    percent,
    three_digits,
)
from presage.schemas.dataset.files import replace_bytes
from presage.schemas.errors import SchemaError, printable
from presage.schemas.storage.locks import is_locked

LATEST = 6
"""Incidents of the live view, newest last; decisions scroll above it."""
REFRESH_SEC = 1.0
CLOSE_SEC = 5.0
"""Time limit for a terminal that does not accept output."""
ADDRESS = "status.url"
"""File with the page's URL in the scheduler's folder, while it is served."""
OFF = -1
"""Port that disables the page."""

Progress = Callable[[str], None]


def render(view: View, num_incidents: int = LATEST, num_decisions: int = 0) -> RenderableType:
    """Return the view for a terminal, with the latest incidents and decisions, newest last."""
    spent = sum(job.spent for job in view.jobs)
    head = (
        f"{headline(view)} | {three_digits(view.used_cpus)} of {three_digits(view.cpus)} cores, "
        f"{memory(view.used_memory_bytes)} of {memory(view.memory_bytes)} reserved | "
        f"cost {three_digits(spent)} | {clock(view.now_sec)} UTC"
    )
    parts: list[RenderableType] = [Text(printable(head), style="bold"), _jobs(view.jobs)]
    for job in view.jobs:
        parts += [Text(printable(f"{job.name}: {note}")) for note in notes_of(job)]
        if job.stores is not None:
            parts.append(_stores(job.name, job.stores))
    if view.incidents:
        parts.append(Text("failures and replacements", style="bold"))
        parts += [_incident(i, view) for i in reversed(view.incidents[:num_incidents])]
    if view.decisions and num_decisions:
        parts.append(Text("decisions", style="bold"))
    for decision in reversed(view.decisions[:num_decisions]):
        subject = f"{decision.job} {decision.process}".strip()
        line = f"{clock(decision.time_sec)} {subject}: {decision.action}: {decision.reason}"
        parts.append(Text(printable(line)))
    return Group(*parts)


@contextmanager
def live(board: Board, console: Console) -> Generator[Callable[[str], None], None, None]:
    """Show a board in a terminal while the context is open.

    A separate thread writes, so that a stopped terminal (^S) blocks nothing else.

    Yields:
        A function that prints a line above the view.
    """
    lines, stop = SimpleQueue[str](), threading.Event()
    thread = threading.Thread(
        target=_show, args=(board, console, lines, stop), name="terminal", daemon=True
    )
    thread.start()
    try:
        yield lines.put
    finally:
        stop.set()
        thread.join(CLOSE_SEC)


def _show(board: Board, console: Console, lines: SimpleQueue[str], stop: threading.Event) -> None:
    # stdout is not redirected: `--json` prints one object there.
    with Live(
        console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
    ) as display:
        over = False
        while not over:
            over = stop.wait(REFRESH_SEC)
            try:
                while True:
                    display.console.print(Text(printable(lines.get_nowait())))
            except Empty:
                pass
            try:
                status: RenderableType = render(board.view())
            except SchemaError as error:
                status = Text(f"no status: {error}")
            display.update(status, refresh=True)


def _jobs(jobs: tuple[JobView, ...]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("job", "phase", "segments", "trained", "pools", "speed", "memory", "cost, time"):
        table.add_column(name, overflow="fold")
    for job in jobs:
        table.add_row(
            Text(printable(job.name)),
            job.phase,
            f"{job.segments_built}/{job.num_segments}",
            f"{percent(job.num_trained / max(job.num_to_train, 1))}, step {job.next_step:,}",
            ", ".join(map(_pool, job.pools)) or "none",
            _speeds(job) or "not measured",
            _memory(job),
            _cost(job),
        )
    return table


def _pool(pool: PoolView) -> str:
    running = pool.count("running")
    more = len(pool.processes) - running
    return f"{pool.name} {running}/{pool.wanted}" + (f" +{more}" if more else "")


def _stores(job: str, stores: Stores) -> Text:
    parts = [_store(store) for store in stores.stores]
    if stores.move is not None:
        parts.append(describe_move(stores.move))
    return Text(printable(f"{job}: stores {'; '.join(parts)}"))


def _store(store: StoreView) -> str:
    share = "" if store.share is None else f", {percent(store.share)} of accesses"
    status = "no process" if store.process is None else store.process.status
    state = "" if status == "running" else f", {status}"
    return f"{store.number}: {counted(len(store.ranges), 'range')}{share}{state}"


def _speeds(job: JobView) -> str:
    parts: list[str] = []
    for pool, unit in (("preprocessing", "rows/s"), ("training", "samples/s")):
        speeds = [speed for speed in job.speeds if speed.pool == pool]
        if speeds:
            last = speeds[-1]
            parts.append(
                f"{three_digits(last.measured)} {unit} ({three_digits(last.predicted)} predicted)"
            )
    return ", ".join(parts)


def _memory(job: JobView) -> str:
    """Return the process that is closest to its limit."""
    shares = [
        (process.resident_bytes / process.limit_bytes, process.name)
        for pool in job.pools
        for process in pool.processes
        if process.resident_bytes is not None and process.limit_bytes
    ]
    if not shares:
        return "not read"
    share, name = max(shares)
    return f"{percent(share)} of {name}"


def _cost(job: JobView) -> str:
    forecast = job.forecast
    if forecast is None:
        return three_digits(job.spent)
    total = three_digits(job.spent + forecast.left_cost)
    return f"{three_digits(job.spent)} of {total}, {duration(forecast.left_sec)} left"


def _incident(incident: Incident, view: View) -> Text:
    if incident.back_sec is not None:
        delay = duration(incident.back_sec - incident.time_sec)
        outcome = f"replaced by {incident.successor} after {delay}"
    elif not incident.process:
        outcome = "noted"
    else:
        outcome = "not replaced yet" if view.is_open(incident) else "no longer needed"
    subject = f"{incident.job} {incident.process}".strip()
    text = f"{clock(incident.time_sec)} {subject}: {incident.kind}, {outcome}"
    return Text(printable(f"{text}; {incident.detail}" if incident.detail else text))


def port_of(text: str) -> int:
    """Parse the value of `--status`.

    Raises:
        ValueError: it is neither a port nor `off`.
    """
    if text == "off":
        return OFF
    port = int(text)
    if not 0 <= port <= 65535:
        raise ValueError(f"port must be 0 to 65535, got {port}; 0 selects any free port")
    return port


@contextmanager
def watching(
    output: Path, port: int, console: Console, progress: Progress
) -> Generator[Progress, None, None]:
    """Show the status of a scheduler that runs in the context.

    Args:
        output: folder of the scheduler.
        port: of the page, 0 for any free port, OFF for none.
        console: shows the live view if it is a terminal.
        progress: prints one line if it is not.

    Yields:
        A function to be called with one line for each decision.

    Raises:
        PlanError: the port is in use or not permitted.
    """
    board = Board(output / LOG)
    with ExitStack() as stack:
        if console.is_terminal and not console.is_dumb_terminal:
            progress = stack.enter_context(live(board, console))
        if port != OFF and not is_locked(output):
            address = stack.enter_context(serving(board, port))
            output.mkdir(parents=True, exist_ok=True)
            replace_bytes(output / ADDRESS, f"{address}\n".encode())
            stack.callback((output / ADDRESS).unlink, missing_ok=True)
            progress(f"status page: {address}")
        yield progress


def board_of(output: Path) -> Board:
    """Return the board of a running or ended scheduler.

    Raises:
        SchemaError: there is no log.
    """
    if not (output / LOG).is_file():
        raise SchemaError(
            f"folder has no scheduler log {LOG}; give the --output of a run",
            file=str(output),
        )
    return Board(output / LOG)

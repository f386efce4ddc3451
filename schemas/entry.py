"""Run a command as this process: its imports, its signals, and its end.

Imports only the standard library, so that all that takes time or memory is loaded inside.
"""

from __future__ import annotations

import atexit
import os
import pwd
import resource
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from types import FrameType
from typing import NoReturn

from presage import ROOT
from presage.schemas.errors import printable

MIN_ADDRESS_BYTES = 1 << 30
"""With less address space libraries abort the process, or hang, while they are loaded: below 700 MB
in `pipelines build` on 2 cores (`ulimit -v`, 2026-11-30)."""


def run_command(load: Callable[[], Callable[[], int]]) -> NoReturn:
    """Run the command of this process, and end the process.

    SIGINT ends the process at once while modules are imported and after the command. In between it
    raises KeyboardInterrupt, so that contexts close, unless the command handles it; the process
    then ends by the signal all the same, and by a second one at once.

    Args:
        load: imports what has the command, and returns it; a command returns an exit status.
    """
    interrupts: list[int] = []

    def interrupt(number: int, _: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        interrupts.append(number)
        raise KeyboardInterrupt

    status, catches = 1, signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if catches:  # else the parent process ignores it, as shells do for background jobs
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        try:
            _check_address_space()
            os.environ |= process_variables()
            _prepare_texts()
            command = load()
            if catches:
                signal.signal(signal.SIGINT, interrupt)
            status = command()
        except SystemExit as end:
            status = _status_of(end)
        except Exception as error:
            if not interrupts:  # else a library replaced KeyboardInterrupt
                _report(error)
        finally:
            if catches:
                signal.signal(signal.SIGINT, signal.SIG_DFL)
    except KeyboardInterrupt:
        pass
    end_threads()
    status = _flush(status)
    if interrupts and status:
        os.kill(os.getpid(), interrupts[0])
    os._exit(status)


def process_variables() -> dict[str, str]:
    """Return the environment variables of commands and their child processes.

    They import these packages: their root comes first on PYTHONPATH, and the working directory is
    not searched. A user id without an entry in the user database, as in many containers, gets a
    name, and the temporary directory as its home.
    """
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    others = [path for path in paths if path and path != str(ROOT)]
    variables = {"PYTHONPATH": os.pathsep.join([str(ROOT), *others]), "PYTHONSAFEPATH": "1"}
    try:
        pwd.getpwuid(os.getuid())
    except KeyError:
        defaults = {"HOME": tempfile.gettempdir(), "USER": f"uid-{os.getuid()}"}
        variables |= {name: os.environ.get(name) or value for name, value in defaults.items()}
    return variables


def _prepare_texts() -> None:
    """Escape texts that the locale cannot print; refuse names of files that it cannot read."""
    encoding = sys.getfilesystemencoding()
    if encoding != "utf-8" and not all(map(str.isascii, (*sys.argv, str(Path.cwd())))):
        sys.exit(f"error: file names must be UTF-8, got the encoding {encoding}; set PYTHONUTF8=1")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            with suppress(OSError):  # not of a file that is read, too
                stream.reconfigure(errors="backslashreplace")


def end_threads() -> None:
    """Wait for threads and run exit functions, as the interpreter does first when it ends.

    `run_command` does not let it continue: it would take apart modules, and before Python 3.14 a
    thread of a library that returns to Python meanwhile aborts the process.
    """
    # As the processes of multiprocessing and torch end; there are no public names.
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
    atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]


def _check_address_space() -> None:
    limit = _address_space()
    if limit is not None and limit < MIN_ADDRESS_BYTES:
        sys.exit(
            f"error: address space must have at least {MIN_ADDRESS_BYTES >> 20} MiB, got "
            f"{limit >> 20} (ulimit -v); raise the limit"
        )


def _address_space() -> int | None:
    """Return the limit of this process in bytes, None if there is none."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if limit == resource.RLIM_INFINITY else limit


def _status_of(end: SystemExit) -> int:
    if end.code is None or isinstance(end.code, int):
        return end.code or 0
    print(end.code, file=sys.stderr)
    return 1


def _report(error: Exception) -> None:
    """Print one line if memory is the cause, or else the traceback of a fault of this program."""
    limit = _address_space()
    if limit is None and not isinstance(error, MemoryError):
        sys.excepthook(type(error), error, error.__traceback__)
        return
    cause = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(": ")
    advice = "use a machine with more"
    if limit is not None:
        advice = f"address space is limited to {limit >> 20} MiB (ulimit -v), raise the limit"
    print(printable(f"error: memory may not suffice: {cause}; {advice}"), file=sys.stderr)


def _flush(status: int) -> int:
    """Write what is buffered; return the exit status, of a failure if that is not possible."""
    try:
        sys.stdout.flush()
    except OSError as error:
        status = 1
        with suppress(OSError):
            print(f"error: output cannot be written: {error}", file=sys.stderr)
    with suppress(OSError):
        sys.stderr.flush()
    return status

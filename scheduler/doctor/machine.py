"""What the machine itself must have: shared memory, disk, ports, a clock, a compiler."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scheduler.doctor.finding import Finding, one_line
from schemas.events import read_lines

LOG = "scheduler.jsonl"
"""Of a scheduler, in its folder."""
COMPILERS = ("g++", "c++", "clang++")
"""Names under which the trainer looks for a compiler of C++."""
MOST_SKEW_SEC = 2.0
"""Between this machine's clock and that of a filesystem."""
_GIB = 1 << 30


def shared_memory_finding(folder: Path, least_bytes: int) -> Finding:
    """See whether copies of checkpoints have room in memory.

    Args:
        folder: where shared memory is mounted.
        least_bytes: that must be free.
    """
    free = _free(folder)
    return Finding(
        name="shared memory",
        ok=free is not None and free >= least_bytes,
        must=f"have {_size(least_bytes)} free in {folder}",
        found="no such folder" if free is None else _size(free),
        fix="mount a larger one (docker run --shm-size; in a Pod an emptyDir of medium Memory), "
        "or set train.checkpoint.copy_to to a folder of a disk",
    )


def disk_finding(folder: Path, least_bytes: int) -> Finding:
    """See whether the folder of datasets and runs has room, and may be written.

    Args:
        folder: maybe not there yet; then the nearest one above it is looked at.
        least_bytes: that must be free.
    """
    place = nearest_folder(folder)
    free = _free(place) or 0
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"doctor")
            file.flush()
            trouble = ""
    except OSError as error:
        trouble = f" that cannot be written: {error.strerror}"
    return Finding(
        name="disk",
        ok=free >= least_bytes and not trouble,
        must=f"have {_size(least_bytes)} free in {place}, and be writable",
        found=f"{_size(free)}{trouble}",
        fix="free some, give the folder to this user, or choose another --output",
    )


def port_finding(port: int) -> Finding:
    """See whether a port of the loopback interface is free.

    Args:
        port: 0 for any.
    """
    trouble = ""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind(("127.0.0.1", port))
            server.listen()
        except OSError as error:
            trouble = error.strerror or str(error)
    return Finding(
        name="ports",
        ok=not trouble,
        must=f"have {f'port {port}' if port else 'a port'} free on loopback",
        found=trouble.lower() or "one",
        fix="end the process that listens there (ss -ltnp), or name another --port",
    )


def clock_finding(folder: Path, now: float) -> Finding:
    """See whether the clock agrees with that of the folder's filesystem and with its log.

    Args:
        folder: of a scheduler, maybe not there yet.
        now: seconds since 1970.
    """
    problems = list(_clock_problems(folder, now))
    return Finding(
        name="clock",
        ok=not problems,
        must=f"agree with files to {MOST_SKEW_SEC:g} s, and not be behind the log",
        found="; ".join(problems) or "both",
        fix="synchronize this machine and the file server (chronyc tracking, timedatectl)",
    )


def _clock_problems(folder: Path, now: float) -> Iterator[str]:
    try:
        with tempfile.NamedTemporaryFile(dir=nearest_folder(folder)) as file:
            file.write(b"doctor")
            file.flush()
            skew = os.fstat(file.fileno()).st_mtime - now
    except OSError as error:
        yield f"no file to compare with: {error.strerror}"
        return
    if abs(skew) > MOST_SKEW_SEC:
        yield f"files {abs(skew):.1f} s {'ahead' if skew > 0 else 'behind'}"
    last = last_time(folder / LOG)
    if last is not None and last - now > MOST_SKEW_SEC:
        yield f"{LOG} {last - now:.1f} s ahead"


def last_time(log: Path) -> float | None:
    """Return the time of the last event of a log, seconds since 1970; None without a log."""
    if not log.is_file():
        return None
    times = read_lines(log, _time_of, lambda line, _: f"line must be an event, got {line!r}")
    return max((time for time in times if time is not None), default=None)


def _time_of(body: dict[str, Any]) -> float | None:
    """Return the time of an event's line; a decision's has none of its own."""
    return body.get("time_sec")


def compiler_finding(search: str) -> Finding:
    """See whether there is a compiler for the trainer's kernels.

    Args:
        search: directories that programs are looked for in, as PATH has them.
    """
    found = next((p for name in COMPILERS if (p := shutil.which(name, path=search))), None)
    return Finding(
        name="compiler",
        ok=found is not None,
        must=f"be one of {', '.join(COMPILERS)} on PATH",
        found=one_line(found or "none"),
        fix="install g++, or set train.kernels to torch",
        needed_for="train.kernels: compiled",
    )


def nearest_folder(folder: Path) -> Path:
    """Return a folder, or the nearest one above it that exists."""
    place = folder.absolute()
    while not place.is_dir() and place != place.parent:
        place = place.parent
    return place


def _free(folder: Path) -> int | None:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def _size(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.1f} GiB"

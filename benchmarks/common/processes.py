"""Processes that benchmarks start and measure, and the page cache before they start."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.logs import REPOSITORY


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A process that has ended.

    Attributes:
        output: what it printed.
        status: exit status.
        sec: wall time.
        cpu_sec: processor time, of waited-for children too.
        peak_bytes: peak resident memory of the largest process.
    """

    output: str
    status: int
    sec: float
    cpu_sec: float
    peak_bytes: int

    def json(self) -> Any:
        """Return the object that it printed."""
        return json.loads(self.output)


def module(*words: object) -> list[str]:
    """Return the command that runs a module of this Python."""
    return [sys.executable, "-m", *map(str, words)]


def run(
    command: Sequence[object], variables: Mapping[str, str] | None = None, *, check: bool = True
) -> Finished:
    """Run a process to its end.

    Args:
        command: its words.
        variables: of its environment, besides those of this process.
        check: whether it must succeed.

    Raises:
        RuntimeError: it failed; the message has the end of its errors.
    """
    start = time.perf_counter()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), **(variables or {})}
        words = list(map(str, command))
        process = subprocess.Popen(words, stdout=out, stderr=err, cwd=REPOSITORY, env=environment)
        _, status, usage = os.wait4(process.pid, 0)
        sec = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        if check and process.returncode:
            err.seek(0)
            raise RuntimeError(f"{' '.join(words)} must succeed, got {err.read()[-2000:]}")
        out.seek(0)
        return Finished(
            output=out.read(),
            status=process.returncode,
            sec=sec,
            cpu_sec=usage.ru_utime + usage.ru_stime,
            peak_bytes=1024 * usage.ru_maxrss,
        )


def start_quietly(
    command: Sequence[str], variables: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start a process whose output is dropped, in an environment that replaces this one."""
    none = subprocess.DEVNULL
    return subprocess.Popen(command, cwd=REPOSITORY, stdout=none, stderr=none, env=variables)


def in_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of a function in a new process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def measured(function: Callable[..., Any], *arguments: Any) -> dict[str, Any]:
    """Return the result of a function, its seconds, and the growth of peak memory in MB."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from the present size
    before, start = memory_bytes("VmHWM"), time.perf_counter()
    result = function(*arguments)
    sec = time.perf_counter() - start
    return {
        "result": result,
        "sec": round(sec, 3),
        "mb": (memory_bytes("VmHWM") - before) // 1_000_000,
    }


def process_tree(root: int) -> list[int]:
    """Return a process and its descendants."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with suppress(OSError):
                parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
                children.setdefault(int(parent), []).append(int(folder.name))
    tree = [root]
    for pid in tree:
        tree += children.get(pid, [])
    return tree


def memory_bytes(field: str, pid: int | str = "self", file: str = "status") -> int:
    """Return a field of the memory of a process, such as `VmHWM`; 0 if it has ended."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/{file}").read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) << 10
    return 0


def drop_pages(folder: Path) -> int:
    """Remove the files of a folder from the page cache; return their bytes."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return sum(path.stat().st_size for path in files)
